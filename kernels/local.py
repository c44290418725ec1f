"""One rank's share of the loss on a GPU: the same functions as `vpcce.reference`, made of the kernels of this folder.

    local_stats       forward -> merge of splits -> target logits (-> top-k) (-> marks)
    hot_set           a lower bound for the marks
    local_backward    dense for gradients whose policy is exact or filtered, packed for sampled ones

Each gradient has its own policy. Where both have the same they share the recomputed logits; otherwise dE is computed
first, so that its collective can start, and dC after it. On real heads the paper's filter keeps more than half of its
tiles, too many for lists to pay: it is the dense backward with the dropped tiles of G set to 0.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .backward_dense import dense_backward
from .backward_packed import packed_backward
from .forward import forward_stats
from .hot_set import hot_set
from .marks import marks_shape
from .problem import Head, HiddenGradReady, LocalStats, Marks, Policy, RowGradients, Sampling, weight_factors
from .tiles import compute_dtype as operand_dtype

__all__ = ["hot_set", "local_backward", "local_stats", "marks_shape", "operand_dtype"]


def local_stats(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] or [N, K] int64, local rows, -1 for elsewhere
    *,
    n_rows: Tensor | None = None,
    entropy: bool = False,
    argmax: bool = False,
    logit_sum: bool = False,
    sampling: Sampling | None = None,
    topk: int = 0,
) -> LocalStats:
    """max, sum of exp, target logit and what else is asked for, over this shard."""
    with torch.cuda.device_of(hidden):
        return forward_stats(
            hidden, head, target, n_rows=n_rows, entropy=entropy, argmax=argmax, logit_sum=logit_sum, sampling=sampling,
            topk=topk,
        )  # fmt: skip


def local_backward(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] or [N, K] int64, local rows, -1 for elsewhere
    lse: Tensor,  # [N], over the whole vocabulary
    rows: RowGradients,
    *,
    n_rows: Tensor | None = None,
    row_index: Tensor | None = None,
    hidden_policy: Policy | None = None,
    weight_policy: Policy | None = None,
    bias_grad: bool = False,
    marks: Marks | None = None,
    main_grad: Tensor | None = None,
    hidden_grad_dtype: torch.dtype,
    hidden_grad_ready: HiddenGradReady,
    hidden_grad: bool = True,
    low_rank_grad: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dE (handed to `hidden_grad_ready` too), dC or None when main_grad took it, dbias. None policy: not wanted.

    Rows of hidden that do not count, those from n_rows on, must be finite: dC multiplies them by 0. Row i of dE is
    written to row_index[i], and rows that do not count to nowhere: they are 0. The gradient of `head.low_rank.hidden`
    is written into `low_rank_grad`, [N, R] fp32 zeros in the order of hidden, before dE is ready; without `hidden_grad`
    it is all that is computed under hidden_policy.
    """
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    if head.weight.stride(-1) != 1:
        head = replace(head, weight=head.weight.contiguous())
    bias_policy = weight_policy or hidden_policy
    results: dict[str, Tensor | None] = {"hidden": None, "weight": None, "bias": None}
    with torch.cuda.device_of(hidden):
        for policy in dict.fromkeys(p for p in (hidden_policy, weight_policy) if p is not None):
            wanted = {
                "hidden": policy == hidden_policy and hidden_grad,
                "weight": policy == weight_policy,
                "bias": bias_grad and policy == bias_policy,
            }
            # With a softcap, label smoothing's constant is no longer the same for all columns, and never sparse.
            smoothed = rows.constant is not None and head.softcap is not None
            shared: dict[str, Any] = dict(
                n_rows=n_rows, row_index=row_index, main_grad=main_grad, hidden_grad=wanted["hidden"],
                weight_grad=wanted["weight"], bias_grad=wanted["bias"], hidden_grad_dtype=hidden_grad_dtype,
                hidden_grad_ready=hidden_grad_ready, low_rank_grad=low_rank_grad if policy == hidden_policy else None,
            )  # fmt: skip
            if policy.kind == "filtered":
                filtered = _filtered_in_order if policy.sort else _dense
                made = filtered(hidden, head, target, lse, rows, filter_eps=policy.eps, **shared)
            elif policy.kind == "exact" or smoothed:
                made = _dense(hidden, head, target, lse, rows, **shared)
            else:
                made = packed_backward(hidden, head, target, lse, rows, policy=policy, marks=marks, **shared)
            results.update((name, part) for name, part in zip(wanted, made, strict=True) if wanted[name])
    return results["hidden"], results["weight"], results["bias"]


def _dense(
    hidden, head: Head, target, lse, rows, *, n_rows, row_index, main_grad, hidden_grad, weight_grad, bias_grad,
    hidden_grad_dtype, hidden_grad_ready, low_rank_grad, filter_eps=None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    device, like = hidden.device, weight_factors(hidden, head)[1]
    d_hidden = None
    if hidden_grad:
        # Rows that do not count are never written, and without ids none is.
        make = torch.zeros if n_rows is not None or not len(head.weight) else torch.empty
        d_hidden = make(hidden.shape, dtype=hidden_grad_dtype, device=device)
    d_weight = None
    if weight_grad and main_grad is None:
        make = torch.empty if hidden.shape[0] else torch.zeros
        d_weight = make(like.shape, dtype=like.dtype if head.low_rank is None else torch.float32, device=device)
    d_bias = torch.zeros(len(like), device=device) if bias_grad else None
    dense_backward(
        hidden, head, target, lse, rows, n_rows=n_rows, row_index=row_index, hidden_grad=d_hidden,
        weight_grad=main_grad if weight_grad and main_grad is not None else d_weight, accumulate=main_grad is not None,
        bias_grad=d_bias, hidden_grad_ready=hidden_grad_ready, storage=d_weight if head.low_rank is None else None,
        filter_eps=filter_eps, low_rank_grad=low_rank_grad,
    )  # fmt: skip
    return d_hidden, d_weight, d_bias


def _filtered_in_order(
    hidden, head: Head, target, lse, rows, *, n_rows, main_grad, weight_grad, bias_grad, **shared
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The filter on columns sorted by mean logit: a sorted copy of the head, and its gradients put back in place."""
    counting = hidden
    if n_rows is not None:
        counting = torch.where((torch.arange(len(hidden), device=hidden.device) < n_rows)[:, None], hidden, 0.0)
    mean = counting.sum(0, dtype=torch.float32).to(head.weight.dtype)
    mean_logit = head.weight @ mean
    if head.low_rank is not None:  # its rows that do not count are 0
        mean_logit = mean_logit.float() + head.low_rank.weight.float() @ head.low_rank.hidden.float().sum(0)
    order = mean_logit.argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)

    def in_order(part):
        return None if part is None else part[order]

    ordered = replace(
        head, weight=in_order(head.weight), bias=in_order(head.bias), column_weight=in_order(head.column_weight)
    )
    if head.low_rank is not None:
        ordered = replace(ordered, low_rank=replace(head.low_rank, weight=head.low_rank.weight[order]))
    moved = torch.where(target >= 0, place[target.clamp(min=0)], -1)
    d_hidden, d_weight, d_bias = _dense(
        hidden, ordered, moved, lse, rows, n_rows=n_rows, main_grad=None, weight_grad=weight_grad, bias_grad=bias_grad,
        **shared,
    )  # fmt: skip
    if d_weight is not None:
        d_weight = d_weight[place]
    if d_weight is not None and main_grad is not None:
        main_grad += d_weight
        d_weight = None
    return d_hidden, d_weight, None if d_bias is None else d_bias[place]
