"""What users call: cross-entropy, log-probabilities and statistics of `hidden @ weight.T` without the logits.

`linear_stats` is the primitive; the losses are a few lines of PyTorch on its results, so a loss of your own (token
weights, z-loss, importance ratios) needs no kernel. All functions share their first arguments:

    tensor     global shape    shape on a rank        forward                    dgrad                 wgrad
    hidden     [N, D]          [N, D]                 used as it is              all-reduced           -
               [N, D]          [N / T, D] with        all-gathered               reduce-scattered      -
                               sequence_parallel
    weight     [V, D]          [V_local, D]           stays                      -                     stays
    target     [N]             [N]                    same on all T ranks        -                     -
    result     [N] or scalar   [N] or scalar          same on all T ranks

Two small collectives at most run forward and one backward, two with LoRA, beside the comparison of arguments
(`vpcce.parallel.agreement`); every rank then holds the same loss and the same dE (or its tokens of it), and the
gradient of its own rows of the weight. A loss that is the same on all ranks must not be averaged over them again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpcce import autograd
from vpcce.arguments import Arguments, check_loss_options, prepare
from vpcce.lora import LoRA
from vpcce.parallel.shard import VocabShard
from vpcce.settings import fingerprint
from vpcce.targets import next_tokens


class TopK(NamedTuple):
    """The largest first; of equal logits any may come first, but the same on all ranks."""

    logprobs: Tensor  # [..., k] fp32, never above 0, detached; -inf where fewer than k ids have a probability
    ids: Tensor  # [..., k] int64, global; any id where the log-probability is -inf


class LinearStats(NamedTuple):
    """Per-token statistics of the logits, in the tokens' shape; 0 for ignored tokens."""

    lse: Tensor  # fp32, log-sum-exp over the whole vocabulary; differentiable
    target_logit: Tensor  # fp32, in the target's shape, never above lse; differentiable
    entropy: Tensor | None  # fp32, entropy of the softmax in nats; differentiable
    argmax: Tensor | None  # int64, global id of the largest logit, the lowest of equals
    topk: TopK | None = None


def linear_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    backward="auto",
    sequence_parallel: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    topk: int | None = None,
    main_grad: Tensor | None = None,
    reduce_hidden_grad: bool = True,
    lora: LoRA | None = None,
) -> LinearStats:
    """Statistics of a language-model head's logits, from which losses are made.

    Equals::

        weight = weight + lora.scale * lora.b @ lora.a            # with lora
        logits = logit_scale * (hidden @ weight.T + bias).float()
        logits = softcap * torch.tanh(logits / softcap)          # with a softcap
        lse = logits.logsumexp(-1)
        target_logit = logits.gather(-1, target[..., None])[..., 0]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        argmax = logits.argmax(-1)
        topk = logits.log_softmax(-1).topk(topk)

    over the whole vocabulary of all ranks. Neither the logits nor their gradient are ever materialised. The accuracy
    of teacher-forced predictions is `(stats.argmax == target)[target != ignore_index].float().mean()`.

    Args:
        hidden: [..., D], what the model hands to its head; bf16, fp16, fp32, or fp64 on the CPU.
        weight: [V_local, D], this rank's rows; its dtype may differ from hidden's. A DTensor that is Shard(0) brings
            its own shard, see `vpcce.parallel.dtensor`.
        target: [...] int64 or int32, global ids; same on all ranks, and all tokens also with sequence_parallel.
            [..., K] asks for K <= 64 logits per token; the backward is then exact, whatever policy is asked for, and
            a token is ignored where all its ids are.
        bias: [V_local].
        shard: which rows `weight` holds; None is the whole vocabulary on one rank.
        ignore_index: tokens with this target get 0 everywhere and cost nothing; None gives no id that meaning.
        softcap: bounds logits to (-softcap, softcap).
        logit_scale: multiplies the logits before the softcap: a float, or a 0-dim tensor that may be learned.
        backward: "auto", `exact()`, `filtered()`, `sampled()`, or a pair (policy of dE, policy of dC).
        sequence_parallel: hidden is this rank's part of the tokens, split along the first dimension.
        entropy, argmax: compute these too.
        topk: k in 1 to 64, at most vocab_size: return the k most likely ids and their log-probabilities too, without a
            gradient. On a GPU it needs, for the time of the call, an eighth of a byte per logit of this rank (bf16
            since sm_90; a quarter before; half a byte for fp32) and at most 256 * k bytes per token.
        main_grad: [V_local, D] buffer of its own memory, fp32, bf16 or weight's dtype; the backward adds dC to it in
            place and weight's own gradient stays None, as trainers with gradient buffers want it.
        reduce_hidden_grad: False leaves dE as this rank's part, for a caller that sums over the ranks itself.
        lora: a `vpcce.LoRA(a, b, scale)`; the logits are those of a weight + scale * b @ a that is never formed. weight
            must be frozen, a and b get gradients; a's is summed over the ranks whatever reduce_hidden_grad says.

    Raises:
        TypeError, ValueError: arguments that do not fit, on all ranks where ranks disagree, see
            `vpcce.parallel.agreement`.
        RuntimeError: a second derivative is asked for, or a transform of torch.func (grad, vmap, ...).

    Source: Cut Cross-Entropy (arXiv 2411.09009), algorithms 1 and 2, on vocabulary shards.
    """
    return stats_of(
        "linear_stats", hidden, weight, target, bias=bias, shard=shard, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, backward=backward, sequence_parallel=sequence_parallel, entropy=entropy, argmax=argmax,
        topk=topk, main_grad=main_grad, reduce_hidden_grad=reduce_hidden_grad, lora=lora,
    )  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    backward="auto",
    sequence_parallel: bool = False,
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    main_grad: Tensor | None = None,
    reduce_hidden_grad: bool = True,
    lora: LoRA | None = None,
) -> Any:  # a Tensor; with return_z_loss a pair of them
    """Cross-entropy of a language-model head.

    Equals::

        weight = weight + lora.scale * lora.b @ lora.a            # with lora
        logits = logit_scale * (hidden @ weight.T + bias).float()
        logits = softcap * torch.tanh(logits / softcap)          # with a softcap
        F.cross_entropy(logits.flatten(0, -2), target.flatten(), weight=class_weight, ignore_index=ignore_index,
                        reduction=reduction, label_smoothing=label_smoothing)
        + z_loss * logits.logsumexp(-1) ** 2                     # reduced over the tokens that are not ignored

    over the whole vocabulary of all ranks, except that "mean" over no token is 0 with zero gradients, where
    PyTorch gives NaN. With `shift`, logits[..., :-1, :] stand against target[..., 1:]. Neither the logits nor their
    gradient are ever materialised.

    Args:
        hidden, weight, target, bias, shard, ignore_index, softcap, logit_scale, backward, sequence_parallel,
            main_grad, reduce_hidden_grad, lora: see `linear_stats`.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        class_weight: [vocab_size], the same on all ranks; a token's loss is multiplied with its target's weight, and
            "mean" divides by the sum of these. It gets no gradient.
        label_smoothing: in [0, 1]; the target keeps 1 - label_smoothing, the rest is spread evenly over all
            `vocab_size` ids: (1 - s) * (lse - target_logit) + s * (lse - mean of all logits). With class weights w:
            (1 - s) * w[target] * (lse - target_logit) + s / vocab_size * sum_v w[v] * (lse - logit_v).
        z_loss: weight of lse^2, which keeps the softmax's normaliser near 1. Class weights do not touch it: its
            "mean" is over tokens.
        return_z_loss: return (loss, z) for logging; z is the loss's z-loss part, detached.
        shift: target holds the tokens themselves, and each predicts the next one along target's last dimension. Only
            the targets move; the last position has no label and counts as ignored.
        cu_seqlens: [B + 1] integers from 0 to the number of tokens, the sequences' bounds in a flat target of packed
            sequences; with `shift`, the last token of each has no label. Their values are checked on the CPU only.

    Returns:
        fp32 (fp64 for fp64 arguments): a scalar, or the target's shape with reduction "none". Same on all ranks.

    Raises:
        As `linear_stats`.
    """
    who = "linear_cross_entropy"
    refused: Exception | None = None
    try:
        check_loss_options(who, reduction, label_smoothing, z_loss)
        target = next_tokens(who, hidden, target, shift, cu_seqlens, ignore_index, sequence_parallel)
    except Exception as error:
        refused = error
    upstream = ""  # torch.compile may have made symbols of the numbers; then they go uncompared
    if not torch.compiler.is_compiling():
        weights = fingerprint(class_weight) if shard is not None and isinstance(class_weight, Tensor) else None
        upstream = repr((reduction, label_smoothing, z_loss, bool(shift), weights))
    call = prepare(
        who, hidden, weight, target, bias=bias, shard=shard, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, backward=backward, sequence_parallel=sequence_parallel,
        logit_sum=refused is None and label_smoothing > 0, class_weight=class_weight, main_grad=main_grad,
        reduce_hidden_grad=reduce_hidden_grad, lora=lora, upstream=upstream, refused=refused,
    )  # fmt: skip
    run = _run(call)
    lse, target_logit, logit_sum = run.lse, run.target_logit, run.logit_sum
    share = _target_weight(call)
    loss = lse - target_logit if share is None else share * (lse - target_logit)
    if logit_sum is not None:
        mean_weight = 1.0 if call.class_weight is None else call.class_weight.mean()
        smooth = mean_weight * lse - logit_sum / call.settings.vocab_size
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    loss = _reduce(call, loss, reduction, run.divisor, share)
    if z_loss == 0:
        return (loss, torch.zeros_like(loss)) if return_z_loss else loss
    z_term = _reduce(call, z_loss * lse.square(), reduction, run.divisor)
    return (loss + z_term, z_term.detach()) if return_z_loss else loss + z_term


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabShard | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    backward="auto",
    sequence_parallel: bool = False,
    entropy: bool = False,
    lora: LoRA | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and the entropy of each token's distribution.

    Equals::

        logits = logit_scale * (hidden @ weight.T + bias).float()
        logits = softcap * torch.tanh(logits / softcap)          # with a softcap
        logprobs = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]

    or, for K ids per token in a target [..., K], `gather(-1, target)`. Arguments and errors are those of
    `linear_stats`. Values are never above 0, and 0 for ignored ids. K ids cost one more weight row per id; their
    backward is always exact, since the sampled and filtered ones know one target per token.

    Returns:
        fp32 in the target's shape, or (log-probabilities, entropies) when `entropy` is set; entropies have one value
        per token. Both differentiable.
    """
    stats = stats_of(
        "linear_logprobs", hidden, weight, target, bias=bias, shard=shard, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, backward=backward, sequence_parallel=sequence_parallel, entropy=entropy, lora=lora,
    )  # fmt: skip
    if stats.target_logit.shape == stats.lse.shape:
        logprobs = stats.target_logit - stats.lse
    else:
        logprobs = stats.target_logit - stats.lse[..., None]
        if ignore_index is not None:
            logprobs = logprobs.masked_fill(target == ignore_index, 0.0)
    return logprobs if stats.entropy is None else (logprobs, stats.entropy)


def stats_of(who: str, hidden: Tensor, weight: Tensor, target: Tensor, **options) -> LinearStats:
    """`linear_stats` for the function `who`, whose name stands in errors."""
    call = prepare(who, hidden, weight, target, several_ids=True, **options)
    run = _run(call)
    return LinearStats(
        run.lse.view(call.shape),
        run.target_logit.view(target.shape),
        None if run.entropy is None else run.entropy.view(call.shape),
        None if run.argmax is None else run.argmax.view(call.shape),
        None if run.topk_ids is None else TopK(*(t.detach().view(*call.shape, t.shape[1]) for t in run.topk)),
    )


def _run(call: Arguments) -> autograd.Outputs:
    how = call.settings
    smoothed_weight = None
    if call.class_weight is not None and how.logit_sum:
        smoothed_weight = call.class_weight[how.start : how.start + how.n_valid]
    return autograd.head_stats(
        call.hidden, call.weight, call.target, bias=call.bias, scale=call.scale, column_weight=smoothed_weight,
        logit_scale=call.logit_scale, softcap=call.softcap, main_grad=call.main_grad, settings=how, lora=call.lora,
    )  # fmt: skip


def _target_weight(call: Arguments) -> Tensor | None:
    """[N] class weights of the targets, 0 for ignored tokens."""
    if call.class_weight is None:
        return None
    if call.settings.ignore_index is None:
        return call.class_weight[call.target]
    kept = call.target != call.settings.ignore_index
    return torch.where(kept, call.class_weight[torch.where(kept, call.target, 0)], 0.0)


def _reduce(
    call: Arguments, per_token: Tensor, reduction: str, divisor: Tensor | None, share: Tensor | None = None
) -> Tensor:
    """A "mean" divides by the number of tokens that count (`divisor`; None is all), or by the sum of their `share`."""
    if reduction == "none":
        return per_token.view(call.shape)
    if reduction == "sum":
        return per_token.sum()
    if share is None:
        return per_token.sum() / (max(call.target.numel(), 1) if divisor is None else divisor)
    total = share.sum()
    return per_token.sum() / torch.where(total == 0, 1.0, total)
