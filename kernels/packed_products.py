"""The two products of the packed backward on the lists that `pack` made, and dbias.

    dE[block]  = sum over the block's kept pairs of G[pair] (x) weight[column]         one program owns its part
    dC[column] += sum over the four row blocks of a super-block of G[pair] @ hidden    one addition per super-block
    dbias[column] += sum over all row blocks of the sum of G[pair]                     one program owns its columns

The coin is shared by a super-block, so the kept sets of its row blocks nest and one list (their union) serves all
four: a product with 512 tokens behind every addition into dC instead of 128, and about half as many additions.

dC is added to in fp32, by atomics; without them (`deterministic`) one program owns (slab of columns, part of
D) and takes the super-blocks in order. `packed_stream` does the same for dC in half precision.
"""

import triton
import triton.language as tl

from .pack import PLAN_BASE, PLAN_FIRST, PLAN_LAST, pair_of, word_of
from .packed_gradient import arena_rows, load_arena
from .tiles import load_tile


@triton.jit
def packed_hidden_grad_kernel(
    weight_ptr,  # [V, D]
    storage_ptr,  # G
    extra_ptr,  # G
    unit_ptr,  # [] fp32 or None
    plan_ptr,  # this round's row of the plan
    block_start_ptr,  # [row blocks] int64
    kept_counts_ptr,  # [row blocks, groups] int32
    kept_pair_ptr,  # [pairs of a round]
    kept_column_ptr,  # [pairs of a round]
    n_rows_ptr,  # [1] or None
    row_index_ptr,  # [N] int64 where row i belongs in out, or None
    constant_ptr,  # [N] or None: adds constant (x) constant_weight
    constant_weight_ptr,  # [D] or None
    out_ptr,  # [N, D]
    n,
    stride_weight,
    n_groups,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    n_blocks = tl.load(plan_ptr + PLAN_LAST).to(tl.int32) - first
    block_base = tl.load(block_start_ptr + first)
    arena = load_arena(plan_ptr)
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    dtype = extra_ptr.dtype.element_ty
    groups = tl.arange(0, GROUPS)
    offs_m = tl.arange(0, 128)
    for item in range(tl.program_id(0), n_blocks * tl.cdiv(D, BLOCK_D), PROGRAMS):
        row_block = first + item % n_blocks
        offs_d = item // n_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = offs_d < D
        counts = tl.load(kept_counts_ptr + row_block * n_groups + groups, mask=groups < n_groups, other=0)
        n_pairs = tl.sum(counts, 0)
        at = tl.load(block_start_ptr + row_block) - block_base
        acc = tl.zeros((128, BLOCK_D), tl.float32)
        for t in range(0, n_pairs, BLOCK_K):
            offs_k = t + tl.arange(0, BLOCK_K)
            inside = offs_k < n_pairs
            pair = tl.load(kept_pair_ptr + at + offs_k, mask=inside, other=0)
            column = tl.load(kept_column_ptr + at + offs_k, mask=inside, other=0).to(tl.int64)
            g_rows = arena_rows(storage_ptr, extra_ptr, arena, pair)
            g = tl.load(g_rows[:, None] + offs_m[None, :], mask=inside[:, None], other=0.0)
            weight = weight_ptr + column[:, None] * stride_weight + offs_d[None, :]
            if D % BLOCK_D == 0:
                w = tl.load(weight, mask=inside[:, None], other=0.0)
            else:
                w = tl.load(weight, mask=inside[:, None] & in_d[None, :], other=0.0)
            acc = tl.dot(tl.trans(g), w.to(dtype), acc, input_precision=PRECISION)
        if unit_ptr is not None:
            acc *= tl.load(unit_ptr)
        rows = row_block * 128 + offs_m
        if constant_ptr is not None:
            constant = tl.load(constant_ptr + rows, mask=rows < n, other=0.0)
            acc += constant[:, None] * tl.load(constant_weight_ptr + offs_d, mask=in_d, other=0.0)[None, :]
        to = rows.to(tl.int64)
        if row_index_ptr is not None:
            to = tl.load(row_index_ptr + rows, mask=rows < n, other=0)
        out = out_ptr + to[:, None] * D + offs_d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None] & in_d[None, :])


@triton.jit
def kept_pairs(
    bits_ptr, kept_bits_ptr, word_start_ptr, n_words, row_block, last, base, column, inside
):  # fmt: skip
    """The listed columns' pairs in one row block, -1 where it did not keep them."""
    at = row_block * n_words.to(tl.int64) + word_of(column)
    mask = inside & (row_block < last)
    kept_bits = tl.load(kept_bits_ptr + at, mask=mask, other=0)
    bits = tl.load(bits_ptr + at, mask=mask, other=0)
    pair = pair_of(bits, tl.load(word_start_ptr + at, mask=mask, other=0), column) - base
    return tl.where(((kept_bits >> ((column // 8) % 32)) & 1) != 0, pair, -1)


@triton.jit
def active_blocks(pair_0, pair_1, pair_2, pair_3):
    """How many row blocks keep any of these columns, and which, two bits each: lists are ordered so that it is often
    one or two."""
    use_0 = (tl.max(pair_0, 0) >= 0).to(tl.int32)
    use_1 = (tl.max(pair_1, 0) >= 0).to(tl.int32)
    use_2 = (tl.max(pair_2, 0) >= 0).to(tl.int32)
    use_3 = (tl.max(pair_3, 0) >= 0).to(tl.int32)
    order = (use_1 << (2 * use_0)) | ((2 * use_2) << (2 * (use_0 + use_1)))
    order |= (3 * use_3) << (2 * (use_0 + use_1 + use_2))
    return use_0 + use_1 + use_2 + use_3, order


@triton.jit
def add_tokens(
    acc,  # [columns, BLOCK_D]
    hidden,  # [N, D] descriptor or pointer
    storage_ptr,
    extra_ptr,
    arena,
    pair,  # [columns] of the row block, -1 where it did not keep the column
    row_block,
    k,  # which BLOCK_K tokens of it
    n,
    stride_hidden,
    first_d,  # which BLOCK_D of D
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + G.T @ hidden of BLOCK_K tokens."""
    dtype = extra_ptr.dtype.element_ty
    offs_k = k * BLOCK_K + tl.arange(0, BLOCK_K)
    g_rows = arena_rows(storage_ptr, extra_ptr, arena, pair)
    g = tl.load(g_rows[:, None] + offs_k[None, :], mask=(pair >= 0)[:, None], other=0.0)
    row = row_block * 128 + k * BLOCK_K
    h = load_tile(hidden, row, first_d, n, D, stride_hidden, 1, BLOCK_K, BLOCK_D, TMA_HIDDEN)
    return tl.dot(g, h.to(dtype), acc, input_precision=PRECISION)


@triton.jit
def add_product(
    acc,  # [columns, BLOCK_D]
    hidden,
    storage_ptr,
    extra_ptr,
    arena,
    pair_0,  # [columns]
    pair_1,
    pair_2,
    pair_3,
    n,
    stride_hidden,
    super_block,
    order,
    i,  # which BLOCK_K tokens of the active row blocks
    first_d,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    STEPS: tl.constexpr = 128 // BLOCK_K
    b = (order >> (2 * (i // STEPS))) & 3
    pair = tl.where(b < 2, tl.where(b == 0, pair_0, pair_1), tl.where(b == 2, pair_2, pair_3))
    return add_tokens(
        acc, hidden, storage_ptr, extra_ptr, arena, pair, super_block * 4 + b, i % STEPS, n, stride_hidden, first_d, D,
        BLOCK_D, BLOCK_K, TMA_HIDDEN, PRECISION,
    )  # fmt: skip


@triton.jit
def column_products(
    hidden,
    storage_ptr,
    extra_ptr,
    arena,
    bits_ptr,
    kept_bits_ptr,
    word_start_ptr,
    n_words,
    n,
    stride_hidden,
    column,  # [BLOCK_N]
    inside,  # [BLOCK_N]
    super_block,
    last,
    base,
    first_d,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[BLOCK_N, BLOCK_D]: the columns' gradient from one super-block's tokens."""
    STEPS: tl.constexpr = 128 // BLOCK_K
    block = super_block * 4
    pair_0 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block, last, base, column, inside)
    pair_1 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 1, last, base, column, inside)
    pair_2 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 2, last, base, column, inside)
    pair_3 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 3, last, base, column, inside)
    n_active, order = active_blocks(pair_0, pair_1, pair_2, pair_3)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for i in range(n_active * STEPS):
        acc = add_product(
            acc, hidden, storage_ptr, extra_ptr, arena, pair_0, pair_1, pair_2, pair_3, n, stride_hidden, super_block,
            order, i, first_d, D, BLOCK_D, BLOCK_K, TMA_HIDDEN, PRECISION,
        )  # fmt: skip
    return acc


@triton.jit
def packed_weight_grad_kernel(
    hidden,  # [N, D] descriptor or pointer
    storage_ptr,  # G
    extra_ptr,  # G
    unit_ptr,  # [] fp32 or None
    plan_ptr,  # this round's row of the plan
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    union_ptr,  # [pairs of a round]
    union_start_ptr,  # [super-blocks, slabs]
    union_count_ptr,  # [super-blocks, slabs]
    n_rows_ptr,  # [1] or None
    out_ptr,  # [V, D] fp32
    n,
    stride_hidden,
    stride_out,
    n_words,
    n_slabs,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds a round's dC to out."""
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    base = tl.load(plan_ptr + PLAN_BASE).to(tl.int32)
    arena = load_arena(plan_ptr)
    n_super = tl.cdiv(last - first, 4)
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
    N_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    # With atomics a program takes one super-block at a time; without, all of them in order.
    inner = 1
    outer = n_super
    if not ATOMIC:
        inner = n_super
        outer = tl.minimum(n_super, 1)
    for item in range(tl.program_id(0), n_slabs * outer * N_D, PROGRAMS):
        first_d = item % N_D * BLOCK_D
        offs_d = first_d + tl.arange(0, BLOCK_D)
        slab = item // (N_D * outer)
        for s in range(inner):
            super_block = first // 4 + (item // N_D) % outer + s
            n_columns = tl.load(union_count_ptr + super_block * n_slabs + slab)
            start = tl.load(union_start_ptr + super_block * n_slabs + slab)
            for t in range(0, n_columns, BLOCK_N):
                offs_n = t + tl.arange(0, BLOCK_N)
                inside = offs_n < n_columns
                column = tl.load(union_ptr + start + offs_n, mask=inside, other=0)
                acc = column_products(
                    hidden, storage_ptr, extra_ptr, arena, bits_ptr, kept_bits_ptr, word_start_ptr, n_words, n,
                    stride_hidden, column, inside, super_block, last, base, first_d, D, BLOCK_N, BLOCK_D, BLOCK_K,
                    TMA_HIDDEN, PRECISION,
                )  # fmt: skip
                if unit_ptr is not None:
                    acc *= unit
                out = out_ptr + column.to(tl.int64)[:, None] * stride_out + offs_d[None, :]
                mask = inside[:, None] & (offs_d < D)[None, :]
                if ATOMIC:
                    tl.atomic_add(out, acc, mask=mask, sem="relaxed")
                else:
                    tl.store(out, tl.load(out, mask=mask, other=0.0) + acc, mask=mask)
            if not ATOMIC:
                tl.debug_barrier()  # the next super-block's threads read what these wrote


@triton.jit
def packed_bias_grad_kernel(
    pair_sum_ptr,  # [pairs of a round] fp32
    unit_ptr,  # [] fp32 or None
    plan_ptr,  # this round's row of the plan
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    out_ptr,  # [V] fp32
    n_words,
    n_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dbias[column] += sum over the round's kept pairs of the column. One program owns BLOCK_N columns and looks them
    up in BLOCK_M row blocks at a time: neighbours share their words, so that costs less than a list of pairs."""
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    base = tl.load(plan_ptr + PLAN_BASE).to(tl.int32)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n_columns
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, last, BLOCK_M):
        row_blocks = block + tl.arange(0, BLOCK_M)
        pair = kept_pairs(
            bits_ptr, kept_bits_ptr, word_start_ptr, n_words, row_blocks[:, None], last, base, columns[None, :],
            inside[None, :],
        )  # fmt: skip
        acc += tl.load(pair_sum_ptr + pair, mask=pair >= 0, other=0.0)
    total = tl.sum(acc, 0)
    if unit_ptr is not None:
        total *= tl.load(unit_ptr)
    tl.store(out_ptr + columns, tl.load(out_ptr + columns, mask=inside, other=0.0) + total, mask=inside)
