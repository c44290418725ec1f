"""Marks: one bit per (row block, column) that the forward leaves for the packed backward.

The forward marks a column when one of the block's 128 tokens may reach the threshold of that column:

    2^(x * log2 e - shift) >= threshold         shift is a lower bound of the token's log-sum-exp, in base 2

The left-hand side is the exponential that the token's sum takes anyway, so a mark costs a compare and an addition.

Packing predicates needs few instructions if the bits of one word lie in one thread. In the accumulator layout of
tensor cores a thread holds, of each 8 neighbouring columns, the same two; so word w of a 256-column tile collects
the columns w, w + 8, w + 16, ...: 32 compares, selects and adds inside a thread, and only eight words per tile and
row cross threads (a maximum over tokens of every column would shuffle 256 values: 18% of the forward, measured).

    column c  <->  word (c // 256) * 8 + c % 8, bit (c // 8) % 32      e.g. c = 300: word 8 + 4 = 12, bit 37 % 32 = 5

Tiles narrower than 256 columns fill 16- or 8-bit parts of the words. Bits of columns beyond the vocabulary are
undefined, readers mask them; words of row blocks without tokens are 0.

Is the bound a bound? It and x carry rounding errors, and the backward recomputes x in another order of additions.
SLACK covers both: 2^-6 absolutely, in base 2 (1.1% of a probability; products whose absolute terms sum up to 2^16
still fit) plus 2^-13 of the bound, since a column matters only if its x is within 25 of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .coin import ROW_BLOCK

WORD_TILE = 256  # columns of eight words
SLACK: tl.constexpr = tl.constexpr(2.0**-6)
SLACK_RELATIVE: tl.constexpr = tl.constexpr(2.0**-13)
FAR: tl.constexpr = tl.constexpr(1e30)


def marks_shape(n_rows: int, n_columns: int) -> tuple[int, int]:
    return triton.cdiv(n_rows, ROW_BLOCK), triton.cdiv(n_columns, WORD_TILE) * 8


@triton.jit
def mark_bound(lower_bound, m, s):
    """The larger of two lower bounds of each token's log-sum-exp, base 2: the given one, and the sum s * 2^m so far."""
    return tl.maximum(lower_bound, m + tl.log2(s))


@triton.jit
def finished_bound(
    lower_bound,  # [BLOCK_M] base 2, from all hot columns
    found_ptr,  # [splits, N], see `store_found`, NaN until the split is finished
    n,
    rows,  # [BLOCK_M]
    counts,  # [BLOCK_M]
    finished,  # how many splits to take into account; waits for them
):
    """[BLOCK_M]: the lower bound with all columns of the first splits in place of their hot ones.

    Numbers themselves say that they are there, so nothing else has to be ordered. Which splits count does not depend
    on timing, and with it no bit of the result.
    """
    SPLITS: tl.constexpr = 64  # loaded at a time: a second round trip to memory would show
    offs = tl.arange(0, SPLITS)
    top = tl.maximum(lower_bound, -FAR)
    total = tl.full(top.shape, 1.0, tl.float32)  # of exponentials relative to top
    for first in range(0, finished, SPLITS):
        split = first + offs
        mask = (split < finished)[:, None] & counts[None, :]
        at = found_ptr + split.to(tl.int64)[:, None] * n + rows[None, :]
        found = tl.load(at, mask=mask, other=-FAR, volatile=True)
        while tl.max((found != found).to(tl.int32)) > 0:
            found = tl.load(at, mask=mask, other=-FAR, volatile=True)
        new_top = tl.maximum(top, tl.max(found, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(found - new_top[None, :]), 0)
        top = new_top
    return top + tl.log2(total)


@triton.jit
def store_found(found_ptr, hot_ptr, at, counts, m, s):
    """What a split has found besides its hot columns: log2 of its sum without theirs, [splits, N], see `HotSplits`.

    Infinities and NaN would spread or keep others waiting.
    """
    whole = m + tl.log2(s)
    hot = tl.load(hot_ptr + at, mask=counts, other=0.0)
    found = whole + tl.log2(tl.maximum(1.0 - tl.exp2(hot - whole), 0.0))
    tl.store(found_ptr + at, tl.where(tl.abs(found) < FAR, found, -FAR), mask=counts)


@triton.jit
def mark_shift(bound, least, most):
    """What each token's exponentials are taken relative to, base-2 units: a lower bound of its log-sum-exp minus the
    slack, within [least, most] so that sums neither overflow nor vanish.

    `least` must be a lower bound too: no logit of the tile is below it, or some logit so far is above it. Where `most`
    cuts, more columns may be marked than needed.
    """
    return tl.maximum(tl.minimum(bound - SLACK - SLACK_RELATIVE * tl.abs(bound), most), least)


@triton.jit
def mark_words(
    e,  # [128, BLOCK_N] exponentials relative to `mark_shift`
    threshold,  # [BLOCK_N] from `coin_thresholds`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[8, 8] int32: the tile's marks of each 16 tokens, which are a warp's: they meet in memory, not at a barrier.

    Tokens r and r + 8 of the 16 are one thread's: their bits meet first, before the columns' are added.
    """
    tl.static_assert(BLOCK_M == 128)
    hit = e >= threshold[None, :]
    weight = 1 << tl.arange(0, BLOCK_N // 8)
    bits = tl.where(hit.reshape([8, 2, 8, BLOCK_N // 8, 8]), weight[None, None, None, :, None], 0)
    words = tl.sum(tl.reduce_or(bits, 1), 2)  # distinct bits: their sum is their union
    return tl.reduce_or(words, 1)


@triton.jit
def add_marks(
    bits_ptr,  # [row blocks, words] int32, zeros before the first tile
    n_words,
    row_block,
    tile,  # index of this tile of BLOCK_N columns
    words,  # from `mark_words`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the tile's marks, BLOCK_N in {64, 128, 256}."""
    tl.static_assert(BLOCK_M == 128)
    PARTS: tl.constexpr = 256 // BLOCK_N
    at = bits_ptr + row_block.to(tl.int64) * n_words + (tile // PARTS) * 8 + tl.arange(0, 8)
    words = words << (tile % PARTS * (BLOCK_N // 8))
    tl.atomic_or(tl.broadcast_to(at[None, :], [8, 8]), words, mask=words != 0, sem="relaxed")


@triton.jit
def mark_targets(
    bits_ptr,  # [row blocks, words] int32
    rows,  # tokens
    target,  # int64, their local targets, -1 for elsewhere
    n_counting,
    n_words,
):
    """Marks tokens' targets: |G| is large where p is small there, which no bound of p shows."""
    word = (rows // 128).to(tl.int64) * n_words + (target // 256) * 8 + target % 8
    bit = (1 << ((target // 8) % 32).to(tl.int32)).to(tl.int32)
    tl.atomic_or(bits_ptr + word, bit, mask=(target >= 0) & (rows < n_counting), sem="relaxed")


def unpack_marks(bits: Tensor, n_columns: int) -> Tensor:
    """[row blocks, n_columns] bool in vocabulary order."""
    each = bits.view(bits.shape[0], -1, 1, 8) >> torch.arange(32, device=bits.device, dtype=torch.int32)[:, None]
    return (each & 1).bool().reshape(bits.shape[0], -1)[:, :n_columns]


def pack_marks(marks: Tensor) -> Tensor:
    """The inverse of `unpack_marks`; bits beyond the vocabulary are 0."""
    n_blocks, n_columns = marks.shape
    padded = torch.nn.functional.pad(marks.to(torch.int64), (0, -n_columns % WORD_TILE))
    weight = 1 << torch.arange(32, device=marks.device)[:, None]
    words = (padded.view(n_blocks, -1, 32, 8) * weight).sum(2).reshape(n_blocks, -1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
