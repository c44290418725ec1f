"""LoRA with the kernels in Triton's interpreter: against fp64 truth, and draw by draw against the PyTorch backend."""

from dataclasses import replace

import pytest
import torch
import triton
import truth
from interpreter import mend_bf16, never_a_larger_workspace, poison_empty
from spawn import run_ranks
from test_kernels_options import compare
from test_lora import SCALE, merged, problem

import vpcce
from vpcce import reference
from vpcce.kernels import local, packed_layout
from vpcce.kernels.problem import Head, LowRank, RowGradients, Sampling
from vpcce.policy import exact, filtered, sampled

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SEED = torch.tensor(2**40 + 77)


def run_options(r, backward, learned=False, **options):
    hidden, weight, bias, a, b, target = problem(20, 300, 16, r, torch.float32)
    scale = torch.tensor(0.8, requires_grad=True) if learned else 1.3
    leaves = [hidden, bias, a, b] + ([scale] if learned else [])
    wide = [t.detach().double().requires_grad_() for t in leaves]
    ours = vpcce.linear_cross_entropy(
        hidden, weight, target, bias=bias, backward=backward, logit_scale=scale, lora=vpcce.LoRA(a, b, SCALE), **options
    )
    plain = truth.cross_entropy(
        wide[0], merged(weight.double(), *wide[2:4]), target, bias=wide[1], logit_scale=wide[4] if learned else 1.3,
        **options,
    )  # fmt: skip
    compare(ours, plain, leaves, wide)


@pytest.mark.parametrize("r", [3, 40])
@pytest.mark.parametrize(
    "backward", [exact(), sampled(eps=1e-30), filtered(1e-30, sort=True), (exact(), sampled(1e-30))]
)
def test_cross_entropy(r, backward):
    """Ranks below a block of 16 and beyond one of 32; a fifth of the tokens is ignored, so rows are not in order."""
    run_options(r, backward, label_smoothing=0.2, class_weight=torch.rand(300).double(), learned=r == 3)


@pytest.mark.parametrize("backward", [exact(), sampled(eps=1e-30)])
def test_softcap_with_label_smoothing(backward):
    run_options(3, backward, softcap=5.0, label_smoothing=0.2, z_loss=1e-2)


def test_several_ids():
    hidden, weight, bias, a, b, _ = problem(20, 300, 16, 3, torch.float32)
    leaves = [hidden, bias, a, b]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    ids = truth.several_ids(20, 3, 300)
    ours = vpcce.linear_logprobs(hidden, weight, ids, bias=bias, lora=vpcce.LoRA(a, b, SCALE))
    whole = merged(weight.double(), *wide[2:])
    compare(ours, truth.logprobs_of_ids(wide[0], whole, ids, bias=wide[1]), leaves, wide)


class Shard:
    """One rank's rows with a second pair of factors, as a backend gets them."""

    def __init__(self, n, v, d, r, dtype, *, counting=None, constant=False):
        g = torch.Generator().manual_seed(n + v)
        self.hidden = torch.randn(n, d, generator=g).to(dtype)
        weight = (3 * torch.randn(v, d, generator=g) / d**0.5).to(dtype)
        low = LowRank(torch.randn(n, r, generator=g).to(dtype), torch.randn(v, r, generator=g).to(dtype))
        self.n_rows = None
        if counting is not None:
            self.n_rows = torch.tensor([counting], dtype=torch.int32)
            self.hidden[counting:] = low.hidden[counting:] = 0
        self.head = Head(weight, torch.randn(v, generator=g), 1.1, start=700, low_rank=low)
        self.target = torch.randint(0, v, (n,), generator=g)
        self.target[::7] = -1
        x = (self.hidden.double() @ weight.double().T + low.hidden.double() @ low.weight.double().T) + self.head.bias
        self.lse = (1.1 * x).logsumexp(1).float()
        self.target_logit = (1.1 * x).gather(1, self.target.clamp(min=0)[:, None])[:, 0].masked_fill(self.target < 0, 0)
        if counting is not None:
            self.target[counting:] = -1
        share = torch.rand(n, generator=g) / n
        self.rows = RowGradients(share, -share, share if constant else None, 0.01 * share if constant else None)
        self.counting = n if counting is None else counting

    def gradients(self, backend, policies, marks):
        hidden, head, target, lse, rows = self.hidden, self.head, self.target, self.lse, self.rows
        low_grad = torch.zeros(head.low_rank.hidden.shape)
        n_rows = self.n_rows
        if backend is reference:  # wants the rows that count, and fp32 factors
            keep = slice(self.counting)
            low = LowRank(head.low_rank.hidden[keep].float(), head.low_rank.weight.float())
            head, hidden, target, lse, n_rows = replace(head, low_rank=low), hidden[keep], target[keep], lse[keep], None
            rows = RowGradients(*(None if part is None else part[keep] for part in vars(rows).values()))
            low_grad = low_grad[keep]
        ready = []
        d_hidden, d_b, d_bias = backend.local_backward(
            hidden, head, target, lse, rows, n_rows=n_rows, hidden_policy=policies[0], weight_policy=policies[1],
            bias_grad=True, marks=marks, hidden_grad_dtype=torch.float32, low_rank_grad=low_grad,
            hidden_grad_ready=lambda grad: ready.append(low_grad.clone()),
        )  # fmt: skip
        assert torch.equal(ready[0], low_grad), "the second gradient was not complete when dE was"
        return [part[: self.counting] for part in (d_hidden, low_grad)] + [d_b, d_bias]

    def compare(self, policies, tolerance):
        sampling = Sampling(SEED, policies[-1].eps, torch.full((len(self.hidden),), -torch.inf))
        stats = local.local_stats(self.hidden, self.head, self.target, n_rows=self.n_rows, sampling=sampling)
        keep = slice(self.counting)
        lse = stats.max + stats.sum.log()
        torch.testing.assert_close(lse[keep], self.lse[keep], rtol=0, atol=1e-4)
        torch.testing.assert_close(stats.target_logit[keep].double(), self.target_logit[keep], rtol=0, atol=1e-4)
        ours = self.gradients(local, policies, stats.marks)
        complete = self.gradients(reference, (exact(), exact()), stats.marks)
        theirs = self.gradients(reference, policies, stats.marks)
        for part, expected, everything in zip(ours, theirs, complete, strict=True):
            assert part.dtype == torch.float32
            assert ((part - expected).norm() / expected.norm()).item() < tolerance
            if policies[0].eps > 1e-3:
                assert (everything - expected).norm() > 5 * tolerance * expected.norm(), "nothing was dropped"


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(packed_layout, "SHORT_STEP", 0)
    monkeypatch.setattr(packed_layout, "MAX_DENSITY_SHORT_ROWS", 1.0)
    monkeypatch.setattr(packed_layout, "DENSE_GROUP", 1024)
    monkeypatch.setattr(packed_layout, "SLAB_COLUMNS", 512)
    poison_empty(monkeypatch)
    mend_bf16(monkeypatch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_sampled(small_groups, dtype, tolerance, deterministic):
    """Both backends toss the same coins; some columns are dropped, so the exact gradient is no answer."""
    policy = sampled(2.0**-5, deterministic=deterministic)
    Shard(300, 600, 64, 5, dtype, counting=270, constant=True).compare((policy, policy), tolerance)


def test_sampled_in_rounds(small_groups, monkeypatch):
    """An arena for one super-block at a time: every round adds to db and finishes its rows of du."""
    monkeypatch.setattr(packed_layout, "ARENA_BYTES", 4 * 600 * 128 * 4)
    policy = sampled(2.0**-5)
    Shard(1100, 600, 32, 5, torch.float32).compare((policy, policy), 5e-6)


def test_sampled_falls_back_to_the_dense_product(small_groups, monkeypatch):
    """No arena holds the pairs; eps = 0 in effect, so both are exact."""
    monkeypatch.setattr(packed_layout, "ARENA_BYTES", 100 * 128 * 4)
    policy = sampled(1e-30)
    Shard(300, 600, 64, 5, torch.float32, counting=270).compare((policy, policy), 5e-6)


def test_dense_in_slices(small_groups, monkeypatch):
    """Several slices of the vocabulary, over which du is summed in place."""
    monkeypatch.setattr("vpcce.kernels.backward_dense.WORKSPACE_BYTES", 300 * 256 * 4)
    never_a_larger_workspace(monkeypatch)
    Shard(300, 600, 64, 5, torch.float32, counting=270, constant=True).compare((exact(), exact()), 5e-6)


def on_a_rank(rank, world, backward):
    hidden, weight, bias, a, b, target = problem(20, 200, 16, 3, torch.float32)
    shard = (vpcce.VocabShard(0, 70, 200), vpcce.VocabShard(70, 200, 200))[rank]
    rows = slice(shard.start, shard.stop)
    leaves = [t.detach().clone().requires_grad_() for t in (hidden.view(2, 10, 16)[rank], a, b[rows])]
    loss = vpcce.linear_cross_entropy(
        leaves[0], weight[rows], target, bias=bias[rows].detach(), shard=shard, softcap=8.0, sequence_parallel=True,
        lora=vpcce.LoRA(leaves[1], leaves[2], SCALE), backward=backward,
    )  # fmt: skip
    return [t.detach().numpy() for t in (loss, *torch.autograd.grad(loss, leaves))]


@pytest.mark.parametrize("backward", [exact(), sampled(1e-30)])
def test_two_ranks(backward):
    """Uneven shards, and each rank holds half of the tokens."""
    hidden, weight, bias, a, b, target = (
        t.detach().double().requires_grad_() if t.is_floating_point() else t
        for t in problem(20, 200, 16, 3, torch.float32)
    )
    plain = truth.cross_entropy(hidden, merged(weight, a, b), target, bias=bias, softcap=8.0)
    d_hidden, d_a, d_b = torch.autograd.grad(plain, (hidden, a, b))
    for rank, output in enumerate(run_ranks(2, on_a_rank, 2, backward)):
        loss, e, da, db = (torch.from_numpy(t).double() for t in output)
        torch.testing.assert_close(loss, plain.detach(), rtol=1e-5, atol=1e-6)
        rows = (slice(0, 70), slice(70, 200))[rank]
        for ours, expected in ((e, d_hidden.view(2, 10, 16)[rank]), (da, d_a), (db, d_b[rows])):
            assert (ours - expected).norm() <= 1e-4 * expected.norm()
