"""The k most likely ids of each token with their log-probabilities, for evaluation and for a teacher's targets.

The head's product is made block by block, [tokens, columns] with BLOCK_NUMEL numbers; each block is reduced to its k
largest logits and its log-sum-exp, and joins the running ones. Ranks then gather k logits, k ids and one log-sum-exp
per token. The product itself dominates, so there is no kernel here: torch.topk of a block reads it once more.

    tensor          shape on a rank      collectives
    hidden          [N, D] or [N / T, D] all-gathered with sequence_parallel
    logits, ids     [N, k]               one all-gather of (2 k + 1) * 4 * N bytes per rank
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpcce.arguments import Arguments, group_of, prepare, without_dtensors
from vpcce.kernels.problem import LowRank, as_float_bits, from_float_bits
from vpcce.lora import LoRA, described, low_rank
from vpcce.parallel import collectives
from vpcce.parallel.shard import VocabShard
from vpcce.settings import check_agreement

MAX_K = 64
BLOCK_NUMEL = 2**24  # logits of one block: 64 MiB in fp32
BLOCK_COLUMNS = 8192


class TopK(NamedTuple):
    """The largest first; of equal logits any may come first, but the same on all ranks."""

    logprobs: Tensor  # [..., k] fp32, never above 0
    ids: Tensor  # [..., k] int64, global


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

    over the whole vocabulary of all ranks; a block of at most 64 MiB of logits exists at a time. Not for use inside
    torch.compile.

    Args:
        hidden, weight, bias, shard, softcap, logit_scale, sequence_parallel, lora: see `vpcce.linear_stats`.
        k: 1 to 64, at most vocab_size.

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
        _check_k(who, k, weight, shard)
        nothing = _no_target(who, hidden, shard, sequence_parallel)
    except Exception as error:
        refused = error
    call = prepare(
        who, hidden, weight, nothing, bias=bias, shard=shard, ignore_index=None, softcap=softcap,
        logit_scale=logit_scale, backward="auto", sequence_parallel=sequence_parallel, lora=lora, refused=refused,
    )  # fmt: skip
    how, tokens = call.settings, call.shape
    group = collectives.resolve(how.group)
    factor = call.logit_scale if call.scale is None else f"a tensor of {call.scale.dtype}"
    lora_fields = ("lora's rank, scale and dtypes", described(call.lora))
    options = [("logit_scale", factor), ("softcap", softcap), ("k", k), lora_fields]
    same = [("logit_scale", call.scale), ("lora's a", None if call.lora is None else call.lora.a)]
    check_agreement(group, how, call.hidden, weight, call.target, bias, options, same)
    with torch.autocast(hidden.device.type, enabled=False):
        all_tokens = collectives.gather_tokens(call.hidden, group if how.sequence_parallel else None)
        parts = [_shard_topk(rows, call, k) for rows in all_tokens.split(BLOCK_NUMEL // BLOCK_COLUMNS)]
    values, ids, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    packed = torch.cat([values.T, as_float_bits(ids.T, values.dtype), lse[None]])
    ranks = collectives.gather_stats(packed, group)  # [T, 2 k + 1, N]
    best, place = ranks[:, :k].flatten(0, 1).topk(k, 0)
    chosen = from_float_bits(ranks[:, k : 2 * k].flatten(0, 1)).gather(0, place)
    logprobs = (best - ranks[:, -1].logsumexp(0)).clamp(max=0.0)
    return TopK(logprobs.T.reshape(*tokens, k), chosen.T.reshape(*tokens, k))


def _check_k(who: str, k, weight, shard) -> None:
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"{who}: k must be an int, got {type(k).__name__}")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"{who}: expected 1 <= k <= {MAX_K}, got {k}")
    if not isinstance(weight, Tensor):
        raise TypeError(f"{who}: weight must be a torch.Tensor, got {type(weight).__name__}")
    vocab_size = shard.vocab_size if isinstance(shard, VocabShard) else weight.shape[0]
    if k > vocab_size:
        raise ValueError(f"{who}: expected k of at most the vocabulary's {vocab_size} ids, got {k}")


def _no_target(who: str, hidden, shard, sequence_parallel: bool) -> Tensor:
    """Zeros in the place of a target, without memory for each."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"{who}: hidden must be a torch.Tensor, got {type(hidden).__name__}")
    tokens = hidden.shape[:-1]
    if sequence_parallel and isinstance(shard, VocabShard):
        tokens = torch.Size([tokens.numel() * collectives.size(group_of(who, shard))])
    return torch.zeros((), dtype=torch.int64, device=hidden.device).expand(tokens)


def _shard_topk(hidden: Tensor, call: Arguments, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [n, k], global ids [n, k], log-sum-exp [n]) of this rank's ids; -inf where it has fewer than k."""
    how, n = call.settings, hidden.shape[0]
    dtype = torch.float64 if torch.float64 in (hidden.dtype, call.weight.dtype) else torch.float32
    values = torch.full((n, k), -torch.inf, dtype=dtype, device=hidden.device)
    ids = torch.full((n, k), how.start, dtype=torch.int64, device=hidden.device)
    lse = values[:, 0]
    low = None if call.lora is None else low_rank(hidden, *call.lora, dtype)
    for start in range(0, how.n_valid, BLOCK_COLUMNS):
        columns = slice(start, min(start + BLOCK_COLUMNS, how.n_valid))
        x = _logits(hidden, call, columns, dtype, low)
        lse = torch.logaddexp(lse, x.logsumexp(1))
        best, place = x.topk(min(k, x.shape[1]), 1)
        values, order = torch.cat([values, best], 1).topk(k, 1)
        ids = torch.cat([ids, place + (how.start + start)], 1).gather(1, order)
    return values, ids, lse


def _logits(hidden: Tensor, call: Arguments, columns: slice, dtype: torch.dtype, low: LowRank | None) -> Tensor:
    weight = call.weight[columns]
    if hidden.is_cuda and hidden.dtype == weight.dtype != dtype:
        x = torch.mm(hidden, weight.T, out_dtype=dtype)  # half precision operands, an fp32 result
    else:
        x = hidden.to(dtype) @ weight.to(dtype).T
    if low is not None:
        x.addmm_(low.hidden, low.weight[columns].T)
    if call.bias is not None:
        x += call.bias[columns].to(dtype)
    x *= call.logit_scale if call.scale is None else call.scale.to(dtype)
    return x if call.softcap is None else x.div_(call.softcap).tanh_().mul_(call.softcap)
