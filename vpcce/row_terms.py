"""Small terms per token around the matrix products, in PyTorch.

`merge_ranks` and `row_gradients` serve the CPU and targets of several ids per token; one id per token has kernels, see
`vpcce.kernels.merge` and `vpcce.kernels.rows`, because on a device the host's time for so many operations shows.
"""

from functools import partial

import torch
from torch import Tensor

from vpcce.kernels.problem import Head, Merged, RowGradients, StatsLayout, from_float_bits
from vpcce.settings import Settings
from vpcce.tokens import Rows


def merge_ranks(ranks: Tensor, layout: StatsLayout, target: Tensor, how: Settings, rows: Rows) -> Merged:
    """What `vpcce.kernels.merge` documents, also for several ids per token. ranks: [T, rows of the layout, N]."""
    labels = rows.take(target)
    top = ranks[:, 0].amax(0)
    shift = torch.where(top.isinf(), 0.0, top)
    weights = torch.exp(ranks[:, 0] - shift)
    total = (ranks[:, 1] * weights).sum(0)
    target_logit = ranks[:, 2 : layout.expected_row].sum(0).T  # [N, K]
    largest = target_logit
    if labels.dim() == 2 and how.ignore_index is not None:  # ignored ids have no logit
        largest = target_logit.masked_fill(labels == how.ignore_index, -torch.inf)
    lse = torch.maximum(shift + total.log(), largest.amax(1))
    entropy = logit_sum = argmax = None
    if layout.entropy:
        entropy = rows.spread(lse - (ranks[:, layout.expected_row] * weights).sum(0) / total)
    if layout.argmax:
        ids = from_float_bits(ranks[:, layout.argmax_row])
        # A row with NaN equals no maximum and gets the last id.
        argmax = rows.spread(torch.where(ranks[:, 0] == top, ids, how.vocab_size - 1).amin(0))
    if layout.logit_sum:
        logit_sum = rows.spread(ranks[:, layout.logit_sum_row].sum(0))
    return Merged(rows.spread(lse), rows.spread(target_logit.reshape(labels.shape)), entropy, logit_sum, argmax)


def merge_bounds(ranks: Tensor) -> Tensor:
    """[N]: log of the sum of exponentials over all ranks, from maxima and sums [T, 2, N]."""
    top, total = ranks.unbind(1)
    shift = torch.where(top.amax(0).isinf(), 0.0, top.amax(0))
    return shift + (total * torch.exp(top - shift)).sum(0).log()


def row_gradients(grads, lse: Tensor, entropy, target: Tensor, rows: Rows) -> tuple[Tensor, RowGradients]:
    """(lse, upstream gradients) of the tokens that count: `vpcce.kernels.rows.row_gradients`, also for several ids."""
    g_lse, g_target, g_entropy, g_logit_sum = (None if g is None else rows.take(g) for g in grads)
    entropy = None if g_entropy is None else rows.take(entropy)
    lse = rows.take(lse)
    target_shape = (lse.shape[0], *target.shape[1:])
    zero = torch.zeros_like(lse)
    softmax = zero if g_lse is None else g_lse.to(lse.dtype)
    softmax_logit = None
    if g_entropy is not None:
        g_entropy = g_entropy.to(lse.dtype)
        softmax = softmax + g_entropy * (lse - entropy)
        softmax_logit = -g_entropy
    return lse, RowGradients(
        softmax=softmax.contiguous(),
        target=lse.new_zeros(target_shape) if g_target is None else g_target.to(lse.dtype).contiguous(),
        softmax_logit=softmax_logit,
        constant=None if g_logit_sum is None else g_logit_sum.to(lse.dtype).contiguous(),
    )


def linear_logit_sum(tokens: Tensor, head: Head, by_kernels: bool) -> tuple[Tensor, Tensor]:
    """sum_v column_weight_v * x_v where x is linear in hidden, [N], and column_weight @ weight, [D], which gives it."""
    dtype = torch.float64 if torch.float64 in (tokens.dtype, head.weight.dtype) else torch.float32
    if by_kernels:
        from vpcce.kernels.row_sum import row_sum
    else:
        row_sum = partial(_row_sum, dtype=dtype)
    share = head.column_weight
    weight_sum = row_sum(head.weight, share)
    x = tokens.to(dtype) @ weight_sum
    if head.bias is not None:
        x += row_sum(head.bias[:, None], share)
    if head.low_rank is not None:
        x += head.low_rank.hidden.to(dtype) @ row_sum(head.low_rank.weight, share)
    return x * head.scale, weight_sum


def _row_sum(matrix: Tensor, share: Tensor | None, dtype: torch.dtype) -> Tensor:
    """share @ matrix, [D], like `vpcce.kernels.row_sum`."""
    total = torch.zeros(matrix.shape[1], dtype=dtype, device=matrix.device)
    for start in range(0, matrix.shape[0], 16384):  # bounds the copy in `dtype`
        rows = matrix[start : start + 16384].to(dtype)
        total += rows.sum(0) if share is None else share[start : start + 16384].to(dtype) @ rows
    return total
