"""factor * (share @ matrix): a weighted sum of a matrix' rows in fp32, at the speed of memory.

dbias sums the rows that row blocks of G leave, label smoothing those of the weight and of hidden. A sum has few columns
and many rows, so rows are split too: each part of PART_ROWS is summed by a program of its own, the parts are added by a
second launch in their order. No atomics: a column's sum is bitwise repeatable and the same however many columns stand
beside it.

    launch 1    parts[i] = share[i * PART_ROWS : ...] @ matrix[i * PART_ROWS : ...]     [parts, D] fp32
    launch 2    out = factor * (parts[0] + parts[1] + ...), or out += that

Example: 256000 x 2304 in bf16 are 500 parts x 9 blocks of 256 columns, 4500 programs that read 1.2 GB once. The parts
take 1 / 256 of the matrix in half precision, 4.6 MB here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import ceil_div, count_rows

PART_ROWS = 512
MEAN_PART_ROWS = 128  # few rows are summed: 0.065 ms for 32768 x 2304 on an H200, 0.09 in the parts of the others


@triton.jit
def part_sums_kernel(
    matrix_ptr,  # [N, D]
    share_ptr,  # [N] or None
    n_rows_ptr,  # [1] int32 or None
    parts_ptr,  # [parts, D] fp32 out
    n,
    d,
    stride_row,
    stride_col,
    PART_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_blocks = tl.cdiv(d, BLOCK_N)
    part = tl.program_id(0) // n_blocks
    columns = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < d
    first = part * PART_ROWS
    last = tl.minimum(first + PART_ROWS, count_rows(n, n_rows_ptr))
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(first, last, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        counts = rows < last
        at = rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_col
        x = tl.load(matrix_ptr + at, mask=counts[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if share_ptr is not None:
            x *= tl.load(share_ptr + rows, mask=counts, other=0.0).to(tl.float32)[:, None]
        acc += x
    tl.store(parts_ptr + part.to(tl.int64) * d + columns, tl.sum(acc, 0), mask=inside)


@triton.jit
def _added(parts_ptr, columns, inside, n_parts, d, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N]: some columns of the parts, added."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in range(0, n_parts, BLOCK_M):
        parts = part + tl.arange(0, BLOCK_M)
        at = parts.to(tl.int64)[:, None] * d + columns[None, :]
        acc += tl.load(parts_ptr + at, mask=(parts < n_parts)[:, None] & inside[None, :], other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def add_parts_kernel(
    parts_ptr,  # [parts, D] fp32
    factor_ptr,  # [] fp32 or None
    out_ptr,  # [D] fp32
    n_parts,
    d,
    ADD: tl.constexpr,  # to what out holds
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < d
    total = _added(parts_ptr, columns, inside, n_parts, d, BLOCK_M, BLOCK_N)
    if factor_ptr is not None:
        total *= tl.load(factor_ptr)
    if ADD:
        total += tl.load(out_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + columns, total, mask=inside)


@triton.jit
def mean_of_parts_kernel(
    parts_ptr,  # [parts, D] fp32
    out_ptr,  # [2, D] out, see `write_mean_row`
    n_parts,
    d,
    count,  # rows that were summed
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < d
    mean = _added(parts_ptr, columns, inside, n_parts, d, BLOCK_M, BLOCK_N) / count
    rounded = mean.to(out_ptr.dtype.element_ty)
    rest = tl.where(tl.abs(mean) < float("inf"), mean - rounded.to(tl.float32), 0.0)
    tl.store(out_ptr + columns, rounded, mask=inside)
    tl.store(out_ptr + d + columns, rest.to(out_ptr.dtype.element_ty), mask=inside)


def mean_parts(matrix: Tensor) -> Tensor:
    """Memory for `write_mean_row`."""
    return _parts(matrix, MEAN_PART_ROWS)


def write_mean_row(matrix: Tensor, parts: Tensor, out: Tensor) -> None:
    """out[0] + out[1] = matrix.float().mean(0), [2, D] contiguous: the mean rounded, and what that leaves, rounded."""
    n, d = matrix.shape
    with torch.cuda.device_of(matrix):
        _sum_parts(matrix, None, None, parts, PART_ROWS=MEAN_PART_ROWS, BLOCK_M=16, num_warps=4)
        mean_of_parts_kernel[(ceil_div(d, 64),)](parts, out, len(parts), d, n, BLOCK_M=32, BLOCK_N=64, num_warps=4)


def _parts(matrix: Tensor, part_rows: int) -> Tensor:
    n, d = matrix.shape
    return torch.empty(max(1, ceil_div(n, part_rows)), d, dtype=torch.float32, device=matrix.device)


def _sum_parts(matrix: Tensor, share: Tensor | None, n_rows: Tensor | None, parts: Tensor, **launch) -> None:
    n, d = matrix.shape
    part_sums_kernel[(len(parts) * ceil_div(d, 256),)](
        matrix, share, n_rows, parts, n, d, *matrix.stride(), BLOCK_N=256, **launch
    )


def row_sum(
    matrix: Tensor,  # [N, D], any strides
    share: Tensor | None = None,  # [N] contiguous; None is 1
    *,
    n_rows: Tensor | None = None,  # [1] int32 on the device: rows beyond may hold anything
    factor: Tensor | None = None,  # [] fp32
    out: Tensor | None = None,  # [D] fp32, added to
) -> Tensor:
    """[D] fp32: factor * (share[:n_rows] @ matrix[:n_rows].float()), in two launches."""
    n, d = matrix.shape
    parts = _parts(matrix, PART_ROWS)
    total = torch.empty(d, dtype=torch.float32, device=matrix.device) if out is None else out
    with torch.cuda.device_of(matrix):
        _sum_parts(matrix, share, n_rows, parts, PART_ROWS=PART_ROWS, BLOCK_M=32, num_warps=8)
        add_parts_kernel[(ceil_div(d, 64),)](
            parts, factor, total, len(parts), d, ADD=out is not None, BLOCK_M=32, BLOCK_N=64, num_warps=4
        )
    return total
