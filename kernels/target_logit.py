"""The logit of chosen columns: one row of the weight per (token, column), gathered and dotted with the token's hidden.

Cut Cross-Entropy's algorithm 1. The forward could pick the target's logit out of its tiles, at the price of a
compare per element; gathering reads N * D numbers of the weight once, 0.1% of the product. Both sides of the
subtraction lse - target_logit are fp32 sums, in different orders: the caller clamps.
"""

import triton
import triton.language as tl
from torch import Tensor

from .marks import mark_targets
from .problem import Head
from .tiles import ceil_div, count_rows, load_scale, logits_of, low_rank_arguments, scale_tensor


@triton.jit
def target_logit_kernel(
    hidden_ptr,  # [N, D]
    weight_ptr,  # [V, D]
    low_hidden_ptr,  # [N, RANK] or None
    low_weight_ptr,  # [V, RANK] or None
    bias_ptr,  # [V] or None
    scale_ptr,  # [] fp32 or None
    target_ptr,  # [N * K] int64, -1 for none
    out_ptr,  # [.., N] out: column k of the targets is row first_row + k
    bits_ptr,  # [row blocks, words] int32 in which the targets are marked, see `marks`, or None; K = 1
    n_rows_ptr,  # [1] int32 or None, for the marks
    n_words,
    n_pairs,
    per_token,  # K
    n,
    first_row,
    stride_hidden_row,
    stride_hidden_col,
    stride_weight_row,
    stride_weight_col,
    softcap,
    D: tl.constexpr,
    RANK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + pairs, mask=pairs < n_pairs, other=-1)
    exists = target >= 0
    row = tl.where(exists, target, 0)
    hidden = hidden_ptr + (pairs // per_token).to(tl.int64)[:, None] * stride_hidden_row
    weight = weight_ptr + row[:, None] * stride_weight_row
    acc = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for d in range(0, D, BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        mask = exists[:, None] & (offs_d < D)[None, :]
        h = tl.load(hidden + offs_d.to(tl.int64)[None, :] * stride_hidden_col, mask=mask, other=0.0)
        w = tl.load(weight + offs_d.to(tl.int64)[None, :] * stride_weight_col, mask=mask, other=0.0)
        acc += h.to(tl.float32) * w.to(tl.float32)
    if low_hidden_ptr is not None:
        for d in range(0, RANK, BLOCK_D):
            offs_d = d + tl.arange(0, BLOCK_D)
            mask = exists[:, None] & (offs_d < RANK)[None, :]
            token = (pairs // per_token).to(tl.int64)
            h = tl.load(low_hidden_ptr + token[:, None] * RANK + offs_d[None, :], mask=mask, other=0.0)
            w = tl.load(low_weight_ptr + row[:, None] * RANK + offs_d[None, :], mask=mask, other=0.0)
            acc += h.to(tl.float32) * w.to(tl.float32)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=exists, other=0.0).to(tl.float32)
    x = logits_of(tl.sum(acc, 1), bias, load_scale(scale_ptr), softcap, HAS_SOFTCAP)
    out = out_ptr + (first_row + pairs % per_token).to(tl.int64) * n + pairs // per_token
    tl.store(out, tl.where(exists, x, 0.0), mask=pairs < n_pairs)
    if bits_ptr is not None:
        mark_targets(bits_ptr, pairs, target, count_rows(n, n_rows_ptr), n_words)


def write_target_logits(
    hidden: Tensor, head: Head, target: Tensor, packed: Tensor, first_row: int, bits: Tensor | None = None,
    n_rows: Tensor | None = None,
) -> None:  # fmt: skip
    """fp32 logits of `target` ([N], or [N, K]: K columns per token), local rows; 0 where it is -1.

    Column k of the targets is written to packed[first_row + k], [.., N]. Targets [N] of the rows that count are marked
    in `bits`.
    """
    n, n_pairs = packed.shape[1], target.numel()
    low_hidden, low_weight, rank = low_rank_arguments(head)
    target_logit_kernel[(ceil_div(n_pairs, 4),)](
        hidden, head.weight, low_hidden, low_weight, head.bias, scale_tensor(head), target.contiguous(), packed,
        bits, n_rows, 0 if bits is None else bits.shape[1], n_pairs, target.shape[1] if target.dim() > 1 else 1, n,
        first_row, *hidden.stride(), *head.weight.stride(), head.softcap or 1.0, D=hidden.shape[1], RANK=rank,
        HAS_SOFTCAP=head.softcap is not None, BLOCK=4, BLOCK_D=512, num_warps=4,
    )  # fmt: skip
