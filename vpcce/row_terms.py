"""Small terms per token around the kernels: what folds into four numbers, and what needs no kernel at all."""

import torch
from torch import Tensor

from vpcce.kernels.problem import Head, RowGradients


def row_gradients(grads, lse, entropy, target_shape) -> RowGradients:
    g_lse, g_target, g_entropy, g_logit_sum = grads
    zero = torch.zeros_like(lse)
    softmax = zero if g_lse is None else g_lse.to(lse.dtype)
    softmax_logit = None
    if g_entropy is not None:
        g_entropy = g_entropy.to(lse.dtype)
        softmax = softmax + g_entropy * (lse - entropy)
        softmax_logit = -g_entropy
    return RowGradients(
        softmax=softmax.contiguous(),
        target=lse.new_zeros(target_shape) if g_target is None else g_target.to(lse.dtype).contiguous(),
        softmax_logit=softmax_logit,
        constant=None if g_logit_sum is None else g_logit_sum.to(lse.dtype).contiguous(),
    )


def linear_logit_sum(tokens: Tensor, head: Head) -> Tensor:
    """sum_v column_weight_v * x_v where x is linear in hidden: one matrix-vector product."""
    dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    total = torch.zeros(tokens.shape[1], dtype=dtype, device=tokens.device)
    offset = torch.zeros((), dtype=dtype, device=tokens.device)
    for start in range(0, head.weight.shape[0], 16384):  # bounds the copy in `dtype`
        rows = slice(start, start + 16384)
        weight = head.weight[rows].to(dtype)
        share = weight.new_ones(weight.shape[0]) if head.column_weight is None else head.column_weight[rows].to(dtype)
        total += share @ weight
        if head.bias is not None:
            offset += share @ head.bias[rows].to(dtype)
    x = tokens.to(dtype) @ total + offset
    if head.low_rank is not None:
        low = head.low_rank.weight.to(dtype)
        total = low.sum(0) if head.column_weight is None else head.column_weight.to(dtype) @ low
        x += head.low_rank.hidden.to(dtype) @ total
    return x * head.scale


def as_float_bits(ids: Tensor, dtype: torch.dtype) -> Tensor:
    return ids.to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def from_float_bits(bits: Tensor) -> Tensor:
    bits = bits.contiguous()
    return bits.view(torch.int32 if bits.dtype == torch.float32 else torch.int64).to(torch.int64)
