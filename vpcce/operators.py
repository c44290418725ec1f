"""Statistics of a vocabulary-parallel head and their gradient: the only place where kernels meet collectives.

One rank's backend (Triton kernels, or PyTorch on slices of the vocabulary) answers for its shard; one all-gather of
three to five numbers per token, and of 2 k more for the k most likely ids, merges the answers. With M = max
over ranks of the local maxima m_r:

    lse = M + log(sum_r s_r * exp(m_r - M))          target_logit = sum_r target_logit_r
    entropy = lse - sum_r px_r * exp(m_r - M) / exp(lse - M)

The gradient with respect to a logit x_v of the token, given upstream gradients g of the four statistics:

    d/dx_v = p_v * (g_lse + g_entropy * (lse - entropy - x_v)) + onehot_v * g_target + column_weight_v * g_logit_sum

which is `RowGradients` for the backend. Ranks sum dE in hidden's dtype (`collectives`); dC stays on its rank.

A low-rank addition to the head (`vpcce.lora`) is a second pair of factors for the backend; its gradient with respect
to hidden joins dE before the reduction.

Both directions are custom operators that see only tensors and one string, so torch.compile, CUDA graphs and
activation checkpointing treat them as they treat a matrix product. The string is a `Settings`: every argument that
is no tensor. Nothing here waits for the device, and the host waits for other ranks only where
`vpcce.parallel.agreement` says so.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vpcce import reference
from vpcce.kernels.problem import Head, Marks, Merged, Sampling, StatsLayout, best_of_ranks
from vpcce.lora import LoRA, described, grad_of_a, low_rank
from vpcce.parallel import agreement, collectives
from vpcce.row_terms import linear_logit_sum, merge_bounds, merge_ranks, row_gradients
from vpcce.settings import Settings, check_agreement, decode
from vpcce.tokens import Rows, check_targets, uses_kernels


def _forward(
    hidden: Tensor,  # [N, D], or [N / T, D] with sequence_parallel
    weight: Tensor,  # [stop - start, D]
    target: Tensor,  # [N] int64, global ids; or [N, K]
    bias: Tensor | None,  # [stop - start]
    scale: Tensor | None,  # 0-dim; replaces settings.logit_scale
    column_weight: Tensor | None,  # [stop - start]
    lora_a: Tensor | None,  # [r, D]
    lora_b: Tensor | None,  # [stop - start, r]
    logit_scale: float,
    softcap: float | None,
    lora_scale: float,
    settings: str,
) -> list[Tensor]:
    """The fields of `Outputs` that were asked for. Statistics of ignored tokens are 0."""
    how = decode(settings)
    group = collectives.resolve(how.group)
    try:
        check_targets(target, how)
    except Exception as error:
        agreement.report_failure(group, how.check, error)
        raise
    factor = logit_scale if scale is None else f"a tensor of {scale.dtype}"
    lora = None if lora_a is None else LoRA(lora_a, lora_b, lora_scale)
    options = [("logit_scale", factor), ("softcap", softcap), ("lora's rank, scale and dtypes", described(lora))]
    check_agreement(group, how, hidden, weight, target, bias, options, [("logit_scale", scale), ("lora's a", lora_a)])
    rows = Rows(target, how, check=True)
    tokens = rows.take(collectives.gather_tokens(hidden, group if how.sequence_parallel else None))
    backend = _backend(hidden)
    head = _head(how, weight, bias, logit_scale if scale is None else scale, softcap, column_weight)
    head = _with_lora(head, backend, tokens, lora_a, lora_b, lora_scale)

    sampling = None
    if how.marks:
        seed = torch.randint(2**62, (), device=hidden.device)
        hot = backend.hot_set(tokens, head, rows.local)
        bound, seed = _lower_bound(hot.stats, rows, seed, group)
        eps = min(policy.eps for policy in how.policies if policy.kind != "exact")
        sampling = Sampling(seed, eps, bound, hot.splits, hot.mean_bound)
    want_sum = how.logit_sum and softcap is not None
    part = backend.local_stats(
        tokens, head, rows.local, n_rows=rows.count, entropy=how.entropy, argmax=how.argmax, logit_sum=want_sum,
        sampling=sampling, topk=how.topk,
    )  # fmt: skip
    packed, layout, weight_sum = part.packed, part.layout, None
    if how.logit_sum and not want_sum:
        logit_sum, weight_sum = linear_logit_sum(tokens, head, uses_kernels(hidden))
        packed, layout = torch.cat([packed, logit_sum[None]]), layout._replace(logit_sum=True)
    ranks = packed if group is None else collectives.gather_stats(packed, group)  # without a group, one view less
    merged = _merge(ranks, layout, target, how, rows)
    topk = _topk(ranks, layout, merged.lse, rows) if how.topk else (None, None)
    marks = (None, None, None) if sampling is None else (part.marks.bits, sampling.seed, weight_sum)
    outputs = Outputs(*merged, *topk, *marks, None if how.ignore_index is None else rows.divisor())
    return [output.contiguous() for output in outputs if output is not None]  # as `_fake_forward` says


class Outputs(NamedTuple):
    """What the forward may return; `wanted` says which fields a call has."""

    lse: Tensor  # [N]
    target_logit: Tensor  # like target
    entropy: Tensor | None  # [N]
    logit_sum: Tensor | None  # [N]
    argmax: Tensor | None  # [N] int64, global ids
    topk_logprobs: Tensor | None  # [N, k], the largest first
    topk_ids: Tensor | None  # [N, k] int64, global
    marks: Tensor | None  # the backend's
    seed: Tensor | None  # [] int64
    weight_sum: Tensor | None  # [D], the shard's column_weight @ weight: with marks and a linear logit_sum
    divisor: Tensor | None  # [] int32, how many tokens count, but at least 1; with an ignore_index

    @property
    def topk(self) -> tuple[Tensor, Tensor]:
        return self.topk_logprobs, self.topk_ids

    @staticmethod
    def wanted(how: Settings, softcap: float | None) -> tuple[bool, ...]:
        topk, marks = (how.topk > 0,) * 2, (how.marks,) * 2
        with_sum = how.marks and how.logit_sum and softcap is None
        optional = (how.entropy, how.logit_sum, how.argmax, *topk, *marks, with_sum)
        return (True, True, *optional, how.ignore_index is not None)


def _fake_forward(
    hidden, weight, target, bias, scale, column_weight, lora_a, lora_b, logit_scale, softcap, lora_scale, settings
):  # fmt: skip
    how = decode(settings)
    n = target.shape[0]
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    per_token = hidden.new_empty(n, dtype=dtype)
    outputs = [per_token, hidden.new_empty(target.shape, dtype=dtype)]
    outputs += [torch.empty_like(per_token) for wanted in (how.entropy, how.logit_sum) if wanted]
    if how.argmax:
        outputs.append(hidden.new_empty(n, dtype=torch.int64))
    if how.topk:
        outputs.append(hidden.new_empty(n, how.topk, dtype=dtype))
        outputs.append(hidden.new_empty(n, how.topk, dtype=torch.int64))
    if how.marks:
        outputs.append(hidden.new_empty(_backend(hidden).marks_shape(n, how.n_valid), dtype=torch.int32))
        outputs.append(hidden.new_empty((), dtype=torch.int64))
        if how.logit_sum and softcap is None:
            outputs.append(hidden.new_empty(weight.shape[1], dtype=dtype))
    if how.ignore_index is not None:
        outputs.append(hidden.new_empty((), dtype=torch.int32))
    return outputs


def _backward(
    grad_lse: Tensor | None,  # [N]
    grad_target_logit: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logit_sum: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    column_weight: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lse: Tensor,
    entropy: Tensor | None,
    marks: Tensor | None,
    seed: Tensor | None,
    weight_sum: Tensor | None,
    main_grad: Tensor | None,  # [stop - start, D]; dC is added to it
    needs: str,  # letters of the wanted gradients: h(idden) w(eight) b(ias) s(cale), A and B of LoRA
    logit_scale: float,
    softcap: float | None,
    lora_scale: float,
    settings: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dE, dC, dbias, dscale, da, db; empty where not wanted, and dC where it went into main_grad.

    No list as the forward's: PyTorch's functionalisation refuses one from operators that mutate an argument.
    """
    how = decode(settings)
    group = collectives.resolve(how.group)
    rows = Rows(target, how)
    tokens = rows.take(collectives.gather_tokens(hidden, group if how.sequence_parallel else None))
    backend = _backend(hidden)
    head = _head(how, weight, bias, logit_scale if scale is None else scale, softcap, column_weight)
    head = replace(_with_lora(head, backend, tokens, lora_a, lora_b, lora_scale), weight_sum=weight_sum)
    # torch.compile hands over empty gradients for the statistics that were not asked for.
    given = (grad_lse, grad_target_logit, grad_entropy, grad_logit_sum)
    grads = tuple(None if g is None or g.shape[:1] != lse.shape else g for g in given)
    lse_rows, upstream = _row_gradients(grads, lse, entropy, target, rows)
    hidden_policy, weight_policy = how.policies
    want_hidden, want_weight = "h" in needs or "s" in needs, "w" in needs or "B" in needs
    low_grad = None
    if lora_a is not None and (want_hidden or "A" in needs):
        low_grad = lse.new_zeros(head.low_rank.hidden.shape)
    reduction = collectives.HiddenGradReduction(
        group if "h" in needs and how.reduce_hidden_grad else None, how.sequence_parallel
    )
    scale_part: list[Tensor] = []

    def hidden_grad_ready(part: Tensor) -> None:
        if low_grad is not None:
            part.addmm_(rows.spread(low_grad) if rows.on_device else low_grad, lora_a.to(part.dtype), alpha=lora_scale)
        if "s" in needs:  # before the reduction consumes the part
            in_order = part[rows.index] if rows.on_device else part
            scale_part.append((in_order.to(lse.dtype) * tokens.to(lse.dtype)).sum())
        if "h" in needs:
            part = part.to(hidden.dtype)
            reduction(part if rows.on_device else rows.spread(part))  # kernels write dE in the tokens' order

    into = None
    if main_grad is not None:
        torch.autograd.graph.increment_version(main_grad)
        into = main_grad[: how.n_valid]
    _, weight_grad, bias_grad = backend.local_backward(
        tokens, head, rows.local, lse_rows, upstream,
        n_rows=rows.count,
        row_index=rows.index if rows.on_device else None,
        # Without dE and dC, dbias alone is computed under hidden's policy.
        hidden_policy=hidden_policy if want_hidden or low_grad is not None or not want_weight else None,
        weight_policy=weight_policy if want_weight else None,
        bias_grad="b" in needs or ("s" in needs and bias is not None),
        marks=None if marks is None else Marks(marks, seed),
        main_grad=into,
        hidden_grad_dtype=lse.dtype if "s" in needs or low_grad is not None else hidden.dtype,
        hidden_grad_ready=hidden_grad_ready,
        hidden_grad=want_hidden,
        low_rank_grad=low_grad,
    )  # fmt: skip
    a_grad = b_grad = None
    if "A" in needs:
        a_grad = collectives.sum_small(grad_of_a(low_grad, tokens, lora_scale), group).to(lora_a.dtype)
    if lora_a is not None:
        weight_grad, b_grad = None, weight_grad
    hidden_grad = reduction.wait() if "h" in needs else None
    scale_grad = None
    if "s" in needs:
        total = scale_part[0] if bias is None else scale_part[0] + (bias_grad * head.bias.to(bias_grad.dtype)).sum()
        scale_grad = (collectives.sum_small(total, group) / _nonzero(scale).to(lse.dtype)).to(scale.dtype)
    return (
        hidden.new_empty(0) if hidden_grad is None else hidden_grad,
        hidden.new_empty(0) if weight_grad is None else _with_padding(weight_grad, weight.shape[0]),
        hidden.new_empty(0) if "b" not in needs else _with_padding(bias_grad.to(bias.dtype), weight.shape[0]),
        hidden.new_empty(0) if scale_grad is None else scale_grad,
        hidden.new_empty(0) if a_grad is None else a_grad,
        hidden.new_empty(0) if b_grad is None else _with_padding(b_grad.to(lora_b.dtype), weight.shape[0]),
    )


def _fake_backward(
    grad_lse, grad_target_logit, grad_entropy, grad_logit_sum, hidden, weight, target, bias, scale, column_weight,
    lora_a, lora_b, lse, entropy, marks, seed, weight_sum, main_grad, needs, logit_scale, softcap, lora_scale,
    settings,
):  # fmt: skip
    return (
        hidden.new_empty(hidden.shape if "h" in needs else 0),
        weight.new_empty(weight.shape if "w" in needs and main_grad is None else 0),
        hidden.new_empty(0) if "b" not in needs else bias.new_empty(bias.shape),
        hidden.new_empty(0) if "s" not in needs else scale.new_empty(()),
        hidden.new_empty(0) if "A" not in needs else lora_a.new_empty(lora_a.shape),
        hidden.new_empty(0) if "B" not in needs else lora_b.new_empty(lora_b.shape),
    )


# Not `torch.library.custom_op`: its wrappers in Python take 8 us a call, and 80 us with the backward's 19 arguments of
# which one is mutated. They keep autograd out and count versions, which `HeadStats` and `_backward` do here.
_library = torch.library.Library("vpcce", "FRAGMENT")


def _operator(name: str, function: Callable, fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
    """torch.ops.vpcce.<name>, which runs `function` on every device."""
    schema = torch.library.infer_schema(function, mutates_args=mutates, op_name=name)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vpcce::{name}", fake, lib=_library)
    return getattr(torch.ops.vpcce, name).default


head_stats_op = _operator("head_stats", _forward, _fake_forward)
head_stats_backward_op = _operator("head_stats_backward", _backward, _fake_backward, mutates=("main_grad",))


def _backend(tensor: Tensor):
    if not uses_kernels(tensor):
        return reference
    from vpcce.kernels import local

    return local


def _merge(ranks: Tensor, layout: StatsLayout, target: Tensor, how: Settings, rows: Rows) -> Merged:
    if not rows.by_kernels:
        return merge_ranks(ranks if ranks.dim() == 3 else ranks[None], layout, target, how, rows)
    from vpcce.kernels import merge

    return merge.merge_ranks(ranks, layout, how.vocab_size, rows.index, rows.count)


def _topk(ranks: Tensor, layout: StatsLayout, lse: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """(log-probabilities, global ids), [N, k] in the order of the tokens."""
    logits, ids = best_of_ranks(ranks if ranks.dim() == 3 else ranks[None], layout)
    logprobs = (rows.spread(logits) - lse[:, None]).clamp(max=0.0)  # the two are sums in different orders
    return logprobs, rows.spread(ids)


def _row_gradients(grads, lse: Tensor, entropy: Tensor | None, target: Tensor, rows: Rows):
    if not rows.by_kernels:
        return row_gradients(grads, lse, entropy, target, rows)
    from vpcce.kernels import rows as kernels

    return kernels.row_gradients(grads, lse, entropy, rows.index, rows.count)


SMALLEST_SCALE = 1e-20  # a learned scale of 0: its gradient is divided by it, and the logits are still 0


def _nonzero(scale: Tensor) -> Tensor:
    """A learned scale as it is computed with."""
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return torch.where(scale == 0, SMALLEST_SCALE, scale)


def _head(how: Settings, weight, bias, scale, softcap, column_weight) -> Head:
    """This rank's true ids: padding rows are cut off here and seen by nobody below."""
    if isinstance(scale, Tensor):
        scale = _nonzero(scale)
    n = how.n_valid
    if n == weight.shape[0]:
        return Head(weight, bias, scale, softcap, how.start, column_weight)
    return Head(
        weight=weight[:n],
        bias=None if bias is None else bias[:n],
        scale=scale,
        softcap=softcap,
        start=how.start,
        column_weight=None if column_weight is None else column_weight[:n],
    )


def _with_lora(head: Head, backend, tokens, a, b, scale) -> Head:
    if a is None:
        return head
    dtype = backend.operand_dtype(tokens, head)
    return replace(head, low_rank=low_rank(tokens, a, b[: len(head.weight)], scale, dtype))


def _lower_bound(stats, rows, seed, group) -> tuple[Tensor, Tensor]:
    """A lower bound of every token's log-sum-exp from all ranks' hot columns, and rank 0's seed."""
    if group is None:
        return stats[2], seed
    # The seed rides along as two rows of bits, so that all ranks toss the same coins.
    halves = torch.stack([seed & 0x7FFFFFFF, seed >> 31]).to(torch.int32).view(torch.float32)
    gathered = collectives.gather_stats(torch.cat([stats[:2].flatten(), halves]), group)  # [T, 2 N + 2]
    low, high = gathered[0, -2:].contiguous().view(torch.int32).to(torch.int64)
    seed = low | (high << 31)
    ranks = gathered[:, :-2].view(gathered.shape[0], 2, -1)
    if rows.by_kernels:
        from vpcce.kernels import merge

        return merge.merge_bounds(ranks), seed
    return merge_bounds(ranks), seed


def _with_padding(grad: Tensor, n_rows: int) -> Tensor:
    """Rows of the padded vocabulary get a zero gradient."""
    if grad.shape[0] == n_rows:
        return grad
    return torch.cat([grad, grad.new_zeros(n_rows - grad.shape[0], *grad.shape[1:])])
