"""The k most likely ids of each token with their log-probabilities, for evaluation and for a teacher's targets.

`linear_stats(..., topk=k)` without targets, gradients and the other statistics; `vpcce.kernels.topk` says how.
"""

from typing import Any

import torch
from torch import Tensor

from vpcce.arguments import group_of, without_dtensors
from vpcce.lora import LoRA
from vpcce.loss import TopK, stats_of
from vpcce.parallel import collectives
from vpcce.parallel.shard import VocabShard


@torch.no_grad()
def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    sequence_parallel: bool = False,
    lora: LoRA | None = None,
) -> TopK:
    """The k most likely next ids and their log-probabilities, without the logits and without a gradient.

    Equals::

        weight = weight + lora.scale * lora.b @ lora.a            # with lora
        logits = logit_scale * (hidden @ weight.T + bias).float()
        logits = softcap * torch.tanh(logits / softcap)          # with a softcap
        logprobs, ids = logits.log_softmax(-1).topk(k)

    over the whole vocabulary of all ranks; one all-gather of (2 k + 3) * 4 * N bytes per rank. Beside a loss,
    `linear_stats(..., topk=k)` needs no second product.

    Args:
        hidden, weight, bias, shard, softcap, logit_scale, sequence_parallel, lora: see `vpcce.linear_stats`.
        k: 1 to 64, at most vocab_size; memory as there.

    Returns:
        Both [..., k] in hidden's leading dimensions ([N, k] with sequence_parallel), the same on all ranks.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    who = "linear_topk"
    hidden, weight, bias, shard = without_dtensors(who, hidden, weight, None, bias, shard)
    refused: Exception | None = None
    nothing: Any = None
    try:
        if k is None:
            raise TypeError(f"{who}: k must be an int, got NoneType")
        nothing = _no_target(who, hidden, shard, sequence_parallel)
    except Exception as error:
        refused = error
    top = stats_of(
        who, hidden, weight, nothing, bias=bias, shard=shard, ignore_index=None, softcap=softcap,
        logit_scale=logit_scale, backward="auto", sequence_parallel=sequence_parallel, lora=lora, topk=k,
        refused=refused,
    ).topk  # fmt: skip
    assert top is not None
    return top


def _no_target(who: str, hidden, shard, sequence_parallel: bool) -> Tensor:
    """Zeros in the place of a target."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"{who}: hidden must be a torch.Tensor, got {type(hidden).__name__}")
    tokens = hidden.shape[:-1]
    if sequence_parallel and isinstance(shard, VocabShard):
        tokens = torch.Size([tokens.numel() * collectives.size(group_of(who, shard))])
    return torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
