"""The forward's marks: none is missing that the backward would keep, and their bits are where readers look for them."""

import math

import pytest
import torch
import triton
from interpreter import prepare_kernels

import vpcce
from vpcce import sampling
from vpcce.kernels import hot_set, launch_table, local, marks
from vpcce.kernels.coin import coin_thresholds
from vpcce.kernels.forward import forward_stats
from vpcce.kernels.problem import Head, Sampling

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SEED = torch.tensor(2**40 + 77)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    prepare_kernels(monkeypatch)


def test_pack_and_unpack_marks_are_inverse():
    wanted = torch.rand(3, 1000) < 0.3
    bits = marks.pack_marks(wanted)
    assert bits.shape == marks.marks_shape(384, 1000)
    assert torch.equal(marks.unpack_marks(bits, 1000), wanted)


def test_coin_of_kernel_and_cpu_are_equal():
    table = coin_thresholds(SEED, 1.0, 1200, 5, 3000)
    k = sampling.coin(SEED, torch.arange(0, 12, 4), torch.arange(5, 3005)).double()
    assert torch.equal(table.double() * sampling.LEVELS, k)


ADVERSARIAL = {
    "ordinary": lambda x: x,
    "all logits near -200": lambda x: x - 200,
    "all logits near +5000": lambda x: x + 5000,
    "ties": lambda x: (x * 2).round() / 2,
    "one-hot": lambda x: torch.where(x == x.amax(1, keepdim=True), 80.0, x),
    "identical rows": lambda x: x[:1].expand_as(x),
    "sure, with doubts as large as eps": lambda x: torch.where(x == x.amax(1, keepdim=True), 80.0, 71.5 + x / 8),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_the_bound_is_a_bound(shape, splits, monkeypatch):
    """No column that the backward would keep goes unmarked, whatever the logits; weight = identity makes them so.

    With several splits the hot columns are few, so that those of finished splits make the difference.
    """
    monkeypatch.setattr(launch_table, "choose_splits", lambda *_: splits)
    if splits > 1:
        monkeypatch.setattr(hot_set, "HOT_COLUMNS", 32)
    n, v, eps = 640, 512, 2.0**-12  # two coin groups; of the last row block a few tokens count
    n_rows = torch.tensor([520], dtype=torch.int32)
    g = torch.Generator().manual_seed(1)
    x = shape(4 * torch.randn(n, v, generator=g))
    head = Head(torch.eye(v), start=100)
    target = torch.randint(0, v, (n,), generator=g)
    hot = hot_set.hot_set(x, head, target)
    bound = hot.stats[2]
    assert (hot.splits is not None) == (splits > 1)
    truth = x.double()
    lse = truth.logsumexp(1)
    for lower in (bound, hot.mean_bound):
        assert torch.all(lower.double()[:520] <= lse[:520] + 1e-3 * (1 + lse[:520].abs() * 1e-2))
    stats = forward_stats(
        x, head, target, n_rows=n_rows, entropy=False, argmax=False, logit_sum=False,
        sampling=Sampling(SEED, eps, bound, hot.splits, hot.mean_bound),
    )  # fmt: skip
    error = (truth - lse[:, None]).exp()
    error[torch.arange(n), target] -= 1
    error[520:] = 0
    m = sampling._block_max(error)
    kept = sampling.keep_scale(m, eps, SEED, torch.arange(5), torch.arange(100, 100 + v)) > 0
    marked = marks.unpack_marks(stats.marks.bits, v)
    assert not torch.any(kept & ~marked)
    if shape is ADVERSARIAL["ordinary"]:
        assert marked[:, -128:].sum() < 1.3 * kept[:, -128:].sum() + 10
    if shape is ADVERSARIAL["one-hot"] and splits == 1:  # and so few columns that those of other tokens would show
        assert marked[4].sum() < 1.5 * kept[4].sum() + 5


@pytest.mark.parametrize("base", [-6.0, -12.0])
@pytest.mark.parametrize("softcap", [30.0, 100.0])
def test_the_bound_of_small_sums_behind_a_softcap(softcap, base):
    """Sums relative to 0 of logits far below it, and then a tile whose maxima are needed: 0 is no bound there."""
    n, v, eps = 128, 256, 2.0**-6
    g = torch.Generator().manual_seed(2)
    z = base + 0.5 * torch.randn(n, v, generator=g)
    z[1, 200] = 27.0 if softcap == 30.0 else 60.0  # in the second tile of 128 columns
    head = Head(torch.eye(v), softcap=softcap)
    target = torch.zeros(n, dtype=torch.int64)
    truth = softcap * torch.tanh(z.double() / softcap)
    lse = truth.logsumexp(1)
    assert lse[0] < 0
    stats = forward_stats(
        z, head, target, n_rows=None, entropy=False, argmax=False, logit_sum=False,
        sampling=Sampling(SEED, eps, (lse - 1e-3).float()), splits=1,
    )  # fmt: skip
    torch.testing.assert_close((stats.max + stats.sum.log()).double(), lse, rtol=1e-5, atol=1e-5)
    m = sampling._block_max((truth - lse[:, None]).exp())
    kept = sampling.keep_scale(m, eps, SEED, torch.arange(1), torch.arange(v)) > 0
    assert 10 < kept[:, 128:].sum() < 128
    assert not torch.any(kept & ~marks.unpack_marks(stats.marks.bits, v))


@pytest.mark.parametrize("splits", [1, 4])
def test_the_mean_makes_the_bound_of_a_flat_softmax_tight(splits, monkeypatch):
    """From the first tile on, where without it a split marks whatever its few hot columns cannot exclude."""
    monkeypatch.setattr(launch_table, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(hot_set, "HOT_COLUMNS", 16)
    n, v, eps = 640, 1024, 2.0**-7
    x = torch.randn(n, v, generator=torch.Generator().manual_seed(3)) / 8
    head, target = Head(torch.eye(v)), torch.zeros(n, dtype=torch.int64)
    hot = hot_set.hot_set(x, head, target)
    share = (x - x.logsumexp(1, keepdim=True)).exp().view(5, 128, v).amax(1)
    threshold = coin_thresholds(SEED, eps, n, 0, v).repeat_interleave(4, 0)[:5]
    marked = {}
    for mean_bound in (None, hot.mean_bound):
        stats = forward_stats(
            x, head, target, n_rows=None, entropy=False, argmax=False, logit_sum=False,
            sampling=Sampling(SEED, eps, hot.stats[2], hot.splits, mean_bound),
        )  # fmt: skip
        marked[mean_bound is not None] = marks.unpack_marks(stats.marks.bits, v)[:, 1:]  # without everybody's target
    assert not torch.any((share >= threshold)[:, 1:] & ~marked[True])
    assert not torch.any(marked[True] & (1.03 * share < threshold)[:, 1:])
    assert marked[True].sum() < 0.6 * marked[False].sum()


def test_the_loss_hands_the_mean_bound_to_the_forward(monkeypatch):
    seen = []
    stats = local.local_stats
    monkeypatch.setattr(local, "local_stats", lambda *args, **how: seen.append(how["sampling"]) or stats(*args, **how))
    hidden, weight = torch.randn(20, 16, requires_grad=True), torch.randn(300, 16)
    vpcce.linear_cross_entropy(hidden, weight, torch.zeros(20).long(), backward=vpcce.sampled())
    expected = (hidden.detach() @ weight.T).mean(1) + math.log(300)
    torch.testing.assert_close(seen[0].mean_bound, expected)


def test_finished_splits_make_the_bound_tighter(monkeypatch):
    """A flat distribution, for which few hot columns are a bound of little, and finished splits of most."""
    n, v, eps, splits = 640, 1024, 2.0**-8, 8
    monkeypatch.setattr(launch_table, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(hot_set, "HOT_COLUMNS", 64)
    x = torch.randn(n, v, generator=torch.Generator().manual_seed(3)) / 4
    head, target = Head(torch.eye(v)), torch.zeros(n, dtype=torch.int64)
    hot = hot_set.hot_set(x, head, target)
    is_hot = torch.zeros(v).index_fill(0, hot_set._most_frequent(target, v, 62), 1.0)
    whole = x.exp().view(n, splits, -1).sum(2).T
    of_hot = (x.exp() * is_hot).view(n, splits, -1).sum(2).T
    assert torch.all(hot.splits.mass.exp2() >= of_hot) and torch.all(hot.splits.mass.exp2() <= 1.02 * of_hot)
    stats = forward_stats(
        x, head, target, n_rows=None, entropy=False, argmax=False, logit_sum=False,
        sampling=Sampling(SEED, eps, hot.stats[2], hot.splits),
    )  # fmt: skip
    torch.testing.assert_close(stats.max + stats.sum.log(), x.logsumexp(1))
    marked = marks.unpack_marks(stats.marks.bits, v)
    threshold = coin_thresholds(SEED, eps, n, 0, v).repeat_interleave(4, 0)[:5]
    before = whole.cumsum(0) - whole
    known = (before + of_hot.flip(0).cumsum(0).flip(0)).T.repeat_interleave(
        v // splits, 1
    )  # when a column's turn comes
    share = (x.exp() / known).view(5, 128, v).amax(1)
    assert not torch.any((share >= threshold) & ~marked)
    surplus = marked & (1.03 * share < threshold)
    surplus[:, 0] = False  # everybody's target
    assert not torch.any(surplus)
    assert marked[:, :128].all() and marked[:, -128:].float().mean() < 0.8


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_no_split_waits_for_a_number_that_is_none(value, monkeypatch):
    monkeypatch.setattr(launch_table, "choose_splits", lambda *_: 4)
    n, v = 640, 512
    x = torch.randn(n, v, generator=torch.Generator().manual_seed(3))
    bias = torch.zeros(v)
    bias[70] = value
    head, target = Head(torch.eye(v), bias), torch.zeros(n, dtype=torch.int64)
    hot = hot_set.hot_set(x, head, target)
    stats = forward_stats(
        x, head, target, n_rows=None, entropy=False, argmax=False, logit_sum=False,
        sampling=Sampling(SEED, 2**-12, hot.stats[2], hot.splits),
    )  # fmt: skip
    lse = stats.max + stats.sum.log()
    assert torch.all(lse.isfinite()) if value == -torch.inf else torch.all(lse.isnan() | (lse == torch.inf))
