"""From marks to lists: which (row block, column) pairs the packed backward works on, and where their gradient lies.

A pair is one column of one row block; its 128 gradients are one row of the arena G. Columns are cut into groups of
GROUP columns and groups into slabs; a super-block is the four row blocks of a coin. Pairs are ordered by
(group, row block) when all of them fit at once, else by (super-block, group, row block) and worked on in rounds of
super-blocks; within a (group, row block) they are ordered as words and bits are (`marks`). So the pairs of one
super-block in one group are contiguous in both orders, and their columns' union fits where the pairs are.

    counts[b, g] = marked columns           start[b, g] = exclusive sum in that order
    word_start[b, w] = pair of the first bit of word w; pair of (b, v) = word_start[b, w(v)] + bits below v in w(v)

Worked example, 256-column tiles cut to 8 words of which three have marks, one row block, start = 10:
    word 0 = 0b101 (columns 0, 16)   word 3 = 0b1 (column 3)   word 7 = 0b10 (column 15)
    word_start = 10 12 12 12 13 13 13 13            list = [10: 0, 11: 16, 12: 3, 13: 15]

Nothing here waits for the device: how many pairs there are is known only there, so `plan_in_place_kernel` or
`plan_rounds_kernel` decides on the rounds, or sets `dense`, which sends the whole backward to the dense kernels when
the lists would not pay or fit.
"""

import triton
import triton.language as tl

# Columns of a row of the plan, one per round: row blocks [first, last), number of the round's first pair, and where
# pair p of the round lies in G: at storage row p + storage_shift if p < spill, else at extra row p + extra_shift.
PLAN_FIELDS = 6
PLAN_FIRST: tl.constexpr = tl.constexpr(0)
PLAN_LAST: tl.constexpr = tl.constexpr(1)
PLAN_BASE: tl.constexpr = tl.constexpr(2)
PLAN_SPILL: tl.constexpr = tl.constexpr(3)
PLAN_STORAGE_SHIFT: tl.constexpr = tl.constexpr(4)
PLAN_EXTRA_SHIFT: tl.constexpr = tl.constexpr(5)
SLACK_PAIRS: tl.constexpr = tl.constexpr(2048)  # so many are never too many


@triton.jit
def popcount(x):  # int32
    x = x.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def word_of(column):
    return (column // 256) * 8 + column % 8


@triton.jit
def pair_of(bits, word_start, column):
    """Where the pair of a marked column is, given its word and the word's first pair."""
    below = (1 << ((column // 8) % 32).to(tl.int32)).to(tl.int32) - 1
    return word_start + popcount(bits & below)


@triton.jit
def load_words(bits_ptr, row_block, words, n_words, n_columns):
    """Marks of one row block with undefined bits cleared."""
    bits = tl.load(bits_ptr + row_block * n_words.to(tl.int64) + words, mask=words < n_words, other=0)
    first_column = (words // 8) * 256 + words % 8
    n_valid = tl.minimum(tl.maximum((n_columns - first_column + 7) // 8, 0), 32)
    valid = (1 << tl.minimum(n_valid, 31)).to(tl.int32) - 1
    return bits & tl.where(n_valid == 32, -1, valid)


@triton.jit
def count_kernel(
    bits_ptr,  # [row blocks, words]
    n_rows_ptr,  # [1] or None
    counts_ptr,  # [super-blocks * 4, groups] int64 out, 0 where no row block is
    n_words,
    n_columns,
    n_blocks,
    GROUP_WORDS: tl.constexpr,
):
    group, row_block = tl.program_id(0), tl.program_id(1)
    counts = row_block < n_blocks
    if n_rows_ptr is not None:
        counts = counts & (row_block * 128 < tl.load(n_rows_ptr))
    n = tl.zeros((), tl.int64)
    if counts:
        words = group * GROUP_WORDS + tl.arange(0, GROUP_WORDS)
        n = tl.sum(popcount(load_words(bits_ptr, row_block, words, n_words, n_columns)), 0).to(tl.int64)
    tl.store(counts_ptr + row_block * tl.num_programs(0) + group, n)


@triton.jit
def _most_pairs(n, n_columns, n_rows_ptr, max_density):
    """More marked pairs of the tokens that count than this are more work than all of them in dense products."""
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    return (max_density * tl.cdiv(n, 128) * n_columns).to(tl.int64) + SLACK_PAIRS


@triton.jit
def plan_rounds_kernel(
    counts_ptr,  # [super-blocks * 4, groups] int64
    n_rows_ptr,  # [1] or None
    start_ptr,  # [super-blocks * 4, groups] int64 out
    block_start_ptr,  # [super-blocks * 4] int64 out: pairs of the row blocks before
    super_counts_ptr,  # [super-blocks] int64, scratch
    plan_ptr,  # [rounds, PLAN_FIELDS] int64 out
    dense_ptr,  # [1] int32 out
    n,
    n_columns,
    n_groups,
    n_super,
    n_blocks,
    capacity,  # pairs the arena holds
    list_pairs,  # pairs the lists hold
    max_density,
    n_rounds,
    PLAN_FIELDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SUPERS: tl.constexpr,
):
    """Orders the pairs and fills rounds with as many super-blocks as fit, from the last of both; one program.

    So the last round has work: dE is complete before the last of dC is made, and its collective can run meanwhile.
    """
    group = tl.arange(0, GROUPS)
    base = tl.zeros((), tl.int64)  # pairs of the super-blocks before
    for first in range(0, n_super, SUPERS):
        s = first + tl.arange(0, SUPERS)
        row = 4 * s[:, None] + tl.arange(0, 4)[None, :]
        at = row[:, :, None] * n_groups + group[None, None, :]
        inside = (s < n_super)[:, None, None] & (group < n_groups)[None, None, :]
        pairs = tl.load(counts_ptr + at, mask=inside, other=0)
        in_group = tl.sum(pairs, 1)
        in_block = tl.sum(pairs, 2)
        in_super = tl.sum(in_block, 1)
        super_start = base + tl.cumsum(in_super, 0) - in_super
        group_start = super_start[:, None] + tl.cumsum(in_group, 1) - in_group
        tl.store(start_ptr + at, group_start[:, None, :] + tl.cumsum(pairs, 1) - pairs, mask=inside)
        block_start = super_start[:, None] + tl.cumsum(in_block, 1) - in_block
        tl.store(block_start_ptr + row, block_start, mask=(s < n_super)[:, None])
        tl.store(super_counts_ptr + s, in_super, mask=s < n_super)
        base += tl.sum(in_super, 0)
    for r in range(n_rounds):
        _store_round(plan_ptr + r * PLAN_FIELDS, 0, 0, base * 0, True)
    tl.debug_barrier()  # the loads below need not be by the threads that stored
    used = tl.zeros((), tl.int64)
    last = n_blocks
    at_round = n_rounds - 1
    most = tl.minimum(_most_pairs(n, n_columns, n_rows_ptr, max_density), list_pairs)
    fits = (base <= most).to(tl.int32)
    for i in range(n_super):
        s = n_super - 1 - i
        pairs = tl.load(super_counts_ptr + s)
        fits = tl.where(pairs > capacity, 0, fits)
        if used + pairs > capacity:
            _store_round(plan_ptr + at_round * PLAN_FIELDS, (s + 1) * 4, last, base, at_round >= 0)
            used = tl.zeros((), tl.int64)
            last = (s + 1) * 4
            at_round -= 1
        used += pairs
        base -= pairs
    _store_round(plan_ptr + at_round * PLAN_FIELDS, 0, last, base, at_round >= 0)
    dense = (fits == 0) | (at_round < 0)
    if dense:
        for r in range(n_rounds):
            _store_round(plan_ptr + r * PLAN_FIELDS, 0, 0, base * 0, True)
    tl.store(dense_ptr, dense.to(tl.int32))


@triton.jit
def _store_round(plan_ptr, first, last, base, mask):
    """A round whose G lies in `extra` alone."""
    tl.store(plan_ptr + PLAN_FIRST, first, mask=mask)
    tl.store(plan_ptr + PLAN_LAST, last, mask=mask)
    tl.store(plan_ptr + PLAN_BASE, base, mask=mask)
    tl.store(plan_ptr + PLAN_SPILL, 0, mask=mask)
    tl.store(plan_ptr + PLAN_STORAGE_SHIFT, 0, mask=mask)
    tl.store(plan_ptr + PLAN_EXTRA_SHIFT, 0, mask=mask)


@triton.jit
def plan_in_place_kernel(
    counts_ptr,  # [super-blocks * 4, groups] int64
    n_rows_ptr,  # [1] or None
    start_ptr,  # [super-blocks * 4, groups] int64 out
    block_start_ptr,  # [super-blocks * 4] int64 out: pairs of the row blocks before
    plan_ptr,  # [1, PLAN_FIELDS] int64 out
    dense_ptr,  # [1] int32 out
    n,
    n_columns,
    n_groups,
    n_blocks,
    capacity,  # pairs that the lists hold
    max_density,
    storage_rows,  # rows of G that dC's own storage holds
    extra_rows,  # rows of G beside it
    row_bytes,  # of G
    column_bytes,  # of dC
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One round with G at the end of dC's storage and `extra` behind it, if no group's G is overwritten too early.

    dC is finished group by group from the front, so while group g is, the pairs from start[0, g] on must lie beyond
    the group's last column. One program.
    """
    group = tl.arange(0, GROUPS)
    in_group = tl.zeros((GROUPS,), tl.int64)
    for first in range(0, n_blocks, BLOCKS):
        row = first + tl.arange(0, BLOCKS)
        at = row[:, None] * n_groups + group[None, :]
        inside = (row < n_blocks)[:, None] & (group < n_groups)[None, :]
        in_group += tl.sum(tl.load(counts_ptr + at, mask=inside, other=0), 0)
    total = tl.sum(in_group, 0)
    first_pair = tl.cumsum(in_group, 0) - in_group
    group_start = first_pair
    base = tl.zeros((), tl.int64)
    for first in range(0, n_blocks, BLOCKS):
        row = first + tl.arange(0, BLOCKS)
        at = row[:, None] * n_groups + group[None, :]
        inside = (row < n_blocks)[:, None] & (group < n_groups)[None, :]
        pairs = tl.load(counts_ptr + at, mask=inside, other=0)
        in_block = tl.sum(pairs, 1)
        tl.store(start_ptr + at, group_start[None, :] + tl.cumsum(pairs, 0) - pairs, mask=inside)
        tl.store(block_start_ptr + row, base + tl.cumsum(in_block, 0) - in_block, mask=row < n_blocks)
        group_start += tl.sum(pairs, 0)
        base += tl.sum(in_block, 0)
    spill = tl.maximum(total - extra_rows, 0)
    end = tl.minimum((group + 1).to(tl.int64) * GROUP, n_columns) * column_bytes
    in_storage = (first_pair < spill) & (group < n_groups)
    clash = in_storage & ((first_pair + storage_rows - spill) * row_bytes < end)
    most = tl.minimum(capacity, _most_pairs(n, n_columns, n_rows_ptr, max_density))
    dense = (total > most) | (tl.sum(clash.to(tl.int32), 0) > 0)
    tl.store(dense_ptr, dense.to(tl.int32))
    _store_round(plan_ptr, 0, tl.where(dense, 0, n_blocks), total * 0, True)
    tl.store(plan_ptr + PLAN_SPILL, spill)
    tl.store(plan_ptr + PLAN_STORAGE_SHIFT, storage_rows - spill)
    tl.store(plan_ptr + PLAN_EXTRA_SHIFT, -spill)


@triton.jit
def list_kernel(
    bits_ptr,  # [row blocks, words]
    n_rows_ptr,  # [1] or None
    start_ptr,  # [row blocks, groups] int64
    dense_ptr,  # [1]
    word_start_ptr,  # [row blocks, words] int32
    list_ptr,  # [pairs] int32: column of each pair
    n_words,
    n_columns,
    GROUP_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, row_block = tl.program_id(0), tl.program_id(1)
    if tl.load(dense_ptr) != 0:
        return
    if n_rows_ptr is not None:
        if row_block * 128 >= tl.load(n_rows_ptr):
            return
    start = tl.load(start_ptr + row_block * tl.num_programs(0) + group).to(tl.int32)
    bit = tl.arange(0, 32)
    for w in range(0, GROUP_WORDS, BLOCK):
        words = group * GROUP_WORDS + w + tl.arange(0, BLOCK)
        bits = load_words(bits_ptr, row_block, words, n_words, n_columns)
        n = popcount(bits)
        word_start = start + tl.cumsum(n, 0) - n
        tl.store(word_start_ptr + row_block * n_words.to(tl.int64) + words, word_start, mask=words < n_words)
        column = ((words // 8) * 256 + words % 8)[:, None] + 8 * bit[None, :]
        marked = ((bits[:, None] >> bit[None, :]) & 1) != 0
        offs = word_start[:, None] + popcount(bits[:, None] & ((1 << bit) - 1)[None, :])
        tl.store(list_ptr + offs, column, mask=marked)
        start += tl.sum(n, 0)


@triton.jit
def keep_kernel(
    bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    keep_ptr,  # [pairs of a round] int8
    plan_ptr,  # this round's row of the plan
    kept_bits_ptr,  # [row blocks, words] out: marks with the dropped columns cleared
    kept_counts_ptr,  # [row blocks, groups] int32 out
    n_words,
    n_columns,
    n_groups,
    GROUP_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    n_blocks = tl.load(plan_ptr + PLAN_LAST).to(tl.int32) - first
    base = tl.load(plan_ptr + PLAN_BASE).to(tl.int32)
    bit = tl.arange(0, 32)
    for item in range(tl.program_id(0), n_blocks * n_groups, PROGRAMS):
        row_block = first + item // n_groups
        group = item % n_groups
        n = tl.zeros((), tl.int32)
        for w in range(0, GROUP_WORDS, BLOCK):
            words = group * GROUP_WORDS + w + tl.arange(0, BLOCK)
            offs_words = row_block * n_words.to(tl.int64) + words
            bits = load_words(bits_ptr, row_block, words, n_words, n_columns)
            word_start = tl.load(word_start_ptr + offs_words, mask=words < n_words, other=0)
            pair = (word_start - base)[:, None] + popcount(bits[:, None] & ((1 << bit) - 1)[None, :])
            marked = ((bits[:, None] >> bit[None, :]) & 1) != 0
            keep = tl.load(keep_ptr + pair, mask=marked, other=0).to(tl.int32)
            kept_bits = tl.sum(keep << bit[None, :], 1)
            tl.store(kept_bits_ptr + offs_words, kept_bits, mask=words < n_words)
            n += tl.sum(popcount(kept_bits), 0)
        tl.store(kept_counts_ptr + row_block * n_groups + group, n)


@triton.jit
def kept_list_kernel(
    bits_ptr,  # [row blocks, words]
    kept_bits_ptr,  # [row blocks, words]
    word_start_ptr,  # [row blocks, words]
    block_start_ptr,  # [row blocks] int64: pairs of the row blocks before
    kept_counts_ptr,  # [row blocks, groups] int32
    plan_ptr,  # this round's row of the plan
    kept_pair_ptr,  # [pairs of a round] out: per row block, the pairs that stay
    kept_column_ptr,  # [pairs of a round] out: their columns
    n_words,
    n_columns,
    n_groups,
    GROUP_WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    n_blocks = tl.load(plan_ptr + PLAN_LAST).to(tl.int32) - first
    base = tl.load(plan_ptr + PLAN_BASE).to(tl.int32)
    block_base = tl.load(block_start_ptr + first)
    bit = tl.arange(0, 32)
    below = ((1 << bit) - 1)[None, :]
    groups = tl.arange(0, GROUPS)
    for item in range(tl.program_id(0), n_blocks * n_groups, PROGRAMS):
        row_block = first + item // n_groups
        group = item % n_groups
        earlier = tl.load(kept_counts_ptr + row_block * n_groups + groups, mask=groups < group, other=0)
        at = (tl.load(block_start_ptr + row_block) - block_base).to(tl.int32) + tl.sum(earlier, 0)
        for w in range(0, GROUP_WORDS, BLOCK):
            words = group * GROUP_WORDS + w + tl.arange(0, BLOCK)
            offs_words = row_block * n_words.to(tl.int64) + words
            bits = load_words(bits_ptr, row_block, words, n_words, n_columns)
            kept_bits = tl.load(kept_bits_ptr + offs_words, mask=words < n_words, other=0)
            word_start = tl.load(word_start_ptr + offs_words, mask=words < n_words, other=0)
            n = popcount(kept_bits)
            offs = (at + tl.cumsum(n, 0) - n)[:, None] + popcount(kept_bits[:, None] & below)
            kept = ((kept_bits[:, None] >> bit[None, :]) & 1) != 0
            pair = (word_start - base)[:, None] + popcount(bits[:, None] & below)
            column = ((words // 8) * 256 + words % 8)[:, None] + 8 * bit[None, :]
            tl.store(kept_pair_ptr + offs, pair, mask=kept)
            tl.store(kept_column_ptr + offs, column, mask=kept)
            at += tl.sum(n, 0)
