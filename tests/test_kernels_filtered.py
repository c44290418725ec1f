"""The filter in Triton's interpreter drops the tiles that the reference drops, in vocabulary order and sorted."""

import pytest
import torch
import triton

from vpcce import reference
from vpcce.kernels import local
from vpcce.kernels.problem import Head, RowGradients
from vpcce.policy import exact, filtered

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_filtered(sort, main_grad):
    """Three row blocks and six tiles of columns; only the first row block has targets, so most tiles are dropped."""
    n, v, d = 300, 700, 64
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g)
    weight, bias = 3 * torch.randn(v, d, generator=g) / 8, torch.randn(v, generator=g)
    target = torch.randint(0, 100, (n,), generator=g)
    target[5:] = -1
    head = Head(weight, bias, 1.1, start=50)
    lse = ((hidden @ weight.T + bias) * 1.1).logsumexp(1)
    rows = RowGradients(torch.rand(n, generator=g) / n, -torch.rand(n, generator=g) / n)

    def run(backend, policy, total=None):
        results = backend.local_backward(
            hidden, head, target, lse, rows, hidden_policy=policy, weight_policy=policy, bias_grad=True,
            main_grad=total, hidden_grad_dtype=torch.float32, hidden_grad_ready=lambda grad: None,
        )  # fmt: skip
        return results if total is None else (results[0], total - 1, results[2])

    policy = filtered(0.9, sort=sort)
    total = torch.ones(v, d) if main_grad else None
    ours, truth = run(local, policy, total), run(reference, policy)
    for part, reference_part in zip(ours, truth, strict=True):
        assert ((part - reference_part).norm() / reference_part.norm()).item() < (1e-3 if main_grad else 5e-6)
    everything = run(reference, exact())
    assert (truth[1] - everything[1]).norm() > 0.5 * everything[1].norm()
