"""Options of the losses against `F.cross_entropy` and autograd in fp64, on one rank and on uneven shards of several."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import truth
from spawn import run_ranks

import vpcce


def uneven(rank: int, world: int, v: int) -> vpcce.VocabShard:
    """Shards of 1, 2, 3, ... parts of the vocabulary; one rank owns it whole."""
    parts = world * (world + 1) // 2
    edges = [v * (r * (r + 1) // 2) // parts for r in range(world + 1)]
    group = dist.group.WORLD if world > 1 and dist.is_initialized() else None
    return vpcce.VocabShard(edges[rank], edges[rank + 1], v, group)


def shard_of(rank: int, world: int, hidden, weight, bias, sequence_parallel=False):
    """What one rank holds: hidden, its rows of weight and bias as fresh leaves, and its shard."""
    shard = uneven(rank, world, weight.shape[0])
    mine = hidden.view(world, -1, *hidden.shape[1:])[rank] if sequence_parallel else hidden
    parts = (mine, weight[shard.start : shard.stop], bias[shard.start : shard.stop])
    return [part.detach().clone().requires_grad_() for part in parts], shard


def assert_ranks_equal(outputs, expected, d_hidden, d_weight, d_bias, sequence_parallel=False, world=1):
    """`outputs` holds (result, dE, dC, dbias) per rank as NumPy arrays, `expected` the plain results."""
    for rank, (result, e, c, b) in enumerate([[torch.from_numpy(t) for t in output] for output in outputs]):
        shard = uneven(rank, world, d_weight.shape[0])
        mine = d_hidden.view(world, -1, *d_hidden.shape[1:])[rank] if sequence_parallel else d_hidden
        torch.testing.assert_close(result, expected.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(e, mine, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(c, d_weight[shard.start : shard.stop], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(b, d_bias[shard.start : shard.stop], rtol=1e-9, atol=1e-12)


def run(world: int, function, *args) -> list:
    """`run_ranks`, without processes for one rank."""
    return [function(0, 1, *args)] if world == 1 else run_ranks(world, function, world, *args)


def class_weights(v: int, dtype=torch.float64):
    """Some are 0, as for a padding id that must not count."""
    weights = torch.rand(v, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 3
    weights[::5] = 0
    return weights.to(dtype)


def weighted(rank, world, options, sequence_parallel):
    hidden, weight, bias, target = truth.problem(24, 61, 6, bias=True, ignored=0.2)
    leaves, shard = shard_of(rank, world, hidden, weight, bias, sequence_parallel)
    loss = vpcce.linear_cross_entropy(
        leaves[0], leaves[1], target, bias=leaves[2], shard=shard, class_weight=class_weights(61),
        sequence_parallel=sequence_parallel, **options,
    )  # fmt: skip
    upstream = torch.linspace(0.5, 1.5, max(loss.numel(), 1)).view(loss.shape)
    return [t.detach().numpy() for t in (loss, *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype)))]


@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize(
    "options",
    [
        dict(reduction="mean"),
        dict(reduction="none", label_smoothing=0.2),
        dict(reduction="mean", label_smoothing=0.2, softcap=5.0, z_loss=1e-2),
    ],
    ids=["mean", "none, smoothed", "mean, smoothed, softcap, z-loss"],
)
def test_class_weight(world, sequence_parallel, options):
    hidden, weight, bias, target = truth.problem(24, 61, 6, bias=True, ignored=0.2)
    plain = truth.cross_entropy(hidden, weight, target, bias=bias, class_weight=class_weights(61), **options)
    upstream = torch.linspace(0.5, 1.5, max(plain.numel(), 1)).view(plain.shape).to(plain.dtype)
    grads = torch.autograd.grad(plain, (hidden, weight, bias), upstream)
    outputs = run(world, weighted, options, sequence_parallel)
    assert_ranks_equal(outputs, plain, *grads, sequence_parallel=sequence_parallel, world=world)


def test_class_weight_on_a_padded_vocabulary_and_in_fp32():
    hidden, weight, bias, target = truth.problem(24, 64, 6, torch.float32, bias=True)
    target %= 50
    options = dict(class_weight=class_weights(50, torch.float32), label_smoothing=0.3)
    shard = vpcce.VocabShard(0, 64, 50)
    loss = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, shard=shard, **options)
    plain = truth.cross_entropy(hidden, weight[:50], target, bias=bias[:50], **options)
    assert loss.dtype == torch.float32
    for a, b in zip((loss, *torch.autograd.grad(loss, (hidden, weight, bias))),
                    (plain, *torch.autograd.grad(plain, (hidden, weight, bias))), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_class_weights_of_zero_give_zero_not_nan():
    hidden, weight, _, target = truth.problem(5, 9, 3)
    loss = vpcce.linear_cross_entropy(hidden, weight, target, class_weight=torch.zeros(9), label_smoothing=0.1)
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss_is_reported(reduction):
    hidden, weight, _, target = truth.problem(24, 50, 6, ignored=0.3)
    options = dict(reduction=reduction, class_weight=class_weights(50))
    loss, z = vpcce.linear_cross_entropy(hidden, weight, target, z_loss=1e-2, return_z_loss=True, **options)
    torch.testing.assert_close(loss, truth.cross_entropy(hidden, weight, target, z_loss=1e-2, **options))
    torch.testing.assert_close(loss - z, truth.cross_entropy(hidden, weight, target, **options))
    assert not z.requires_grad
    _, off = vpcce.linear_cross_entropy(hidden, weight, target, return_z_loss=True, **options)
    assert off.shape == loss.shape and (off == 0).all()


def labels_of(target, bounds):
    """The next token by a plain loop over sequences."""
    flat = target.flatten()
    label = torch.full_like(flat, -100)
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for position in range(start, stop - 1):
            label[position] = flat[position + 1]
    return label.view(target.shape)


PACKED = [0, 0, 7, 8, 8, 20, 24]  # empty sequences in front and inside, one of a single token


def shifted(rank, world, packed, sequence_parallel):
    hidden, weight, bias, target = truth.problem(24, 61, 6, bias=True, ignored=0.1)
    options: dict = {}
    if packed:
        options["cu_seqlens"] = torch.tensor(PACKED, dtype=torch.int32)
    else:
        hidden, target = hidden.view(6, 4, 6), target.view(6, 4)
    leaves, shard = shard_of(rank, world, hidden, weight, bias, sequence_parallel)
    loss = vpcce.linear_cross_entropy(
        leaves[0], leaves[1], target.int(), bias=leaves[2], shard=shard, sequence_parallel=sequence_parallel,
        shift=True, **options,
    )  # fmt: skip
    return [t.detach().numpy() for t in (loss, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (3, False), (2, True)])
def test_shift(world, sequence_parallel, packed):
    hidden, weight, bias, target = truth.problem(24, 61, 6, bias=True, ignored=0.1)
    label = labels_of(target, PACKED if packed else range(0, 25, 4))
    plain = truth.cross_entropy(hidden, weight, label, bias=bias)
    d_hidden, d_weight, d_bias = torch.autograd.grad(plain, (hidden, weight, bias))
    outputs = run(world, shifted, packed, sequence_parallel)
    d_hidden = d_hidden if packed else d_hidden.view(6, 4, 6)
    assert_ranks_equal(outputs, plain, d_hidden, d_weight, d_bias, sequence_parallel=sequence_parallel, world=world)


def test_shift_equals_slicing_as_trainers_do():
    hidden, weight, _, target = truth.problem(24, 50, 6)
    hidden, target = hidden.view(3, 8, 6), target.view(3, 8)
    loss = vpcce.LinearCrossEntropy(shift=True)(hidden, weight, target)
    logits = truth.logits_of(hidden[:, :-1], weight)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target[:, 1:].flatten()))
    per_token = vpcce.linear_cross_entropy(hidden, weight, target, shift=True, reduction="none")
    assert per_token.shape == (3, 8) and (per_token[:, -1] == 0).all()
    assert vpcce.linear_cross_entropy(hidden[:, :0], weight, target[:, :0], shift=True) == 0


HIDDEN, WEIGHT, TARGET = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(class_weight=torch.ones(9)), ValueError, r"class_weight of shape \[10\] \(the whole vocabulary\) on cpu"),
        (dict(class_weight=[1.0] * 10), TypeError, "class_weight must be a tensor of floats, got list"),
        (dict(class_weight=torch.ones(10).long()), TypeError, "a tensor of floats, got torch.int64"),
        (dict(cu_seqlens=torch.tensor([0, 6])), ValueError, "expected shift=True, got shift=False"),
        (dict(shift=True, ignore_index=None), ValueError, "expected an ignore_index, got None"),
        (dict(shift=True, cu_seqlens=[0, 6]), TypeError, "cu_seqlens must be a tensor of int32 or int64, got list"),
        (dict(shift=True, cu_seqlens=torch.tensor(6)), ValueError, r"shape \[sequences \+ 1\] on cpu, got \[\]"),
        (dict(shift=True, hidden=HIDDEN.view(2, 3, 4)), ValueError, "cannot see where sequences end in a flat target"),
        (
            dict(shift=True, cu_seqlens=torch.tensor([0, 6]), hidden=HIDDEN.view(2, 3, 4), target=TARGET.view(2, 3)),
            ValueError,
            r"cu_seqlens belongs to a flat target, got \[2, 3\]",
        ),
    ],
)
def test_message(options, error, message):
    arguments = dict(hidden=HIDDEN, target=TARGET) | options
    with pytest.raises(error, match=message):
        vpcce.linear_cross_entropy(weight=WEIGHT, **arguments)


def logprobs_of_several(rank, world, options, sequence_parallel):
    hidden, weight, bias, _ = truth.problem(24, 61, 6, bias=True)
    leaves, shard = shard_of(rank, world, hidden, weight, bias, sequence_parallel)
    logprobs, entropy = vpcce.linear_logprobs(
        leaves[0], leaves[1], truth.several_ids(24, 5, 61), bias=leaves[2], shard=shard, entropy=True,
        sequence_parallel=sequence_parallel, backward=vpcce.sampled(), **options,
    )  # fmt: skip
    assert (logprobs <= 0).all()
    total = (logprobs * torch.linspace(0.5, 1.5, logprobs.numel()).view(24, 5)).sum() + entropy.sum()
    return [t.detach().numpy() for t in (logprobs, *torch.autograd.grad(total, leaves))]


@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("options", [dict(), dict(softcap=3.0, logit_scale=1.3)], ids=["plain", "softcap, scale"])
def test_logprobs_of_several_ids(world, sequence_parallel, options):
    hidden, weight, bias, _ = truth.problem(24, 61, 6, bias=True)
    ids = truth.several_ids(24, 5, 61)
    plain = truth.logprobs_of_ids(hidden, weight, ids, bias=bias, **options)
    x = truth.logits_of(hidden, weight, bias=bias, **options)
    entropy = torch.distributions.Categorical(logits=x).entropy()[(ids >= 0).any(1)]
    total = (plain * torch.linspace(0.5, 1.5, plain.numel()).view(24, 5)).sum() + entropy.sum()
    grads = torch.autograd.grad(total, (hidden, weight, bias))
    outputs = run(world, logprobs_of_several, options, sequence_parallel)
    assert_ranks_equal(outputs, plain, *grads, sequence_parallel=sequence_parallel, world=world)


def test_several_ids_are_told_from_one_by_their_shape():
    hidden, weight, _, target = truth.problem(24, 50, 6)
    one = vpcce.linear_logprobs(hidden, weight, target)
    assert torch.equal(vpcce.linear_logprobs(hidden, weight, target[:, None])[:, 0], one)
    deep = vpcce.linear_logprobs(hidden.view(2, 12, 6), weight, target.view(2, 12, 1).expand(2, 12, 3).int())
    assert torch.equal(deep, one.view(2, 12, 1).expand(2, 12, 3))
    stats = vpcce.linear_stats(hidden, weight, target[:, None].expand(24, 4), argmax=True)
    assert [t.shape for t in (stats.lse, stats.target_logit, stats.argmax)] == [(24,), (24, 4), (24,)]
    with pytest.raises(ValueError, match=r"expected 1 to 64 ids per token, got a target of \[24, 65\]"):
        vpcce.linear_logprobs(hidden, weight, target[:, None].expand(24, 65))
    with pytest.raises(ValueError, match="expected a target of 24 ids"):
        vpcce.linear_cross_entropy(hidden, weight, target[:, None].expand(24, 2))
    with pytest.raises(ValueError, match=r"target 50 at position \[1, 0\] is outside"):
        vpcce.linear_logprobs(hidden[:2], weight, torch.tensor([[1, 2], [50, 3]]))


def test_an_ignored_id_inside_the_vocabulary():
    """ignore_index may be a true id, such as 0 for padding."""
    hidden, weight, _, target = truth.problem(24, 50, 6)
    ids = torch.stack([target, torch.zeros_like(target)], 1)
    logprobs = vpcce.linear_logprobs(hidden, weight, ids, ignore_index=0)
    assert (logprobs[:, 1] == 0).all()
    plain = truth.logprobs_of_ids(hidden, weight, ids, ignore_index=0)
    torch.testing.assert_close(logprobs, plain)
    for a, b in zip(torch.autograd.grad(logprobs.sum(), (hidden, weight)),
                    torch.autograd.grad(plain.sum(), (hidden, weight)), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b)


def dense_of(ids, probs, v):
    """The distribution [N, V] that ids and probabilities stand for."""
    kept = ids != -100
    dense = torch.zeros(ids.shape[0], v, dtype=probs.dtype)
    return dense.scatter_add(1, torch.where(kept, ids, 0), torch.where(kept, probs, 0.0))


def soft(rank, world, options, sequence_parallel):
    hidden, weight, bias, _ = truth.problem(24, 61, 6, bias=True)
    leaves, shard = shard_of(rank, world, hidden, weight, bias, sequence_parallel)
    loss = vpcce.linear_soft_cross_entropy(
        leaves[0], leaves[1], truth.several_ids(24, 5, 61).int(), PROBS, bias=leaves[2], shard=shard,
        sequence_parallel=sequence_parallel, **options,
    )  # fmt: skip
    upstream = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [t.detach().numpy() for t in (loss, *torch.autograd.grad(loss, leaves, upstream))]


PROBS = torch.rand(24, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("reduction, softcap", [("none", None), ("mean", 3.0), ("sum", None)])
def test_soft_targets(world, sequence_parallel, reduction, softcap):
    hidden, weight, bias, _ = truth.problem(24, 61, 6, bias=True)
    ids = truth.several_ids(24, 5, 61)
    x = truth.logits_of(hidden, weight, bias, softcap=softcap)
    plain = F.cross_entropy(x, dense_of(ids, PROBS, 61), reduction="none")
    if reduction != "none":
        plain = plain.sum() / ((ids >= 0).any(1).sum() if reduction == "mean" else 1)
    upstream = torch.linspace(0.5, 1.5, plain.numel(), dtype=plain.dtype).view(plain.shape)
    grads = torch.autograd.grad(plain, (hidden, weight, bias), upstream)
    outputs = run(world, soft, dict(reduction=reduction, softcap=softcap), sequence_parallel)
    assert_ranks_equal(outputs, plain, *grads, sequence_parallel=sequence_parallel, world=world)


def test_soft_targets_differentiate_the_probabilities():
    hidden, weight, _, _ = truth.problem(6, 20, 5)
    ids = truth.several_ids(6, 3, 20)
    probs = torch.rand(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h, w, p: vpcce.linear_soft_cross_entropy(h, w, ids, p), (hidden, weight, probs)
    )
    with pytest.raises(ValueError, match=r"ids and probs of shape \[..., K\] .* got \[6, 3\], \[6, 2\] and \[6, 5\]"):
        vpcce.linear_soft_cross_entropy(hidden, weight, ids, probs[:, :2])


def topk_of(rank, world, k, sequence_parallel):
    hidden, weight, bias, _ = truth.problem(24, 61, 6, bias=True)
    leaves, shard = shard_of(rank, world, hidden, weight, bias, sequence_parallel)
    top = vpcce.linear_topk(
        leaves[0], leaves[1], k, bias=leaves[2], shard=shard, softcap=8.0, logit_scale=1.3,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return [t.numpy() for t in top]


@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("k", [1, 40])
def test_topk(world, sequence_parallel, k):
    """40 of 61 ids are more than any of 3 uneven shards holds."""
    hidden, weight, bias, _ = truth.problem(24, 61, 6, bias=True)
    x = truth.logits_of(hidden, weight, bias, softcap=8.0, logit_scale=1.3)
    expected = x.log_softmax(-1).topk(k)
    for logprobs, ids in run(world, topk_of, k, sequence_parallel):
        torch.testing.assert_close(torch.from_numpy(logprobs), expected.values.detach())
        assert torch.equal(torch.from_numpy(ids), expected.indices)


def test_topk_in_blocks_and_layouts(monkeypatch):
    """Blocks of 10 columns; a padded vocabulary; a teacher's targets for a student."""
    monkeypatch.setattr("vpcce.reference.MIN_WIDTH", 10)
    monkeypatch.setattr("vpcce.reference.BLOCK_NUMEL", 10)
    hidden, weight, _, _ = truth.problem(24, 64, 6, torch.float32)
    top = vpcce.linear_topk(hidden.view(2, 12, 6), weight, 12, shard=vpcce.VocabShard(0, 64, 50))
    expected = truth.logits_of(hidden, weight[:50]).log_softmax(-1).topk(12)
    torch.testing.assert_close(top.logprobs.view(24, 12), expected.values)
    assert torch.equal(top.ids.view(24, 12), expected.indices)
    loss = vpcce.linear_soft_cross_entropy(hidden.view(2, 12, 6), weight, top.ids, top.logprobs.exp())
    assert loss.requires_grad and not top.logprobs.requires_grad
    target = torch.arange(24)
    stats = vpcce.linear_stats(hidden, weight, target[:, None].expand(24, 4), topk=5)
    assert [t.shape for t in stats.topk] == [(24, 5), (24, 5)] and stats.lse.requires_grad
    compiled = torch.compile(vpcce.linear_stats, fullgraph=True, backend="aot_eager")(hidden, weight, target, topk=5)
    assert torch.equal(compiled.topk.ids, stats.topk.ids) and compiled.lse.requires_grad
    assert not compiled.topk.logprobs.requires_grad and not stats.topk.logprobs.requires_grad
    for k, error in ((0, ValueError), (65, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="linear_stats: .*k"):
            vpcce.linear_stats(hidden, weight, target, topk=k)
        with pytest.raises(error, match="linear_topk: "):
            vpcce.linear_topk(hidden, weight, k)
    with pytest.raises(TypeError, match="linear_topk: k must be an int, got NoneType"):
        vpcce.linear_topk(hidden, weight, None)
    with pytest.raises(ValueError, match="at most the vocabulary's 8 ids, got 9"):
        vpcce.linear_topk(hidden, weight[:8], 9)


@pytest.mark.parametrize("tokens", [0, 5])
def test_the_filter_without_a_token_that_counts(tokens):
    hidden, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (tokens, 30))
    vpcce.linear_cross_entropy(hidden, weight, torch.full((tokens,), -100), backward=vpcce.filtered()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_a_softcap_with_label_smoothing_is_exact_under_any_policy():
    hidden, weight = (torch.randn(rows, 16, dtype=torch.float64, requires_grad=True) for rows in (140, 300))
    target = torch.randint(300, (140,))

    def gradients(backward):
        loss = vpcce.linear_cross_entropy(hidden, weight, target, softcap=5.0, label_smoothing=0.1, backward=backward)
        return torch.autograd.grad(loss, (hidden, weight))

    for ours, truth_ in zip(gradients(vpcce.sampled(1.0)), gradients(vpcce.exact()), strict=True):
        torch.testing.assert_close(ours, truth_)
