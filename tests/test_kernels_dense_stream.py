"""The backward that the device may refuse in Triton's interpreter, against `dense_backward` on the same problem."""

import pytest
import torch
import triton
from interpreter import prepare_kernels
from tolerance import relative_error

from vpcce.kernels import dense_stream as module
from vpcce.kernels.backward_dense import dense_backward
from vpcce.kernels.dense_stream import dense_stream
from vpcce.kernels.problem import Head, LowRank, RowGradients

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def several_slices(monkeypatch):
    """Narrow slices have 128 columns, chunks 128 rows."""
    prepare_kernels(monkeypatch)
    monkeypatch.setattr(module, "RING_BYTES", 1)
    monkeypatch.setattr(module, "MIN_WIDTH", 128)
    monkeypatch.setattr(module, "CHUNK_ROWS", 128)


@pytest.fixture
def launches(monkeypatch):
    """What each launch has: (columns, rows, width of a slice)."""
    found, call = [], module._Stream.__call__

    def recorded(self, *args, columns=None, rows=None, **kwargs):
        ring = args[4]
        found.append((columns or (0, self.head.weight.shape[0]), rows or (0, self.n), ring.width))
        return call(self, *args, columns=columns, rows=rows, **kwargs)

    monkeypatch.setattr(module._Stream, "__call__", recorded)
    return found


class Problem:
    def __init__(self, n, v, d, dtype, options=False):
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(n, d, generator=g).to(dtype)
        weight = torch.randn(v, d, generator=g).to(dtype)
        self.target = torch.randint(-1, v, (n,), generator=g)
        part, column = torch.rand(n, generator=g), torch.rand(v, generator=g)
        self.head, self.rows = Head(weight), RowGradients(part, -part)
        self.n_rows = self.row_index = None
        if options:
            self.head = Head(weight, column.to(dtype), 0.7, 3.0, 0, column)
            self.rows = RowGradients(part, -part, 0.1 * part, 0.01 * part)
            self.n_rows = torch.tensor([n - 60], dtype=torch.int32)
            self.row_index = torch.randperm(n, generator=g)
        logits = self.hidden.float() @ weight.float().T * d**-0.5
        self.lse = logits.logsumexp(1)

    def common(self):
        return dict(n_rows=self.n_rows, row_index=self.row_index)

    def arguments(self):
        return self.hidden, self.head, self.target, self.lse, self.rows

    def truth(self, main_grad, bias_grad):
        d_hidden = torch.zeros(self.hidden.shape)
        dense_backward(
            *self.arguments(), **self.common(), hidden_grad=d_hidden, weight_grad=main_grad, accumulate=True,
            bias_grad=bias_grad, hidden_grad_ready=lambda part: None,
        )  # fmt: skip
        return d_hidden


THREE = dict(n=200, v=4700, d=96, launches=3)
WAYS = {
    "dE is its own sum": dict(hidden_dtype=FP32, launches=1),
    "lower halves where dC will be": dict(v=1500, launches=2),
    "lower halves under nearly half of dC": dict(v=640, launches=2),
    "few columns: lower halves in memory of their own": dict(v=100, launches=1),
    "wide slices, narrow ones, dC under the lower halves": THREE,
    "wide slices and narrow ones, dE is its own sum": THREE | dict(hidden_dtype=FP32, launches=2),
    "wide slices, odd D and V, row blocks that nobody counts": THREE | dict(v=4703, d=97, n=190),
    "an arena for lower halves and a wide ring": dict(v=1500, arena=1 << 19, launches=1, width=1280),
    "a wider ring, but no room for lower halves": dict(v=1500, arena=1 << 13, launches=2, width=128),
    "an arena that is too small": dict(v=1500, arena=64, launches=2, width=128),
    "into main_grad": dict(main_grad=True, launches=3),
    "into main_grad, odd D and V": dict(main_grad=True, v=333, d=51, launches=3),
    "into main_grad, dE is its own sum": dict(main_grad=True, hidden_dtype=FP32, launches=3),
    "into main_grad, no arena": dict(main_grad=True, arena=0, launches=3),
    "into main_grad, an arena for lower halves only": dict(main_grad=True, arena=4000, launches=3),
    "dE alone": dict(wants_weight=False, launches=3),
    "dE alone, few columns": dict(wants_weight=False, v=5, launches=3),
    "dC alone": dict(wants_hidden=False, launches=1),
    "dC alone, into main_grad": dict(wants_hidden=False, main_grad=True, launches=1),
    "dbias without dC": dict(wants_hidden=False, wants_weight=False, launches=1),
}


@pytest.mark.parametrize("options", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_equals_the_dense_backward(way, options, launches, dtype=BF16):
    settings = dict(
        n=300, v=600, d=48, hidden_dtype=dtype, main_grad=False, wants_hidden=True, wants_weight=True,
        arena=1 << 18 if way.get("main_grad") or not way.get("wants_weight", True) else 0,
    )  # fmt: skip
    settings |= way
    n, d, v = settings["n"], settings["d"], settings["v"]
    problem = Problem(n, v, d, dtype, options)
    start = torch.randn(v, d) if settings["main_grad"] else torch.zeros(v, d)
    true_weight, true_bias = start.clone(), torch.ones(v)
    true_hidden = problem.truth(true_weight, true_bias)

    def run():
        d_hidden = torch.zeros(n, d, dtype=settings["hidden_dtype"]) if settings["wants_hidden"] else None
        d_weight = None
        if settings["wants_weight"]:
            d_weight = start.clone() if settings["main_grad"] else torch.full((v, d), torch.nan, dtype=dtype)
        d_bias = torch.ones(v)
        dense_stream(
            *problem.arguments(), **problem.common(), dense=torch.ones(1, dtype=torch.int32), hidden_grad=d_hidden,
            weight_grad=d_weight, accumulate=settings["main_grad"], bias_grad=d_bias,
            arena=torch.full((settings["arena"],), torch.nan),
        )  # fmt: skip
        return d_hidden, d_weight, d_bias

    d_hidden, d_weight, d_bias = results = run()
    assert len(launches) == settings["launches"], launches
    assert launches[0][2] == settings.get("width", launches[0][2])
    assert relative_error(d_bias, true_bias) < 2**-8
    if d_hidden is not None:  # rounded once, however many slices there are
        error = {BF16: 2**-9, FP16: 2**-11, FP32: 1e-5}[settings["hidden_dtype"]]
        assert relative_error(d_hidden, true_hidden) < error
    if d_weight is not None:
        assert relative_error(d_weight, true_weight) < 2**-8
    if options:  # slices depend on no address; that the order of sums does not depend on time only a GPU can show
        for first, again in zip(results, run(), strict=True):
            assert first is None or torch.equal(first, again)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_other_dtypes(dtype, launches):
    test_equals_the_dense_backward(dict(v=1500, launches=2 if dtype == FP16 else 1), True, launches, dtype)
    launches.clear()
    test_equals_the_dense_backward(dict(main_grad=True, launches=3), True, launches, dtype)


def test_wide_slices_come_first_and_end_where_their_ring_begins(launches):
    test_equals_the_dense_backward(THREE, True, launches)
    ((start, wide_stop), _, wide), (second, _, narrow), ((stop, end), _, _) = launches[:3]
    assert (wide, narrow) == (256, 128)
    assert start == 0 and second == (wide_stop, 4700) and end == 4700
    ring_columns, lower_columns = 2 * 256 * wide * 2 / (96 * 2), 200 * 96 * 2 / (96 * 2)
    assert 0 <= stop - wide_stop - ring_columns < 32 and 0 <= end - stop - lower_columns < 32
    assert wide_stop > 2 * wide and wide_stop % wide and end - wide_stop > 2 * narrow


@pytest.mark.parametrize("n_rows", [0, 1, 128, 200, 256, 300])
@pytest.mark.parametrize("weight", ["dE alone", "main_grad", "fresh"])
def test_rows_that_count_end_in_any_chunk(weight, n_rows):
    """Without any there is no dE, nothing is added, and a fresh dC is 0."""
    n, v, d = 300, 260, 32
    problem = Problem(n, v, d, BF16)
    problem.n_rows = torch.tensor([n_rows], dtype=torch.int32)
    problem.row_index = torch.randperm(n)
    true_weight = torch.zeros(v, d)
    true_hidden = problem.truth(true_weight, None)
    d_hidden, d_weight = torch.zeros(n, d, dtype=BF16), None
    if weight != "dE alone":
        d_weight = torch.zeros(v, d) if weight == "main_grad" else torch.full((v, d), torch.nan, dtype=BF16)
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.ones(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=weight == "main_grad", bias_grad=None,
        arena=torch.full((0 if weight == "fresh" else 1 << 16,), torch.nan),
    )  # fmt: skip
    counts = problem.row_index[:n_rows]
    rest = torch.ones(n, dtype=torch.bool)
    rest[counts] = False
    assert torch.all(d_hidden[rest] == 0)
    assert relative_error(d_hidden, true_hidden) < 2**-8 if n_rows else torch.all(d_hidden == 0)
    if d_weight is not None:
        assert relative_error(d_weight, true_weight) < 2**-8 if n_rows else torch.all(d_weight == 0)


@pytest.mark.parametrize("hidden_dtype", [BF16, FP32], ids=str)
def test_low_rank(hidden_dtype, launches):
    """dC belongs to the second product's weight, in one launch of its own; dE follows in chunks."""
    n, v, d, rank = 300, 400, 48, 12
    problem = Problem(n, v, d, BF16, options=True)
    low = LowRank(torch.randn(n, rank).to(BF16) / 4, torch.randn(v, rank).to(BF16) / 4)
    problem.head = Head(**{**vars(problem.head), "low_rank": low})
    start = torch.randn(v, rank)
    true_weight, true_bias, true_hidden, true_low = (
        start.clone(),
        torch.ones(v),
        torch.zeros(n, d),
        torch.zeros(n, rank),
    )
    dense_backward(
        *problem.arguments(), **problem.common(), hidden_grad=true_hidden, weight_grad=true_weight, accumulate=True,
        bias_grad=true_bias, hidden_grad_ready=lambda part: None, low_rank_grad=true_low,
    )  # fmt: skip
    d_hidden, d_low, d_bias = torch.zeros(n, d, dtype=hidden_dtype), torch.zeros(n, rank), torch.ones(v)
    d_weight = start.clone()
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.ones(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=True, bias_grad=d_bias, arena=torch.full((1 << 18,), torch.nan),
        low_rank_grad=d_low,
    )  # fmt: skip
    assert [rows for _, rows, _ in launches] == [(0, 300), (0, 128), (128, 256), (256, 300)]
    assert relative_error(d_hidden, true_hidden) < (2**-9 if hidden_dtype == BF16 else 1e-5)
    for ours, truth in ((d_weight, true_weight), (d_low, true_low), (d_bias, true_bias)):
        assert relative_error(ours, truth) < 1e-3


SHAPES = {  # (n, d, arena's MiB, accumulate), each launch's width of a slice, bytes allocated
    "fresh": ((8192, 2304, 20, False), [4096, 1024, 1024], 32 << 20),
    "fresh, small lower halves": ((8192, 512, 128, False), [3840], 0),
    "fresh, large lower halves": ((8192, 3072, 64, False), [4096, 2048, 2048], 0),
    "fresh, few tokens": ((2048, 2304, 20, False), [4096, 4096], 32 << 20),
    "main_grad": ((8192, 2304, 36, True), [3328] * 4, 0),
    "main_grad, a large arena": ((8192, 768, 128, True), [3584], 0),
    "main_grad, wide rows": ((8192, 4096, 36, True), [2560] * 4, 0),
    "main_grad, many tokens": ((65536, 2304, 36, True), [1024] * 16, 0),
}


@pytest.mark.parametrize("shape, widths, allocated", SHAPES.values(), ids=SHAPES)
def test_slices_and_memory_of_large_shapes(shape, widths, allocated, monkeypatch):
    """Only planned, on tensors without memory. Beside the counters one ring is allocated, or nothing."""
    monkeypatch.undo()
    (n, d, arena_mb, accumulate), v = shape, 256000
    found, sizes, empty = [], [], torch.empty

    def recorded_empty(*args, **kwargs):
        memory = empty(*args, **kwargs)
        sizes.append(memory.nbytes)
        return memory

    with torch.device("meta"):
        hidden, weight, per_row = empty(n, d, dtype=BF16), empty(v, d, dtype=BF16), empty(n)
        d_hidden, d_weight = empty(n, d, dtype=BF16), empty(v, d, dtype=FP32 if accumulate else BF16)
        arena = empty(arena_mb << 19, dtype=BF16)
        monkeypatch.setattr(torch, "empty", recorded_empty)
        monkeypatch.setattr(module._Stream, "__call__", lambda *args, **_: found.append(args[5].width))
        dense_stream(
            hidden, Head(weight), per_row, per_row, RowGradients(per_row, per_row),
            dense=per_row, n_rows=None, row_index=None, hidden_grad=d_hidden, weight_grad=d_weight,
            accumulate=accumulate, bias_grad=None, arena=arena,
        )  # fmt: skip
    assert found == widths
    counters = 4 * 17 * (1 + 3 * 500)
    assert sum(sizes) == counters + allocated


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_rows_shorter_than_the_alignment(d):
    """dE's lower halves begin at a multiple of 16 bytes in dC's storage, and the columns before them are dC's."""
    problem = Problem(3, 999, d, BF16)
    d_hidden, d_weight = torch.zeros(3, d, dtype=BF16), torch.zeros(999, d, dtype=BF16)
    true_weight = torch.zeros(999, d)
    problem.truth(true_weight, None)
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.ones(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=False, bias_grad=None, arena=torch.empty(0),
    )  # fmt: skip
    assert relative_error(d_weight, true_weight) < 2**-8


def test_nothing_is_touched_unless_the_device_says_so():
    problem = Problem(130, 300, 32, BF16)
    d_hidden, d_weight, d_bias = torch.ones(130, 32, dtype=BF16), torch.ones(300, 32, dtype=BF16), torch.ones(300)
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.zeros(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=False, bias_grad=d_bias, arena=torch.empty(0),
    )  # fmt: skip
    assert all(torch.all(out == 1) for out in (d_hidden, d_weight, d_bias))
