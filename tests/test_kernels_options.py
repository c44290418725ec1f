"""The losses' options through the public functions with the kernels in Triton's interpreter, against fp64 truth."""

import pytest
import torch
import triton
import truth
from spawn import run_ranks

import vpcce

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


def compare(ours, plain, leaves, wide):
    """fp32 products in another order: 1e-4 of each gradient's norm."""
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-6)
    upstream = torch.linspace(0.5, 1.5, max(plain.numel(), 1)).view(plain.shape)
    grads = torch.autograd.grad(ours, leaves, upstream.to(ours.dtype))
    truths = torch.autograd.grad(plain, wide, upstream.double())
    for grad, expected in zip(grads, truths, strict=True):
        assert (grad.double() - expected).norm() <= 1e-4 * expected.norm()


def problem(n, v, d):
    hidden, weight, bias, target = truth.problem(n, v, d, torch.float32, bias=True, ignored=0.2)
    leaves = [hidden, weight, bias]
    return leaves, [t.detach().double().requires_grad_() for t in leaves], target


@pytest.mark.parametrize(
    "options",
    [dict(softcap=5.0), dict(logit_scale=1.3), dict(softcap=5.0, backward="sampled"), dict(backward="sampled")],
    ids=["softcap, so a kernel sums the weighted logits", "linear", "softcap, sampled", "sampled"],
)
def test_class_weight_with_label_smoothing(options):
    """The sampled backward keeps every column at this eps, so it too equals the exact gradient."""
    options = dict(options, class_weight=torch.rand(200).double(), label_smoothing=0.3, z_loss=1e-2)
    policy = vpcce.sampled(eps=1e-30) if options.pop("backward", None) else vpcce.exact()
    leaves, wide, target = problem(20, 200, 16)
    ours = vpcce.linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2], backward=policy, **options)
    plain = truth.cross_entropy(wide[0], wide[1], target, bias=wide[2], **options)
    compare(ours, plain, leaves, wide)


@pytest.mark.parametrize("backward", [vpcce.exact(), vpcce.sampled(1e-30)], ids=["exact", "sampled"])
@pytest.mark.parametrize("softcap", [1e-30, 1e-7, 1e-4])
def test_tiny_softcaps(softcap, backward):
    """At logits of 0, where the slope is 1; powers of the softcap must not overflow on the way."""
    leaves, wide, target = problem(20, 200, 16)
    leaves[0].data.zero_(), wide[0].data.zero_()
    ours = vpcce.linear_cross_entropy(leaves[0], leaves[1], target, softcap=softcap, backward=backward)
    compare(ours, truth.cross_entropy(wide[0], wide[1], target, softcap=softcap), leaves[:2], wide[:2])


@pytest.mark.parametrize("softcap", [30.0, 1e4, 1e12])
@pytest.mark.parametrize("backward", [vpcce.exact(), vpcce.sampled(1e-30)], ids=["exact", "sampled"])
def test_softcap_of_confident_tokens(backward, softcap):
    """p - 1 of a target is small: forward, target logit and both backwards have to compute the same tanh."""
    hidden, weight, _, target = truth.problem(40, 300, 16, torch.float32)
    weight = torch.nn.functional.normalize(weight.detach(), dim=1)
    hidden = (13.0 * weight[target] + 0.05 * hidden.detach()).requires_grad_()
    leaves, wide = [hidden, weight.requires_grad_()], [t.detach().double().requires_grad_() for t in (hidden, weight)]
    ours = vpcce.linear_cross_entropy(*leaves, target, softcap=softcap, backward=backward)
    plain = truth.cross_entropy(*wide, target, softcap=softcap)
    for got, right in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, wide), strict=True):
        assert (got.double() - right).norm() <= 2e-3 * right.norm()
    torch.testing.assert_close(ours.double(), plain, rtol=1e-3, atol=1e-6)


PEAKS = {"degree 2": (0.25, 3e-6), "degree 3": (0.49, 4e-6), "degree 6": (1.2, 1e-5), "exponential": (2.0, 2e-5)}
TOKENS = {
    "plain": (1.0, 128, 5.0),
    "one negative": (-1.0, 128, 5.0),
    "some ignored": (1.0, 100, 5.0),
    "powers of the softcap that overflow": (1.0, 128, 1e-4),
}


@pytest.mark.parametrize("peak, bound", PEAKS.values(), ids=PEAKS)
@pytest.mark.parametrize("upstream, kept, softcap", TOKENS.values(), ids=TOKENS)
def test_gradients_of_capped_logits(upstream, kept, softcap, peak, bound):
    """The weight is the identity, so dE is the logits' gradient, each element relative to fp64's; a slope of large
    logits is a small difference. The first tile of 64 columns has all targets, the others have none."""
    g = torch.Generator().manual_seed(0)
    v = 160
    hidden = (2 * torch.rand(128, v, generator=g) - 1) * peak * softcap
    hidden[:, ::9] = peak * softcap  # every tile has it
    target = torch.randint(0, 64, (128,), generator=g)
    hidden[kept:], target[kept:] = torch.nan, -100
    upstream = torch.where(torch.arange(128) == 3, upstream, 1.0)
    hidden.requires_grad_()
    ours = vpcce.linear_cross_entropy(
        hidden, torch.eye(v), target, softcap=softcap, backward=vpcce.exact(), reduction="none"
    )
    (grad,) = torch.autograd.grad(ours, hidden, upstream)
    wide = hidden[:kept].detach().double().requires_grad_()
    plain = truth.cross_entropy(wide, torch.eye(v).double(), target[:kept], softcap=softcap, reduction="none")
    (expected,) = torch.autograd.grad(plain, wide, upstream[:kept].double())
    assert not grad[kept:].any()
    error = ((grad[:kept].double() - expected) / expected).abs().max()
    assert error <= bound, error


@pytest.mark.parametrize("into_main", [False, True], ids=["fresh", "main_grad"])
def test_label_smoothing_when_no_list_holds_the_marks(into_main, monkeypatch):
    """The dense backward takes over and has the smoothed part itself: it is there once, in dE, dC and dbias."""
    monkeypatch.setattr("vpcce.kernels.packed_layout.ARENA_BYTES", 16 * 128 * 4)
    leaves, wide, target = problem(20, 200, 16)
    total = torch.ones(200, 16) if into_main else None
    ours = vpcce.linear_cross_entropy(
        *leaves[:2], target, bias=leaves[2], label_smoothing=0.3, backward=vpcce.sampled(1e-30), main_grad=total
    )
    plain = truth.cross_entropy(*wide[:2], target, bias=wide[2], label_smoothing=0.3)
    ours.backward()
    d_weight = total - 1 if into_main else leaves[1].grad
    for got, right in zip((leaves[0].grad, d_weight, leaves[2].grad), torch.autograd.grad(plain, wide), strict=True):
        assert (got.double() - right).norm() <= 1e-4 * right.norm()


@pytest.mark.parametrize("backward", [vpcce.exact(), vpcce.sampled(1e-30)], ids=["exact", "sampled"])
def test_bias_alone(backward):
    leaves, wide, target = problem(20, 200, 16)
    loss = vpcce.linear_cross_entropy(*(t.detach() for t in leaves[:2]), target, bias=leaves[2], backward=backward)
    (right,) = torch.autograd.grad(truth.cross_entropy(*wide[:2], target, bias=wide[2]), wide[2:])
    (got,) = torch.autograd.grad(loss, leaves[2])
    assert (got.double() - right).norm() <= 1e-4 * right.norm()


@pytest.mark.parametrize("options", [dict(), dict(softcap=3.0, logit_scale=1.3)], ids=["plain", "softcap, scale"])
def test_logprobs_of_several_ids(options):
    """300 columns: ids in more than one tile, some twice for a token, some ignored."""
    leaves, wide, _ = problem(20, 300, 16)
    ids = truth.several_ids(20, 3, 300)
    ours = vpcce.linear_logprobs(leaves[0], leaves[1], ids, bias=leaves[2], **options)
    compare(ours, truth.logprobs_of_ids(wide[0], wide[1], ids, bias=wide[2], **options), leaves, wide)


def on_a_rank(rank, world):
    """Uneven shards of 70 and 130 rows; the smoothed, weighted loss and a soft one."""
    leaves, _, target = problem(20, 200, 16)
    shard = (vpcce.VocabShard(0, 70, 200), vpcce.VocabShard(70, 200, 200))[rank]
    part = [leaves[0], *(t.detach()[shard.start : shard.stop].requires_grad_() for t in leaves[1:])]
    call = dict(bias=part[2], shard=shard, softcap=5.0)
    loss = vpcce.linear_cross_entropy(
        *part[:2], target, class_weight=torch.arange(200.0) % 4, label_smoothing=0.3, **call
    )
    ids = truth.several_ids(20, 3, 200)
    loss = loss + vpcce.linear_soft_cross_entropy(*part[:2], ids, torch.full((20, 3), 0.25), **call)
    return [t.detach().numpy() for t in (loss, *torch.autograd.grad(loss, part))]


def test_two_ranks():
    _, wide, target = problem(20, 200, 16)
    call = dict(bias=wide[2], softcap=5.0)
    weights = torch.arange(200.0, dtype=torch.float64) % 4
    plain = truth.cross_entropy(*wide[:2], target, class_weight=weights, label_smoothing=0.3, **call)
    ids = truth.several_ids(20, 3, 200)
    logprobs = truth.logprobs_of_ids(*wide[:2], ids, **call)
    plain = plain - 0.25 * logprobs.sum() / (ids >= 0).any(1).sum()
    d_hidden, d_weight, d_bias = torch.autograd.grad(plain, wide)
    outputs = run_ranks(2, on_a_rank, 2)
    for (loss, e, c, b), rows in zip(outputs, (slice(0, 70), slice(70, 200)), strict=True):
        torch.testing.assert_close(torch.from_numpy(loss).double(), plain.detach(), rtol=1e-5, atol=1e-6)
        for ours, expected in ((e, d_hidden), (c, d_weight[rows]), (b, d_bias[rows])):
            assert (torch.from_numpy(ours).double() - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("backward", [vpcce.exact(), vpcce.sampled(1e-30)], ids=str)
def test_layouts_of_bias_class_weight_and_ids(backward):
    """A column of a matrix, one number for all, ids of a transposed matrix: the same as their contiguous copies."""
    hidden, weight = torch.randn(40, 16), torch.randn(90, 16)
    target, ids = torch.randint(90, (40,)), torch.randint(90, (3, 40)).T

    def gradients(bias, class_weight, ids):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = vpcce.linear_cross_entropy(
            *leaves, target, bias=bias, class_weight=class_weight, label_smoothing=0.2, backward=backward
        )
        (loss - vpcce.linear_logprobs(*leaves, ids, bias=bias, ignore_index=None).mean()).backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    for bias in (torch.randn(90, 2)[:, 0], torch.randn(1).expand(90)):
        given = bias, torch.rand(90, 2)[:, 1], ids
        ours, expected = gradients(*given), gradients(*(x.contiguous() for x in given))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e5])
@pytest.mark.parametrize("backward", [vpcce.exact(), vpcce.sampled(1e-30)], ids=str)
def test_scales_far_from_1_in_half_precision(backward, scale):
    """G holds the scale, for which fp16 has no room by itself."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).half() for n in (20, 90))
    target = torch.randint(90, (20,), generator=generator)
    if scale > 1:
        hidden = hidden / 1024
        weight = weight / 64
    ours = [x.clone().requires_grad_() for x in (hidden, weight, torch.tensor(scale))]
    true = [x.detach().double().requires_grad_() for x in ours]
    vpcce.linear_cross_entropy(*ours[:2], target, logit_scale=ours[2], backward=backward).backward()
    torch.nn.functional.cross_entropy(true[2] * (true[0] @ true[1].T), target).backward()
    compared = slice(None) if scale > 1 else slice(2, None)  # dE and dC of the small ones are 0 in fp16
    for leaf, expected in zip(ours[compared], true[compared], strict=True):
        assert (leaf.grad.double() - expected.grad).norm() < 3e-3 * expected.grad.norm()
