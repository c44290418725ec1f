"""Which columns of dC need no sums in memory: those that one super-block keeps, and those that most of them keep.

    single   kept by exactly one super-block, whose product is the column's row of dC
    hot      kept by at least half of the super-blocks, and by two: one product over all tokens, with zeros for G where
             a row block did not keep the column; at most HOT_MOST of them
    summed   the other kept columns; `packed_stream` adds up what each super-block has for them

`packed_direct` stores single and hot columns ("direct" together). Both kinds have their row of dC before G's first pair
in dC's storage: behind that it would overwrite G that the stream still reads, so such columns are the stream's, whose
order of groups protects it. At 8192 x 256000 x 2304 on an H200, 16 super-blocks, 3% of the columns are hot and would
make 37% of the stream's additions.

Single columns are listed per super-block and set of `kept_apart`, over the whole vocabulary: tiles are full, and one of
a set that a row block alone keeps multiplies 128 tokens instead of 512.

    counts[5 s + set] = single columns of super-block s; lists follow each other in that order in one [V] array, since
    a column is in one list at most; their tiles of BLOCK_N columns are numbered through

Worked example, BLOCK_N = 128, one super-block, counts = 130 5 0 0 200:
    lists start at 0 130 135 135 135        tiles = 2 1 0 0 2, ending at 2 3 3 3 5
    tile 3: lists 0 to 3 end before it, so it is tile 3 - 3 = 0 of list 4: columns 135 to 262 of the array

Lists are filled by atomic cursors: which columns share a tile depends on timing, no column's sum does. Where there are
more than HOT_MOST hot columns, so does which of them are left to the stream.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .pack import PLAN_LAST, PLAN_SPILL, PLAN_STORAGE_SHIFT, popcount
from .packed_products import kept_pairs
from .unions import SETS, append_columns, kept_apart, kept_words

HOT_MOST = 8192  # columns; their pairs are a table of 4 bytes per row block and column
HOT_TILE = 256  # columns of a program of `hot_pairs_kernel`, a multiple of every BLOCK_N
LISTS: tl.constexpr = tl.constexpr(256)  # whose counts are loaded at a time


def hot_width(n_columns: int) -> int:
    """Columns of the table of hot pairs."""
    return min(HOT_MOST, triton.cdiv(n_columns, HOT_TILE) * HOT_TILE)


@dataclass
class DirectColumns:
    """What `packed_direct` stores, and what it leaves to `packed_stream`."""

    is_single: Tensor  # [words], bits
    is_direct: Tensor  # [words], bits: single or hot
    is_summed: Tensor  # [words], bits
    n_hot: Tensor  # [1], zero before
    hot: Tensor  # [hot_width], column ids
    hot_pairs: Tensor  # [row blocks, hot_width]
    single_counts: Tensor  # [super-blocks * 5], zeros before
    single_cursors: Tensor  # [super-blocks * 5], zeros before
    single: Tensor  # [V], column ids
    ticket: Tensor  # [1], zero before
    tiles: Tensor  # [programs, 5, BLOCK_N], scratch: columns and pairs of the tile at work


@triton.jit
def direct_limit(plan_ptr, n_columns, D: tl.constexpr):
    """Columns before this one have their row of dC wholly before G, of the same dtype, in dC's storage."""
    before = tl.load(plan_ptr + PLAN_STORAGE_SHIFT) * 128 // D
    return tl.where(tl.load(plan_ptr + PLAN_SPILL) > 0, before, n_columns).to(tl.int32)


@triton.jit
def _words_of(chosen):  # [words, 32] bool
    return tl.sum(chosen.to(tl.int32) << tl.arange(0, 32)[None, :], 1)


@triton.jit
def column_kinds_kernel(
    kept_bits_ptr,  # [row blocks, words]
    n_rows_ptr,  # [1] or None
    plan_ptr,  # the only round's row of the plan
    single_ptr,  # [words] int32 out
    direct_ptr,  # [words] int32 out: single or hot
    summed_ptr,  # [words] int32 out
    n_hot_ptr,  # [1] int32, zero: out, may end above HOT_MOST
    hot_columns_ptr,  # [HOT_MOST] int32 out
    n,
    n_words,
    n_columns,
    D: tl.constexpr,
    HOT_MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    last = tl.minimum(tl.load(plan_ptr + PLAN_LAST).to(tl.int32), tl.cdiv(n, 128))
    n_super = tl.cdiv(last, 4)
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)[None, :]
    kept_by = tl.zeros((BLOCK, 32), tl.int32)
    for s in range(n_super):
        kept = kept_words(kept_bits_ptr, s * 4, last, words, n_words)
        kept |= kept_words(kept_bits_ptr, s * 4 + 1, last, words, n_words)
        kept |= kept_words(kept_bits_ptr, s * 4 + 2, last, words, n_words)
        kept |= kept_words(kept_bits_ptr, s * 4 + 3, last, words, n_words)
        kept_by += (kept[:, None] >> bit) & 1
    column = ((words // 8) * 256 + words % 8)[:, None] + 8 * bit
    before_g = column < direct_limit(plan_ptr, n_columns, D)
    single = before_g & (kept_by == 1)
    hot = before_g & (kept_by >= tl.maximum(tl.cdiv(n_super, 2), 2))
    bits = _words_of(hot)
    count = popcount(bits)
    at = tl.atomic_add(n_hot_ptr, tl.sum(count, 0), sem="relaxed")
    place = (at + tl.cumsum(count, 0) - count)[:, None] + popcount(bits[:, None] & ((1 << bit) - 1))
    hot &= place < HOT_MOST
    tl.store(hot_columns_ptr + place, column, mask=hot)
    direct = single | hot
    inside = words < n_words
    tl.store(single_ptr + words, _words_of(single), mask=inside)
    tl.store(direct_ptr + words, _words_of(direct), mask=inside)
    tl.store(summed_ptr + words, _words_of((kept_by > 0) & ~direct), mask=inside)


@triton.jit
def hot_pairs_kernel(
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    plan_ptr,  # the only round's row of the plan
    n_hot_ptr,  # [1]
    hot_columns_ptr,  # [HOT_MOST]
    hot_pairs_ptr,  # [row blocks, HOT_MOST] int32 out: -1 where the row block does not keep the column
    n_words,
    HOT_MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes whole tiles: behind the last hot column is -1 too."""
    tile, row_block = tl.program_id(0), tl.program_id(1)
    n_hot = tl.minimum(tl.load(n_hot_ptr), HOT_MOST)
    if tile * BLOCK >= n_hot:
        return
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    inside = place < n_hot
    column = tl.load(hot_columns_ptr + place, mask=inside, other=0)
    pair = kept_pairs(bits_ptr, kept_bits_ptr, word_start_ptr, n_words, row_block, last, 0, column, inside)
    tl.store(hot_pairs_ptr + row_block.to(tl.int64) * HOT_MOST + place, pair)


@triton.jit
def single_list_kernel(
    kept_bits_ptr,  # [row blocks, words]
    plan_ptr,  # the only round's row of the plan
    single_ptr,  # [words]
    counts_ptr,  # [super-blocks, 5]
    cursor_ptr,  # [super-blocks, 5] int32, zeros: columns listed so far
    columns_ptr,  # [V] int32 out
    n_words,
    n_slabs,
    SLAB_WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    bit = tl.arange(0, 32)
    for item in range(tl.program_id(0), tl.cdiv(last, 4) * n_slabs, PROGRAMS):
        super_block = item // n_slabs
        words = item % n_slabs * SLAB_WORDS + tl.arange(0, SLAB_WORDS)
        sets = kept_apart(kept_bits_ptr, super_block, last, words, n_words)
        single = tl.load(single_ptr + words, mask=words < n_words, other=0)
        counts = counts_ptr + super_block * SETS
        cursor = cursor_ptr + super_block * SETS
        start = tl.zeros((), tl.int32)
        for lists in range(0, super_block * SETS, LISTS):
            offs = lists + tl.arange(0, LISTS)
            start += tl.sum(tl.load(counts_ptr + offs, mask=offs < super_block * SETS, other=0), 0)
        for i in tl.static_range(SETS):
            bits = sets[i] & single
            at = start + tl.atomic_add(cursor + i, tl.sum(popcount(bits), 0), sem="relaxed")
            append_columns(columns_ptr + at, bits, words, bit)
            start += tl.load(counts + i)


@triton.jit
def count_tiles(counts_ptr, n_lists, BLOCK_N: tl.constexpr):
    n_tiles = tl.zeros((), tl.int32)
    for first in range(0, n_lists, LISTS):
        offs = first + tl.arange(0, LISTS)
        n_tiles += tl.sum(tl.cdiv(tl.load(counts_ptr + offs, mask=offs < n_lists, other=0), BLOCK_N), 0)
    return n_tiles


@triton.jit
def find_tile(counts_ptr, n_lists, tile, BLOCK_N: tl.constexpr):
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
