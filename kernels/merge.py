"""The statistics of all ranks become those of the whole vocabulary, in the order of the caller's tokens.

With M = max over ranks of m_r, a rank's maximum or what its sum is relative to, and what `StatsLayout` says each rank
has sent:

    lse = M + log(sum_r s_r * exp(m_r - M))       never below the target's logit, which is summed in another order
    target_logit = sum_r target_logit_r           0 on all ranks but one
    entropy = lse - sum_r px_r * exp(m_r - M) / sum_r s_r * exp(m_r - M)
    argmax = the lowest id of the ranks with m_r = M

Ranks are added in rank order, so every rank gets the same bits. A maximum of -inf (every logit is) is subtracted as
0. NaN goes through every maximum here. Ignored tokens get 0: the order of the tokens is a permutation, see `rows`, so
every number of the results is written once. One token per thread: nothing is reduced over tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .problem import Merged, StatsLayout
from .tiles import ceil_div, count_rows

BLOCK = 256


@triton.jit
def merge_ranks_kernel(
    ranks_ptr,  # [T, K, N]
    index_ptr,  # [N] int64 or None
    n_rows_ptr,  # [] int32, or None with index_ptr
    lse_ptr,  # [N] out, as are the next four
    target_logit_ptr,
    entropy_ptr,  # or None
    argmax_ptr,  # int64, or None
    logit_sum_ptr,  # or None
    n,
    n_ranks,
    vocab_size,
    K: tl.constexpr,  # numbers per token: max, sum, target logit, and the rows below
    EXPECTED: tl.constexpr,
    ARGMAX: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = rows < n
    counts = rows < count_rows(n, n_rows_ptr)
    wide_n = tl.full((), n, tl.int64)  # n = 1 arrives as a constant
    own = ranks_ptr + rows.to(tl.int64)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for rank in range(n_ranks):
        m = tl.load(own + rank * K * wide_n, mask=counts, other=-float("inf"))
        top = tl.maximum(top, m, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    target_logit = tl.zeros((BLOCK,), tl.float32)
    expected = tl.zeros((BLOCK,), tl.float32)
    logit_sum = tl.zeros((BLOCK,), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32) + (vocab_size - 1)  # of a row with NaN
    for rank in range(n_ranks):
        part = own + rank * K * wide_n
        m = tl.load(part, mask=counts, other=-float("inf"))
        weight = tl.exp(m - shift)
        total += tl.load(part + wide_n, mask=counts, other=0.0) * weight
        target_logit += tl.load(part + 2 * wide_n, mask=counts, other=0.0)
        if entropy_ptr is not None:
            expected += tl.load(part + EXPECTED * wide_n, mask=counts, other=0.0) * weight
        if argmax_ptr is not None:
            bits = tl.load(part + ARGMAX * wide_n, mask=counts, other=0.0)
            best = tl.where(m == top, tl.minimum(best, bits.to(tl.int32, bitcast=True)), best)
        if logit_sum_ptr is not None:
            logit_sum += tl.load(part + LOGIT_SUM * wide_n, mask=counts, other=0.0)
    lse = tl.maximum(shift + tl.log(total), target_logit, propagate_nan=tl.PropagateNan.ALL)
    at = rows.to(tl.int64)
    if index_ptr is not None:
        at = tl.load(index_ptr + rows, mask=stored, other=0)
    tl.store(lse_ptr + at, tl.where(counts, lse, 0.0), mask=stored)
    tl.store(target_logit_ptr + at, tl.where(counts, target_logit, 0.0), mask=stored)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + at, tl.where(counts, lse - expected / total, 0.0), mask=stored)
    if argmax_ptr is not None:
        tl.store(argmax_ptr + at, tl.where(counts, best, 0).to(tl.int64), mask=stored)
    if logit_sum_ptr is not None:
        tl.store(logit_sum_ptr + at, tl.where(counts, logit_sum, 0.0), mask=stored)


def merge_ranks(
    ranks: Tensor,  # [T, rows of the layout, N] fp32 contiguous, or [rows of the layout, N] of a single rank
    layout: StatsLayout,  # of one id per token
    vocab_size: int,
    index: Tensor | None,  # [N] int64: the token that row i is
    n_rows: Tensor | None,
) -> Merged:
    """`Merged`, in the order of the tokens, of one id per token."""
    k, n = ranks.shape[-2:]
    n_ranks = ranks.shape[0] if ranks.dim() == 3 else 1

    def per_token(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(n, dtype=dtype, device=ranks.device) if wanted else None

    entropy, logit_sum = per_token(layout.entropy), per_token(layout.logit_sum)
    merged = Merged(per_token(), per_token(), entropy, logit_sum, per_token(layout.argmax, torch.int64))
    if n:
        with torch.cuda.device_of(ranks):
            merge_ranks_kernel[(ceil_div(n, BLOCK),)](
                ranks, index, n_rows, merged.lse, merged.target_logit, merged.entropy, merged.argmax, merged.logit_sum,
                n, n_ranks, vocab_size, K=k, EXPECTED=layout.expected_row, ARGMAX=layout.argmax_row,
                LOGIT_SUM=layout.logit_sum_row, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return merged


@triton.jit
def merge_bounds_kernel(
    ranks_ptr,  # [T, 2, N]: maxima, sums
    out_ptr,  # [N] out
    n,
    n_ranks,
    stride_rank,
    stride_sum,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < n
    own = ranks_ptr + rows.to(tl.int64)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for rank in range(n_ranks):
        top = tl.maximum(top, tl.load(own + rank * stride_rank, mask=inside, other=-float("inf")))
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(n_ranks):
        part = own + rank * stride_rank
        m = tl.load(part, mask=inside, other=-float("inf"))
        total += tl.load(part + stride_sum, mask=inside, other=0.0) * tl.exp(m - shift)
    tl.store(out_ptr + rows, shift + tl.log(total), mask=inside)


def merge_bounds(ranks: Tensor) -> Tensor:
    """[N]: log of the sum of exponentials over all ranks, from maxima and sums [T, 2, N]; for marks only."""
    n = ranks.shape[-1]
    out = torch.empty(n, dtype=torch.float32, device=ranks.device)
    if n:
        with torch.cuda.device_of(ranks):
            merge_bounds_kernel[(ceil_div(n, BLOCK),)](
                ranks, out, n, ranks.shape[0], ranks.stride(0), ranks.stride(1), BLOCK=BLOCK, num_warps=4
            )
    return out
