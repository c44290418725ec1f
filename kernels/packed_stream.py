"""dC in half precision without an fp32 buffer of its size: sums live in L2, in a ring of small parts.

A part is one slab of columns times BLOCK_D of D, fp32, 8 MB; RING of them exist. Parts pass through two kinds of work,
cut into items that programs take in the order of a ticket counter:

    add      one super-block's kept columns in the part: G.T @ hidden, by atomics into the part
    round    some rows of a complete part: to half precision into dC, and cleared for the part RING places later

Step k of the order holds the adds of part k and the rounds of part k - LAG. A round waits until all adds of its part
are done, an add until the part that used its place before is rounded. What an item waits for has a smaller ticket,
so a running program has taken it: waits end, however many programs run at once. Most items find it done already.

Columns that no row block kept, more than half at the benchmark's first shape, have no sum: their zeros are written
without reading or clearing the part. Columns that `packed_direct` has stored are in no list here, and the round
leaves their rows of dC as they are.

G lies in the storage of dC's later columns (`pack`): while a group of columns is worked on, its G and that of later
groups lies behind it. So a round also waits for all adds of the earlier groups, whose G may lie where it writes.
"""

import triton
import triton.language as tl

from .pack import PLAN_LAST, word_of
from .packed_gradient import load_arena
from .packed_products import column_products
from .tickets import signal, wait_for


@triton.jit
def packed_stream_kernel(
    hidden,  # [N, D] descriptor or pointer
    storage_ptr,  # G
    extra_ptr,  # G
    unit_ptr,  # [] fp32 or None
    dense_ptr,  # [1]
    plan_ptr,  # the only round's row of the plan
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    union_ptr,  # [pairs]
    union_start_ptr,  # [super-blocks, slabs]
    union_count_ptr,  # [super-blocks, slabs]
    summed_ptr,  # [words]
    direct_ptr,  # [words]
    n_rows_ptr,  # [1] or None
    constant_hidden_ptr,  # [D] fp32 or None: adds column_weight (x) constant_hidden
    column_weight_ptr,  # [V] fp32 or None
    ring_ptr,  # [RING, SLAB, BLOCK_D] fp32, zeros
    ticket_ptr,  # [1] int32, zero
    added_ptr,  # [parts] int32, zeros
    rounded_ptr,  # [parts] int32, zeros
    group_ptr,  # [groups] int32, zeros: adds that are done
    out_ptr,  # [V, D] contiguous
    n,
    stride_hidden,
    n_words,
    n_slabs,
    n_columns,
    n_super,
    D: tl.constexpr,
    SLAB: tl.constexpr,
    GROUP_SLABS: tl.constexpr,
    RING: tl.constexpr,
    LAG: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUND_ROWS: tl.constexpr,
    ROUND_STEP: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
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
    ROUNDS: tl.constexpr = SLAB // ROUND_ROWS
    PART: tl.constexpr = SLAB * BLOCK_D
    GROUP_PARTS: tl.constexpr = GROUP_SLABS * N_D
    # An add waits for the round, and so for the adds, of the part RING before it: the other groups are done then.
    GROUPS_BACK: tl.constexpr = (RING + GROUP_PARTS - 1) // GROUP_PARTS
    n_parts = n_slabs * N_D
    n_adds = n_super * SLOTS
    per_step = n_adds + ROUNDS
    n_items = (n_parts + LAG) * per_step
    item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while item < n_items:
        step = item // per_step
        sub = item % per_step
        if sub < n_adds:
            if step < n_parts:
                if step >= RING:
                    wait_for(rounded_ptr + step - RING, ROUNDS)
                slab = step // N_D
                offs_part = tl.arange(0, BLOCK_D)
                first_d = step % N_D * BLOCK_D
                super_block = sub // SLOTS
                count = tl.load(union_count_ptr + super_block * n_slabs + slab)
                start = tl.load(union_start_ptr + super_block * n_slabs + slab)
                part_ptr = ring_ptr + (step % RING).to(tl.int64) * PART
                for t in range(sub % SLOTS * BLOCK_N, count, SLOTS * BLOCK_N):
                    offs_n = t + tl.arange(0, BLOCK_N)
                    inside = offs_n < count
                    column = tl.load(union_ptr + start + offs_n, mask=inside, other=0)
                    acc = column_products(
                        hidden, storage_ptr, extra_ptr, arena, bits_ptr, kept_bits_ptr, word_start_ptr, n_words, n,
                        stride_hidden, column, inside, super_block, last, 0, first_d, D, BLOCK_N, BLOCK_D, BLOCK_K,
                        TMA_HIDDEN, "tf32",
                    )  # fmt: skip
                    if unit_ptr is not None:
                        acc *= unit
                    out = part_ptr + (column - slab * SLAB)[:, None] * BLOCK_D + offs_part[None, :]
                    tl.atomic_add(out, acc, mask=inside[:, None], sem="relaxed")
                signal(added_ptr + step)
                signal(group_ptr + slab // GROUP_SLABS)
        else:
            part = step - LAG
            if part >= 0:
                wait_for(added_ptr + part, n_adds)
                slab = part // N_D
                group = slab // GROUP_SLABS
                for earlier in range(tl.maximum(group - GROUPS_BACK, 0), group):
                    wait_for(group_ptr + earlier, n_adds * GROUP_PARTS)
                offs_part = tl.arange(0, BLOCK_D)
                offs_d = part % N_D * BLOCK_D + offs_part
                in_d = offs_d < D
                part_ptr = ring_ptr + (part % RING).to(tl.int64) * PART
                first = (sub - n_adds) * ROUND_ROWS
                if constant_hidden_ptr is not None:
                    constant = tl.load(constant_hidden_ptr + offs_d, mask=in_d, other=0.0)[None, :]
                for r in range(0, ROUND_ROWS, ROUND_STEP):
                    row = first + r + tl.arange(0, ROUND_STEP)
                    column = slab * SLAB + row
                    valid = column < n_columns
                    word, bit = word_of(column), (column // 8) % 32
                    summed = (tl.load(summed_ptr + word, mask=valid, other=0) >> bit) & 1 != 0
                    direct = (tl.load(direct_ptr + word, mask=valid, other=0) >> bit) & 1 != 0
                    at = part_ptr + row[:, None] * BLOCK_D + offs_part[None, :]
                    x = tl.load(at, mask=summed[:, None], other=0.0, cache_modifier=".cg")
                    tl.debug_barrier()  # the store below need not give a thread the elements that it loaded
                    tl.store(at, tl.zeros((ROUND_STEP, BLOCK_D), tl.float32), mask=summed[:, None])
                    if constant_hidden_ptr is not None:
                        share = constant
                        if column_weight_ptr is not None:
                            share = tl.load(column_weight_ptr + column, mask=valid, other=0.0)[:, None] * share
                        x += share
                    out = out_ptr + column.to(tl.int64)[:, None] * D + offs_d[None, :]
                    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=(valid & ~direct)[:, None] & in_d[None, :])
                signal(rounded_ptr + part)
        item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
