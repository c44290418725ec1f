"""dC in half precision of the columns that one super-block alone keeps: a product, rounded and stored.

`packed_stream` sums what several super-blocks add to a column, in fp32: atomics, a ring, and a round that reads it.
A column of a single super-block has nothing to be summed with, so its product is its row of dC. More than half of the
kept columns are such ones where tokens are few and the vocabulary is large, and most of them belong to one row block.

Columns are listed per super-block and set of `kept_apart`, over the whole vocabulary: tiles are full, and one of a
column set that a row block alone keeps multiplies 128 tokens instead of 512. The stream's lists lose these columns.

    direct    kept by exactly one super-block, and its row of dC lies before G's first pair in dC's storage

Rows behind that would overwrite G that the stream still reads, so their columns stay in the stream, whose order of
groups protects it. Rows of other columns are the stream's: it skips the direct ones and writes zeros where no super-
block kept the column.

    counts[5 s + set] = direct columns of super-block s; lists follow each other in that order in one [V] array, since
    a column is in one list at most; their tiles of BLOCK_N columns are numbered through

Worked example, BLOCK_N = 128, one super-block, counts = 130 5 0 0 200:
    lists start at 0 130 135 135 135        tiles = 2 1 0 0 2, ending at 2 3 3 3 5
    tile 3: lists 0 to 3 end before it, so it is tile 3 - 3 = 0 of list 4: columns 135 to 262 of the array
"""

import triton
import triton.language as tl

from .pack import PLAN_LAST, PLAN_SPILL, PLAN_STORAGE_SHIFT, load_words, popcount
from .packed_gradient import load_arena
from .packed_products import active_blocks, add_product, kept_pairs
from .unions import append_columns, append_union, kept_apart

SETS: tl.constexpr = tl.constexpr(5)  # of `kept_apart`
LISTS: tl.constexpr = tl.constexpr(256)  # whose counts are loaded at a time


@triton.jit
def direct_limit(plan_ptr, n_columns, D: tl.constexpr):
    """Columns before this one have their row of dC wholly before G, of the same dtype, in dC's storage."""
    before = tl.load(plan_ptr + PLAN_STORAGE_SHIFT) * 128 // D
    return tl.where(tl.load(plan_ptr + PLAN_SPILL) > 0, before, n_columns).to(tl.int32)


@triton.jit
def _sets_of(item, kept_bits_ptr, touched_ptr, twice_ptr, last, limit, n_words, n_slabs, SLAB_WORDS: tl.constexpr):
    """An item of the list kernels: (super-block, words of its slab, its five sets, the bits of direct columns)."""
    super_block = item // n_slabs
    words = item % n_slabs * SLAB_WORDS + tl.arange(0, SLAB_WORDS)
    sets = kept_apart(kept_bits_ptr, super_block, last, words, n_words)
    touched = load_words(touched_ptr, 0, words, n_words, limit)
    direct = touched & ~load_words(twice_ptr, 0, words, n_words, limit)
    return super_block, words, sets, direct


@triton.jit
def split_unions_kernel(
    kept_bits_ptr,  # [row blocks, words]
    touched_ptr,  # [words]
    twice_ptr,  # [words]
    plan_ptr,  # the only round's row of the plan
    union_ptr,  # [pairs] in, out: loses the direct columns
    union_start_ptr,  # [super-blocks, slabs]
    union_count_ptr,  # [super-blocks, slabs] out
    counts_ptr,  # [super-blocks, 5] int32, zeros: out, direct columns
    n_words,
    n_slabs,
    n_columns,
    D: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    limit = direct_limit(plan_ptr, n_columns, D)
    bit = tl.arange(0, 32)
    for item in range(tl.program_id(0), tl.cdiv(last, 4) * n_slabs, PROGRAMS):
        super_block, words, sets, direct = _sets_of(
            item, kept_bits_ptr, touched_ptr, twice_ptr, last, limit, n_words, n_slabs, SLAB_WORDS
        )
        counts = counts_ptr + super_block * SETS
        for i in tl.static_range(SETS):
            tl.atomic_add(counts + i, tl.sum(popcount(sets[i] & direct), 0), sem="relaxed")
        total = append_union(
            union_ptr + tl.load(union_start_ptr + item), sets[0] & ~direct, sets[1] & ~direct, sets[2] & ~direct,
            sets[3] & ~direct, sets[4] & ~direct, words, bit,
        )  # fmt: skip
        tl.store(union_count_ptr + item, total)


@triton.jit
def direct_list_kernel(
    kept_bits_ptr,  # [row blocks, words]
    touched_ptr,  # [words]
    twice_ptr,  # [words]
    plan_ptr,  # the only round's row of the plan
    counts_ptr,  # [super-blocks, 5]
    cursor_ptr,  # [super-blocks, 5] int32, zeros: columns listed so far
    direct_ptr,  # [V] int32 out
    n_words,
    n_slabs,
    n_columns,
    D: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Which columns share a tile depends on timing; no column's sum does."""
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    limit = direct_limit(plan_ptr, n_columns, D)
    bit = tl.arange(0, 32)
    for item in range(tl.program_id(0), tl.cdiv(last, 4) * n_slabs, PROGRAMS):
        super_block, words, sets, direct = _sets_of(
            item, kept_bits_ptr, touched_ptr, twice_ptr, last, limit, n_words, n_slabs, SLAB_WORDS
        )
        counts = counts_ptr + super_block * SETS
        cursor = cursor_ptr + super_block * SETS
        start = tl.zeros((), tl.int32)
        for lists in range(0, super_block * SETS, LISTS):
            offs = lists + tl.arange(0, LISTS)
            start += tl.sum(tl.load(counts_ptr + offs, mask=offs < super_block * SETS, other=0), 0)
        for i in tl.static_range(SETS):
            bits = sets[i] & direct
            at = start + tl.atomic_add(cursor + i, tl.sum(popcount(bits), 0), sem="relaxed")
            append_columns(direct_ptr + at, bits, words, bit)
            start += tl.load(counts + i)


@triton.jit
def _count_tiles(counts_ptr, n_lists, BLOCK_N: tl.constexpr):
    n_tiles = tl.zeros((), tl.int32)
    for first in range(0, n_lists, LISTS):
        offs = first + tl.arange(0, LISTS)
        n_tiles += tl.sum(tl.cdiv(tl.load(counts_ptr + offs, mask=offs < n_lists, other=0), BLOCK_N), 0)
    return n_tiles


@triton.jit
def _find_tile(counts_ptr, n_lists, tile, BLOCK_N: tl.constexpr):
    """The tile's list, where that list starts, and the tile's place in it."""
    index = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    first_tile = tl.zeros((), tl.int32)
    n_tiles = tl.zeros((), tl.int32)
    for first in range(0, n_lists, LISTS):
        offs = first + tl.arange(0, LISTS)
        counts = tl.load(counts_ptr + offs, mask=offs < n_lists, other=0)
        tiles = tl.cdiv(counts, BLOCK_N)
        before = n_tiles + tl.cumsum(tiles, 0) <= tile
        index += tl.sum(before.to(tl.int32), 0)
        start += tl.sum(tl.where(before, counts, 0), 0)
        first_tile += tl.sum(tl.where(before, tiles, 0), 0)
        n_tiles += tl.sum(tiles, 0)
    return index, start, (tile - first_tile) * BLOCK_N


@triton.jit
def packed_direct_kernel(
    hidden_ptr,  # [N, D]
    storage_ptr,  # G
    extra_ptr,  # G
    unit_ptr,  # [] fp32 or None
    dense_ptr,  # [1]
    plan_ptr,  # the only round's row of the plan
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    direct_ptr,  # [V]
    counts_ptr,  # [super-blocks, 5]
    n_rows_ptr,  # [1] or None
    constant_hidden_ptr,  # [D] fp32 or None: adds column_weight (x) constant_hidden
    column_weight_ptr,  # [V] fp32 or None
    out_ptr,  # [V, D] contiguous
    n,
    stride_hidden,
    n_words,
    n_lists,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """An item is a tile of columns times PARTS parts of D: its pairs are found once."""
    if tl.load(dense_ptr) != 0:
        return
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    arena = load_arena(plan_ptr)
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
    N_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    RUNS: tl.constexpr = (N_D + PARTS - 1) // PARTS
    STEPS: tl.constexpr = 128 // BLOCK_K
    offs_n = tl.arange(0, BLOCK_N)
    n_tiles = _count_tiles(counts_ptr, n_lists, BLOCK_N)
    for item in range(tl.program_id(0), n_tiles * RUNS, PROGRAMS):
        first_part = item % RUNS * PARTS
        index, start, offset = _find_tile(counts_ptr, n_lists, item // RUNS, BLOCK_N)
        size = tl.load(counts_ptr + index) - offset
        inside = offs_n < size
        column = tl.load(direct_ptr + start + offset + offs_n, mask=inside, other=0)
        super_block = index // SETS
        kept_by = index % SETS
        several = kept_by == SETS - 1
        block = super_block * 4
        in_0 = inside & (several | (kept_by == 0))
        in_1 = inside & (several | (kept_by == 1))
        in_2 = inside & (several | (kept_by == 2))
        in_3 = inside & (several | (kept_by == 3))
        pair_0 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block, last, 0, column, in_0)
        pair_1 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 1, last, 0, column, in_1)
        pair_2 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 2, last, 0, column, in_2)
        pair_3 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 3, last, 0, column, in_3)
        n_active, order = active_blocks(pair_0, pair_1, pair_2, pair_3)
        steps = n_active * STEPS
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        # One loop over parts and tokens: with one row block there are too few steps a part to hide a load's latency.
        for i in range(tl.minimum(N_D - first_part, PARTS) * steps):
            offs_d = (first_part + i // steps) * BLOCK_D + tl.arange(0, BLOCK_D)
            acc = add_product(
                acc, hidden_ptr, storage_ptr, extra_ptr, arena, pair_0, pair_1, pair_2, pair_3, n, stride_hidden,
                super_block, order, i % steps, offs_d, D, BLOCK_D, BLOCK_K, "tf32",
            )  # fmt: skip
            if i % steps == steps - 1:
                # Again, since kept through the loop they would take registers that the product needs.
                inside = offs_n < size
                column = tl.load(direct_ptr + start + offset + offs_n, mask=inside, other=0)
                x = acc
                if unit_ptr is not None:
                    x *= unit
                if constant_hidden_ptr is not None:
                    share = tl.load(constant_hidden_ptr + offs_d, mask=offs_d < D, other=0.0)[None, :]
                    if column_weight_ptr is not None:
                        share = tl.load(column_weight_ptr + column, mask=inside, other=0.0)[:, None] * share
                    x += share
                out = out_ptr + column.to(tl.int64)[:, None] * D + offs_d[None, :]
                tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (offs_d < D)[None, :])
                acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
