"""The kernels of the k largest logits in Triton's interpreter, against torch.topk of fp64 logits.

Which of nearly equal columns is chosen depends on roundings, so values are compared, and ids through the true logits
that they stand for.
"""

import math

import pytest
import torch
import triton
import truth
from interpreter import prepare_kernels, shrink_tiles
from spawn import run_ranks

import vpcce
from vpcce.kernels import tiles
from vpcce.kernels.local import local_stats
from vpcce.kernels.problem import Head, LowRank
from vpcce.kernels.tiles import Tile

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = 4e-6  # some 30 fp32 roundings, relative to max(1, |value|)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    prepare_kernels(monkeypatch)


def make(n, v, d, dtype=F32, bias=None, scale=1.0, softcap=None, rank=0, start=0) -> tuple[torch.Tensor, Head]:
    g = torch.Generator().manual_seed(n + 3 * v + 7 * d)
    hidden = torch.randn(n, d, generator=g).to(dtype)
    weight = (3 * torch.randn(v, d, generator=g) / d**0.5).to(dtype)
    offset = None if bias is None else (bias + torch.randn(v, generator=g)).to(dtype)
    low = None
    if rank:
        low = LowRank(*(torch.randn(rows, rank, generator=g).to(dtype) for rows in (n, v)))
    return hidden, Head(weight, offset, scale, softcap, start, low_rank=low)


def logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """[N, V] fp64."""
    z = hidden.double() @ head.weight.double().T
    if head.low_rank is not None:
        z += head.low_rank.hidden.double() @ head.low_rank.weight.double().T
    z = (z if head.bias is None else z + head.bias.double()) * head.scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def check(hidden: torch.Tensor, head: Head, k: int, n_rows: int | None = None, **options) -> None:
    count = None if n_rows is None else torch.tensor([n_rows], dtype=torch.int32)
    n = len(hidden) if n_rows is None else n_rows
    stats = local_stats(hidden, head, torch.full((len(hidden),), -1), n_rows=count, topk=k, **options)
    values, rows = stats.topk
    x = logits(hidden[:n], head)
    most = min(k, x.shape[1])
    expected = x.topk(most).values
    assert values.shape == rows.shape == (len(hidden), k)
    torch.testing.assert_close(values[:n, :most].double(), expected, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(x.gather(1, rows[:n, :most]), expected, rtol=ROUNDING, atol=ROUNDING)
    assert all(len(set(row)) == most for row in rows[:n, :most].tolist())
    assert torch.all(values[:n, most:] == -math.inf) and torch.all(values[n:] == -math.inf)
    assert torch.all((rows >= 0) & (rows < len(head.weight)))
    torch.testing.assert_close(stats.max[:n].double(), x.amax(1), rtol=ROUNDING, atol=ROUNDING)


SHAPES = {
    "full tiles": (16, 256, 64, 8),
    "two row blocks, partly empty tile and k-step": (130, 505, 72, 8),
    "fewer columns than k": (3, 5, 64, 8),
    "one column": (2, 1, 64, 2),
    "fewer groups than k": (3, 100, 64, 64),
    "more tiles than k": (3, 1500, 64, 3),
    "one id": (9, 505, 64, 1),
    "64 ids": (3, 3000, 16, 64),
    "one token": (1, 300, 64, 5),
}


@pytest.mark.parametrize("n, v, d, k", SHAPES.values(), ids=SHAPES)
def test_shapes(n, v, d, k):
    check(*make(n, v, d), k)


@pytest.mark.parametrize("block_n", [64, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_widths_of_tiles(block_n, dtype, monkeypatch):
    """Groups of 8 and 32 columns; elsewhere they have 16."""
    shrink_tiles(monkeypatch, Tile(128, block_n, 64, 4, 1))
    check(*make(5, 600, 64, dtype, bias=0.0), 6)


OPTIONS = {
    "bias": dict(bias=0.0),
    "negative scale on the device": dict(scale=torch.tensor(-1.7)),
    "softcap": dict(softcap=2.0),
    "low rank": dict(rank=5),
    "all of them": dict(bias=0.0, scale=0.7, softcap=4.0, rank=20, dtype=BF16),
    "every logit near -200": dict(bias=-200.0),
    # Beyond the vocabulary must not become -softcap, which is as large as the true logits here.
    "softcap 30 with every logit near -30": dict(bias=-200.0, softcap=30.0),
    "a shard's rows": dict(start=70000),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    check(*make(7, 300, 64, **options), 5)


@pytest.mark.parametrize("n_rows", [0, 1, 128, 131])
def test_rows_that_do_not_count(n_rows):
    hidden, head = make(140, 200, 32)
    hidden[n_rows:] = torch.nan  # whoever reads them is found
    check(hidden, head, 3, n_rows)


@pytest.mark.parametrize("d", [64, 123])
def test_plain_loads_and_strides(d, monkeypatch):
    monkeypatch.setattr(tiles, "has_tma", lambda device: False)
    hidden, head = make(5, 300, d)
    check(hidden.T.contiguous().T, Head(head.weight.T.contiguous().T), 4)


def test_several_of_a_group():
    """All of the largest in one group of tile 1, which is then a token's only pick that matters; the rest is equal."""
    weight = torch.zeros(600, 16)
    weight[131:256:8] = 1.0
    check(torch.ones(3, 16), Head(weight), 5)
    check(torch.ones(3, 16), Head(weight), 30)


def test_equals():
    """Of equal columns the lowest is first, whatever tile it is in; products of small integers are exact."""
    weight = torch.zeros(600, 16)
    weight[[7, 9, 300, 599]] = 1.0
    stats = local_stats(torch.ones(2, 16), Head(weight), torch.tensor([-1, -1]), topk=4)
    assert stats.topk[1].tolist() == 2 * [[7, 9, 300, 599]]
    check(torch.zeros(3, 16), Head(weight), 9)


def test_masked_columns():
    hidden, head = make(4, 400, 32, bias=0.0)
    head.bias[:395] = -math.inf
    values, rows = local_stats(hidden, head, torch.full((4,), -1), topk=8).topk
    expected = logits(hidden, head).topk(8).values
    torch.testing.assert_close(values.double(), expected, rtol=ROUNDING, atol=ROUNDING)
    assert torch.all(rows[:, :5] >= 395) and torch.all(rows < 400)


def test_chunks_of_tiles(monkeypatch):
    """Three chunks of four tiles, the last one not full."""
    monkeypatch.setattr("vpcce.kernels.topk.MOST_TILES", 4)
    check(*make(3, 1300, 16), 3)


@pytest.mark.parametrize("n, v", [(0, 100), (10, 0)])
def test_nothing(n, v):
    values, _ = local_stats(torch.ones(n, 8), Head(torch.ones(v, 8)), torch.full((n,), -1), topk=3).topk
    assert values.shape == (n, 3) and torch.all(values == -math.inf)


def on_a_rank(rank, world, bounds):
    hidden, weight, bias, target = truth.problem(20, 300, 16, torch.float32, bias=True, ignored=0.2)
    rows = slice(*bounds[rank : rank + 2])
    shard = vpcce.VocabShard(rows.start, rows.stop, 290)
    leaves = [hidden, *(t.detach()[rows].requires_grad_() for t in (weight, bias))]
    call = dict(bias=leaves[2], shard=shard, softcap=9.0)
    stats = vpcce.linear_stats(
        *leaves[:2], target % 290 * (target >= 0) - 100 * (target < 0), backward=vpcce.sampled(1e-30), entropy=True,
        argmax=True, topk=6, **call,
    )  # fmt: skip
    (stats.lse - stats.target_logit + stats.entropy).sum().backward()
    alone = vpcce.linear_topk(*leaves[:2], 6, **call)
    kept = target >= 0
    assert not stats.topk.logprobs.requires_grad
    assert torch.equal(stats.topk.ids[kept], alone.ids[kept]) and torch.equal(stats.topk.ids[:, 0], stats.argmax)
    return [t.detach().numpy() for t in (*stats.topk, *alone, hidden.grad)]


@pytest.mark.parametrize(
    "bounds", [(0, 300), (0, 70, 300), (0, 0, 4, 300)], ids=["one rank", "two", "three, one empty"]
)
def test_beside_the_loss(bounds):
    """A padded vocabulary, ignored tokens, the other statistics and a sampled gradient at the same time."""
    hidden, weight, bias, target = truth.problem(20, 300, 16, torch.float32, bias=True, ignored=0.2)
    hidden, weight, bias = (t.detach().double().requires_grad_() for t in (hidden, weight, bias))
    x = truth.logits_of(hidden, weight[:290], bias[:290], softcap=9.0)
    log_p, kept = x.log_softmax(-1), target >= 0
    expected = log_p.topk(6)
    picked = x.gather(1, torch.where(kept, target % 290, 0)[:, None])[:, 0]
    loss = x.logsumexp(-1) - picked - (log_p.exp() * log_p).sum(1)
    (d_hidden,) = torch.autograd.grad(loss[kept].sum(), hidden)
    world = len(bounds) - 1
    for logprobs, ids, alone, alone_ids, grad in run_ranks(world, on_a_rank, world, bounds):
        logprobs, ids, alone, grad = map(torch.from_numpy, (logprobs, ids, alone, grad))
        torch.testing.assert_close(alone.double(), expected.values.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logprobs[kept], alone[kept])
        assert torch.equal(torch.from_numpy(alone_ids), expected.indices)
        assert torch.all(logprobs[~kept] == 0) and torch.all(ids[~kept] == 0)
        assert (grad.double() - d_hidden).norm() <= 1e-4 * d_hidden.norm()
