"""The forward's kernels in Triton's interpreter against fp64.

Products of bf16 and fp16 numbers are exact in fp32 and sums are fp32 for every dtype, so one bound of a few fp32
roundings holds for all: the truth is computed from the same rounded inputs. Comparisons are approximate, because sums
run in another order than PyTorch's, unless a test says bitwise.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from interpreter import prepare_kernels

from vpcce.kernels import tiles
from vpcce.kernels.forward import forward_stats
from vpcce.kernels.launch_table import choose_splits
from vpcce.kernels.local import local_stats
from vpcce.kernels.problem import Head, Sampling

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = 4e-6  # some 30 fp32 roundings, relative to max(1, |value|)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    prepare_kernels(monkeypatch)


@triton.jit
def _bf16_kernel(a_ptr, b_ptr, sum_ptr, less_ptr, dot_ptr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(sum_ptr + at, a + b)
    tl.store(less_ptr + at, (a < b).to(tl.int32))
    tl.store(dot_ptr + at, tl.dot(a, b).to(tl.bfloat16))


def test_the_interpreter_computes_bf16_as_pytorch_does():
    """Bitwise: one rounding to nearest even per operation. The product may fall the other way at a tie."""
    a, b = torch.randn(2, 16, 16).to(BF16)
    total, dot, less = torch.empty_like(a), torch.empty_like(a), torch.empty(16, 16, dtype=torch.int32)
    _bf16_kernel[(1,)](a, b, total, less, dot)
    assert torch.equal(total, a + b) and torch.equal(less.bool(), a < b)
    torch.testing.assert_close(dot, (a.double() @ b.double()).to(BF16), rtol=2**-7, atol=1e-6)
    assert (dot == (a.double() @ b.double()).to(BF16)).float().mean() > 0.98


@dataclass
class Problem:
    hidden: torch.Tensor
    head: Head
    target: torch.Tensor

    def logits(self) -> torch.Tensor:
        """[N, V] fp64."""
        head = self.head
        z = self.hidden.double() @ head.weight.double().T
        z = (z if head.bias is None else z + head.bias.double()) * head.scale
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def make(n, v, d, hidden_dtype=F32, weight_dtype=None, *, bias=None, scale=1.0, softcap=None, share=False) -> Problem:
    g = torch.Generator().manual_seed(n + 3 * v + 7 * d)
    hidden = torch.randn(n, d, generator=g).to(hidden_dtype)
    weight = (3 * torch.randn(v, d, generator=g) / d**0.5).to(weight_dtype or hidden_dtype)
    if bias is not None:
        bias = (bias + torch.randn(v, generator=g)).to(weight.dtype)
    target = torch.randint(0, v, (n,), generator=g)
    target[::3] = -1
    return Problem(hidden, Head(weight, bias, scale, softcap, 0, torch.rand(v, generator=g) if share else None), target)


def close(ours: torch.Tensor, truth: torch.Tensor) -> None:
    assert ours.dtype == F32
    torch.testing.assert_close(ours.double(), truth, rtol=ROUNDING, atol=ROUNDING)


def check(problem: Problem, n_rows: int | None = None) -> None:
    """All statistics of the rows that count; the late ones are those of an empty shard."""
    count = None if n_rows is None else torch.tensor([n_rows], dtype=torch.int32)
    stats = local_stats(
        problem.hidden, problem.head, problem.target, n_rows=count, entropy=True, argmax=True, logit_sum=True
    )
    n = len(problem.target) if n_rows is None else n_rows
    x = problem.logits()[:n]
    p = x.softmax(1)
    share = problem.head.column_weight
    close(stats.max[:n], x.amax(1))
    close((stats.max + stats.sum.log())[:n], x.logsumexp(1))
    close((stats.expected / stats.sum)[:n], (p * x).sum(1))
    close(stats.logit_sum[:n] / x.shape[1], (x if share is None else x * share).mean(1))
    at_best = x.gather(1, stats.argmax[:n, None])[:, 0]
    close(at_best.float(), x.amax(1))
    picked = x.gather(1, problem.target[:n, None].clamp(min=0))[:, 0]
    close(stats.target_logit[:n], torch.where(problem.target[:n] >= 0, picked, 0.0))
    assert torch.all(stats.max[n:] == -math.inf) and torch.all(stats.sum[n:] == 0)


SHAPES = {
    "a tile of each kind full": (128, 256, 128),
    "partly empty row block, tile and k-step": (130, 505, 200),
    "vocabulary of less than a tile": (64, 125, 64),
    "one column more than a tile": (3, 129, 64),
    "one token": (1, 300, 64),
    "one column": (5, 1, 64),
}


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "plain loads"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, tma, monkeypatch):
    monkeypatch.setattr(tiles, "has_tma", lambda device: tma)
    check(make(*shape))


@pytest.mark.parametrize("d", [123, 497])
def test_d_that_tma_cannot_take(d):
    check(make(130, 200, d, BF16))


@pytest.mark.parametrize("weight_dtype", [BF16, F16, F32])
@pytest.mark.parametrize("hidden_dtype", [BF16, F16, F32])
def test_dtypes(hidden_dtype, weight_dtype):
    """Where they differ, both are converted to the wider one, tile by tile."""
    check(make(100, 200, 96, hidden_dtype, weight_dtype, bias=0.0))


OPTIONS = {
    "bias": dict(bias=0.0),
    "scale": dict(scale=0.3),
    "scale on the device": dict(scale=torch.tensor(1.7)),
    "softcap": dict(softcap=2.0),
    "column weights": dict(share=True),
    "all of them": dict(bias=0.0, scale=1.7, softcap=4.0, share=True),
    # The running maximum must not start at 0: every exponential would underflow.
    "every logit near -200": dict(bias=-200.0),
    # Lanes beyond the vocabulary must not become -softcap, which is as large as the true logits here.
    "softcap 30 with every logit near -30": dict(bias=-200.0, softcap=30.0),
    "every logit near +5000": dict(bias=5000.0),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    check(make(130, 200, 64, **options))


CAPS = {"no softcap": None, "polynomial": 40.0, "longer polynomial": 16.0, "exponential": 4.0, "no use": 1e6}


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("below", [0.0, 3.0, 150.0])
@pytest.mark.parametrize("softcap", CAPS.values(), ids=CAPS)
@pytest.mark.parametrize("marks", [False, True])
def test_sums_relative_to_other_numbers_than_the_maximum(marks, softcap, below, entropy):
    """Marks and softcap choose what exponentials are taken relative to; `below` is how poor the given bound is."""
    problem = make(140, 500, 64, bias=60.0 if softcap == 1e6 else None, softcap=softcap)
    x = problem.logits()
    lse = x.logsumexp(1)
    sampling = Sampling(torch.tensor(1), 2.0**-12, (lse - below).float()) if marks else None
    stats = local_stats(
        problem.hidden, problem.head, problem.target, n_rows=None, entropy=entropy, sampling=sampling
    )  # fmt: skip
    close(stats.max + stats.sum.log(), lse)
    if entropy:
        close(stats.expected / stats.sum, (x.softmax(1) * x).sum(1))


@pytest.mark.parametrize("softcap", [1e-30, 1e-12, 1e-7, 1e-4, 30.0, 1e3, 1e6, 1e12])
def test_softcaps_of_any_size(softcap):
    """One logit beyond the softcap sends its tile to the formula for all sizes; the other tokens keep their digits."""
    problem = make(6, 200, 64, softcap=softcap)
    problem.head.weight[7] = 0.0
    problem.head.weight[7, 0] = 1.3 * softcap
    problem.hidden[:, 0] = 0.0
    problem.hidden[3, 0] = 1.0
    stats = local_stats(problem.hidden, problem.head, problem.target, n_rows=None)
    close(stats.max + stats.sum.log(), problem.logits().logsumexp(1))


@pytest.mark.parametrize("n_rows", [0, 1, 128, 200, 300])
def test_rows_that_do_not_count(n_rows):
    """None; part of the first block; a whole block; part of the second; all."""
    problem = make(300, 150, 64)
    problem.hidden[n_rows:] = torch.nan  # whoever reads them is found
    check(problem, n_rows)


@pytest.mark.parametrize("layout", ["transposed", "every second column", "rows apart", "odd address"])
def test_layouts(layout):
    """Bitwise: descriptors and plain loads bring the same numbers. Only rows that lie apart keep the descriptors."""
    problem = make(70, 200, 64)

    def moved(matrix):
        if layout == "transposed":
            return matrix.T.contiguous().T
        wide = torch.full((len(matrix), 136), torch.nan)
        parts = {"every second column": wide[:, :128:2], "rows apart": wide[:, :64], "odd address": wide[:, 1:65]}
        return parts[layout].copy_(matrix)

    hidden, weight = moved(problem.hidden), moved(problem.head.weight)
    assert tiles.fits_tma(problem.hidden)
    assert tiles.fits_tma(hidden) == tiles.fits_tma(weight) == (layout == "rows apart")
    stats = local_stats(hidden, replace(problem.head, weight=weight), problem.target)
    expected = local_stats(problem.hidden, problem.head, problem.target)
    for name in ("max", "sum", "target_logit"):
        assert torch.equal(getattr(stats, name), getattr(expected, name)), name


def test_masked_columns_and_rows():
    """Columns of -inf have no probability; a row with nothing else has the statistics of an empty shard, not NaN."""
    problem = make(20, 300, 64)
    bias = torch.zeros(300)
    bias[:140] = -math.inf  # the first tile altogether
    head = replace(problem.head, bias=bias)
    problem.target.fill_(200)
    stats = local_stats(problem.hidden, head, problem.target, entropy=True, argmax=True)
    x = Problem(problem.hidden, head, problem.target).logits()
    close(stats.max + stats.sum.log(), x.logsumexp(1))
    finite = x[:, 140:]
    close(stats.expected / stats.sum, (finite.softmax(1) * finite).sum(1))
    assert torch.equal(stats.argmax, x.argmax(1))
    stats = local_stats(problem.hidden, replace(head, bias=torch.full((300,), -math.inf)), problem.target, entropy=True)
    assert torch.all(stats.max == -math.inf) and torch.all(stats.sum == 0) and torch.all(stats.expected == 0)


@pytest.mark.parametrize("n, v", [(0, 100), (10, 0), (0, 0)])
def test_nothing(n, v):
    stats = local_stats(
        torch.ones(n, 8), Head(torch.ones(v, 8)), torch.full((n,), -1), entropy=True, argmax=True, logit_sum=True
    )
    assert torch.equal(stats.max, torch.full((n,), -math.inf))
    for part in (stats.sum, stats.target_logit, stats.expected, stats.logit_sum, stats.argmax):
        assert part.shape == (n,) and torch.all(part == 0)


def test_argmax_of_equals_is_the_lowest():
    """Within a tile, and between tiles of one split and of two."""
    weight = torch.zeros(600, 16)
    weight[[7, 9, 300, 599]] = 1.0
    stats = local_stats(torch.ones(2, 16), Head(weight), torch.tensor([-1, -1]), argmax=True)
    assert stats.argmax.tolist() == [7, 7]


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_equals_in_neighbouring_tiles_and_other_splits(splits):
    """Products of small integers are exact, so most rows have their maximum several times."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randint(-2, 3, (129, 8), generator=g).float()
    weight = torch.randint(-1, 2, (505, 8), generator=g).float()
    x = hidden @ weight.T
    assert ((x == x.amax(1, keepdim=True)).sum(1) > 1).float().mean() > 0.5
    stats = forward_stats(
        hidden, Head(weight), torch.full((129,), -1), n_rows=None, entropy=False, argmax=True, logit_sum=False,
        sampling=None, splits=splits,
    )  # fmt: skip
    assert torch.equal(stats.argmax, torch.from_numpy(x.numpy().argmax(1)))  # numpy promises the first


def test_splits_change_only_the_order_of_sums():
    """Bitwise the same maximum under any split; 4 tiles in 3 splits are 2 + 2, in 9 they are 4."""
    problem = make(130, 505, 72, BF16, bias=0.0, softcap=8.0)

    def run(splits):
        return forward_stats(
            problem.hidden, problem.head, problem.target, n_rows=None, entropy=True, argmax=True, logit_sum=True,
            sampling=None, splits=splits,
        )  # fmt: skip

    one = run(1)
    for splits in (2, 3, 9):
        some = run(splits)
        assert torch.equal(some.max, one.max) and torch.equal(some.argmax, one.argmax)
        for name in ("sum", "expected", "logit_sum"):
            close(getattr(some, name) / 505, getattr(one, name).double() / 505)


def test_row_blocks_in_groups():
    """Five row blocks, two to a group: the last one is alone, in each split. Bitwise what one group gives."""
    hidden, weight, target = (torch.randn(600, 24), torch.randn(300, 24), torch.zeros(600, dtype=torch.int64))
    plain = dict(n_rows=None, entropy=True, argmax=True, logit_sum=False, sampling=None)
    one, two = (forward_stats(hidden, Head(weight), target, **plain, splits=3, group=group) for group in (5, 2))
    assert torch.equal(one.packed, two.packed)


def test_repeats_bitwise():
    problem = make(130, 700, 64, BF16)
    first, second = (local_stats(problem.hidden, problem.head, problem.target) for _ in range(2))
    for name in ("max", "sum", "target_logit"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_several_columns_per_token():
    problem = make(10, 50, 520, BF16, bias=0.0, softcap=5.0)
    columns = torch.randint(0, 50, (10, 3))
    columns[4, 1] = -1
    truth = torch.where(columns >= 0, problem.logits().gather(1, columns.clamp(min=0)), 0.0)
    close(local_stats(problem.hidden, problem.head, columns).target_logit, truth)


@pytest.mark.parametrize("programs", [132, 108])
@pytest.mark.parametrize("n_blocks", [1, 4, 16, 64, 256, 1024])
@pytest.mark.parametrize("n_tiles", [1, 126, 501, 1000])
def test_splits_keep_the_multiprocessors_busy(n_blocks, n_tiles, programs):
    """Few tokens use every multiprocessor there is work for; many leave less than a sixth of the time idle."""
    splits = choose_splits(n_blocks, n_tiles, programs)
    assert 1 <= splits <= n_tiles
    per_split = math.ceil(n_tiles / splits)
    launched = n_blocks * math.ceil(n_tiles / per_split)
    if n_blocks * n_tiles >= 32 * programs:
        busy = n_blocks * n_tiles / (math.ceil(launched / programs) * programs * per_split)
        assert busy > 5 / 6
