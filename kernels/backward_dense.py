"""The exact backward: G for a slice of the vocabulary at a time, and two matrix products on it.

    gradient   recomputes the logits of a slice and stores G, [N, width] in the operands' dtype     1 product
    product    dC[slice] = G.T @ hidden, rounded once                                               1 product
    product    dE += G @ weight[slice], in fp32 over all slices, rounded once                       1 product

G is the only workspace, bounded by WORKSPACE_BYTES. p - onehot is formed in fp32 before G is rounded: rounding p first
would lose a confident target's gradient altogether. No atomics: every result is bitwise repeatable.

Two numbers live on the device and are read by every kernel: how many rows count (row blocks of ignored tokens are
skipped, and dC's product ends there), and, where this is the fallback of the sampled backward, whether to run at all.

The last slice computes dE first, so that its collective runs under the remaining product of dC.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_table import launch_parameters
from .problem import Head, HiddenGradReady, RowGradients
from .tiles import (
    LOG2E,
    TL_DTYPE,
    Source,
    Tile,
    compute_dtype,
    count_rows,
    gradient_unit,
    load_scale,
    load_tile,
    logits_of,
    multiprocessors,
    scale_tensor,
)

WORKSPACE_BYTES = 64 << 20  # G of one slice


@triton.jit
def gradient_kernel(
    hidden,  # [N, D] descriptor or pointer
    weight,  # [width, D] descriptor or pointer, from the slice's first row
    bias_ptr,  # [width] or None
    scale_ptr,  # [] fp32 or None
    column_weight_ptr,  # [width] or None
    target_ptr,  # [N] int64, rows of the whole shard
    lse_ptr,  # [N]
    softmax_ptr,  # [N]
    target_grad_ptr,  # [N]
    softmax_logit_ptr,  # [N] or None
    constant_ptr,  # [N] or None
    unit_ptr,  # [] or None
    n_rows_ptr,  # [1] int32 or None
    predicate_ptr,  # [1] int32 or None
    grad_ptr,  # [N, width] out
    n,
    width,
    first_column,
    stride_hidden_row,
    stride_hidden_col,
    stride_weight_row,
    stride_weight_col,
    stride_grad,
    softcap,
    programs,
    D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if predicate_ptr is not None:
        if tl.load(predicate_ptr) == 0:
            return
    n_counting = count_rows(n, n_rows_ptr)
    scale = load_scale(scale_ptr)
    factor = 1.0 if scale is None else scale
    if unit_ptr is not None:
        factor = factor / tl.load(unit_ptr)
    n_blocks = tl.cdiv(n_counting, BLOCK_M)
    for item in tl.range(tl.program_id(0), n_blocks * tl.cdiv(width, BLOCK_N), programs, flatten=True):
        row = (item % n_blocks) * BLOCK_M
        column = (item // n_blocks) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            h = load_tile(hidden, row, k, n, D, stride_hidden_row, stride_hidden_col, BLOCK_M, BLOCK_K, TMA_HIDDEN)
            w = load_tile(weight, column, k, width, D, stride_weight_row, stride_weight_col, BLOCK_N, BLOCK_K, TMA_WEIGHT)
            acc = tl.dot(h.to(DTYPE), w.to(DTYPE).T, acc, input_precision=PRECISION)
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        counts = rows < n_counting
        inside = columns < width
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = logits_of(acc, bias, scale, softcap, HAS_SOFTCAP)
        lse = tl.load(lse_ptr + rows, mask=counts, other=float("inf")) * LOG2E
        target = tl.load(target_ptr + rows, mask=counts, other=-1) - first_column
        per_row = tl.load(softmax_ptr + rows, mask=counts, other=0.0)[:, None]
        p = tl.exp2(x * LOG2E - lse[:, None])
        if softmax_logit_ptr is not None:
            slope = tl.load(softmax_logit_ptr + rows, mask=counts, other=0.0)
            per_row = per_row + slope[:, None] * tl.where(p > 0.0, x, 0.0)
        target_grad = tl.load(target_grad_ptr + rows, mask=counts, other=0.0)
        g = p * per_row + tl.where(target[:, None] == columns[None, :], target_grad[:, None], 0.0)
        if constant_ptr is not None:
            constant = tl.load(constant_ptr + rows, mask=counts, other=0.0)[:, None]
            if column_weight_ptr is not None:
                constant = constant * tl.load(column_weight_ptr + columns, mask=inside, other=0.0)[None, :]
            g += constant
        if HAS_SOFTCAP:
            ratio = x / softcap
            g *= 1.0 - ratio * ratio
        g = tl.where(counts[:, None], g * factor, 0.0)
        at = rows.to(tl.int64)[:, None] * stride_grad + columns[None, :]
        tl.store(grad_ptr + at, g.to(DTYPE), mask=(rows < n)[:, None] & inside[None, :])


@triton.jit
def product_kernel(
    grad,  # [N, width] descriptor or pointer
    factor,  # [N, D] hidden, or [width, D] weight: descriptor or pointer
    base_ptr,  # what the product is added to, in out's shape, or None
    out_ptr,  # [width, D] dC, or [N, D] dE
    unit_ptr,  # [] or None
    n_rows_ptr,  # [1] int32 or None
    predicate_ptr,  # [1] int32 or None
    n,
    width,
    n_factor_rows,
    stride_grad,
    stride_factor_row,
    stride_factor_col,
    programs,
    D: tl.constexpr,
    FOR_WEIGHT: tl.constexpr,  # dC = grad.T @ hidden, else dE = grad @ weight
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_GRAD: tl.constexpr,
    TMA_FACTOR: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if predicate_ptr is not None:
        if tl.load(predicate_ptr) == 0:
            return
    n_counting = count_rows(n, n_rows_ptr)
    if FOR_WEIGHT:
        n_out, depth = width, n_counting
    else:
        n_out, depth = n_counting, width
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
    n_blocks = tl.cdiv(n_out, BLOCK_M)
    for item in tl.range(tl.program_id(0), n_blocks * tl.cdiv(D, BLOCK_N), programs):
        row = (item % n_blocks) * BLOCK_M
        column = (item // n_blocks) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, depth, BLOCK_K):
            if FOR_WEIGHT:
                g = load_tile(grad, k, row, n_counting, width, stride_grad, 1, BLOCK_K, BLOCK_M, TMA_GRAD).T
            else:
                g = load_tile(grad, row, k, n_counting, width, stride_grad, 1, BLOCK_M, BLOCK_K, TMA_GRAD)
            f = load_tile(
                factor, k, column, n_factor_rows, D, stride_factor_row, stride_factor_col, BLOCK_K, BLOCK_N, TMA_FACTOR
            )
            acc = tl.dot(g, f.to(DTYPE), acc, input_precision=PRECISION)
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        mask = (rows < n_out)[:, None] & (columns < D)[None, :]
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]
        if unit_ptr is not None:
            acc *= unit
        if base_ptr is not None:
            acc += tl.load(base_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def column_sum_kernel(
    grad_ptr,  # [N, width]
    out_ptr,  # [width] fp32, added to
    unit_ptr,  # [] or None
    n_rows_ptr,  # [1] int32 or None
    predicate_ptr,  # [1] int32 or None
    n,
    width,
    stride_grad,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if predicate_ptr is not None:
        if tl.load(predicate_ptr) == 0:
            return
    n_counting = count_rows(n, n_rows_ptr)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for row in range(0, n_counting, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        at = rows.to(tl.int64)[:, None] * stride_grad + columns[None, :]
        g = tl.load(grad_ptr + at, mask=(rows < n_counting)[:, None] & (columns < width)[None, :], other=0.0)
        total += tl.sum(g.to(tl.float32), 0)
    if unit_ptr is not None:
        total *= tl.load(unit_ptr)
    total += tl.load(out_ptr + columns, mask=columns < width, other=0.0)
    tl.store(out_ptr + columns, total, mask=columns < width)


def slice_width(n: int, n_columns: int, dtype: torch.dtype, tile: Tile) -> int:
    """Columns of one slice: as many as the workspace holds, whole tiles of every kernel."""
    step = max(tile.block_m, tile.block_n)
    most = WORKSPACE_BYTES // (max(n, 1) * dtype.itemsize) // step * step
    return min(max(most, step), triton.cdiv(n_columns, step) * step)


def dense_backward(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] int64, local rows, -1 for elsewhere
    lse: Tensor,  # [N]
    rows: RowGradients,
    *,
    n_rows: Tensor | None,
    hidden_grad: Tensor | None,  # [N, D] out
    weight_grad: Tensor | None,  # [V, D] out, or added to with accumulate
    accumulate: bool,
    bias_grad: Tensor | None,  # [V] fp32, added to
    hidden_grad_ready: HiddenGradReady,
    predicate: Tensor | None = None,  # [1] int32 on the device: 0 leaves everything untouched
    tiles: tuple[Tile, Tile] | None = None,
    width: int | None = None,
) -> None:
    """Writes dE, writes or adds dC, adds dbias; `tiles` (gradient, product) and `width` override the launch table.

    Outputs are contiguous. Rows of dE that do not count keep what they held: pass zeros. A dE of more than one slice
    is summed in an fp32 buffer, where it is not fp32 itself.
    """
    n, d = hidden.shape
    n_columns = head.weight.shape[0]
    dtype = compute_dtype(hidden, head)
    device = hidden.device
    for_gradient, for_product = tiles or (
        launch_parameters("gradient", device, dtype),
        launch_parameters("product", device, dtype),
    )
    width = width or slice_width(n, n_columns, dtype, for_gradient)
    total = hidden_grad
    if hidden_grad is not None and hidden_grad.dtype != torch.float32 and n_columns > width:
        total = torch.empty(n, d, dtype=torch.float32, device=device)
    if n and n_columns:
        grad = torch.empty(n, width, dtype=dtype, device=device)
        unit = gradient_unit(rows, dtype)
        programs = multiprocessors(device)
        for start in range(0, n_columns, width):
            stop = min(start + width, n_columns)
            h = Source(hidden, for_gradient.block_m, for_gradient.block_k)
            w = Source(head.weight[start:stop], for_gradient.block_n, for_gradient.block_k)
            gradient_kernel[(programs,)](
                h.source, w.source, _part(head.bias, start, stop), scale_tensor(head), _part(head.column_weight, start, stop),
                target, lse, rows.softmax, rows.target, rows.softmax_logit, rows.constant, unit, n_rows, predicate, grad,
                n, stop - start, start, h.stride_row, h.stride_col, w.stride_row, w.stride_col, width,
                head.softcap or 1.0, programs,
                D=d, HAS_SOFTCAP=head.softcap is not None, BLOCK_M=for_gradient.block_m, BLOCK_N=for_gradient.block_n,
                BLOCK_K=for_gradient.block_k, TMA_HIDDEN=h.tma, TMA_WEIGHT=w.tma, DTYPE=TL_DTYPE[dtype],
                PRECISION="ieee", num_warps=for_gradient.num_warps, num_stages=for_gradient.num_stages,
            )  # fmt: skip

            def product(base, out, factor, for_weight, columns=stop - start):
                t = for_product
                g = Source(grad[:, :columns], *((t.block_k, t.block_m) if for_weight else (t.block_m, t.block_k)))
                f = Source(factor, t.block_k, t.block_n)
                product_kernel[(programs,)](
                    g.source, f.source, base, out, unit, n_rows, predicate, n, columns, factor.shape[0],
                    grad.stride(0), f.stride_row, f.stride_col, programs,
                    D=d, FOR_WEIGHT=for_weight, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, TMA_GRAD=g.tma, TMA_FACTOR=f.tma, DTYPE=TL_DTYPE[dtype], PRECISION="ieee",
                    num_warps=t.num_warps, num_stages=t.num_stages,
                )  # fmt: skip

            if bias_grad is not None:
                column_sum_kernel[(triton.cdiv(stop - start, 64),)](
                    grad, bias_grad[start:stop], unit, n_rows, predicate, n, stop - start, width, BLOCK_M=64, BLOCK_N=64
                )
            if hidden_grad is not None:
                last = stop == n_columns
                base = None if start == 0 else total
                product(base, hidden_grad if last else total, head.weight[start:stop], for_weight=False)
                if last:
                    hidden_grad_ready(hidden_grad)
            if weight_grad is not None:
                part = weight_grad[start:stop]
                product(part if accumulate else None, part, hidden, for_weight=True)
    elif hidden_grad is not None:
        hidden_grad_ready(hidden_grad)


def _part(per_column: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if per_column is None else per_column[start:stop]
