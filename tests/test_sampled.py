"""The sampled gradient is exact in expectation, its variance is the theory's, and the filter is the paper's rule.

A small head in fp64, and the decisions of `vpcce.sampling` under many seeds: the mean over K draws must approach the
exact gradient like 1/sqrt(K), separately for rows of dC that are targets, for frequent rows that never are, and for
the rest, whose gradients are 10^4 times smaller. A bias of 1% must make the same test fail.
"""

import pytest
import torch

import vpcce
from vpcce import policy, sampling
from vpcce.kernels.problem import Head, Marks, RowGradients
from vpcce.policy import exact, filtered, sampled
from vpcce.reference import local_backward

N, V, D, EPS, START = 640, 300, 16, 2.0**-5, 1000  # five row blocks: two coin groups, the second one short


class Problem:
    """G, p - onehot and the operands of one small head, in fp64."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(N, D, generator=g, dtype=torch.float64)
        prior = -2.0 * torch.arange(1, V + 1, dtype=torch.float64).log()
        self.weight = torch.randn(V, D, generator=g, dtype=torch.float64) * 0.3
        self.head = Head(self.weight, prior, start=START)
        x = self.hidden @ self.weight.T + prior
        self.lse = x.logsumexp(1)
        p = (x - self.lse[:, None]).exp()
        self.target = torch.multinomial(p, 1, generator=g)[:, 0]
        self.target[self.target < 20] = torch.randint(100, 150, (int((self.target < 20).sum()),), generator=g)
        self.rows = RowGradients(torch.rand(N, generator=g).double() / N, -torch.rand(N, generator=g).double() / N)
        onehot = torch.nn.functional.one_hot(self.target, V).double()
        self.error = p - onehot
        self.grad = p * self.rows.softmax[:, None] + onehot * self.rows.target[:, None]
        m = sampling._block_max(torch.where(onehot > 0, 1.0, p))
        self.m = m

    def backward(self, policy, seed=0):
        marks = Marks(torch.zeros(1, dtype=torch.int32), torch.tensor(seed))
        d_hidden, d_weight, d_bias = local_backward(
            self.hidden, self.head, self.target, self.lse, self.rows, hidden_policy=policy, weight_policy=policy,
            bias_grad=True, marks=marks, hidden_grad_dtype=torch.float64, hidden_grad_ready=lambda grad: None,
        )  # fmt: skip
        return d_hidden, d_weight, d_bias

    def scales(self, n_draws, first_seed=0):
        """[draws, blocks, V]: what each draw multiplies G's columns with."""
        blocks, columns = torch.arange(self.m.shape[0]), torch.arange(START, START + V)
        return torch.stack(
            [
                sampling.keep_scale(self.m, EPS, torch.tensor(first_seed + 7919 * k), blocks, columns)
                for k in range(n_draws)
            ]
        )


@pytest.fixture(scope="module")
def problem():
    return Problem()


@pytest.fixture(scope="module")
def draws(problem):
    return problem.scales(4096)


def weight_grad(problem, scale):
    """dC of one draw or of a mean of draws (dC is linear in the scales)."""
    return sampling.scale_columns(problem.grad, scale).T @ problem.hidden


def row_classes(problem):
    target = torch.zeros(V, dtype=torch.bool)
    target[problem.target] = True
    frequent = problem.m.amax(0) >= EPS
    return {"target": target, "frequent, never a target": frequent & ~target, "rest": ~frequent & ~target}


def test_reference_applies_the_decisions(problem):
    """`local_backward` of the CPU backend is G with its columns scaled, products as usual; same seed, same columns."""
    scale = problem.scales(1, first_seed=5)[0]
    grad = sampling.scale_columns(problem.grad, scale)
    d_hidden, d_weight, d_bias = problem.backward(sampled(EPS), seed=5)
    torch.testing.assert_close(d_hidden, grad @ problem.weight, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d_weight, grad.T @ problem.hidden, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d_bias, grad.sum(0), rtol=1e-10, atol=1e-14)
    assert 0.1 < (scale > 0).double().mean() < 0.9


def error_ratio(problem, draws, bias=1.0):
    """For each class of rows, the error of the mean of 4096 draws in units of what 1/sqrt(K) predicts."""
    truth = problem.grad.T @ problem.hidden
    ratios = {}
    for name, rows in row_classes(problem).items():
        single = torch.stack([(weight_grad(problem, s) - truth)[rows] for s in draws[:256]])
        predicted = (single**2).sum((1, 2)).mean().sqrt() / len(draws) ** 0.5
        ratios[name] = ((weight_grad(problem, draws.mean(0) * bias) - truth)[rows].norm() / predicted).item()
    return ratios


def test_mean_of_draws_converges_to_the_exact_gradient(problem, draws):
    for name, ratio in error_ratio(problem, draws).items():
        assert 0.5 < ratio < 1.6, (name, ratio)


def test_a_bias_of_one_percent_would_be_seen(problem, draws):
    ratios = error_ratio(problem, draws, bias=1.01)
    assert ratios["target"] > 1.6 and ratios["frequent, never a target"] > 1.6, ratios


def test_the_error_falls_like_the_square_root(problem, draws):
    """Quadrupling the draws halves the error: slope of log error over log K between 64 and 4096 draws."""
    truth = problem.grad.T @ problem.hidden
    sizes = [64, 256, 1024]
    errors = []
    for k in sizes:
        means = draws[: 4096 // k * k].view(-1, k, *draws.shape[1:]).mean(1)
        errors.append(torch.stack([(weight_grad(problem, s) - truth).norm() for s in means]).square().mean().sqrt())
    for small, large in zip(errors, errors[1:], strict=False):
        assert 1.7 < (small / large).item() < 2.35, errors


def test_hidden_gradient_converges_too(problem, draws):
    truth = problem.grad @ problem.weight
    single = torch.stack([sampling.scale_columns(problem.grad, s) @ problem.weight - truth for s in draws[:128]])
    predicted = (single**2).sum((1, 2)).mean().sqrt() / len(draws) ** 0.5
    mean = sampling.scale_columns(problem.grad, draws.mean(0)) @ problem.weight
    assert 0.5 < ((mean - truth).norm() / predicted).item() < 1.6


def test_variance_is_the_theorys(problem, draws):
    """Within a coin group Cov(scale_b, scale_c) = 1 / max(q_b, q_c) - 1; groups are independent."""
    q = (problem.m * (sampling.LEVELS / EPS)).ceil().clamp(max=sampling.LEVELS) / sampling.LEVELS
    blocks = problem.m.shape[0]
    group = torch.arange(blocks) // sampling.COIN_BLOCKS
    covariance = 1 / torch.maximum(q[:, None], q[None, :]) - 1
    covariance *= (group[:, None] == group[None, :])[:, :, None]
    padded = torch.nn.functional.pad(problem.grad, (0, 0, 0, blocks * 128 - N))
    tokens = torch.nn.functional.pad(problem.hidden, (0, 0, 0, blocks * 128 - N))
    part = torch.einsum("brv,brd->bvd", padded.view(blocks, 128, V), tokens.view(blocks, 128, D))
    theory = torch.einsum("bvd,cvd,bcv->v", part, part, covariance)
    truth = problem.grad.T @ problem.hidden
    seen = torch.stack([(weight_grad(problem, s) - truth).square().sum(1) for s in draws[:2048]]).mean(0)
    rows = q.amax(0) > 0.02  # rarer columns are kept too seldom for their variance to be seen
    ratio = seen[rows & (theory > 0)] / theory[rows & (theory > 0)]
    assert abs(ratio.mean().item() - 1) < 0.1 and ratio.min() > 0.3 and ratio.max() < 2.5


def test_small_eps_is_exact(problem):
    """Every column with m >= eps is kept and unscaled."""
    for ours, truth in zip(problem.backward(sampled(2.0**-40)), problem.backward(exact()), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-14)


def test_filter_is_the_papers_rule(problem):
    """A tile of 128 tokens and 128 columns is dropped when no |p - onehot| in it reaches eps."""
    eps = 0.02
    grad = problem.grad.clone()
    dropped = 0
    for row in range(0, N, 128):
        for column in range(0, V, 128):
            tile = (slice(row, row + 128), slice(column, column + 128))
            if problem.error[tile].abs().max() < eps:
                grad[tile] = 0
                dropped += 1
    assert dropped
    d_hidden, d_weight, _ = problem.backward(filtered(eps))
    torch.testing.assert_close(d_hidden, grad @ problem.weight, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d_weight, grad.T @ problem.hidden, rtol=1e-10, atol=1e-14)


def test_each_gradient_has_its_own_policy(problem):
    marks = Marks(torch.zeros(1, dtype=torch.int32), torch.tensor(3))
    d_hidden, d_weight, _ = local_backward(
        problem.hidden, problem.head, problem.target, problem.lse, problem.rows, hidden_policy=sampled(EPS),
        weight_policy=exact(), marks=marks, hidden_grad_dtype=torch.float64, hidden_grad_ready=lambda grad: None,
    )  # fmt: skip
    torch.testing.assert_close(d_weight, problem.backward(exact())[1], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(d_hidden, problem.backward(sampled(EPS), seed=3)[0], rtol=1e-10, atol=1e-14)


def test_a_sure_target_keeps_what_other_terms_ask_of_it():
    """p = 1 after rounding: |p - onehot| is 0, but the z-loss still moves the target's row."""
    weight = torch.zeros(1000, 8)
    weight[7, 0] = 30.0
    weight.requires_grad_()
    hidden = torch.zeros(128, 8)
    hidden[:, 0] = 1.0
    target = torch.full((128,), 7)
    grads = []
    for backward in (exact(), sampled()):
        loss = vpcce.linear_cross_entropy(hidden, weight, target, z_loss=1e-4, backward=backward)
        grads += torch.autograd.grad(loss, weight)
    assert grads[0][7, 0] > 1e-3
    torch.testing.assert_close(grads[1][7], grads[0][7])


@pytest.mark.parametrize(
    "vocab_size, kind", [(512, "exact"), (11702, "exact"), (11703, "sampled"), (262144, "sampled")]
)
def test_what_a_gpu_samples(vocab_size, kind):
    """Only where a flat softmax would keep few columns. The CPU, filters and coarser thresholds are as asked for."""

    def kinds(backward, device, vocab_size=vocab_size):
        pair = policy.resolve("who", backward, torch.bfloat16, torch.device(device), vocab_size)
        return [part.kind for part in pair]

    assert kinds("auto", "cuda") == kinds(sampled(), "cuda") == [kind] * 2
    assert kinds((sampled(), vpcce.filtered()), "cuda") == [kind, "filtered"]
    assert kinds(sampled(), "cpu") == ["sampled"] * 2
    assert kinds(sampled(2**-6), "cuda") == ["sampled"] * 2
    assert kinds(sampled(1e-30), "cuda") == ["exact"] * 2
