"""LoRA on the head: the logits of hidden @ (weight + s * b @ a).T without that sum, gradients for a and b alone.

    u = s * (hidden @ a.T)      [N, r]           product = hidden @ weight.T + u @ b.T
    du = G @ b                  [N, r]           dE = G @ weight + s * du @ a
    db = G.T @ u                [V_local, r]     da = s * du.T @ hidden

The kernels see (u, b) as a second pair of factors, `vpcce.kernels.problem.LowRank`: one narrow product more per tile of
logits, and the products with G once more at width r. What concerns `a` stays here, in PyTorch, on [N, r].

    tensor   global shape   shape on a rank   forward                  gradient
    a        [r, D]         [r, D]            same on all T ranks      all-reduced in fp32: the same on all ranks
    b        [V, r]         [V_local, r]      stays                    stays

s * du @ a is added to a rank's part of dE before that is reduced, so dE needs no further collective, and u is made
from the gathered tokens, so sequence_parallel needs none either. Without LoRA nothing here runs.

Rounding: u and b enter the products in the operands' dtype, as hidden and weight do (on the CPU in that of the sums);
du, dE's sum and da are fp32, or fp64 for fp64 arguments, and rounded once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vpcce.kernels.problem import LowRank

BLOCK_ROWS = 4096  # tokens that are widened at a time


class LoRA(NamedTuple):
    """A low-rank addition to the head's frozen weight: weight + scale * b @ a, as in LoRA (arXiv 2106.09685).

    The names are peft's: `a` is lora_A.weight, `b` is lora_B.weight, `scale` is alpha / r.
    """

    a: Tensor  # [r, D], the same on all ranks
    b: Tensor  # [stop - start, r], this rank's rows, padding included as in weight
    scale: float = 1.0


def check_lora(who: str, lora, hidden: Tensor, weight: Tensor, main_grad, floats) -> None:
    if lora is None:
        return
    if not isinstance(lora, LoRA):
        raise TypeError(f"{who}: lora must be a vpcce.LoRA, got {type(lora).__name__}")
    for name, value in (("a", lora.a), ("b", lora.b)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: lora.{name} must be a torch.Tensor, got {type(value).__name__}")
        if hasattr(value, "device_mesh"):
            raise TypeError(f"{who}: expected a lora.{name} that is a plain tensor, got a DTensor: pass to_local()")
        if value.device != hidden.device:
            raise ValueError(f"{who}: lora.{name} is on {value.device}, expected hidden's device {hidden.device}")
        if value.dtype not in floats or (value.dtype == torch.float64 and value.is_cuda):
            raise TypeError(f"{who}: lora.{name} must be a float tensor (float64 on the CPU only), got {value.dtype}")
    rank = lora.a.shape[0] if lora.a.dim() == 2 else 0
    if lora.a.shape != (rank, weight.shape[1]) or lora.b.shape != (weight.shape[0], rank) or rank == 0:
        raise ValueError(
            f"{who}: expected lora.a [r, {weight.shape[1]}] and lora.b [{weight.shape[0]}, r] with r >= 1, "
            f"got {list(lora.a.shape)} and {list(lora.b.shape)}"
        )
    if not isinstance(lora.scale, (int, float)) or isinstance(lora.scale, bool):
        raise TypeError(f"{who}: lora.scale must be a float, got {type(lora.scale).__name__}")
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError(f"{who}: expected a frozen weight with lora, got one with requires_grad=True: detach it")
    if main_grad is not None:
        raise ValueError(f"{who}: expected no main_grad with lora, whose weight is frozen")


def described(lora: LoRA | None) -> tuple | None:
    """What must be equal on all ranks."""
    return None if lora is None else (lora.a.shape[0], lora.scale, str(lora.a.dtype), str(lora.b.dtype))


def low_rank(tokens: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> LowRank:
    """(u, b) in `dtype`; u is summed in fp32 and rounded once."""
    if tokens.is_cuda and tokens.dtype in (torch.bfloat16, torch.float16):
        u = torch.mm(tokens, a.to(tokens.dtype).T, out_dtype=torch.float32)
    else:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        u = tokens.to(wide) @ a.to(wide).T
    return LowRank((u * scale).to(dtype).contiguous(), b.to(dtype).contiguous())


def grad_of_a(low_grad: Tensor, tokens: Tensor, scale: float) -> Tensor:
    """[r, D] in the dtype of `low_grad`: this rank's part of da."""
    total = low_grad.new_zeros(low_grad.shape[1], tokens.shape[1])
    for start in range(0, tokens.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        total.addmm_(low_grad[rows].T, tokens[rows].to(total.dtype), alpha=scale)
    return total
