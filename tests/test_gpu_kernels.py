"""The kernels on a GPU: accuracy, repeatability, sizes beyond 32 bits, and how PyTorch may call them.

Run by hand: `pytest -m gpu tests/test_gpu_kernels.py`. Most tests share one width of hidden, a constant of the
kernels, so that few of them have to be compiled.
"""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
import truth
from tolerance import assert_as_good_as, assert_weight_grad_as_good_as, relative_error
from torch.utils.checkpoint import checkpoint

import vpcce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXACT, SAMPLED = vpcce.exact(), vpcce.sampled()
N, V, D = 1024, 32000, 256


@pytest.fixture(autouse=True)
def memory():
    """Every test finds an empty device and no compiled code, whatever the one before left behind."""
    yield
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def problem(dtype=BF16, *, n=N, v=V, d=D, bias=False, ignored=0.0, seed=0):
    return truth.problem(n, v, d, dtype, bias=bias, ignored=ignored, seed=seed, device="cuda")


def grads_of(loss, *leaves):
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


def step(hidden, weight, target, backward=EXACT, **options):
    """loss, dE, dC."""
    loss = vpcce.linear_cross_entropy(hidden, weight, target, backward=backward, **options)
    return loss.detach(), *grads_of(loss, hidden, weight)


def all_equal(some, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_accuracy(dtype):
    """No further from fp64 than 1.1 times PyTorch in the same dtype; fp32 sums may be in another order."""
    hidden, weight, _, target = problem(dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = truth.cross_entropy(*wide, target)
    plain = F.cross_entropy((hidden @ weight.T).float(), target)
    right, same = grads_of(exact, *wide), grads_of(plain, hidden, weight)
    loss, e, c = step(hidden, weight, target)
    assert e.dtype == c.dtype == dtype
    assert relative_error(loss, exact.detach()) < 2e-6
    assert_as_good_as(e, same[0], right[0], 1.1, floor=3e-6)
    assert_weight_grad_as_good_as(c, same[1], right[1], target, 1.1, floor=3e-6)


def test_accuracy_with_options():
    """Bias, scale, softcap, smoothing and z-loss in one, half the tokens ignored, odd D by plain loads."""
    options = dict(logit_scale=1.3, softcap=12.0, label_smoothing=0.1, z_loss=1e-3)
    hidden, weight, bias, target = problem(n=700, v=5001, d=251, bias=True, ignored=0.5)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    exact = truth.cross_entropy(*wide[:2], target, bias=wide[2], **options)
    loss = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, backward=EXACT, **options)
    assert relative_error(loss.detach(), exact.detach()) < 3e-6
    x = 1.3 * F.linear(hidden, weight, bias).float()
    x = 12.0 * torch.tanh(x / 12.0)
    plain = F.cross_entropy(x, target, label_smoothing=0.1) + 1e-3 * x.logsumexp(-1)[target >= 0].square().mean()
    right, same = grads_of(exact, *wide), grads_of(plain, hidden, weight, bias)
    e, c, b = grads_of(loss, hidden, weight, bias)
    assert_as_good_as(e, same[0], right[0])
    assert_weight_grad_as_good_as(c, same[1], right[1], target)
    assert_as_good_as(b, same[2], right[2])


@pytest.mark.parametrize("rank", [16, 100])
@pytest.mark.parametrize("backward, k", [(EXACT, 1.3), (SAMPLED, 4.0)], ids=["exact", "sampled"])
def test_low_rank(backward, k, rank):
    """Against PyTorch with the same two products in bf16, a third of the tokens ignored; a draw has more noise."""
    hidden, weight, _, target = problem(ignored=0.3)
    weight = weight.detach()
    g = torch.Generator("cuda").manual_seed(1)
    a = (torch.randn(rank, D, generator=g, device="cuda") / D**0.5).to(BF16).requires_grad_()
    b = (torch.randn(V, rank, generator=g, device="cuda") / rank**0.5).to(BF16).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (hidden, a, b)]
    exact = truth.cross_entropy(wide[0], weight.double() + 0.5 * wide[2] @ wide[1], target)
    plain = F.cross_entropy((hidden @ weight.T + 0.5 * (hidden @ a.T) @ b.T).float(), target)
    loss = vpcce.linear_cross_entropy(hidden, weight, target, lora=vpcce.LoRA(a, b, 0.5), backward=backward)
    assert relative_error(loss.detach(), exact.detach()) < 1e-4
    right, same, ours = grads_of(exact, *wide), grads_of(plain, hidden, a, b), grads_of(loss, hidden, a, b)
    for value, yardstick, expected in zip(ours, same, right, strict=True):
        assert value.dtype == BF16
        assert_as_good_as(value, yardstick, expected, k)


def test_statistics():
    hidden, weight, _, target = problem()
    stats = vpcce.linear_stats(hidden, weight, target, entropy=True, argmax=True, backward=EXACT)
    x = truth.logits_of(hidden.detach().double(), weight.detach().double())
    assert relative_error(stats.lse.detach(), x.logsumexp(-1)) < 2e-6
    assert relative_error(stats.target_logit.detach(), x.gather(1, target[:, None])[:, 0]) < 2e-6
    assert relative_error(stats.entropy.detach(), torch.distributions.Categorical(logits=x).entropy()) < 1e-5
    assert torch.equal(stats.argmax, x.argmax(-1))


@pytest.mark.parametrize("k", [1, 8, 64])
def test_topk(k):
    """Products of bf16 are exact in fp32, so only the order of sums differs from the truth."""
    hidden, weight, _, target = problem(v=65536 + 5, d=512, ignored=0.2)
    vpcce.linear_stats(hidden, weight, target, topk=k)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = vpcce.linear_stats(hidden, weight, target, topk=k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    log_p = truth.logits_of(hidden.detach().double(), weight.detach().double()).log_softmax(-1)
    expected, kept = log_p.topk(k), target >= 0
    torch.testing.assert_close(stats.topk.logprobs[kept].double(), expected.values[kept], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(log_p.gather(1, stats.topk.ids)[kept], expected.values[kept], rtol=1e-5, atol=2e-5)
    assert (stats.topk.ids == expected.indices)[kept].double().mean() > 0.99
    assert (stats.topk.logprobs[~kept] == 0).all() and (stats.topk.ids[~kept] == 0).all()
    alone = vpcce.linear_topk(hidden, weight, k)
    torch.testing.assert_close(alone.logprobs[kept], stats.topk.logprobs[kept], rtol=1e-5, atol=2e-5)


def test_repeats_bitwise():
    """No atomics anywhere: twenty runs, half of them beside another kernel that takes multiprocessors away."""
    hidden, weight, _, target = problem(ignored=0.2)
    first = step(hidden, weight, target)
    busy, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for i in range(20):
        with torch.cuda.stream(side):
            if i % 2:
                busy @ busy
        assert all_equal(step(hidden, weight, target), first)
    torch.cuda.synchronize()


SIZES = {
    "V x D beyond 2^31": (256, 256000, 12288),
    "131072 tokens, N x V beyond 2^31": (131072, 32768, 64),
    "2^20 ids": (256, 1 << 20, 64),
}


@pytest.mark.parametrize("n, v, d", SIZES.values(), ids=SIZES)
def test_sizes(n, v, d):
    """The last tokens' dE and the last ids' dC, where an offset of 32 bits has long wrapped around."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(n, d, device="cuda", dtype=BF16, generator=g).requires_grad_()
    weight = torch.randn(v, d, device="cuda", dtype=BF16, generator=g).mul_(3 / d**0.5).requires_grad_()
    target = torch.randint(0, v, (n,), device="cuda", generator=g)
    target[:64] = torch.arange(v - 64, v, device="cuda")
    loss, e, c = step(hidden, weight, target, reduction="sum")
    lse = torch.full((n,), -torch.inf, device="cuda")
    picked = torch.zeros(n, device="cuda")
    last = slice(v - 512, v)
    tail = slice(n - 128, n)
    right_e = torch.zeros(128, d, device="cuda")
    with torch.no_grad():
        wide = hidden.float()
        spans = [slice(start, min(start + 2048, v)) for start in range(0, v, 2048)]
        for span in spans:
            x = wide @ weight[span].float().T
            lse = torch.logaddexp(lse, x.logsumexp(1))
            inside = (target >= span.start) & (target < span.stop)
            column = torch.where(inside, target - span.start, 0)[:, None]
            picked += torch.where(inside, x.gather(1, column)[:, 0], 0.0)
        for span in spans:
            rows = weight[span].float()
            right_e += torch.exp(wide[tail] @ rows.T - lse[tail, None]) @ rows
        right_e -= weight[target[tail]].float()
        grad = torch.exp(wide @ weight[last].float().T - lse[:, None])
        grad -= (target[:, None] == torch.arange(last.start, last.stop, device="cuda")).float()
        right_c = grad.T @ wide
    assert relative_error(loss, (lse - picked).sum()) < 1e-5
    # G, and then the result, are rounded to bf16: 2^-9 each at most.
    assert relative_error(e[tail], right_e) < 2**-8
    was_target = torch.isin(torch.arange(last.start, last.stop, device="cuda"), target)
    for rows in (was_target, ~was_target):
        if rows.any():
            assert relative_error(c[last][rows], right_c[rows]) < 2**-8


@pytest.mark.parametrize("backward", [EXACT, SAMPLED], ids=["exact", "sampled"])
def test_the_host_never_waits(backward):
    hidden, weight, _, target = problem(ignored=0.5)
    step(hidden, weight, target, backward)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(hidden, weight, target, backward)
        vpcce.linear_stats(hidden, weight, target, entropy=True, argmax=True, topk=8, backward=backward)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(hidden, weight, target, backward):
    """A graph of forward and backward, and the tensors that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(hidden, weight, target, backward)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(hidden, weight, target, backward)
    return graph, results


def test_cuda_graph():
    """Replays on other numbers, with another number of ignored tokens, are bitwise what a call gives."""
    hidden, weight, _, target = problem(ignored=0.3)
    graph, results = captured(hidden, weight, target, EXACT)
    for seed, ignored in ((1, 0.0), (2, 0.7), (3, 1.0)):
        other, _, _, ids = problem(ignored=ignored, seed=seed)
        with torch.no_grad():
            hidden.copy_(other)
            target.copy_(ids)
        graph.replay()
        assert all_equal([t.clone() for t in results], step(hidden, weight, target))


def test_cuda_graph_tosses_fresh_coins():
    hidden, weight, _, target = problem(ignored=0.3)
    target %= 500  # an ignored token becomes one that counts
    with torch.no_grad():  # sure enough of the targets that lists pay and coins decide about the other columns
        hidden.copy_(1.5 * weight[target])
    exact = step(hidden, weight, target)
    graph, results = captured(hidden, weight, target, SAMPLED)
    graph.replay()
    first = [t.clone() for t in results]
    graph.replay()
    assert torch.equal(first[0], results[0])  # bitwise: the loss takes no part in sampling
    assert relative_error(first[0], exact[0]) < 1e-6
    for a, b, right in zip(first[1:], results[1:], exact[1:], strict=True):
        assert not torch.equal(a, b)
        assert relative_error(a, right) < 0.5 and relative_error(b, right) < 0.5


@pytest.mark.parametrize("backward", [EXACT, SAMPLED], ids=["exact", "sampled"])
def test_compile(backward):
    """Inductor fuses what stands before and after; the head itself stays one operator in each direction."""
    hidden, weight, _, target = problem()

    def model(hidden, weight, target):
        normed = F.rms_norm(hidden, (D,))
        return 2 * vpcce.linear_cross_entropy(normed, weight, target, backward=backward)

    loss = torch.compile(model, fullgraph=True)(hidden, weight, target)
    expected = model(hidden, weight, target)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    allowed = 0.02 if backward is EXACT else 0.7
    for a, b in zip(grads_of(loss, hidden, weight), grads_of(expected, hidden, weight), strict=True):
        assert relative_error(a, b) < allowed


def test_activation_checkpointing():
    """Bitwise: the same work twice."""
    hidden, weight, _, target = problem(ignored=0.2)
    loss = checkpoint(vpcce.linear_cross_entropy, hidden, weight, target, backward=EXACT, use_reentrant=False)
    assert all_equal((loss, *grads_of(loss, hidden, weight)), step(hidden, weight, target))


def test_streams_and_threads():
    """Work on another stream, and from a thread that never touched the device; bitwise."""
    hidden, weight, _, target = problem(ignored=0.2)
    expected = step(hidden, weight, target)
    torch.cuda.synchronize()
    results = {}

    def work(name):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            results[name] = step(hidden, weight, target)
        side.synchronize()

    work("here")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and all(all_equal(result, expected) for result in results.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one():
    hidden, weight, _, target = problem()
    moved = [t.detach().to("cuda:1").requires_grad_() for t in (hidden, weight)]
    assert torch.cuda.current_device() == 0
    results = step(*moved, target.to("cuda:1"))
    assert all_equal([t.cuda() for t in results], step(hidden, weight, target))


def test_frozen_sides():
    """Bitwise the other side's gradient, and no memory for a gradient that nobody wants."""
    hidden, weight, _, target = problem(n=512, v=131072)
    _, e, c = step(hidden, weight, target)
    loss = vpcce.linear_cross_entropy(hidden.detach(), weight, target, backward=EXACT)
    assert torch.equal(grads_of(loss, weight)[0], c)
    del loss, c
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = vpcce.linear_cross_entropy(hidden, weight.detach(), target, backward=EXACT)
    (alone,) = grads_of(loss, hidden)
    # G of the slices takes up to 64 MiB and dC would take 64 MiB more.
    assert torch.cuda.max_memory_allocated() - before < 80 << 20
    assert relative_error(alone, e) < 2**-8  # its slices are others than where dC lends its storage


def test_ignored_tokens():
    """Half of them hold NaN and are ignored: zeros for them, and the others' gradients as if alone."""
    hidden, weight, _, target = problem(ignored=0.5)
    kept = target >= 0
    with torch.no_grad():
        hidden[~kept] = torch.nan
    loss, e, c = step(hidden, weight, target)
    alone = hidden.detach()[kept].requires_grad_()
    expected = step(alone, weight, target[kept])
    assert relative_error(loss, expected[0]) < 1e-6
    assert (e[~kept] == 0).all()
    # Other splits of the vocabulary move the log-sum-exp by a rounding, and some bf16 roundings with it.
    assert relative_error(e[kept], expected[1]) < 1e-3 and relative_error(c, expected[2]) < 1e-3


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_main_grad(dtype):
    hidden, weight, _, target = problem()
    c = step(hidden, weight, target)[2].double()
    before = (c.abs().mean() * torch.randn(V, D, device="cuda")).to(dtype)
    total = before.clone()
    vpcce.linear_cross_entropy(hidden, weight, target, backward=EXACT, main_grad=total).backward()
    assert weight.grad is None
    assert relative_error(total, before.double() + c) < 2**-8
    assert relative_error(total.double() - before.double(), c) < (2**-8 if dtype == FP32 else 2**-5)
