"""The sampled backward on a GPU: error per draw, on average, and what must not change it. Run with `pytest -m gpu`.

Truth is fp32; the yardstick is the exact backward in the same dtype. Rows of dC that were targets and rows that never
were are judged apart: the latter are 10^3 times smaller, and sampling is all of their error.
"""

import sys
from pathlib import Path

import pytest
import torch

import vpcce
from vpcce import policy, reference
from vpcce.kernels import local, packed_layout
from vpcce.kernels.problem import Head, Marks, RowGradients, Sampling
from vpcce.policy import sampled

sys.path.insert(0, str(Path(__file__).parents[1] / "launch" / "bench"))
from lm_like import lm_like  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def relative(value, truth):
    error = ((value.float() - truth).norm() / truth.norm()).item()
    assert error == error
    return error


def gradients(hidden, weight, target, backward, **options):
    """(dE, dC) of the mean loss."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    vpcce.linear_cross_entropy(hidden, weight, target, backward=backward, **options).backward()
    return hidden.grad, weight.grad


def truth_of(hidden, weight, target, logit_scale=1.0):
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    total = 0
    for rows in torch.arange(len(target), device="cuda").split(1024):
        x = logit_scale * (hidden[rows] @ weight.T)
        (torch.nn.functional.cross_entropy(x, target[rows], reduction="sum") / (target >= 0).sum()).backward()
        total += len(rows)
    return hidden.grad, weight.grad


@pytest.fixture(scope="module", params=["default", "peaked"])
def head(request):
    hidden, weight, target = lm_like(4096, 65536, 1024, kind=request.param)
    truth = truth_of(hidden, weight, target)
    was_target = torch.zeros(65536, dtype=torch.bool, device="cuda")
    was_target[target] = True
    return hidden, weight, target, truth, was_target


def test_error_of_one_draw(head):
    """dE at most 1.3 times, dC at most 2.5 times the error of the exact backward."""
    hidden, weight, target, (d_hidden, d_weight), _ = head
    ours = gradients(hidden, weight, target, sampled())
    exact = gradients(hidden, weight, target, vpcce.exact())
    assert relative(ours[0], d_hidden) <= 1.3 * relative(exact[0], d_hidden)
    assert relative(ours[1], d_weight) <= 2.5 * relative(exact[1], d_weight)


def test_the_mean_of_draws_converges(head):
    """64 draws: in rows that never were targets what sampling adds to the exact backward's error shrinks 8 times."""
    hidden, weight, target, (_, d_weight), was_target = head
    rounding = relative(gradients(hidden, weight, target, vpcce.exact())[1][~was_target], d_weight[~was_target])
    squares, mean = 0.0, torch.zeros_like(d_weight)
    for _ in range(64):
        draw = gradients(hidden, weight, target, sampled())[1]
        squares += relative(draw[~was_target], d_weight[~was_target]) ** 2 / 64
        mean += draw.float() / 64
    assert squares > 2 * rounding**2
    expected = ((squares - rounding**2) / 64 + rounding**2) ** 0.5
    ratio = relative(mean[~was_target], d_weight[~was_target]) / expected
    assert 0.7 < ratio < 1.3, ratio  # a bias of 1% would be four times as much


def test_same_seed_same_columns(head):
    """Atomics leave the order of fp32 additions open, nothing else; `deterministic` fixes that too."""
    hidden, weight, target, (_, d_weight), _ = head

    def draw(seed, **options):
        torch.manual_seed(seed)
        return gradients(hidden, weight, target, sampled(**options))

    first, second, other = draw(1), draw(1), draw(2)
    assert relative(first[1], second[1].float()) < 1e-3 < relative(first[1], other[1].float())
    assert torch.equal(first[0], second[0])
    first, second = draw(3, deterministic=True), draw(3, deterministic=True)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_main_grad_and_fresh_gradient_agree(head):
    hidden, weight, target, _, _ = head
    torch.manual_seed(4)
    fresh = gradients(hidden, weight, target, sampled())
    total = torch.zeros(weight.shape, device="cuda")
    torch.manual_seed(4)
    d_hidden, nothing = gradients(hidden, weight, target, sampled(), main_grad=total)
    assert nothing is None
    assert relative(fresh[1], total) < 4e-3  # bf16 rounding of the fresh one
    assert relative(d_hidden, fresh[0].float()) < 1e-3


def test_the_cpu_keeps_the_same_columns(monkeypatch):
    """fp32 and one seed: the two backends differ by rounding, where another column kept would show as 1e-2."""
    monkeypatch.setattr(packed_layout, "MAX_DENSITY_SHORT_ROWS", 1.0)
    g = torch.Generator().manual_seed(0)
    n, v, d, eps, seed = 640, 3000, 64, 2.0**-6, torch.tensor(2**45 + 3)
    hidden, weight = torch.randn(n, d, generator=g), 3 * torch.randn(v, d, generator=g) / 8
    target = torch.randint(0, v, (n,), generator=g)
    lse = (hidden @ weight.T).logsumexp(1)
    rows = (torch.rand(n, generator=g) / n, -torch.rand(n, generator=g) / n)
    options = dict(hidden_policy=sampled(eps), weight_policy=sampled(eps), hidden_grad_dtype=torch.float32)
    cpu = reference.local_backward(
        hidden, Head(weight, start=123), target, lse, RowGradients(*rows), marks=Marks(torch.zeros(1), seed),
        hidden_grad_ready=lambda grad: None, **options,
    )  # fmt: skip
    on_gpu = [t.cuda() for t in (hidden, weight, target, lse, *rows, seed)]
    hidden, weight, target, lse, *rows, seed = on_gpu
    head = Head(weight, start=123)
    bound = torch.full((n,), -torch.inf, device="cuda")
    stats = local.local_stats(hidden, head, target, sampling=Sampling(seed, eps, bound))
    gpu = local.local_backward(
        hidden,
        head,
        target,
        lse,
        RowGradients(*rows),
        marks=stats.marks,
        hidden_grad_ready=lambda grad: None,
        **options,
    )
    for ours, truth in zip(gpu[:2], cpu[:2], strict=True):
        assert relative(ours.cpu(), truth) < 1e-5


@pytest.mark.parametrize("shape", [(1000, 512, 256), (300, 1_000_000, 64), (1, 40000, 512), (2048, 30001, 72)], ids=str)
@pytest.mark.parametrize(
    "logit_scale, max_density", [(1.0, 0.35), (0.01, 0.35), (0.01, 0.0)], ids=["peaked", "flat", "flat, dense products"]
)
def test_any_density(shape, logit_scale, max_density, monkeypatch):
    """Also of 512 ids, and of lists too long, which the device replaces by dense products.

    A flat softmax has next to all of its mass in columns that are sampled: dE's and dC's errors reach eps ** 0.5.
    """
    monkeypatch.setattr(policy, "DENSE", float("inf"))
    for name in ("MAX_DENSITY", "MAX_DENSITY_SHORT_ROWS"):
        monkeypatch.setattr(packed_layout, name, max_density)
    n, v, d = shape
    g = torch.Generator(device="cuda").manual_seed(1)
    hidden = torch.randn(n, d, generator=g, device="cuda").bfloat16()
    weight = (6 * torch.randn(v, d, generator=g, device="cuda") / d**0.5).bfloat16()
    target = torch.randint(0, v, (n,), generator=g, device="cuda")
    target[1::3] = -100
    truth = truth_of(hidden, weight, target, logit_scale)
    exact = gradients(hidden, weight, target, vpcce.exact(), logit_scale=logit_scale)
    ours = gradients(hidden, weight, target, sampled(), logit_scale=logit_scale)
    for ours_part, exact_part, truth_part in zip(ours, exact, truth, strict=True):
        sampling = 1.2 * 2**-6 if logit_scale < 1 and max_density > 0 else 2e-3
        assert relative(ours_part, truth_part) <= 3 * relative(exact_part, truth_part) + sampling
    assert torch.all(ours[0][1::3] == 0)
    if logit_scale < 1 and max_density > 0 and n > 1 and v > 11702:  # it was sampled
        assert relative(ours[0], truth[0]) > 2 * relative(exact[0], truth[0])


def test_one_token_marks_everything():
    """A token with equal logits marks every column of its row block; the other blocks stay sparse."""
    hidden, weight, target = lm_like(2048, 65536, 512)
    hidden[700] = 0
    truth = truth_of(hidden, weight, target)
    ours = gradients(hidden, weight, target, sampled())
    exact = gradients(hidden, weight, target, vpcce.exact())
    for ours_part, exact_part, truth_part in zip(ours, exact, truth, strict=True):
        assert relative(ours_part, truth_part) <= 2.5 * relative(exact_part, truth_part)


def test_graph_replays_draw_fresh_coins():
    hidden, weight, target = lm_like(1024, 32768, 512)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

    def step():
        loss = vpcce.linear_cross_entropy(hidden, weight, target, backward=sampled())
        return torch.autograd.grad(loss, (hidden, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, d_weight = step()
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(d_weight.clone())
    assert 1e-4 < relative(draws[0], draws[1].float()) < 0.1
