"""dC in half precision of the columns that need no sums in memory: a product, rounded and stored.

`packed_stream` sums what several super-blocks add to a column, in fp32: atomics, a ring, and a round that reads it.
The columns of `column_kinds` do without:

    hot      a tile of columns times one part of D: all row blocks, G gathered by a table of pairs
    single   a tile of columns of one list times PARTS parts of D: the row blocks of its super-block that keep it

Hot items, which take as long as all tokens do, have the first tickets; the short single ones fill the end. Both run
one loop that loads its pairs from a table, a program's own where columns are single: with a second loop for four pairs
per column in registers, these do not suffice. The loop divides its counter, since Triton 3.6 does not pipeline one
that carries a step and a part.

Rows of other columns are the stream's: it skips these and writes zeros where no super-block kept the column.
"""

import triton
import triton.language as tl

from .column_kinds import count_tiles, find_tile
from .pack import PLAN_LAST
from .packed_gradient import load_arena
from .packed_products import active_blocks, add_tokens, kept_pairs
from .unions import SETS


@triton.jit
def _store_columns(
    acc,  # [columns, BLOCK_D]
    column,  # [columns], -1 behind the tile's last
    offs_d,  # [BLOCK_D]
    unit_ptr,
    constant_hidden_ptr,
    column_weight_ptr,
    out_ptr,
    D: tl.constexpr,
):
    inside = column >= 0
    if unit_ptr is not None:
        acc *= tl.load(unit_ptr)
    if constant_hidden_ptr is not None:
        share = tl.load(constant_hidden_ptr + offs_d, mask=offs_d < D, other=0.0)[None, :]
        if column_weight_ptr is not None:
            share = tl.load(column_weight_ptr + column, mask=inside, other=0.0)[:, None] * share
        acc += share
    out = out_ptr + column.to(tl.int64)[:, None] * D + offs_d[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (offs_d < D)[None, :])


@triton.jit
def packed_direct_kernel(
    hidden,  # [N, D] descriptor or pointer
    storage_ptr,  # G
    extra_ptr,  # G
    unit_ptr,  # [] fp32 or None
    dense_ptr,  # [1]
    plan_ptr,  # the only round's row of the plan
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    n_hot_ptr,  # [1]
    hot_columns_ptr,  # [HOT_MOST]
    hot_pairs_ptr,  # [row blocks, HOT_MOST]
    counts_ptr,  # [super-blocks, 5] of single columns
    columns_ptr,  # [V] single columns
    tile_ptr,  # [programs, 5, BLOCK_N] int32, scratch: the columns at work; pairs of single ones in four row blocks
    n_rows_ptr,  # [1] or None
    constant_hidden_ptr,  # [D] fp32 or None: adds column_weight (x) constant_hidden
    column_weight_ptr,  # [V] fp32 or None
    ticket_ptr,  # [1] int32, zero
    out_ptr,  # [V, D] contiguous
    n,
    stride_hidden,
    n_words,
    n_lists,
    D: tl.constexpr,
    HOT_MOST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
):
    """`column_kinds` shows how the tiles of single columns are numbered."""
    if tl.load(dense_ptr) != 0:
        return
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    arena = load_arena(plan_ptr)
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    N_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    RUNS: tl.constexpr = (N_D + PARTS - 1) // PARTS
    STEPS: tl.constexpr = 128 // BLOCK_K
    offs_n = tl.arange(0, BLOCK_N)
    n_hot = tl.minimum(tl.load(n_hot_ptr), HOT_MOST)
    n_hot_items = tl.cdiv(n_hot, BLOCK_N) * N_D
    n_items = n_hot_items + count_tiles(counts_ptr, n_lists, BLOCK_N) * RUNS
    tile_ptr += tl.program_id(0) * 5 * BLOCK_N
    item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while item < n_items:
        tl.debug_barrier()  # no thread reads the last item's tile any more
        hot = item < n_hot_items
        if hot:
            first_part = item % N_D
            place = item // N_D * BLOCK_N
            column = tl.load(hot_columns_ptr + place + offs_n, mask=place + offs_n < n_hot, other=-1)
            pairs = hot_pairs_ptr + place
            block = 0
            n_active = tl.cdiv(n, 128)
            order = 0
        else:
            run = item - n_hot_items
            first_part = run % RUNS * PARTS
            index, start, offset = find_tile(counts_ptr, n_lists, run // RUNS, BLOCK_N)
            inside = offset + offs_n < tl.load(counts_ptr + index)
            column = tl.load(columns_ptr + start + offset + offs_n, mask=inside, other=-1)
            pairs = tile_ptr + BLOCK_N
            block = index // SETS * 4
            kept_by = index % SETS
            several = kept_by == SETS - 1
            in_0 = inside & (several | (kept_by == 0))
            in_1 = inside & (several | (kept_by == 1))
            in_2 = inside & (several | (kept_by == 2))
            in_3 = inside & (several | (kept_by == 3))
            pair_0 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block, last, 0, column, in_0)
            pair_1 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 1, last, 0, column, in_1)
            pair_2 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 2, last, 0, column, in_2)
            pair_3 = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, block + 3, last, 0, column, in_3)
            n_active, order = active_blocks(pair_0, pair_1, pair_2, pair_3)
            tl.store(pairs + offs_n, pair_0)
            tl.store(pairs + BLOCK_N + offs_n, pair_1)
            tl.store(pairs + 2 * BLOCK_N + offs_n, pair_2)
            tl.store(pairs + 3 * BLOCK_N + offs_n, pair_3)
        tl.store(tile_ptr + offs_n, column)
        tl.debug_barrier()  # the loop's loads need not be by the threads that stored
        steps = n_active * STEPS
        n_parts = tl.where(hot, 1, tl.minimum(N_D - first_part, PARTS))
        stride_pairs = tl.where(hot, HOT_MOST, BLOCK_N)
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        # One loop over parts and tokens: with one row block a part has too few steps to hide a load's latency.
        for i in range(n_parts * steps):
            first_d = (first_part + i // steps) * BLOCK_D
            b = i % steps // STEPS
            b = tl.where(hot, b, (order >> (2 * tl.minimum(b, 3))) & 3)
            pair = tl.load(pairs + b * stride_pairs + offs_n)
            acc = add_tokens(
                acc, hidden, storage_ptr, extra_ptr, arena, pair, block + b, i % STEPS, n, stride_hidden, first_d, D,
                BLOCK_D, BLOCK_K, TMA_HIDDEN, "tf32",
            )  # fmt: skip
            if i % steps == steps - 1:
                column = tl.load(tile_ptr + offs_n)
                offs_d = first_d + tl.arange(0, BLOCK_D)
                _store_columns(acc, column, offs_d, unit_ptr, constant_hidden_ptr, column_weight_ptr, out_ptr, D)
                acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
