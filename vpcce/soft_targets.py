"""Distillation: the teacher's k most likely ids per token and their probabilities are the target.

    loss = -sum_k p_k * log_softmax(x)[id_k] = lse * sum_k p_k - sum_k p_k * x_k

is arithmetic on `linear_stats` with K ids per token, so loss and gradient are exact: the K logits are gathered, and
the backward subtracts p_k at id_k before G is rounded. The probabilities need not sum to 1: what the teacher spread
over other ids is then simply left out; divide by the sum first to redistribute it.
"""

import torch
from torch import Tensor

from vpcce.arguments import check_loss_options
from vpcce.lora import LoRA
from vpcce.loss import stats_of
from vpcce.parallel.shard import VocabShard


def linear_soft_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    sequence_parallel: bool = False,
    lora: LoRA | None = None,
) -> Tensor:
    """Cross-entropy against a distribution that is given on K ids per token.

    Equals::

        weight = weight + lora.scale * lora.b @ lora.a            # with lora
        logits = logit_scale * (hidden @ weight.T + bias).float()
        logits = softcap * torch.tanh(logits / softcap)          # with a softcap
        F.cross_entropy(logits, torch.zeros_like(logits).scatter_add_(-1, ids, probs), reduction=reduction)

    over the whole vocabulary of all ranks; neither the logits nor the dense distribution are ever materialised. Two
    small collectives at most run forward and one backward, as for `linear_cross_entropy`.

    Args:
        hidden, weight, bias, shard, softcap, logit_scale, sequence_parallel, lora: see `linear_stats`.
        ids: [..., K] int64 or int32, global ids, K <= 64; the same on all ranks. An id may occur twice.
        probs: [..., K] floats; same on all ranks. They may want a gradient: lse - logit of the id.
        ignore_index: ids that do not count, whatever their probability; a token without any other is ignored.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".

    Returns:
        fp32 (fp64 for fp64 arguments): a scalar, or the shape of ids[..., 0] with reduction "none".

    Raises:
        TypeError, ValueError: as `linear_stats`, and for ids and probs of different shapes.
    """
    who = "linear_soft_cross_entropy"
    refused: Exception | None = None
    try:
        check_loss_options(who, reduction)
        _check_probs(who, hidden, ids, probs)
    except Exception as error:
        refused = error
    stats = stats_of(
        who, hidden, weight, ids, bias=bias, shard=shard, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, backward="auto", sequence_parallel=sequence_parallel, lora=lora,
        upstream=repr((reduction,)), refused=refused,
    )  # fmt: skip
    kept = torch.ones_like(ids, dtype=torch.bool) if ignore_index is None else ids != ignore_index
    share = torch.where(kept, probs.to(stats.lse.dtype), 0.0)
    loss = (share * (stats.lse[..., None] - stats.target_logit)).sum(-1)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / kept.any(-1).sum().clamp(min=1)


def _check_probs(who: str, hidden, ids, probs) -> None:
    for name, value in (("hidden", hidden), ("ids", ids), ("probs", probs)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if ids.shape != probs.shape or ids.dim() != hidden.dim():
        raise ValueError(
            f"{who}: expected ids and probs of shape [..., K] with a hidden of shape [..., D], "
            f"got {list(ids.shape)}, {list(probs.shape)} and {list(hidden.shape)}"
        )
