"""How much the host does for one loss: PyTorch operations and kernel launches, each 2 to 20 us of a training step.

The launches are recorded instead of run (`aot.py`) and the operators' functions called without the dispatcher, so that
a dispatch mode sees what they do inside. Contents are meaningless; only what is dispatched counts, allocations and
views included.
"""

from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from aot import recorded_launches
from torch.utils._python_dispatch import TorchDispatchMode

import vpcce
from vpcce import autograd, operators, tokens

BF16 = torch.bfloat16
EXACT, SAMPLED = vpcce.exact(), vpcce.sampled()


class Dispatched(TorchDispatchMode):
    """Lists the names of all PyTorch operations."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        # Nobody has written what these two read.
        if func.overloadpacket is torch.ops.aten._assert_async:
            return None
        if func.overloadpacket is torch.ops.aten.scatter_add_:
            return args[0]
        return func(*args, **(kwargs or {}))


def host_work(step) -> list[tuple[Counter, list[str]]]:
    """For each part that `step` yields after: PyTorch operations, and the kernels launched."""
    found = []
    with ExitStack() as stack:
        launches = stack.enter_context(recorded_launches("sm90"))
        stack.enter_context(mock.patch.object(tokens, "_interpreting", lambda: True))
        stack.enter_context(mock.patch.object(autograd, "head_stats_op", operators._forward))
        stack.enter_context(mock.patch.object(autograd, "head_stats_backward_op", operators._backward))
        parts = step()
        while True:
            launches.clear()
            with Dispatched() as seen:
                done = next(parts, None) is None
            if done:
                return found
            found.append((Counter(seen.names), [kernel.__name__ for kernel, _, _ in launches]))


def training_step(n=512, v=1024, d=256, backward=EXACT, **options):
    hidden = torch.randn(n, d).to(BF16).requires_grad_()
    weight = torch.randn(v, d).to(BF16).requires_grad_()
    target, upstream = torch.randint(0, v, (n,)), torch.ones(())

    def step():
        loss = vpcce.linear_cross_entropy(hidden, weight, target, backward=backward, **options)
        yield "forward"
        torch.autograd.grad(loss, (hidden, weight), upstream)
        yield "backward"

    return step


# ignore_index: PyTorch operations forward, backward (3 and 4 of them for the matrix products' own memory); and the
# kernels that put tokens in order, each launched once in both directions.
CEILINGS = {-100: (15, 18, ["select_rows_kernel", "take_rows_kernel"]), None: (12, 15, ["select_rows_kernel"])}


@pytest.mark.parametrize("ignore_index", CEILINGS)
def test_a_mean_on_one_rank(ignore_index):
    """Nothing is compacted, gathered or copied where no token can be ignored."""
    (forward, first), (backward, second) = host_work(training_step(ignore_index=ignore_index))
    most_forward, most_backward, small = CEILINGS[ignore_index]
    assert Counter(first) == Counter(
        [*small, "forward_kernel", "merge_splits_kernel", "target_logit_kernel", "merge_ranks_kernel"]
    )
    assert Counter(second) == Counter([*small, "row_gradients_kernel", "gradient_kernel", *2 * ["products_kernel"]])
    assert forward.total() <= most_forward, forward
    assert backward.total() <= most_backward, backward


def test_a_slice_of_the_backward_costs_three_views():
    sizes = [host_work(training_step(n=2048, v=v))[1] for v in (1024, 65536)]
    slices = [launches.count("gradient_kernel") for _, launches in sizes]
    assert slices[0] == 1 and slices[1] > 3, slices
    (few, _), (many, _) = sizes
    assert many.total() - few.total() <= 3 * slices[1] + 1, many


def test_a_sampled_mean():
    """Forward only: the packed backward plans its own work. Some find the frequent targets."""
    forward, launches = host_work(training_step(backward=SAMPLED))[0]
    assert forward.total() <= 38, forward  # 3 of them for the fp64 product of a CPU
    assert len(launches) == 10, launches


def test_label_smoothing_reads_the_weight_once_more():
    """Its rows are summed in the forward, those of hidden in the backward, two launches each."""
    for _, launches in host_work(training_step(backward=SAMPLED, label_smoothing=0.1)):
        assert launches.count("part_sums_kernel") - launches.count("mean_of_parts_kernel") == 1, launches
        assert launches.count("add_parts_kernel") == 1, launches
    for options in (dict(label_smoothing=0.1, softcap=30.0), dict()):
        for _, launches in host_work(training_step(backward=SAMPLED, **options)):
            assert "add_parts_kernel" not in launches


def test_a_buffer_that_a_kernel_adds_to_has_a_new_version():
    """Autograd refuses a stale saved tensor by it; no PyTorch operation touches main_grad here."""
    hidden, weight = torch.randn(128, 64, dtype=BF16), torch.randn(256, 64, dtype=BF16, requires_grad=True)
    buffer = torch.zeros(256, 64)

    def step():
        loss = vpcce.linear_cross_entropy(hidden, weight, torch.zeros(128).long(), backward=EXACT, main_grad=buffer)
        yield "forward"
        loss.backward()
        yield "backward"

    host_work(step)
    assert buffer._version == 1 and weight.grad is None
