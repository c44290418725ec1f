"""One rank's statistics and gradients in plain PyTorch: the CPU backend, and the truth of the tests.

The same functions as `vpcce.kernels.local`, see `vpcce.kernels.problem` for what they are asked. Logits exist for
one slice of the vocabulary at a time, [N, width] with N * width bounded, so memory stays near the inputs and the
gradients; such a block also stays in the caches of a CPU, which makes the recomputation in the
backward about as fast as reading stored logits back.

bf16 and fp16 operands are widened to fp32 slice by slice, so products and sums are fp32 and each result is rounded
once; fp64 stays fp64.
"""

import torch
from torch import Tensor

from vpcce.kernels.problem import Head, HiddenGradReady, LocalStats, Marks, Policy, RowGradients, Sampling

# Numbers in one [N, width] block of logits: 8 MiB in fp32.
BLOCK_NUMEL = 2**21
# Slices narrower than this leave matrix products inefficient; N above BLOCK_NUMEL / MIN_WIDTH makes larger blocks.
MIN_WIDTH = 256


def local_stats(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] int64, local rows, -1 for elsewhere
    *,
    n_rows: Tensor | None = None,
    entropy: bool = False,
    argmax: bool = False,
    logit_sum: bool = False,
    sampling: Sampling | None = None,
) -> LocalStats:
    """max, sum of exp, target logit and what else is asked for, over this shard."""
    dtype = _accumulate_dtype(hidden, head)
    n = hidden.shape[0]
    rows = hidden.to(dtype)
    top = rows.new_full((n,), -torch.inf)
    total = torch.zeros_like(top)
    target_logit = torch.zeros_like(top)
    expected = torch.zeros_like(top) if entropy else None
    weighted = torch.zeros_like(top) if logit_sum else None
    best = torch.zeros(n, dtype=torch.int64, device=hidden.device) if argmax else None
    for start, stop in _slices(n, head.weight.shape[0]):
        x = _logits(rows, head, start, stop)
        peak, where = x.max(1)
        if best is not None:
            best = torch.where(peak > top, where + start, best)
        new_top = torch.maximum(top, peak)
        shift = torch.where(new_top.isinf(), 0.0, new_top)
        rescale = torch.exp(top - shift)
        column = target - start
        inside = (column >= 0) & (column < stop - start)
        picked = x.gather(1, torch.where(inside, column, 0)[:, None])[:, 0]
        target_logit += torch.where(inside, picked, 0.0)
        if weighted is not None:
            weighted += x.sum(1) if head.column_weight is None else x @ head.column_weight[start:stop].to(dtype)
        if expected is None:
            e = x.sub_(shift[:, None]).exp_()
        else:
            e = torch.exp(x - shift[:, None])
            expected = expected * rescale + torch.where(e > 0, e * x, 0.0).sum(1)
        total = total * rescale + e.sum(1)
        top = new_top
    return LocalStats(top, total, target_logit, expected, best, weighted, _no_marks(sampling))


def hot_set_stats(hidden: Tensor, head: Head, target: Tensor, *, n_rows: Tensor | None = None):
    """A bound of the log-sum-exp speeds up kernels; the slices here need none, and -inf is a lower bound."""
    n = hidden.shape[0]
    return hidden.new_full((n,), -torch.inf, dtype=torch.float32), hidden.new_zeros(n, dtype=torch.float32)


def marks_shape(n: int, n_columns: int) -> tuple[int, ...]:
    """The slices here decide about a column when they have its logits, so the forward leaves no marks, only the seed."""
    return (1,)


def local_backward(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] int64, local rows, -1 for elsewhere
    lse: Tensor,  # [N], over the whole vocabulary
    rows: RowGradients,
    *,
    n_rows: Tensor | None = None,
    hidden_policy: Policy | None = None,
    weight_policy: Policy | None = None,
    bias_grad: bool = False,
    marks: Marks | None = None,
    main_grad: Tensor | None = None,
    hidden_grad_dtype: torch.dtype,
    hidden_grad_ready: HiddenGradReady,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dE (handed to `hidden_grad_ready` too), dC or None when main_grad took it, dbias. None policy: not wanted."""
    dtype = _accumulate_dtype(hidden, head)
    wide = hidden.to(dtype)
    n, n_columns = hidden.shape[0], head.weight.shape[0]
    hidden_grad = torch.zeros_like(wide) if hidden_policy is not None else None
    weight_grad = None
    if weight_policy is not None and main_grad is None:
        weight_grad = torch.empty_like(head.weight, memory_format=torch.contiguous_format)
    column_grad = wide.new_zeros(n_columns) if bias_grad else None
    spans = _slices(n, n_columns)
    for start, stop in spans:
        grad, softmax_error = _logit_gradient(wide, head, target, lse, rows, start, stop)
        for_hidden = _apply_policy(hidden_policy, grad, softmax_error, head, start, marks)
        for_weight = for_hidden
        if weight_policy != hidden_policy or hidden_policy is None:
            for_weight = _apply_policy(weight_policy, grad, softmax_error, head, start, marks)
        if hidden_grad is not None:
            hidden_grad.addmm_(for_hidden, head.weight[start:stop].to(dtype))
            if stop == n_columns:
                hidden_grad_ready(hidden_grad := hidden_grad.to(hidden_grad_dtype))
        if column_grad is not None:
            column_grad[start:stop] = (grad if weight_policy is None else for_weight).sum(0)
        if weight_grad is not None:
            weight_grad[start:stop] = for_weight.T @ wide
        elif weight_policy is not None:
            main_grad[start:stop] += for_weight.T @ wide
    if hidden_grad is not None and not spans:
        hidden_grad_ready(hidden_grad := hidden_grad.to(hidden_grad_dtype))
    return hidden_grad, weight_grad, column_grad


def _logit_gradient(wide, head, target, lse, rows, start, stop) -> tuple[Tensor, Tensor]:
    """d loss / d (hidden @ weight.T + bias) of a slice, and p - onehot."""
    x = _logits(wide, head, start, stop)
    p = torch.exp(x - lse[:, None])
    column = target - start
    inside = ((column >= 0) & (column < stop - start)).nonzero()[:, 0]
    at = (inside, column[inside])
    per_row = rows.softmax[:, None]
    if rows.softmax_logit is not None:
        per_row = per_row + rows.softmax_logit[:, None] * torch.where(p > 0, x, 0.0)
    grad = p * per_row
    grad[at] += rows.target[inside]
    if rows.constant is not None:
        share = 1.0 if head.column_weight is None else head.column_weight[start:stop].to(x.dtype)
        grad += rows.constant[:, None] * share
    if head.softcap is not None:
        grad *= 1 - (x / head.softcap) ** 2
    p[at] -= 1
    return grad.mul_(head.scale), p


def _apply_policy(policy: Policy | None, grad, softmax_error, head, start, marks) -> Tensor:
    if policy is None or policy.kind == "exact":
        return grad
    raise NotImplementedError(f"vpcce: {policy.kind} backward")


def _logits(wide: Tensor, head: Head, start: int, stop: int) -> Tensor:
    x = wide @ head.weight[start:stop].to(wide.dtype).T
    if head.bias is not None:
        x += head.bias[start:stop].to(wide.dtype)
    if isinstance(head.scale, Tensor) or head.scale != 1.0:
        x *= head.scale
    if head.softcap is not None:
        x = torch.tanh_(x.div_(head.softcap)).mul_(head.softcap)
    return x


def _slices(n: int, n_columns: int) -> list[tuple[int, int]]:
    """Columns per block of logits, a multiple of 128 so that tiles of the filter never straddle two slices."""
    width = max(MIN_WIDTH, BLOCK_NUMEL // max(n, 1) // 128 * 128)
    return [(start, min(start + width, n_columns)) for start in range(0, n_columns, width)]


def _accumulate_dtype(hidden: Tensor, head: Head) -> torch.dtype:
    return torch.float64 if torch.float64 in (hidden.dtype, head.weight.dtype) else torch.float32


def _no_marks(sampling: Sampling | None) -> Marks | None:
    if sampling is None:
        return None
    return Marks(torch.zeros(1, dtype=torch.int32, device=sampling.seed.device), sampling.seed)
