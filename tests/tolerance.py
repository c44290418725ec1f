"""How close is close: never further from fp64 truth than k times the plain PyTorch result in the same dtype.

An absolute tolerance larger than a gradient proves nothing, so errors are relative norms, and the rows of dC that
were targets are judged apart from those that never were: the latter are 10^4 times smaller and would drown.
"""

import torch
from torch import Tensor


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in fp64; NaN never passes."""
    assert value.shape == truth.shape, (value.shape, truth.shape)
    value, truth = value.double(), truth.double()
    norm = truth.norm().item()
    error = (value - truth).norm().item() / norm if norm else value.norm().item()
    assert error == error, "NaN in a result"
    return error


def assert_as_good_as(value: Tensor, yardstick: Tensor, truth: Tensor, k: float = 1.1, floor: float = 0.0) -> None:
    """The error of `value` is at most k times that of `yardstick` (and never judged below `floor`)."""
    ours, theirs = relative_error(value, truth), relative_error(yardstick, truth)
    assert ours <= max(k * theirs, floor), f"error {ours:.3e}, PyTorch in the same dtype {theirs:.3e}, allowed x{k}"


def assert_weight_grad_as_good_as(
    value: Tensor, yardstick: Tensor, truth: Tensor, target: Tensor, k: float = 1.1, floor: float = 0.0
) -> None:
    """`assert_as_good_as` for rows of dC that were targets and for rows that never were, apart."""
    was_target = torch.zeros(value.shape[0], dtype=torch.bool, device=value.device)
    was_target[target[target >= 0].flatten()] = True
    for rows in (was_target, ~was_target):
        if rows.any():
            assert_as_good_as(value[rows], yardstick[rows], truth[rows], k, floor)
