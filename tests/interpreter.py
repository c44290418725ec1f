"""What kernel tests need of Triton's interpreter: right bf16, small tiles, memory that holds NaN until it is written.

The interpreter keeps a bf16 number as the uint16 with its bits. Loads, stores and casts to fp32 know that; products,
arithmetic and comparisons act on the integers, and a cast from fp32 truncates. Here bf16 operands are widened before
an operation and its bf16 result is rounded to nearest even, which is what a GPU does.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from vpcce.kernels import backward_dense, launch_table, slices
from vpcce.kernels.tiles import Tile

COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}
# The interpreter takes about 2 ms a step whatever the tile holds; row blocks are 128 everywhere.
SMALL = Tile(128, 128, 64, 4, 1)


def mend_bf16(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter compute bf16 as a GPU does, until `patch` is undone."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    binary, unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
    ternary = InterpreterBuilder.ternary_op

    def create_dot(self, a, b, acc, *args):
        return dot(self, _widened(a), _widened(b), acc, *args)

    def cast_impl(self, source, dtype):
        if dtype.scalar == tl.bfloat16:
            return source if _is_bf16(source) else _rounded(source)
        return cast(self, _widened(source), dtype)

    def binary_op(self, left, right, op):
        if op in BITWISE or not _is_bf16(left):
            return binary(self, left, right, op)
        result = binary(self, _widened(left), _widened(right), op)
        return result if op in COMPARISONS else _rounded(result)

    def unary_op(self, operand, op):
        return _rounded(unary(self, _widened(operand), op)) if _is_bf16(operand) else unary(self, operand, op)

    def ternary_op(self, first, second, third, op):
        if op is np.where or not _is_bf16(third):
            return ternary(self, first, second, third, op)
        return _rounded(ternary(self, _widened(first), _widened(second), _widened(third), op))

    for method in (create_dot, cast_impl, binary_op, unary_op, ternary_op):
        patch.setattr(InterpreterBuilder, method.__name__, method)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: TensorHandle) -> TensorHandle:
    if not _is_bf16(handle):
        return handle
    return TensorHandle((np.ascontiguousarray(handle.data).astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(handle: TensorHandle) -> TensorHandle:
    """Any number -> bf16 bits, to nearest, ties to even."""
    wide = np.ascontiguousarray(handle.data, dtype=np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(wide), np.uint16(0x7FC0), rounded), tl.bfloat16)


def shrink_tiles(patch: pytest.MonkeyPatch, tile: Tile = SMALL) -> None:
    """Every kernel of the launch table runs with `tile`, so that small shapes have several and partly empty ones."""
    for row in launch_table.TABLE:
        patch.setitem(launch_table.TABLE, row, dict.fromkeys(("forward", "gradient", "product"), tile))


def poison_empty(patch: pytest.MonkeyPatch) -> None:
    """`torch.empty` holds NaN (the largest integer), so that a number nobody wrote shows in a result."""
    patch.setattr(torch, "empty", _poisoned(torch.empty))
    patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    patch.setattr(torch, "empty_strided", _poisoned(torch.empty_strided))


def _poisoned(make: Callable) -> Callable:
    def poisoned(*args, **kwargs):
        memory = make(*args, **kwargs)
        if memory.is_floating_point():
            return memory.fill_(torch.nan)
        return memory if memory.dtype == torch.bool else memory.fill_(torch.iinfo(memory.dtype).max)

    return poisoned


def prepare_kernels(patch: pytest.MonkeyPatch) -> None:
    """All of the above: what a fixture of a kernel test calls."""
    mend_bf16(patch)
    shrink_tiles(patch)
    poison_empty(patch)


def never_a_larger_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact backward's slices are as narrow as WORKSPACE_BYTES makes them, however slow that is."""
    monkeypatch.setattr(slices, "WORTH", float("inf"))
    monkeypatch.setattr(backward_dense, "plan_slices", slices.plan_slices.__wrapped__)  # remembers no other plan
