"""Weighted sums of rows in Triton's interpreter against fp64, and bitwise where a repetition is promised."""

import pytest
import torch
import triton
from interpreter import mend_bf16, poison_empty

from vpcce.kernels.problem import Head
from vpcce.kernels.row_sum import row_sum
from vpcce.row_terms import linear_logit_sum

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
ROUNDINGS = 1e-6  # of fp32 sums over a thousand rows, relative to the sum of sizes


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    mend_bf16(monkeypatch)
    poison_empty(monkeypatch)


def assert_is_sum(got, matrix, share):
    terms = matrix.double() if share is None else matrix.double() * share.double()[:, None]
    assert got.dtype == torch.float32
    assert torch.all((got.double() - terms.sum(0)).abs() <= ROUNDINGS * terms.abs().sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n, d", [(1, 1), (33, 129), (512, 16), (1100, 123)])
def test_sum(n, d, weighted, dtype):
    """One part, exactly one, and three; blocks of columns that are partly empty."""
    matrix, share = torch.randn(n, d).to(dtype), torch.rand(n) if weighted else None
    got = row_sum(matrix, share)
    assert_is_sum(got, matrix, share)
    assert torch.equal(got, row_sum(matrix, share))
    half = d // 2 + 1
    assert torch.equal(got[:half], row_sum(matrix[:, :half], share)), "a column does not know its neighbours"


def test_strides():
    """Bitwise: the same numbers take the same way."""
    matrix = torch.randn(600, 40)
    expected = row_sum(matrix)
    assert torch.equal(row_sum(matrix.T.contiguous().T), expected)
    wide = torch.full((600, 50), torch.nan)
    wide[:, 3:43] = matrix
    assert torch.equal(row_sum(wide[:, 3:43]), expected)


@pytest.mark.parametrize("n_rows", [0, 1, 512, 700, 1100])
def test_rows_that_do_not_count_hold_anything(n_rows):
    """A factor and what is added to, too."""
    matrix, share = torch.randn(1100, 20), torch.rand(1100)
    matrix[n_rows:] = share[n_rows:] = torch.nan
    count, factor, out = torch.tensor([n_rows], dtype=torch.int32), torch.tensor(0.5), torch.ones(20)
    expected = 1 + 0.5 * (share[:n_rows].double() @ matrix[:n_rows].double())
    assert row_sum(matrix, share, n_rows=count, factor=factor, out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_rows():
    assert torch.equal(row_sum(torch.ones(0, 7)), torch.zeros(7))


@pytest.mark.parametrize("weighted", [False, True])
def test_sum_of_logits(weighted):
    """The kernels' and PyTorch's: a bias, a scale, class weights."""
    tokens, weight, bias = torch.randn(9, 24), torch.randn(700, 24), torch.randn(700)
    share = torch.rand(700) if weighted else None
    head = Head(weight, bias, 0.7, column_weight=share)
    logits = 0.7 * (tokens.double() @ weight.double().T + bias.double())
    expected = (logits if share is None else logits * share.double()).sum(1)
    for by_kernels in (True, False):
        got, weight_sum = linear_logit_sum(tokens, head, by_kernels)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
        assert_is_sum(weight_sum, weight, share)
