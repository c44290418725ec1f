"""The exact backward: G for a slice of the vocabulary at a time, and two matrix products on it.

    gradient   recomputes the logits of a slice and stores G, [N, width] in the operands' dtype     1 product
    product    dC[slice] = G.T @ hidden, rounded once                                               1 product
    product    dE += G @ weight[slice], in fp32 over all slices, rounded once                       1 product

G is the only workspace. While dC is being made, the part of its storage that no slice has reached yet is free: G lies
at its end, so that early slices are wide and few, and WORKSPACE_BYTES serve only the last ones. p - onehot is formed in
fp32 before G is rounded: rounding p first would lose a confident target's gradient altogether. There are no atomics,
every result is bitwise repeatable.

Two numbers live on the device and are read by every kernel: how many rows count (row blocks of ignored tokens are
skipped, and dC's product ends there), and, where this is the fallback of the sampled backward, whether to run at all.

Programs that share a strip of G run side by side (tiles of D are numbered fastest), so G is read from memory once.
The last slice computes dE first, so that its collective runs under the remaining product of dC.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_table import launch_parameters
from .problem import Head, HiddenGradReady, RowGradients
from .slices import plan_slices
from .tiles import (
    LOG2E,
    TL_DTYPE,
    Source,
    Tile,
    ceil_div,
    compute_dtype,
    count_rows,
    gradient_unit,
    load_scale,
    load_tile,
    logits_of,
    multiprocessors,
    scale_tensor,
)

WORKSPACE_BYTES = 64 << 20  # G of one slice, where no storage is lent
LAST_WORKSPACE_BYTES = 32 << 20  # G of the last slices, where one is


@triton.jit
def _kept_tiles(p, onehot, counts, inside, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N]: whether the column's 128 x 128 tile has a |p - onehot| of at least eps, Cut Cross-Entropy's rule."""
    tl.static_assert(BLOCK_M == 128 and BLOCK_N % 128 == 0)
    size = tl.where(counts[:, None] & inside[None, :], tl.abs(tl.where(onehot, p - 1.0, p)), 0.0)
    largest = tl.max(tl.max(size, 0).reshape([BLOCK_N // 128, 128]), 1)
    return tl.broadcast_to((largest >= eps)[:, None], [BLOCK_N // 128, 128]).reshape([BLOCK_N])


@triton.jit
def gradient_kernel(
    hidden,  # [N, D] descriptor or pointer
    weight,  # [width, D] descriptor or pointer, from the slice's first row
    bias_ptr,  # [width] or None
    scale_ptr,  # [] fp32 or None
    column_weight_ptr,  # [width] or None
    target_ptr,  # [N, PER_TOKEN] int64, rows of the whole shard
    lse_ptr,  # [N]
    softmax_ptr,  # [N]
    target_grad_ptr,  # [N, PER_TOKEN]
    softmax_logit_ptr,  # [N] or None
    constant_ptr,  # [N] or None
    unit_ptr,  # [] or None
    n_rows_ptr,  # [1] int32 or None
    predicate_ptr,  # [1] int32 or None
    grad,  # [N, width] out, descriptor or pointer
    n,
    width,
    first_column,
    stride_hidden_row,
    stride_hidden_col,
    stride_weight_row,
    stride_weight_col,
    stride_grad,
    softcap,
    filter_eps,
    programs,
    D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FILTER: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # 1 with FILTER
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    TMA_GRAD: tl.constexpr,
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
            w = load_tile(
                weight, column, k, width, D, stride_weight_row, stride_weight_col, BLOCK_N, BLOCK_K, TMA_WEIGHT
            )
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
        target = tl.load(target_ptr + rows * PER_TOKEN, mask=counts, other=-1) - first_column
        per_row = tl.load(softmax_ptr + rows, mask=counts, other=0.0)[:, None]
        p = tl.exp2(x * LOG2E - lse[:, None])
        if softmax_logit_ptr is not None:
            slope = tl.load(softmax_logit_ptr + rows, mask=counts, other=0.0)
            per_row = per_row + slope[:, None] * tl.where(p > 0.0, x, 0.0)
        target_grad = tl.load(target_grad_ptr + rows * PER_TOKEN, mask=counts, other=0.0)
        onehot = target[:, None] == columns[None, :]
        g = p * per_row + tl.where(onehot, target_grad[:, None], 0.0)
        if PER_TOKEN > 1:
            for k in range(1, PER_TOKEN):
                target = tl.load(target_ptr + rows * PER_TOKEN + k, mask=counts, other=-1) - first_column
                target_grad = tl.load(target_grad_ptr + rows * PER_TOKEN + k, mask=counts, other=0.0)
                g += tl.where(target[:, None] == columns[None, :], target_grad[:, None], 0.0)
        if FILTER:
            g = tl.where(_kept_tiles(p, onehot, counts, inside, filter_eps, BLOCK_M, BLOCK_N)[None, :], g, 0.0)
        if constant_ptr is not None:
            constant = tl.load(constant_ptr + rows, mask=counts, other=0.0)[:, None]
            if column_weight_ptr is not None:
                constant = constant * tl.load(column_weight_ptr + columns, mask=inside, other=0.0)[None, :]
            g += constant
        if HAS_SOFTCAP:
            ratio = x / softcap
            g *= 1.0 - ratio * ratio
        g = tl.where(counts[:, None], g * factor, 0.0)
        if TMA_GRAD:
            grad.store([row, column], g.to(DTYPE))
        else:
            at = rows.to(tl.int64)[:, None] * stride_grad + columns[None, :]
            tl.store(grad + at, g.to(DTYPE), mask=(rows < n)[:, None] & inside[None, :])


@triton.jit
def product_kernel(
    grad,  # [N, width] descriptor or pointer
    factor,  # [N, D] hidden, or [width, D] weight: descriptor or pointer
    base_ptr,  # what the product is added to, in out's shape, or None
    out_ptr,  # [width, D] dC, or [N, D] dE
    row_index_ptr,  # [N] int64 where row i of dE belongs in out, or None
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
    FLATTEN: tl.constexpr,  # loads of the next tile run under the end of this one; takes shared memory for both
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
    n_tiles: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    for item in tl.range(tl.program_id(0), tl.cdiv(n_out, BLOCK_M) * n_tiles, programs, flatten=FLATTEN):
        row = (item // n_tiles) * BLOCK_M
        column = (item % n_tiles) * BLOCK_N
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
        inside = rows < n_out
        mask = inside[:, None] & (columns < D)[None, :]
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]
        if unit_ptr is not None:
            acc *= unit
        if base_ptr is not None:
            acc += tl.load(base_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if row_index_ptr is not None:
            at = tl.load(row_index_ptr + rows, mask=inside, other=0)[:, None] * D + columns[None, :]
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


def dense_backward(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] or [N, K] int64, local rows, -1 for elsewhere
    lse: Tensor,  # [N]
    rows: RowGradients,
    *,
    n_rows: Tensor | None,
    row_index: Tensor | None,  # [N] int64: row i of dE belongs there; None is i
    hidden_grad: Tensor | None,  # [N, D] out
    weight_grad: Tensor | None,  # [V, D] out, or added to with accumulate
    accumulate: bool,
    bias_grad: Tensor | None,  # [V] fp32, added to
    hidden_grad_ready: HiddenGradReady,
    storage: Tensor | None = None,  # lent as workspace; it may be a fresh weight_grad itself
    predicate: Tensor | None = None,  # [1] int32 on the device: 0 leaves everything untouched
    filter_eps: float | None = None,  # drops 128 x 128 tiles of G without a |p - onehot| of at least this
    tiles: tuple[Tile, Tile] | None = None,  # (gradient, product), overrides the launch table
) -> None:
    """Writes dE, writes or adds dC, adds dbias.

    Outputs are contiguous. Rows of dE that do not count keep what they held: pass zeros. A dE of more than one slice
    is summed in an fp32 buffer, where it is not fp32 itself and in place.
    """
    n, d = hidden.shape
    n_columns = head.weight.shape[0]
    if not n or not n_columns:
        if hidden_grad is not None:
            hidden_grad_ready(hidden_grad)
        return
    device = hidden.device
    run = _DenseRun(hidden, head, target, lse, rows, n_rows, row_index, predicate, filter_eps, tiles)
    if storage is not None and (storage.data_ptr() % 16 or not storage.is_contiguous()):
        storage = None
    slices = plan_slices(
        n, d, n_columns, run.dtype.itemsize,
        column_bytes=d * storage.element_size() if storage is weight_grad is not None else 0,
        storage_bytes=0 if storage is None else storage.numel() * storage.element_size(),
        workspace_bytes=WORKSPACE_BYTES if storage is None else LAST_WORKSPACE_BYTES,
        step=max(run.for_gradient.block_n, run.for_product.block_n), programs=run.programs,
    )  # fmt: skip
    widths = [stop - start for start, stop, lent in slices if not lent]
    workspace = torch.empty(n * _padded(max(widths)), dtype=run.dtype, device=device) if widths else None
    total = hidden_grad
    if hidden_grad is not None and len(slices) > 1 and (hidden_grad.dtype != torch.float32 or row_index is not None):
        total = torch.empty(n, d, dtype=torch.float32, device=device)
    for start, stop, lent in slices:
        grad = _in_memory(storage if lent else workspace, n, stop - start, run.dtype, at_end=lent)
        weight = _part(head.weight, start, stop)
        run.gradient(grad, weight, start, stop)
        if bias_grad is not None:
            run.column_sum(grad, bias_grad[start:stop])
        if hidden_grad is not None:
            last = stop == n_columns
            base = None if start == 0 else total
            run.hidden_product(grad, weight, base, hidden_grad if last else total, scatter=last)
            if last:
                hidden_grad_ready(hidden_grad)
        if weight_grad is not None:
            part = _part(weight_grad, start, stop)
            run.weight_product(grad, part if accumulate else None, part)


class _DenseRun:
    """The launches on one slice, with what all slices share."""

    def __init__(
        self, hidden, head: Head, target, lse, rows: RowGradients, n_rows, row_index, predicate, filter_eps, tiles
    ):
        self.hidden, self.head, self.target, self.lse, self.rows = hidden, head, target, lse, rows
        self.n_rows, self.row_index, self.predicate, self.filter_eps = n_rows, row_index, predicate, filter_eps
        self.n, self.d = hidden.shape
        self.dtype = compute_dtype(hidden, head)
        self.unit = gradient_unit(rows, self.dtype)
        self.scale = scale_tensor(head)
        self.programs = multiprocessors(hidden.device)
        self.for_gradient: Tile = tiles[0] if tiles else launch_parameters("gradient", hidden.device, self.dtype)
        self.for_product: Tile = tiles[1] if tiles else launch_parameters("product", hidden.device, self.dtype)
        if filter_eps is not None and self.for_gradient.block_n < 128:
            self.for_gradient = replace(self.for_gradient, block_n=128, num_stages=2)  # the filter's tiles are square

    def gradient(self, grad: Tensor, weight: Tensor, start: int, stop: int) -> None:
        head, rows, t = self.head, self.rows, self.for_gradient
        h = Source(self.hidden, t.block_m, t.block_k)
        w = Source(weight, t.block_n, t.block_k)
        g = Source(grad, t.block_m, t.block_n)
        gradient_kernel[(self.programs,)](
            h.source, w.source, _part(head.bias, start, stop), self.scale, _part(head.column_weight, start, stop),
            self.target, self.lse, rows.softmax, rows.target, rows.softmax_logit, rows.constant, self.unit, self.n_rows,
            self.predicate, g.source, self.n, stop - start, start, h.stride_row, h.stride_col, w.stride_row,
            w.stride_col, g.stride_row, head.softcap or 1.0, self.filter_eps or 0.0, self.programs,
            D=self.d, HAS_SOFTCAP=head.softcap is not None, FILTER=self.filter_eps is not None,
            PER_TOKEN=self.target.shape[1] if self.target.dim() > 1 else 1,
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k,
            TMA_HIDDEN=h.tma, TMA_WEIGHT=w.tma, TMA_GRAD=g.tma, DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee",
            num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip

    def hidden_product(self, grad: Tensor, weight: Tensor, base: Tensor | None, out: Tensor, scatter: bool) -> None:
        self._product(grad, weight, base, out, self.row_index if scatter else None, for_weight=False)

    def weight_product(self, grad: Tensor, base: Tensor | None, out: Tensor) -> None:
        self._product(grad, self.hidden, base, out, None, for_weight=True)

    def _product(self, grad, factor, base, out, row_index, for_weight: bool) -> None:
        t = self.for_product
        g = Source(grad, *((t.block_k, t.block_m) if for_weight else (t.block_m, t.block_k)))
        f = Source(factor, t.block_k, t.block_n)
        product_kernel[(self.programs,)](
            g.source, f.source, base, out, row_index, self.unit, self.n_rows, self.predicate, self.n, grad.shape[1],
            factor.shape[0], grad.stride(0), f.stride_row, f.stride_col, self.programs,
            D=self.d, FOR_WEIGHT=for_weight, FLATTEN=base is None and out.element_size() == 2,
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k,
            TMA_GRAD=g.tma, TMA_FACTOR=f.tma, DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee",
            num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip

    def column_sum(self, grad: Tensor, out: Tensor) -> None:
        width = grad.shape[1]
        column_sum_kernel[(ceil_div(width, 64),)](
            grad, out, self.unit, self.n_rows, self.predicate, self.n, width, grad.stride(0), BLOCK_M=64, BLOCK_N=64
        )


def _in_memory(memory: Tensor, n: int, width: int, dtype: torch.dtype, at_end: bool) -> Tensor:
    """[n, width] at the start of a tensor's memory, or at its end, 16-byte aligned. One view: each takes host time."""
    if memory.dtype != dtype:
        raw = memory.view(-1).view(torch.uint8)
        memory = raw[: raw.shape[0] // 16 * 16].view(dtype)
    stride = _padded(width)
    start = (memory.numel() - n * stride) * dtype.itemsize // 16 * 16 // dtype.itemsize if at_end else 0
    return memory.as_strided((n, width), (stride, 1), memory.storage_offset() + start)


def _padded(width: int) -> int:
    """Row stride of G: TMA wants multiples of 16 bytes."""
    return ceil_div(width, 16) * 16


def _part(per_column: Tensor | None, start: int, stop: int) -> Tensor | None:
    if per_column is None or stop - start == per_column.shape[0]:
        return per_column
    return per_column[start:stop]
