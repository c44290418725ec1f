"""Which columns the row blocks of a super-block kept, as lists for dC.

A super-block shares its coin, so the kept sets of its four row blocks nest, and one list serves a product over all of
its tokens. Columns that a single row block kept (about half) stand apart in it, for tiles that need 128 tokens only.
"""

import triton
import triton.language as tl

from .pack import PLAN_BASE, PLAN_FIRST, PLAN_LAST, popcount

SETS: tl.constexpr = tl.constexpr(5)  # of `kept_apart`


@triton.jit
def kept_words(kept_bits_ptr, row_block, last, words, n_words):
    mask = (words < n_words) & (row_block < last)
    return tl.load(kept_bits_ptr + row_block * n_words.to(tl.int64) + words, mask=mask, other=0)


@triton.jit
def kept_apart(kept_bits_ptr, super_block, last, words, n_words):
    """What a super-block keeps, as words of five disjoint sets: kept by row block 0, 1, 2, 3 alone; by several."""
    kept_0 = kept_words(kept_bits_ptr, super_block * 4, last, words, n_words)
    kept_1 = kept_words(kept_bits_ptr, super_block * 4 + 1, last, words, n_words)
    kept_2 = kept_words(kept_bits_ptr, super_block * 4 + 2, last, words, n_words)
    kept_3 = kept_words(kept_bits_ptr, super_block * 4 + 3, last, words, n_words)
    once = kept_0 ^ kept_1 ^ kept_2 ^ kept_3
    once &= ~((kept_0 & kept_1 & kept_2) | (kept_3 & ((kept_0 & kept_1) | (kept_2 & (kept_0 | kept_1)))))
    several = (kept_0 | kept_1 | kept_2 | kept_3) & ~once
    return once & kept_0, once & kept_1, once & kept_2, once & kept_3, several


@triton.jit
def append_columns(out_ptr, bits, words, bit):
    """Stores the columns of the set bits; returns how many."""
    n = popcount(bits)
    offs = (tl.cumsum(n, 0) - n)[:, None] + popcount(bits[:, None] & ((1 << bit) - 1)[None, :])
    column = ((words // 8) * 256 + words % 8)[:, None] + 8 * bit[None, :]
    tl.store(out_ptr + offs, column, mask=((bits[:, None] >> bit[None, :]) & 1) != 0)
    return tl.sum(n, 0)


@triton.jit
def union_kernel(
    kept_bits_ptr,  # [row blocks, words]
    start_ptr,  # [row blocks, groups] int64
    plan_ptr,  # this round's row of the plan
    summed_ptr,  # [words], the columns to list, or None for all
    single_ptr,  # [words] or None, likewise: the columns to count
    single_counts_ptr,  # [super-blocks, 5] int32, zeros, or None: out, per set
    union_ptr,  # [pairs of a round] out: per (super-block, group), the columns that stay in any of its row blocks
    union_start_ptr,  # [super-blocks, slabs] int32 out
    union_count_ptr,  # [super-blocks, slabs] int32 out
    n_words,
    n_groups,
    n_slabs,
    GROUP_WORDS: tl.constexpr,
    SLAB_WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The lists of columns that one row block alone keeps stand at both ends: few tiles mix two row blocks."""
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    last = tl.load(plan_ptr + PLAN_LAST).to(tl.int32)
    base = tl.load(plan_ptr + PLAN_BASE)
    bit = tl.arange(0, 32)
    SLABS: tl.constexpr = GROUP_WORDS // SLAB_WORDS
    for item in range(tl.program_id(0), tl.cdiv(last - first, 4) * n_groups, PROGRAMS):
        super_block = first // 4 + item // n_groups
        group = item % n_groups
        at = (tl.load(start_ptr + super_block * 4 * n_groups + group) - base).to(tl.int32)
        for slab in range(group * SLABS, tl.minimum((group + 1) * SLABS, n_slabs)):
            words = slab * SLAB_WORDS + tl.arange(0, SLAB_WORDS)
            sets = kept_apart(kept_bits_ptr, super_block, last, words, n_words)
            listed = tl.full((SLAB_WORDS,), -1, tl.int32)
            if summed_ptr is not None:
                listed = tl.load(summed_ptr + words, mask=words < n_words, other=0)
                single = tl.load(single_ptr + words, mask=words < n_words, other=0)
                counts = single_counts_ptr + super_block * SETS
                for i in tl.static_range(SETS):
                    tl.atomic_add(counts + i, tl.sum(popcount(sets[i] & single), 0), sem="relaxed")
            total = append_columns(union_ptr + at, sets[0] & listed, words, bit)
            total += append_columns(union_ptr + at + total, sets[1] & listed, words, bit)
            total += append_columns(union_ptr + at + total, sets[4] & listed, words, bit)
            total += append_columns(union_ptr + at + total, sets[2] & listed, words, bit)
            total += append_columns(union_ptr + at + total, sets[3] & listed, words, bit)
            tl.store(union_start_ptr + super_block * n_slabs + slab, at)
            tl.store(union_count_ptr + super_block * n_slabs + slab, total)
            at += total
