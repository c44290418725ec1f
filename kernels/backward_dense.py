"""The exact backward: G for a slice of the vocabulary at a time, and two matrix products on it.

    gradient   recomputes the logits of a slice and stores G, [N, width] in the operands' dtype     1 product
    products   dC[slice] = G.T @ hidden, rounded once                                               1 product
               dE += G @ weight[slice], in fp32 over all slices, rounded once                       1 product

G is the only workspace. While dC is being made, the part of its storage that no slice has reached yet is free: G lies
at its end, so that early slices are wide and few, and a small workspace serves only the last ones. p - onehot is
formed in fp32 before G is rounded: rounding p first would lose a confident target's gradient altogether. There are no
atomics, every result is bitwise repeatable.

dbias does not read G again: each tile of G leaves the sums of its columns, and dbias adds those of all row blocks.

How many rows count is read on the device by every kernel: row blocks of ignored tokens are skipped, and dC's product
ends there. The last slice computes dE first and apart, so that its collective runs under the remaining product of dC.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dense_products import products_kernel
from .launch_table import launch_parameters, sums_by_product
from .logit_gradient import logit_gradient
from .problem import Head, HiddenGradReady, RowGradients, weight_factors
from .row_sum import row_sum
from .slices import plan_slices
from .tiles import (
    TL_DTYPE,
    Source,
    Tile,
    add_low_rank,
    ceil_div,
    compute_dtype,
    count_rows,
    gradient_unit,
    grouped,
    load_scale,
    load_tile,
    low_rank_arguments,
    multiprocessors,
    narrowed,
    rows_in_cache,
    scale_tensor,
    store_row_sum,
)

WORKSPACE_BYTES = 32 << 20  # G of a slice that lies in no lent storage; `slices` may take more


@triton.jit
def gradient_kernel(
    hidden,  # [N, D] descriptor or pointer
    weight,  # [width, D] descriptor or pointer, from the slice's first row
    low_hidden_ptr,  # [N, RANK] or None
    low_weight_ptr,  # [width, RANK] or None
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
    grad,  # [N, width] out, descriptor or pointer
    block_sum_ptr,  # [row blocks, width] fp32 out, or None: sums over a row block of G, rounded if SUMS_BY_PRODUCT
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
    group,
    programs,
    stride_block_sum,
    D: tl.constexpr,
    RANK: tl.constexpr,
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
    SUMS_BY_PRODUCT: tl.constexpr,
):
    n_counting = count_rows(n, n_rows_ptr)
    scale = load_scale(scale_ptr)
    factor = 1.0 if scale is None else scale
    if unit_ptr is not None:
        factor = factor / tl.load(unit_ptr)
    n_blocks = tl.cdiv(n_counting, BLOCK_M)
    n_tiles = tl.cdiv(width, BLOCK_N)
    for item in tl.range(tl.program_id(0), n_blocks * n_tiles, programs, flatten=RANK == 0):
        row_block, tile = grouped(item, n_blocks, n_tiles, group)
        row = row_block * BLOCK_M
        column = tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            h = load_tile(hidden, row, k, n, D, stride_hidden_row, stride_hidden_col, BLOCK_M, BLOCK_K, TMA_HIDDEN)
            w = load_tile(
                weight, column, k, width, D, stride_weight_row, stride_weight_col, BLOCK_N, BLOCK_K, TMA_WEIGHT
            )
            acc = tl.dot(h.to(DTYPE), w.to(DTYPE).T, acc, input_precision=PRECISION)
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < width
        if low_hidden_ptr is not None:
            acc = add_low_rank(
                acc, low_hidden_ptr, low_weight_ptr, rows, rows < n_counting, columns, inside, RANK, DTYPE, PRECISION
            )
        g = logit_gradient(
            acc, row, column, n_counting, width, bias_ptr, scale, column_weight_ptr, target_ptr, lse_ptr, softmax_ptr,
            target_grad_ptr, softmax_logit_ptr, constant_ptr, factor, first_column, softcap, filter_eps,
            HAS_SOFTCAP, FILTER, PER_TOKEN, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if TMA_GRAD:
            grad.store([row, column], g.to(DTYPE))
        else:
            at = rows.to(tl.int64)[:, None] * stride_grad + columns[None, :]
            tl.store(grad + at, g.to(DTYPE), mask=(rows < n)[:, None] & inside[None, :])
        if block_sum_ptr is not None:
            out = block_sum_ptr + row_block.to(tl.int64) * stride_block_sum + column
            store_row_sum(g, out, width - column, DTYPE, SUMS_BY_PRODUCT)


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
    weight_grad: Tensor | None,  # [V, D] out, or added to with accumulate; [V, R] of a low-rank weight
    accumulate: bool,
    bias_grad: Tensor | None,  # [V] fp32, added to
    hidden_grad_ready: HiddenGradReady,
    storage: Tensor | None = None,  # lent as workspace; it may be a fresh weight_grad itself
    filter_eps: float | None = None,  # drops 128 x 128 tiles of G without a |p - onehot| of at least this
    low_rank_grad: Tensor | None = None,  # [N, R] fp32 out, in the order of hidden, before dE is ready
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
    run = _DenseRun(hidden, head, target, lse, rows, n_rows, filter_eps, tiles)
    if storage is not None and (storage.data_ptr() % 16 or not storage.is_contiguous()):
        storage = None
    slices = plan_slices(
        n, d, n_columns, run.dtype.itemsize,
        column_bytes=d * storage.element_size() if storage is weight_grad is not None else 0,
        storage_bytes=0 if storage is None else storage.numel() * storage.element_size(),
        workspace_bytes=WORKSPACE_BYTES, step=max(run.for_gradient.block_n, run.for_product.block_n),
        programs=run.programs,
    )  # fmt: skip
    widths = [stop - start for start, stop, lent in slices if not lent]
    workspace = torch.empty(n * _padded(max(widths)), dtype=run.dtype, device=device) if widths else None
    block_sums = None
    if bias_grad is not None:  # zeros, which row blocks that do not count leave alone
        shape = (ceil_div(n, run.for_gradient.block_m), max(stop - start for start, stop, _ in slices))
        block_sums = torch.zeros(shape, dtype=torch.float32, device=device)
    total = hidden_grad
    if hidden_grad is not None and len(slices) > 1 and (hidden_grad.dtype != torch.float32 or row_index is not None):
        total = torch.empty(n, d, dtype=torch.float32, device=device)
    for start, stop, lent in slices:
        grad = _in_memory(storage if lent else workspace, n, stop - start, run.dtype, at_end=lent)
        weight = _part(head.weight, start, stop)
        run.gradient(grad, weight, start, stop, block_sums)
        if bias_grad is not None:
            row_sum(block_sums[:, : stop - start], factor=run.unit, out=bias_grad[start:stop])
        hidden_factor = weight_factors(hidden, head)[0]
        if low_rank_grad is not None:
            base = None if start == 0 else low_rank_grad
            run.products(grad, (_part(head.low_rank.weight, start, stop), base, low_rank_grad, None), None)
        to_weight = None
        if weight_grad is not None:
            part = _part(weight_grad, start, stop)
            to_weight = (hidden_factor, part if accumulate else None, part)
        if hidden_grad is None:
            run.products(grad, None, to_weight)
            continue
        base = None if start == 0 else total
        last = stop == n_columns
        to_hidden = (weight, base, hidden_grad if last else total, row_index if last else None)
        if hidden_factor.shape[1] == d and not last:
            run.products(grad, to_hidden, to_weight)
            continue
        run.products(grad, to_hidden, None)
        if last:
            hidden_grad_ready(hidden_grad)
        run.products(grad, None, to_weight)


class _DenseRun:
    """The launches on one slice, with what all slices share."""

    def __init__(self, hidden, head: Head, target, lse, rows: RowGradients, n_rows, filter_eps, tiles):
        self.hidden, self.head, self.target, self.lse, self.rows = hidden, head, target, lse, rows
        self.n_rows, self.filter_eps = n_rows, filter_eps
        self.n, self.d = hidden.shape
        self.dtype = compute_dtype(hidden, head)
        self.unit = gradient_unit(rows, head, self.dtype)
        self.scale = scale_tensor(head)
        self.programs = multiprocessors(hidden.device)
        self.for_gradient: Tile = tiles[0] if tiles else launch_parameters("gradient", hidden.device, self.dtype)
        self.for_product: Tile = tiles[1] if tiles else launch_parameters("product", hidden.device, self.dtype)
        if filter_eps is not None and self.for_gradient.block_n < 128:
            self.for_gradient = replace(self.for_gradient, block_n=128, num_stages=2)  # the filter's tiles are square
        self.for_gradient = self.for_gradient.of_depth(self.d)

    def gradient(self, grad: Tensor, weight: Tensor, start: int, stop: int, block_sums: Tensor | None) -> None:
        head, rows, t = self.head, self.rows, self.for_gradient
        h = Source(self.hidden, t.block_m, t.block_k)
        w = Source(weight, t.block_n, t.block_k)
        g = Source(grad, t.block_m, t.block_n)
        low_hidden, low_weight, rank = low_rank_arguments(head, slice(start, stop))
        gradient_kernel[(self.programs,)](
            h.source, w.source, low_hidden, low_weight, _part(head.bias, start, stop), self.scale,
            _part(head.column_weight, start, stop), self.target, self.lse, rows.softmax, rows.target,
            rows.softmax_logit, rows.constant, self.unit, self.n_rows, g.source, block_sums, self.n,
            stop - start, start, h.stride_row, h.stride_col, w.stride_row, w.stride_col, g.stride_row,
            head.softcap or 1.0, self.filter_eps or 0.0, rows_in_cache(self.n, self.d, self.hidden.element_size()),
            self.programs, 0 if block_sums is None else block_sums.stride(0), D=self.d, RANK=rank,
            HAS_SOFTCAP=head.softcap is not None, FILTER=self.filter_eps is not None,
            PER_TOKEN=self.target.shape[1] if self.target.dim() > 1 else 1,
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k,
            TMA_HIDDEN=h.tma, TMA_WEIGHT=w.tma, TMA_GRAD=g.tma, DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee",
            SUMS_BY_PRODUCT=sums_by_product(self.hidden.device, self.dtype),
            num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip

    def products(self, grad: Tensor, to_hidden: tuple | None, to_weight: tuple | None) -> None:
        """out = base + G @ weight for to_hidden = (weight, base, out, row_index or None), and
        out = base + G.T @ hidden for to_weight = (hidden, base, out); None leaves a product out."""
        if to_hidden is None and to_weight is None:
            return
        weight, hidden_base, hidden_out, row_index = to_hidden or (None,) * 4
        hidden, weight_base, weight_out = to_weight or (None,) * 3
        d = (hidden if weight is None else weight).shape[1]
        t = replace(self.for_product, block_n=narrowed(self.for_product.block_n, d))
        rows, columns = Source(grad, t.block_m, t.block_k), Source(grad, t.block_k, t.block_m)
        w = Source(grad if weight is None else weight, t.block_k, t.block_n)
        h = Source(grad if hidden is None else hidden, t.block_k, t.block_n)
        products_kernel[(self.programs,)](
            rows.source, w.source, hidden_base, hidden_out, row_index, columns.source, h.source, weight_base,
            weight_out, self.unit, self.n_rows, self.n, grad.shape[1], grad.stride(0), w.stride_row, w.stride_col,
            h.stride_row, h.stride_col, self.programs, D=d,
            FLATTEN_HIDDEN=_stores_half(hidden_base, hidden_out), FLATTEN_WEIGHT=_stores_half(weight_base, weight_out),
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, TMA_GRAD=rows.tma, TMA_WEIGHT=w.tma,
            TMA_HIDDEN=h.tma, DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee",
            num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip


def _stores_half(base: Tensor | None, out: Tensor | None) -> bool:
    """Whether a tile is small enough on its way out for the next tile's loads to have shared memory too."""
    return base is None and out is not None and out.element_size() == 2


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
