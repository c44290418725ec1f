"""Shared by all tests: the folder on the path, poisoned `torch.empty`, and one thread where ranks are forked."""

import os

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Memory that nobody wrote holds NaN instead of whatever made a test pass; torch fills it in this mode only.

    Not on a GPU, where the mode would change what is tested.
    """
    if torch.cuda.is_available():
        yield
        return
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
