"""The one-launch exact backward in Triton's interpreter, against `dense_backward` on the same problem."""

import pytest
import torch
import triton
from interpreter import prepare_kernels
from tolerance import relative_error

from vpcce.kernels import dense_stream as module
from vpcce.kernels.backward_dense import dense_backward
from vpcce.kernels.dense_stream import dense_stream
from vpcce.kernels.problem import Head, RowGradients

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def several_slices(monkeypatch):
    prepare_kernels(monkeypatch)
    monkeypatch.setattr(module, "RING_BYTES", 1)
    monkeypatch.setattr(module, "MIN_WIDTH", 128)


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


WAYS = {
    "dE is its own sum": dict(hidden_dtype=FP32),
    "lower halves where dC will be": dict(v=1500),
    "lower halves under nearly half of dC": dict(v=620),
    "few columns: lower halves in memory of their own": dict(v=100),
    "into main_grad": dict(main_grad=True),
    "into main_grad, no memory to spare": dict(main_grad=True, spare=0),
    "dE alone": dict(wants_weight=False),
    "dC alone": dict(wants_hidden=False),
    "dbias without dC": dict(wants_hidden=False, wants_weight=False),
}


@pytest.mark.parametrize("options", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_equals_the_dense_backward(way, options, dtype=BF16):
    settings = dict(v=600, hidden_dtype=dtype, main_grad=False, spare=1 << 18, wants_hidden=True, wants_weight=True)
    settings |= way
    n, d, v = 300, 48, settings["v"]
    problem = Problem(n, v, d, dtype, options)
    start = torch.randn(v, d) if settings["main_grad"] else torch.zeros(v, d)
    true_weight, true_bias = start.clone(), torch.ones(v)
    true_hidden = problem.truth(true_weight, true_bias)

    d_hidden = torch.zeros(n, d, dtype=settings["hidden_dtype"]) if settings["wants_hidden"] else None
    d_weight = None
    if settings["wants_weight"]:
        d_weight = start.clone() if settings["main_grad"] else torch.full((v, d), torch.nan, dtype=dtype)
    d_bias = torch.ones(v)
    fresh = settings["wants_weight"] and not settings["main_grad"]
    spare = d_weight if fresh else torch.full((settings["spare"],), torch.nan)
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.ones(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=settings["main_grad"], bias_grad=d_bias, spare=spare,
    )  # fmt: skip
    assert relative_error(d_bias, true_bias) < 1e-3
    if d_hidden is not None:  # rounded once, however many slices there are
        error = {BF16: 2**-9, FP16: 2**-11, FP32: 1e-5}[settings["hidden_dtype"]]
        assert relative_error(d_hidden, true_hidden) < error
    if d_weight is not None:
        assert relative_error(d_weight, true_weight) < 2**-8


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_other_dtypes(dtype):
    test_equals_the_dense_backward(dict(v=1500), True, dtype)


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_rows_shorter_than_the_alignment(d):
    """dE's lower halves begin at a multiple of 16 bytes in dC's storage, and the columns before them are dC's."""
    problem = Problem(3, 999, d, BF16)
    d_hidden, d_weight = torch.zeros(3, d, dtype=BF16), torch.zeros(999, d, dtype=BF16)
    true_weight = torch.zeros(999, d)
    problem.truth(true_weight, None)
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.ones(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=False, bias_grad=None, spare=d_weight,
    )  # fmt: skip
    assert relative_error(d_weight, true_weight) < 2**-8


def test_nothing_is_touched_unless_the_device_says_so():
    problem = Problem(130, 300, 32, BF16)
    d_hidden, d_weight, d_bias = torch.ones(130, 32, dtype=BF16), torch.ones(300, 32, dtype=BF16), torch.ones(300)
    dense_stream(
        *problem.arguments(), **problem.common(), dense=torch.zeros(1, dtype=torch.int32), hidden_grad=d_hidden,
        weight_grad=d_weight, accumulate=False, bias_grad=d_bias, spare=d_weight,
    )  # fmt: skip
    assert all(torch.all(out == 1) for out in (d_hidden, d_weight, d_bias))
