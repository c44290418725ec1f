"""One rank on the CPU: the maths in fp64, the rounding in lower precision, autograd's corners, memory."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import truth
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_good_as, assert_weight_grad_as_good_as

import vpcce
from vpcce import reference

SHAPES = [
    (7, 13, 5),  # smaller than any tile
    (130, 257, 16),  # one past a tile in both directions
    (1, 1000, 8),  # a single token
    (64, 1, 4),  # a vocabulary of one
    (33, 5000, 12),  # several slices once the block is small
]


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of 128 columns, so that small vocabularies need several."""
    monkeypatch.setattr(reference, "BLOCK_NUMEL", 1)
    monkeypatch.setattr(reference, "MIN_WIDTH", 128)


def grads_of(loss, *leaves):
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


@pytest.mark.parametrize("n, v, d", SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_cross_entropy(n, v, d, reduction, small_slices):
    hidden, weight, bias, target = truth.problem(n, v, d, bias=True, ignored=0.2)
    ours = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction)
    plain = truth.cross_entropy(hidden, weight, target, bias=bias, reduction=reduction)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(plain)
    for a, b in zip(grads_of((ours * upstream).sum(), hidden, weight, bias),
                    grads_of((plain * upstream).sum(), hidden, weight, bias), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 70), v=st.integers(1, 400), d=st.integers(1, 20), bias=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 30.0]), logit_scale=st.sampled_from([1.0, 0.0625, -2.0]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]), z_loss=st.sampled_from([0.0, 1e-3]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]), reduction=st.sampled_from(["mean", "sum", "none"]),
)  # fmt: skip
def test_any_combination_of_options(n, v, d, bias, ignored, reduction, **options):
    hidden, weight, offset, target = truth.problem(n, v, d, bias=bias, ignored=ignored, seed=n * 1000 + v)
    ours = vpcce.linear_cross_entropy(hidden, weight, target, bias=offset, reduction=reduction, **options)
    plain = truth.cross_entropy(hidden, weight, target, bias=offset, reduction=reduction, **options)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    for a, b in zip(grads_of(ours.sum(), hidden, weight, offset), grads_of(plain.sum(), hidden, weight, offset),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_statistics_and_gradcheck(softcap):
    hidden, weight, bias, target = truth.problem(6, 20, 5, bias=True)
    target[2] = -100
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def stats(hidden, weight, bias, scale):
        return vpcce.linear_stats(hidden, weight, target, bias=bias, logit_scale=scale, softcap=softcap, entropy=True)[
            :3
        ]

    assert torch.autograd.gradcheck(stats, (hidden, weight, bias, scale))
    got = vpcce.linear_stats(hidden, weight, target, bias=bias, softcap=softcap, entropy=True, argmax=True)
    x = truth.logits_of(hidden, weight, bias, softcap=softcap)
    kept = target >= 0
    torch.testing.assert_close(got.lse[kept], x.logsumexp(-1)[kept])
    torch.testing.assert_close(got.entropy[kept], torch.distributions.Categorical(logits=x).entropy()[kept])
    assert torch.equal(got.argmax[kept], x.argmax(-1)[kept])
    assert all(field[2] == 0 for field in got[:4])


def test_logprobs_are_never_positive():
    hidden, weight, _, target = truth.problem(200, 50, 8, torch.float32, scale=20.0)
    logprobs, entropy = vpcce.linear_logprobs(hidden, weight, target, entropy=True)
    assert (logprobs <= 0).all() and (entropy > -1e-5).all()
    plain = truth.logits_of(hidden, weight).log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprobs, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_no_worse_than_pytorch(dtype):
    """bf16 and fp16: one rounding per result, where PyTorch rounds logits too. fp32: same order of magnitude."""
    hidden, weight, _, target = truth.problem(300, 700, 64, dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = truth.cross_entropy(*wide, target)
    d_hidden, d_weight = grads_of(exact, *wide)
    plain = F.cross_entropy((hidden @ weight.T).float(), target)
    p_hidden, p_weight = grads_of(plain, hidden, weight)
    ours = vpcce.linear_cross_entropy(hidden, weight, target)
    o_hidden, o_weight = grads_of(ours, hidden, weight)
    assert ours.dtype == torch.float32 and o_hidden.dtype == o_weight.dtype == dtype
    k = 2.0 if dtype == torch.float32 else 1.1
    assert_as_good_as(ours, plain, exact, k, floor=1e-7)
    assert_as_good_as(o_hidden, p_hidden, d_hidden, k)
    assert_weight_grad_as_good_as(o_weight, p_weight, d_weight, target, k)


@pytest.mark.parametrize("h_dtype, w_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_mixed_dtypes(h_dtype, w_dtype):
    """DoRA hands over fp32 hidden with a bf16 weight; fp32 master weights are the reverse."""
    hidden, weight, _, target = truth.problem(40, 90, 16, torch.float32)
    hidden, weight = (
        hidden.detach().to(h_dtype).requires_grad_(),
        weight.detach().to(w_dtype).requires_grad_(),
    )
    loss = vpcce.linear_cross_entropy(hidden, weight, target)
    grads = grads_of(loss, hidden, weight)
    assert [g.dtype for g in grads] == [h_dtype, w_dtype]
    torch.testing.assert_close(loss, truth.cross_entropy(hidden, weight, target), rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_its_dtype():
    hidden, weight, _, target = truth.problem(40, 90, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = vpcce.linear_cross_entropy(hidden, weight, target)
    expected = vpcce.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(loss, expected)  # bitwise: the same casts, then the same work
    assert all(g.dtype == torch.float32 for g in grads_of(loss, hidden, weight))


def test_no_tokens_give_zero_not_nan():
    hidden, weight, bias, target = truth.problem(12, 30, 4, bias=True)
    for ids in (torch.full_like(target, -100), target[:0]):
        loss = vpcce.linear_cross_entropy(hidden[: len(ids)], weight, ids, bias=bias, z_loss=0.1, label_smoothing=0.1)
        assert loss == 0
        assert all((g == 0).all() for g in grads_of(loss, hidden, weight, bias))


def test_ignored_rows_never_reach_a_number():
    """0 * NaN would: hidden of an ignored token may hold anything."""
    hidden, weight, _, target = truth.problem(20, 30, 4)
    target[5] = -100
    with torch.no_grad():
        hidden[5] = torch.nan
    loss = vpcce.linear_cross_entropy(hidden, weight, target, reduction="none")
    d_hidden, d_weight = grads_of(loss.sum(), hidden, weight)
    assert loss[5] == 0 and (d_hidden[5] == 0).all()
    assert loss.isfinite().all() and d_hidden.isfinite().all() and d_weight.isfinite().all()


@pytest.mark.parametrize("offset", [-200.0, 5000.0])
def test_extreme_logits(offset):
    """A running maximum that starts at 0 gives NaN at -200."""
    hidden, weight, _, target = truth.problem(9, 40, 4)
    bias = torch.full((40,), offset, dtype=torch.float64, requires_grad=True)
    ours = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias)
    torch.testing.assert_close(ours, truth.cross_entropy(hidden, weight, target, bias=bias))
    capped = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, softcap=30.0)
    torch.testing.assert_close(capped, truth.cross_entropy(hidden, weight, target, bias=bias, softcap=30.0))


def test_masked_ids_have_minus_infinite_logits():
    hidden, weight, _, target = truth.problem(9, 300, 4)
    bias = torch.zeros(300, dtype=torch.float64)
    bias[:256] = -torch.inf  # the whole first slice of a small block
    target = target % 44 + 256
    for small in (2**21, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "BLOCK_NUMEL", small)
            stats = vpcce.linear_stats(hidden, weight, target, bias=bias, entropy=True)
            grads = grads_of(stats.lse.sum() + stats.entropy.sum(), hidden, weight)
        torch.testing.assert_close(stats.lse, truth.logits_of(hidden, weight, bias).logsumexp(-1))
        assert stats.entropy.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_gradient_of_a_sure_target_keeps_its_digits():
    """p = .999 in bf16: p - 1 computed after rounding p would be 0 or wrong by 100%."""
    weight = torch.zeros(32000, 8, dtype=torch.bfloat16)
    weight[7, 0] = 17.5
    weight.requires_grad_()
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden[0, 0] = 1.0
    target = torch.tensor([7])
    (d_weight,) = grads_of(vpcce.linear_cross_entropy(hidden, weight, target), weight)
    p = torch.softmax((hidden.double() @ weight.double().T), -1)[0, 7]
    torch.testing.assert_close(d_weight[7, 0].double(), p - 1, rtol=2**-8, atol=0.0)


def test_layouts_and_strides():
    """Leading dimensions, transposed storage, expanded (stride 0) upstream gradients, int32 targets."""
    hidden, weight, _, target = truth.problem(24, 50, 6)
    expected = grads_of(vpcce.linear_cross_entropy(hidden, weight, target, reduction="sum"), hidden, weight)
    loss = vpcce.linear_cross_entropy(
        hidden.view(2, 3, 4, 6), weight.T.contiguous().T, target.view(2, 3, 4).int(), reduction="none"
    )
    assert loss.shape == (2, 3, 4)
    for a, b in zip(grads_of(loss.sum(), hidden, weight), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_unneeded_gradients_are_not_computed(monkeypatch):
    hidden, weight, _, target = truth.problem(24, 50, 6)
    asked = []
    inner = reference.local_backward

    def record(*args, hidden_policy, weight_policy, **kwargs):
        asked.append((hidden_policy is not None, weight_policy is not None))
        return inner(*args, hidden_policy=hidden_policy, weight_policy=weight_policy, **kwargs)

    monkeypatch.setattr(reference, "local_backward", record)
    full = grads_of(vpcce.linear_cross_entropy(hidden, weight, target), hidden, weight)
    only_hidden = grads_of(vpcce.linear_cross_entropy(hidden, weight.detach(), target), hidden)
    only_weight = grads_of(vpcce.linear_cross_entropy(hidden.detach(), weight, target), weight)
    assert asked == [(True, True), (True, False), (False, True)]
    assert torch.equal(full[0], only_hidden[0]) and torch.equal(full[1], only_weight[0])
    with torch.no_grad():
        assert not vpcce.linear_cross_entropy(hidden, weight, target).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_main_grad_is_added_to(dtype):
    hidden, weight, _, target = truth.problem(24, 50, 6)
    d_hidden, d_weight = grads_of(vpcce.linear_cross_entropy(hidden, weight, target), hidden, weight)
    buffer = torch.ones(50, 6, dtype=dtype)
    loss = vpcce.linear_cross_entropy(hidden, weight, target, main_grad=buffer)
    version = buffer._version
    loss.backward()
    assert weight.grad is None and buffer._version > version
    torch.testing.assert_close(hidden.grad, d_hidden)
    torch.testing.assert_close(buffer, (1 + d_weight).to(dtype))


def test_padded_vocabulary():
    """Rows at or beyond vocab_size are out of the softmax, and their gradient is exactly zero."""
    hidden, weight, bias, target = truth.problem(24, 64, 6, bias=True)
    target %= 50
    loss = vpcce.linear_cross_entropy(
        hidden, weight, target, bias=bias, shard=vpcce.VocabShard(0, 64, 50), label_smoothing=0.1
    )
    plain = truth.cross_entropy(hidden, weight[:50], target, bias=bias[:50], label_smoothing=0.1)
    torch.testing.assert_close(loss, plain)
    for a, b in zip(grads_of(loss, hidden, weight, bias), grads_of(plain, hidden, weight, bias), strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivative_is_refused():
    hidden, weight, _, target = truth.problem(5, 9, 3)
    (grad,) = torch.autograd.grad(vpcce.linear_cross_entropy(hidden, weight, target), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        grad.sum().backward()


def test_compile_fullgraph_with_changing_floats():
    """Floats that change between calls become symbols; none may turn the loss into fp64."""
    hidden, weight, bias, target = truth.problem(24, 50, 6, torch.float32, bias=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(hidden, weight, target, softcap):
        return vpcce.linear_cross_entropy(
            hidden, weight, target, bias=bias, softcap=softcap, logit_scale=softcap / 10, z_loss=1e-3
        )

    for softcap in (30.0, 20.0, 10.0):
        loss = compiled(hidden, weight, target, softcap)
        plain = truth.cross_entropy(
            hidden, weight, target, bias=bias, softcap=softcap, logit_scale=softcap / 10, z_loss=1e-3
        )
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, plain)
        for a, b in zip(grads_of(loss, hidden, weight), grads_of(plain, hidden, weight), strict=True):
            torch.testing.assert_close(a, b)


def test_compile_fullgraph_with_changing_policies():
    """Floats of a policy may become symbols too, and then have no digits to write down."""
    hidden, weight, _, target = truth.problem(24, 50, 6, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(hidden, weight, target, backward):
        return vpcce.linear_cross_entropy(hidden, weight, target, backward=backward)

    plain = truth.cross_entropy(hidden, weight, target)
    for backward in ("auto", vpcce.exact(), vpcce.sampled(), vpcce.sampled(2**-5), (vpcce.filtered(), vpcce.exact())):
        torch.testing.assert_close(compiled(hidden, weight, target, backward), plain)


def test_activation_checkpointing():
    hidden, weight, _, target = truth.problem(24, 50, 6)
    loss = torch.utils.checkpoint.checkpoint(vpcce.linear_cross_entropy, hidden, weight, target, use_reentrant=False)
    expected = vpcce.linear_cross_entropy(hidden, weight, target)
    for a, b in zip(grads_of(loss, hidden, weight), grads_of(expected, hidden, weight), strict=True):
        assert torch.equal(a, b)  # bitwise: the same work twice


def test_module():
    hidden, weight, bias, target = truth.problem(24, 50, 6, bias=True)
    module = vpcce.LinearCrossEntropy(label_smoothing=0.1, reduction="sum")
    expected = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, label_smoothing=0.1, reduction="sum")
    assert torch.equal(module(hidden, weight, target, bias), expected)
    assert "label_smoothing=0.1" in repr(module) and "logit_scale=1.0" in repr(module)


def test_module_owns_its_logit_scale():
    """A learned one is found by optimisers, and both kinds move and are saved with the module."""
    hidden, weight, _, target = truth.problem(24, 50, 6)
    learned = vpcce.LinearCrossEntropy(logit_scale=torch.nn.Parameter(torch.tensor(0.7)))
    fixed = vpcce.LinearCrossEntropy(logit_scale=torch.tensor(0.7))
    assert [name for name, _ in learned.named_parameters()] == ["logit_scale"] and not list(fixed.parameters())
    for module in (learned.double(), fixed.double()):
        assert module.state_dict()["logit_scale"].dtype == torch.float64
        expected = truth.cross_entropy(hidden, weight, target, logit_scale=module.logit_scale)
        torch.testing.assert_close(module(hidden, weight, target), expected)
    learned(hidden, weight, target).backward()
    assert learned.logit_scale.grad is not None


MEMORY_SCRIPT = """
import resource, torch, vpcce
n, v, d = 2048, 131072, 64
hidden, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
target = torch.randint(0, v, (n,))
vpcce.linear_cross_entropy(hidden[:64], weight[:256], target[:64] % 256).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
vpcce.linear_cross_entropy(hidden, weight, target).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 - (n + v) * d * 4 / 2**20)
"""


def test_memory_stays_far_below_the_logits():
    """The logits would take 1 GiB; beyond inputs and gradients less than 300 MB may be used."""
    done = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 300


def test_a_learned_scale_of_zero_has_a_gradient():
    hidden, weight, _, target = truth.problem(6, 9, 4)
    scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    ours = vpcce.linear_cross_entropy(hidden, weight, target, logit_scale=scale)
    plain = F.cross_entropy(scale * (hidden @ weight.T), target)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(loss, scale)[0] for loss in (ours, plain)))


def test_a_row_of_nan_has_an_argmax_inside_the_vocabulary():
    hidden = torch.randn(3, 4)
    hidden[1] = torch.nan
    stats = vpcce.linear_stats(hidden, torch.randn(13, 4), torch.arange(3), argmax=True)
    assert torch.all(stats.argmax < 13) and stats.lse[1].isnan()


def test_autocast_leaves_float64_alone():
    hidden, weight, _, target = truth.problem(6, 9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vpcce.linear_cross_entropy(hidden, weight, target)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, target))
