"""The k largest logits of every token and their columns, from group maxima that the forward left on its way.

The columns of a forward tile fall into eight groups by c % 8: in the accumulator layout of tensor cores a group lies in
one thread, as the bits of a mark do (`marks`), so its maximum costs the forward one instruction per logit. With tiles
of TILE = 8 * WIDTH columns,

    column c  <->  group (c // TILE) * 8 + c % 8, member (c % TILE) // 8      e.g. TILE 256, c = 300: group 12, member 5

A token's k largest logits lie in its k groups with the largest maxima: each logit outside is at most the smallest of
these k maxima. Equal maxima may be chosen either way. So:

    pick_groups     per token, the k tiles of the largest maxima, and of their 8 k groups the k largest
    list_groups     per row block of 128 tokens, the distinct groups that any of them picked
    candidates      the listed groups' logits of the block's tokens once more, gathered as in `packed_gradient`; each
                    token keeps those of its own groups, [N, k, WIDTH]
    top_candidates  per token, the k largest of these

Tokens share groups: 128 tokens with 8 picks each have 340 to 500 distinct ones of 8000 on the heads of
launch/bench/lm_like.py, 4% to 6% of the product. How many is known on the device only, and nobody waits for it.

Values are ordered as 64-bit keys, (bits of the logit made monotonous) << 32 | (2^31 - 1 - index): one sort moves value
and index. K is k rounded up to a power of two, for `tl.topk`. Memory, for the time of the call: N * V / WIDTH * 4 bytes
of maxima, which with tiles of 256 columns is an eighth of a byte per logit, and N * K * WIDTH * 4 of candidates.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packed_table import packed_launch
from .problem import Head
from .tiles import (
    ROW_BLOCK,
    TL_DTYPE,
    Source,
    add_low_rank,
    ceil_div,
    compute_dtype,
    count_rows,
    load_scale,
    load_tile,
    logits_of,
    low_rank_arguments,
    scale_tensor,
)

LAST: tl.constexpr = tl.constexpr(2**31 - 1)  # an index that no column has; i ^ LAST is LAST - i
NOTHING: tl.constexpr = tl.constexpr(-(2**63))  # below every key
MOST_TILES = 1024  # whose maxima one program holds at a time


@dataclass(frozen=True)
class GroupMaxima:
    """What the forward leaves for `write_topk`."""

    values: Tensor  # [N, groups] fp32; undefined for rows that do not count
    width: int  # columns of a group

    @classmethod
    def empty(cls, n: int, n_columns: int, block_n: int, device: torch.device) -> "GroupMaxima":
        return cls(torch.empty(n, ceil_div(n_columns, block_n) * 8, device=device), block_n // 8)


@triton.jit
def store_group_maxima(group_max_ptr, n_groups, rows, counts, tile, x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores the maxima of the tile's eight groups."""
    maxima = tl.max(x.reshape([BLOCK_M, BLOCK_N // 8, 8]), 1)
    at = rows.to(tl.int64)[:, None] * n_groups + tile * 8 + tl.arange(0, 8)[None, :]
    tl.store(group_max_ptr + at, maxima, mask=counts[:, None])


@triton.jit
def _monotonous(bits):
    """Bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(values, index):
    return (_monotonous(values.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)


@triton.jit
def _values_of(keys):
    return _monotonous((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(keys):
    return (keys & LAST).to(tl.int32) ^ LAST


@triton.jit
def pick_groups_kernel(
    group_max_ptr,  # [N, groups]
    n_rows_ptr,  # [1] int32 or None
    picks_ptr,  # [N, K] int32 out: groups, -1 for none
    picked_ptr,  # [row blocks, groups] int8, zeros: out, 1 where a token of the block picked the group
    n,
    n_groups,
    k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # tiles, at least K
):
    row = tl.program_id(0)
    if row >= count_rows(n, n_rows_ptr):
        return
    own = group_max_ptr + row.to(tl.int64) * n_groups
    each = tl.arange(0, 8)[None, :]
    best = tl.full((K,), NOTHING, tl.int64)
    for first in range(0, n_groups // 8, BLOCK):
        tiles = first + tl.arange(0, BLOCK)
        inside = tiles < n_groups // 8
        maxima = tl.load(own + tiles[:, None] * 8 + each, mask=inside[:, None], other=-float("inf"))
        part = tl.topk(tl.where(inside, _keys(tl.max(maxima, 1), tiles), NOTHING), K)
        best = tl.topk(tl.join(best, part).reshape([2 * K]), K)
    exists = best != NOTHING
    groups = _index_of(best)[:, None] * 8 + each
    maxima = tl.load(own + groups, mask=exists[:, None], other=-float("inf"))
    best = tl.topk(tl.where(exists[:, None], _keys(maxima, groups), NOTHING).reshape([8 * K]), K)
    slots = tl.arange(0, K)
    exists = (best != NOTHING) & (slots < k)
    group = _index_of(best)
    tl.store(picks_ptr + row.to(tl.int64) * K + slots, tl.where(exists, group, -1))
    tl.store(picked_ptr + (row // 128).to(tl.int64) * n_groups + group, tl.full((K,), 1, tl.int8), mask=exists)


@triton.jit
def list_groups_kernel(
    picked_ptr,  # [row blocks, groups] int8
    list_ptr,  # [row blocks, groups] int32 out: the picked groups, in order
    counts_ptr,  # [row blocks] int32 out: how many
    n_groups,
    BLOCK: tl.constexpr,
):
    row_block = tl.program_id(0)
    own = row_block.to(tl.int64) * n_groups
    total = tl.zeros((), tl.int32)
    for first in range(0, n_groups, BLOCK):
        groups = first + tl.arange(0, BLOCK)
        picked = tl.load(picked_ptr + own + groups, mask=groups < n_groups, other=0).to(tl.int32)
        at = total + tl.cumsum(picked, 0) - picked
        tl.store(list_ptr + own + at, groups, mask=picked != 0)
        total += tl.sum(picked, 0)
    tl.store(counts_ptr + row_block, total)


@triton.jit
def candidates_kernel(
    hidden,  # [N, D] descriptor or pointer
    weight_ptr,  # [V, D]
    low_hidden_ptr,  # [N, RANK] or None
    low_weight_ptr,  # [V, RANK] or None
    bias_ptr,  # [V] or None
    scale_ptr,  # [] fp32 or None
    n_rows_ptr,  # [1] int32 or None
    picks_ptr,  # [N, K] int32
    list_ptr,  # [row blocks, groups] int32
    counts_ptr,  # [row blocks] int32
    candidates_ptr,  # [N, K, WIDTH] out, for picks that exist
    n,
    n_columns,
    n_groups,
    stride_hidden_row,
    stride_hidden_col,
    stride_weight_row,
    stride_weight_col,
    softcap,
    n_blocks,
    programs,  # per row block
    D: tl.constexpr,
    RANK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of BLOCK_N / WIDTH groups
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row_block = tl.program_id(0) % n_blocks
    n_listed = tl.load(counts_ptr + row_block)
    own_list = list_ptr + row_block.to(tl.int64) * n_groups
    scale = load_scale(scale_ptr)
    rows = row_block * 128 + tl.arange(0, 128)
    counts = rows < count_rows(n, n_rows_ptr)
    GROUPS: tl.constexpr = BLOCK_N // WIDTH
    offs_group, offs_n, offs_k = tl.arange(0, GROUPS), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    slots = tl.arange(0, K)
    for first in range(tl.program_id(0) // n_blocks * GROUPS, n_listed, programs * GROUPS):
        # Which of its picks, if any, each group is to each token.
        group = tl.load(own_list + first + offs_group, mask=first + offs_group < n_listed, other=-2)
        picks = tl.load(picks_ptr + rows.to(tl.int64)[:, None] * K + slots[None, :], mask=counts[:, None], other=-1)
        same = picks[:, None, :] == group[None, :, None]
        slot = tl.max(tl.where(same, slots[None, None, :], -1), 2)
        member = first + offs_n // WIDTH
        listed = member < n_listed
        group = tl.load(own_list + member, mask=listed, other=0)
        column = (group // 8) * (8 * WIDTH) + (offs_n % WIDTH) * 8 + group % 8
        inside = listed & (column < n_columns)
        column = tl.where(inside, column, 0)
        weight = weight_ptr + column.to(tl.int64)[None, :] * stride_weight_row
        acc = tl.zeros((128, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            h = load_tile(
                hidden, row_block * 128, k, n, D, stride_hidden_row, stride_hidden_col, 128, BLOCK_K, TMA_HIDDEN
            )
            at = weight + (k + offs_k).to(tl.int64)[:, None] * stride_weight_col
            if D % BLOCK_K == 0:
                w = tl.load(at)
            else:
                w = tl.load(at, mask=(offs_k < D - k)[:, None], other=0.0)
            acc = tl.dot(h.to(DTYPE), w.to(DTYPE), acc, input_precision=PRECISION)
        if low_hidden_ptr is not None:
            acc = add_low_rank(
                acc, low_hidden_ptr, low_weight_ptr, rows, counts, column, inside, RANK, DTYPE, PRECISION
            )
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = tl.where(inside[None, :], logits_of(acc, bias, scale, softcap, HAS_SOFTCAP), -float("inf"))
        at = (rows.to(tl.int64)[:, None] * K + slot) * WIDTH
        out = candidates_ptr + at[:, :, None] + tl.arange(0, WIDTH)[None, None, :]
        keep = (counts[:, None] & (slot >= 0))[:, :, None]
        tl.store(out, x.reshape([128, GROUPS, WIDTH]), mask=keep)


@triton.jit
def top_candidates_kernel(
    candidates_ptr,  # [N, K, WIDTH]
    picks_ptr,  # [N, K] int32
    n_rows_ptr,  # [1] int32 or None
    out_ptr,  # [2 k, N] out: logits, the largest first, then bits of global ids
    n,
    n_columns,
    first_id,  # global id of column 0
    k,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """-inf, and any column, where a token has fewer than k; also in rows that do not count."""
    row = tl.program_id(0)
    slots, members = tl.arange(0, K), tl.arange(0, WIDTH)
    pick = tl.load(picks_ptr + row.to(tl.int64) * K + slots, mask=row < count_rows(n, n_rows_ptr), other=-1)
    column = (pick // 8 * (8 * WIDTH) + pick % 8)[:, None] + members[None, :] * 8
    exists = (pick >= 0)[:, None] & (column < n_columns)
    at = (row.to(tl.int64) * K + slots)[:, None] * WIDTH + members[None, :]
    x = tl.load(candidates_ptr + at, mask=exists, other=-float("inf"))
    best = tl.topk(_keys(x, tl.where(exists, column, LAST)).reshape([K * WIDTH]), K)
    ids = first_id + tl.minimum(_index_of(best), n_columns - 1)
    out = out_ptr + slots.to(tl.int64) * n + row
    tl.store(out, _values_of(best), mask=slots < k)
    tl.store(out + tl.full((), k, tl.int64) * n, ids.to(tl.float32, bitcast=True), mask=slots < k)


def write_topk(hidden: Tensor, head: Head, maxima: GroupMaxima, n_rows: Tensor | None, k: int, out: Tensor) -> None:
    """Writes the k largest logits of each row and the bits of their global ids into `out`, [2 k, N] contiguous."""
    n, d = hidden.shape
    n_columns, n_groups, device = head.weight.shape[0], maxima.values.shape[1], hidden.device
    n_blocks = ceil_div(n, ROW_BLOCK)
    padded = max(2, triton.next_power_of_2(k))
    picks = torch.empty(n, padded, dtype=torch.int32, device=device)
    picked = torch.zeros(n_blocks, n_groups, dtype=torch.int8, device=device)
    block = max(padded, min(MOST_TILES, triton.next_power_of_2(n_groups // 8)))
    pick_groups_kernel[(n,)](maxima.values, n_rows, picks, picked, n, n_groups, k, K=padded, BLOCK=block, num_warps=4)
    listed = torch.empty(n_blocks, n_groups, dtype=torch.int32, device=device)
    counts = torch.empty(n_blocks, dtype=torch.int32, device=device)
    list_groups_kernel[(n_blocks,)](picked, listed, counts, n_groups, BLOCK=1024, num_warps=4)

    dtype = compute_dtype(hidden, head)
    processors, blocks = packed_launch("candidates", device, dtype)
    most = ceil_div(min(ROW_BLOCK * k, n_groups) * maxima.width, blocks["BLOCK_N"])
    programs = min(most, ceil_div(8 * processors, n_blocks))  # short ones: row blocks list more and fewer groups
    candidates = torch.empty(n, padded, maxima.width, device=device)
    h = Source(hidden, ROW_BLOCK, blocks["BLOCK_K"])
    low_hidden, low_weight, rank = low_rank_arguments(head)
    candidates_kernel[(n_blocks * programs,)](
        h.source, head.weight, low_hidden, low_weight, head.bias, scale_tensor(head), n_rows, picks, listed, counts,
        candidates, n, n_columns, n_groups, h.stride_row, h.stride_col, *head.weight.stride(), head.softcap or 1.0,
        n_blocks, programs, D=d, RANK=rank, HAS_SOFTCAP=head.softcap is not None, TMA_HIDDEN=h.tma, K=padded,
        WIDTH=maxima.width, DTYPE=TL_DTYPE[dtype], PRECISION="ieee", **blocks,
    )  # fmt: skip
    top_candidates_kernel[(n,)](
        candidates, picks, n_rows, out, n, n_columns, head.start, k, K=padded, WIDTH=maxima.width, num_warps=4
    )  # fmt: skip
