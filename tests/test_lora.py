"""LoRA on the head against `F.cross_entropy(hidden @ (weight + s * b @ a).T)` and autograd in fp64."""

import pytest
import torch
import truth
from test_options import class_weights, run, uneven

import vpcce

SCALE, RANK = 0.7, 3
SAMPLED = vpcce.sampled(eps=1e-12)  # keeps every column that fp64 can tell from 0
ALL = dict(softcap=5.0, logit_scale=1.3, label_smoothing=0.2, z_loss=1e-2)
OPTIONS = [dict(), dict(label_smoothing=0.2, logit_scale=1.3), ALL, dict(ALL, reduction="none")]
IDS = ["plain", "smoothed, scale", "softcap, smoothed, scale, z-loss", "the same, none"]


def problem(n=24, v=61, d=6, r=RANK, dtype=torch.float64, **options):
    """hidden, weight (frozen), bias, a, b, target."""
    hidden, weight, bias, target = truth.problem(n, v, d, dtype, bias=True, ignored=0.2, **options)
    g = torch.Generator().manual_seed(9)
    a = (torch.randn(r, d, generator=g, dtype=torch.float64) / d**0.5).to(dtype).requires_grad_()
    b = torch.randn(v, r, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight.detach(), bias, a, b, target


def merged(weight, a, b):
    return weight + SCALE * b @ a


def upstream_of(value):
    return torch.linspace(0.5, 1.5, max(value.numel(), 1), dtype=value.dtype).view(value.shape)


def on_a_rank(rank, world, options, backward, sequence_parallel, classes):
    hidden, weight, bias, a, b, target = problem()
    shard = uneven(rank, world, 61)
    rows = slice(shard.start, shard.stop)
    mine = hidden.view(world, -1, 6)[rank] if sequence_parallel else hidden
    leaves = [t.detach().clone().requires_grad_() for t in (mine, bias[rows], a, b[rows])]
    loss = vpcce.linear_cross_entropy(
        leaves[0], weight[rows], target, bias=leaves[1], shard=shard, sequence_parallel=sequence_parallel,
        class_weight=class_weights(61) if classes else None, backward=backward,
        lora=vpcce.LoRA(leaves[2], leaves[3], SCALE), **options,
    )  # fmt: skip
    grads = torch.autograd.grad(loss, leaves, upstream_of(loss))
    return [t.detach().numpy() for t in (loss, *grads)]


@pytest.mark.parametrize("world, sequence_parallel", [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize(
    "backward", [vpcce.exact(), SAMPLED, (SAMPLED, vpcce.exact()), vpcce.filtered(eps=1e-300, sort=True)]
)
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_cross_entropy(world, sequence_parallel, backward, options):
    """Every rank holds the same loss, the whole gradient of a and that of its own rows of b."""
    classes = "reduction" in options
    if classes:
        options = dict(options, class_weight=class_weights(61))
    hidden, weight, bias, a, b, target = problem()
    plain = truth.cross_entropy(hidden, merged(weight, a, b), target, bias=bias, **options)
    expected = torch.autograd.grad(plain, (hidden, bias, a, b), upstream_of(plain))
    options = {name: value for name, value in options.items() if name != "class_weight"}
    outputs = run(world, on_a_rank, options, backward, sequence_parallel, classes)
    for rank, output in enumerate(outputs):
        loss, d_hidden, d_bias, d_a, d_b = (torch.from_numpy(t) for t in output)
        rows = slice(uneven(rank, world, 61).start, uneven(rank, world, 61).stop)
        mine = expected[0].view(world, -1, 6)[rank] if sequence_parallel else expected[0]
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-10, atol=1e-12)
        for ours, truth_part in (
            (d_hidden, mine),
            (d_bias, expected[1][rows]),
            (d_a, expected[2]),
            (d_b, expected[3][rows]),
        ):
            torch.testing.assert_close(ours, truth_part, rtol=1e-9, atol=1e-12)


def partial_sums(rank, world):
    hidden, weight, _, a, b, target = problem()
    shard = uneven(rank, world, 61)
    rows = slice(shard.start, shard.stop)
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, a)]
    loss = vpcce.linear_cross_entropy(
        leaves[0], weight[rows], target, shard=shard, lora=vpcce.LoRA(leaves[1], b[rows].detach(), SCALE),
        reduce_hidden_grad=False,
    )  # fmt: skip
    return [t.numpy() for t in torch.autograd.grad(loss, leaves)]


def test_a_caller_that_sums_the_gradient_of_hidden_itself():
    """With reduce_hidden_grad=False the parts of dE sum to dE; a's gradient is whole nevertheless."""
    hidden, weight, _, a, b, target = problem()
    d_hidden, d_a = torch.autograd.grad(truth.cross_entropy(hidden, merged(weight, a, b), target), (hidden, a))
    parts = run(2, partial_sums)
    torch.testing.assert_close(sum(torch.from_numpy(part[0]) for part in parts), d_hidden)
    for part in parts:
        torch.testing.assert_close(torch.from_numpy(part[1]), d_a)


@pytest.mark.parametrize("wanted", ["hidden", "a", "b", "scale", "a b", "hidden a", "scale b"])
def test_only_the_gradients_that_are_wanted(wanted):
    hidden, weight, bias, a, b, target = problem()
    scale = torch.tensor(0.8, dtype=torch.float64)
    leaves = dict(hidden=hidden, a=a, b=b, scale=scale)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted.split())
    bias = bias.detach()
    chosen = [leaves[name] for name in wanted.split()]
    options = dict(bias=bias, logit_scale=scale)
    for backward in (vpcce.exact(), SAMPLED):
        lora = vpcce.LoRA(a, b, SCALE)
        ours = vpcce.linear_cross_entropy(hidden, weight, target, lora=lora, backward=backward, **options)
        plain = truth.cross_entropy(hidden, merged(weight, a, b), target, **options)
        for x, y in zip(torch.autograd.grad(ours, chosen), torch.autograd.grad(plain, chosen), strict=True):
            torch.testing.assert_close(x, y)


def test_statistics_ids_and_topk():
    hidden, weight, bias, a, b, target = problem()
    whole = merged(weight, a, b)
    lora = vpcce.LoRA(a, b, SCALE)
    options = dict(bias=bias, softcap=8.0, logit_scale=1.3)
    ids = truth.several_ids(24, 5, 61)
    probs = torch.rand(24, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def results(weight, lora):
        stats = vpcce.linear_stats(hidden, weight, target, entropy=True, argmax=True, lora=lora, **options)
        yield from stats[:3]
        yield vpcce.linear_logprobs(hidden, weight, ids, lora=lora, **options)
        yield vpcce.linear_soft_cross_entropy(hidden, weight, ids, probs, lora=lora, **options)
        yield vpcce.LinearCrossEntropy(softcap=8.0)(hidden, weight, target, bias, lora=lora)
        yield stats.argmax
        yield from vpcce.linear_topk(hidden, weight, 7, lora=lora, **options)

    leaves = (hidden, bias, a, b)
    for ours, plain in zip(results(weight, lora), results(whole, None), strict=True):
        torch.testing.assert_close(ours, plain)
        if plain.requires_grad:
            got = torch.autograd.grad(ours, leaves, upstream_of(ours), retain_graph=True)
            expected = torch.autograd.grad(plain, leaves, upstream_of(plain), retain_graph=True)
            for x, y in zip(got, expected, strict=True):
                torch.testing.assert_close(x, y)


def test_padded_vocabulary_and_other_dtypes():
    """Rows of b beyond the vocabulary get gradient 0; fp32 factors on a bf16 head get fp32 gradients."""
    hidden, weight, _, a, b, target = problem(v=64, dtype=torch.float32)
    target %= 50
    half, head = (t.detach().bfloat16() for t in (hidden, weight))
    half.requires_grad_()
    loss = vpcce.linear_cross_entropy(
        half, head, target, shard=vpcce.VocabShard(0, 64, 50), lora=vpcce.LoRA(a, b, SCALE)
    )
    grads = torch.autograd.grad(loss, (half, a, b))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]
    assert (grads[2][50:] == 0).all()
    plain = truth.cross_entropy(half.float(), merged(head.float(), a, b)[:50], target)
    torch.testing.assert_close(loss, plain)
    for x, y in zip(grads, torch.autograd.grad(plain, (half, a, b)), strict=True):
        torch.testing.assert_close(x, y)


def test_sampling_is_unbiased():
    """The mean of 400 draws, with columns dropped at eps = 2^-5, is within 5 standard errors of the exact gradient."""
    hidden, weight, _, a, b, target = problem(n=130, v=300, d=8)
    lora = vpcce.LoRA(a, b, SCALE)
    leaves = (hidden, a, b)

    def gradients(backward):
        return torch.autograd.grad(
            vpcce.linear_cross_entropy(hidden, weight, target, lora=lora, backward=backward), leaves
        )

    torch.manual_seed(0)
    exact = gradients(vpcce.exact())
    draws = [gradients(vpcce.sampled(eps=2.0**-5)) for _ in range(400)]
    for index, expected in enumerate(exact):
        errors = torch.stack([draw[index] - expected for draw in draws])
        spread = errors.square().mean(0).sum().sqrt()
        assert 0 < spread and errors.mean(0).norm() < 5 * spread / 400**0.5


def test_frozen_hidden_and_checkpointing_and_compile():
    hidden, weight, _, a, b, target = problem()

    def loss(a, b):
        return vpcce.linear_cross_entropy(hidden, weight, target, lora=vpcce.LoRA(a, b, SCALE))

    expected = torch.autograd.grad(loss(a, b), (a, b))
    again = torch.utils.checkpoint.checkpoint(loss, a, b, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(again, (a, b)), expected, strict=True):
        assert torch.equal(x, y)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(a, b), (a, b)), expected, strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        (first,) = torch.autograd.grad(loss(a, b), a, create_graph=True)
        first.sum().backward()


H, W, A, B = torch.randn(6, 4), torch.randn(10, 4), torch.randn(2, 4), torch.randn(10, 2)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(lora=(A, B, 1.0)), TypeError, "lora must be a vpcce.LoRA, got tuple"),
        (dict(lora=vpcce.LoRA(A, [1.0])), TypeError, "lora.b must be a torch.Tensor, got list"),
        (dict(lora=vpcce.LoRA(A.long(), B)), TypeError, "lora.a must be a float tensor .* got torch.int64"),
        (dict(lora=vpcce.LoRA(A.to("meta"), B)), ValueError, "lora.a is on meta, expected hidden's device cpu"),
        (
            dict(lora=vpcce.LoRA(B, A)),
            ValueError,
            r"lora.a \[r, 4\] and lora.b \[10, r\] .* got \[10, 2\] and \[2, 4\]",
        ),
        (dict(lora=vpcce.LoRA(A[:0], B[:, :0])), ValueError, r"with r >= 1, got \[0, 4\] and \[10, 0\]"),
        (dict(lora=vpcce.LoRA(A, B, "2")), TypeError, "lora.scale must be a float, got str"),
        (
            dict(lora=vpcce.LoRA(A, B), weight=W.clone().requires_grad_()),
            ValueError,
            "expected a frozen weight with lora",
        ),
        (dict(lora=vpcce.LoRA(A, B), main_grad=torch.zeros(10, 4)), ValueError, "expected no main_grad with lora"),
    ],
)
def test_message(arguments, error, message):
    with pytest.raises(error, match="linear_cross_entropy: .*" + message):
        vpcce.linear_cross_entropy(**(dict(hidden=H, weight=W, target=torch.arange(6)) | arguments))


def disagreeing(rank, world):
    shard = uneven(rank, world, 10)
    lora = vpcce.LoRA(A, B[shard.start : shard.stop], 1.0 + rank)
    with pytest.raises(ValueError, match="lora's rank, scale and dtypes must be equal on all ranks"):
        vpcce.linear_cross_entropy(H, W[shard.start : shard.stop], torch.arange(6), shard=shard, lora=lora)
    return []


def test_ranks_that_disagree():
    run(2, disagreeing)
