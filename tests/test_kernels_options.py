"""The losses' options through the public functions with the kernels in Triton's interpreter, against fp64 truth."""

import pytest
import torch
import triton
import truth

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


@pytest.mark.parametrize("options", [dict(), dict(softcap=3.0, logit_scale=1.3)], ids=["plain", "softcap, scale"])
def test_logprobs_of_several_ids(options):
    """300 columns: ids in more than one tile, some twice for a token, some ignored."""
    leaves, wide, _ = problem(20, 300, 16)
    ids = truth.several_ids(20, 3, 300)
    ours = vpcce.linear_logprobs(leaves[0], leaves[1], ids, bias=leaves[2], **options)
    compare(ours, truth.logprobs_of_ids(wide[0], wide[1], ids, bias=wide[2], **options), leaves, wide)
