"""Shared by all tests: the folder on the path, poisoned `torch.empty`, and one thread where ranks are forked."""

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Memory that nobody wrote holds NaN instead of whatever made a test pass."""
    torch.use_deterministic_algorithms(False)
    fill, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
