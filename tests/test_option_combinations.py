"""Random combinations of all options on 1, 2 and 3 ranks with uneven, empty and padded shards, against fp64 truth.

One group serves a list of examples, since processes cost more than examples; each rank compares its own part.
"""

import pytest
import torch
import truth
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spawn import run_ranks
from test_options import labels_of, uneven

import vpcce

SAMPLED = vpcce.sampled(eps=1e-12)  # keeps every column that fp64 can tell from 0
SHARED = dict(
    m=st.integers(0, 12), v=st.integers(1, 70), padding=st.sampled_from([0, 0, 9]), d=st.integers(1, 9),
    bias=st.booleans(), softcap=st.sampled_from([None, 0.7, 20.0]), learned=st.booleans(),
    ignored=st.sampled_from([0.0, 0.4, 1.0]), sequence_parallel=st.booleans(), frozen=st.booleans(),
    lora=st.sampled_from([0, 0, 1, 3]),
)  # fmt: skip
LOSS = dict(
    class_weight=st.booleans(), label_smoothing=st.sampled_from([0.0, 0.1, 1.0]), z_loss=st.sampled_from([0.0, 1e-2]),
    reduction=st.sampled_from(["mean", "sum", "none"]), shift=st.sampled_from(["off", "rows", "packed"]),
    backward=st.sampled_from(["auto", SAMPLED, (vpcce.exact(), SAMPLED)]),
)  # fmt: skip
few_lists = settings(max_examples=3, database=None, deadline=None, phases=[Phase.generate])


class Example:
    """A head with `padding` rows beyond its `v` ids, one rank's part of it, and the leaves of both."""

    def __init__(
        self, rank, world, m, v, padding, d, bias, softcap, learned, ignored, sequence_parallel, frozen, lora
    ):  # fmt: skip
        self.n, self.v = m * world, v
        frozen = frozen or lora > 0
        hidden, weight, offset, target = truth.problem(self.n, v + padding, d, bias=bias, ignored=ignored, seed=m + v)
        self.target = torch.where(target >= 0, target % v, target)
        scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True) if learned else None
        self.options = dict(softcap=softcap, logit_scale=1.2 if scale is None else scale)
        g = torch.Generator().manual_seed(m)
        a, b = (torch.randn(shape, generator=g, dtype=weight.dtype) for shape in ((lora, d), (v + padding, lora)))
        a, b = (a.requires_grad_(), b.requires_grad_()) if lora else (None, None)
        whole = weight if a is None else weight + 0.3 * b @ a
        self.plain = [hidden, whole[:v], None if offset is None else offset[:v]]
        leaves = (hidden, None if frozen else weight, offset, b, scale, a)
        self.plain_leaves = [t for t in leaves if t is not None]
        rows = uneven(rank, world, v + padding)
        self.shard = vpcce.VocabShard(rows.start, rows.stop, v, rows.group)
        self.mine = slice(rank * m, (rank + 1) * m) if sequence_parallel else slice(None)
        self.rows, self.frozen, self.scale = slice(rows.start, rows.stop), frozen, scale
        part = [hidden[self.mine], weight[self.rows], *(None if t is None else t[self.rows] for t in (offset, b))]
        self.part = [None if t is None else t.detach().clone().requires_grad_() for t in part]
        self.part[1].requires_grad_(not frozen)
        my_a = None if a is None else a.detach().clone().requires_grad_()
        leaves = (self.part[0], None if frozen else self.part[1], *self.part[2:], scale, my_a)
        self.part_leaves = [t for t in leaves if t is not None]
        self.call = dict(bias=self.part[2], shard=self.shard, sequence_parallel=sequence_parallel, **self.options)
        if lora:
            self.call["lora"] = vpcce.LoRA(my_a, self.part[3], 0.3)

    def check(self, ours, plain):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
        upstream = torch.linspace(0.5, 1.5, plain.numel(), dtype=plain.dtype).view(plain.shape)
        got = list(torch.autograd.grad(ours, self.part_leaves, upstream))
        expected = list(torch.autograd.grad(plain, self.plain_leaves, upstream, retain_graph=True))
        expected[0] = expected[0][self.mine]
        split = 1 + (not self.frozen) + sum(t is not None for t in self.part[2:])
        expected[1:split] = [t[self.rows] for t in expected[1:split]]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def lists_of(options: dict):
    return st.lists(st.fixed_dictionaries(options), min_size=15, max_size=15)


def compare_losses(rank, world, examples):
    for example in examples:
        try:
            compare_loss(rank, world, **example)
        except AssertionError as error:
            raise AssertionError(f"{example}") from error


def compare_loss(rank, world, class_weight, shift, reduction, label_smoothing, z_loss, backward, **shared):
    at = Example(rank, world, **shared)
    options = dict(reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss)
    if class_weight:
        options["class_weight"] = torch.arange(at.v, dtype=torch.float64) % 4
    if at.v == 1:  # p - onehot is exactly 0, and so is the probability of keeping the column
        backward = "auto"
    label, moved = at.target, {}
    if shift != "off":
        bounds = [0, at.n] if shift == "rows" else [0, at.n // 3, at.n // 2, at.n]
        label, moved = labels_of(label, bounds), dict(shift=True)
        if shift == "packed":
            moved["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    ours = vpcce.linear_cross_entropy(*at.part[:2], at.target, backward=backward, **at.call, **options, **moved)
    at.check(ours, truth.cross_entropy(*at.plain[:2], label, bias=at.plain[2], **at.options, **options))


def compare_ids(rank, world, examples):
    for example in examples:
        try:
            compare_several_ids(rank, world, **example)
        except AssertionError as error:
            raise AssertionError(f"{example}") from error


def compare_several_ids(rank, world, k, entropy, **shared):
    at = Example(rank, world, **shared)
    ids = truth.several_ids(at.n, k, at.v) if at.n else torch.zeros(0, k, dtype=torch.int64)
    ours = vpcce.linear_logprobs(*at.part[:2], ids, entropy=entropy, **at.call)
    logprobs = truth.logprobs_of_ids(*at.plain[:2], ids, bias=at.plain[2], **at.options)
    plain = logprobs
    if entropy:
        log_p = truth.logits_of(*at.plain, **at.options).log_softmax(-1)
        kept = (ids >= 0).any(1)
        plain = plain.sum(1) + torch.where(kept, -(log_p.exp() * log_p).sum(1), 0.0)
        ours = ours[0].sum(1) + ours[1]
    at.check(ours, plain)
    top = vpcce.linear_stats(*at.part[:2], at.target, topk=min(k, at.v), **at.call).topk
    log_p = truth.logits_of(*at.plain, **at.options).log_softmax(-1).detach()
    kept = at.target >= 0
    best = log_p.topk(min(k, at.v)).values
    torch.testing.assert_close(top.logprobs, torch.where(kept[:, None], best, 0.0))
    torch.testing.assert_close(log_p.gather(1, top.ids)[kept], best[kept])
    probs = torch.linspace(0.1, 0.9, at.n * k, dtype=torch.float64).view(at.n, k)
    ours = vpcce.linear_soft_cross_entropy(*at.part[:2], ids, probs, reduction="none", **at.call)
    at.check(ours, -(probs * logprobs).sum(1))


@pytest.mark.parametrize("world", [1, 2, 3])
@few_lists
@given(examples=lists_of(SHARED | LOSS))
def test_any_loss(world, examples):
    run_ranks(world, compare_losses, world, examples)


@pytest.mark.parametrize("world", [1, 2, 3])
@few_lists
@given(examples=lists_of(SHARED | dict(k=st.integers(1, 5), entropy=st.booleans())))
def test_any_logprobs_topk_and_soft_targets(world, examples):
    run_ranks(world, compare_ids, world, examples)
