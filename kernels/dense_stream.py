"""The exact backward as one launch that the device may refuse: what the sampled one falls back to.

Whether there are too many marks for lists is known on the device only, so every sampled step enqueues this kernel, and
nearly always each program reads `dense == 0` and leaves. One launch, small memory and no host time matter here; where
the exact policy is asked for, `backward_dense` is faster.

Slices of the vocabulary pass through two kinds of work, cut into items that programs take in the order of a ticket
counter; G of two slices has room at a time:

    step k    gradient    G of slice k, into the half k % 2               waits for the products of slice k - 2
              products    dC and dE of slice k - 1                        wait for its gradient, and dE's sum for k - 2

What an item waits for has a smaller ticket, so a running program has taken it: waits end, however many programs run
at once. G is read and written through L2 by ordinary loads and stores, ordered by the counters. dE is summed in fp32 in
the order of the slices: no atomics on data, bitwise repeatable.

Where dE is fp32 it is its own sum. Otherwise the sums lie where dC will be, at the end of its storage, and the columns
of dC under them follow in a second launch; failing that (no such storage, or a small one), dE is made for as many
tokens at a time as `spare` has sums for, and dC after it, at the price of a second recomputation.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_dense import logit_gradient
from .launch_table import launch_parameters
from .problem import Head, RowGradients
from .tickets import signal, wait_for
from .tiles import (
    ROW_BLOCK,
    TL_DTYPE,
    Source,
    add_low_rank,
    ceil_div,
    compute_dtype,
    count_rows,
    gradient_unit,
    load_scale,
    load_tile,
    low_rank_arguments,
    multiprocessors,
    narrowed,
    scale_tensor,
)

RING_BYTES = 32 << 20  # G of two slices
MIN_WIDTH = 512  # columns of a slice, whatever they take: every slice reads and writes dE's sums


@triton.jit
def dense_stream_kernel(
    dense_ptr,  # [1] int32: 0 leaves everything untouched
    hidden,  # [N, D] descriptor of [BLOCK_M, BLOCK_K] tiles, or pointer
    weight,  # [V, D] descriptor of [BLOCK_N, BLOCK_K] tiles, or pointer
    low_hidden_ptr,  # [N, RANK] or None
    low_weight_ptr,  # [V, RANK] or None
    hidden_factor,  # [N, D_OUT] what dC is G.T times: hidden again or its low-rank partner, [BLOCK_K, BLOCK_D]
    weight_factor,  # [V, D_OUT] what dE is G times: weight again or its low-rank partner, [BLOCK_K, BLOCK_D]
    bias_ptr,  # [V] or None
    scale_ptr,  # [] fp32 or None
    column_weight_ptr,  # [V] or None
    target_ptr,  # [N] int64, rows of the whole shard
    lse_ptr,  # [N]
    softmax_ptr,  # [N]
    target_grad_ptr,  # [N]
    softmax_logit_ptr,  # [N] or None
    constant_ptr,  # [N] or None
    unit_ptr,  # [] or None
    n_rows_ptr,  # [1] int32 or None
    row_index_ptr,  # [N] int64 where row i of dE belongs, or None
    ring_ptr,  # [2, row blocks * BLOCK_M, WIDTH], G
    sums_ptr,  # [N, D_OUT] fp32 out, dE, or None
    weight_grad_ptr,  # [V, D_OUT] out, or None
    bias_grad_ptr,  # [V] fp32, added to, or None
    ticket_ptr,  # [1] int32, zero
    made_ptr,  # [slices] int32, zeros: items of G that are done
    used_ptr,  # [slices] int32, zeros: items of products that are done
    n,
    n_columns,
    n_weight_columns,  # dC is made for these leading columns
    first_column,
    n_blocks,
    stride_hidden_row,
    stride_hidden_col,
    stride_weight_row,
    stride_weight_col,
    stride_hidden_factor,
    stride_weight_factor,
    softcap,
    D: tl.constexpr,
    D_OUT: tl.constexpr,
    RANK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # add dC to what is there
    WIDTH: tl.constexpr,  # columns of a slice
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,  # columns of dE and dC
    TMA_HIDDEN: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    TMA_HIDDEN_FACTOR: tl.constexpr,
    TMA_WEIGHT_FACTOR: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.load(dense_ptr) == 0:
        return
    n_counting = count_rows(n, n_rows_ptr)
    scale = load_scale(scale_ptr)
    factor = 1.0 if scale is None else scale
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
        factor = factor / unit
    N_D: tl.constexpr = (D_OUT + BLOCK_D - 1) // BLOCK_D
    n_gradient = n_blocks * (WIDTH // BLOCK_N)
    n_weight = 0
    if weight_grad_ptr is not None or bias_grad_ptr is not None:
        n_weight = WIDTH // BLOCK_M * N_D
    n_hidden = 0
    if sums_ptr is not None:
        n_hidden = n_blocks * N_D
    per_step = n_gradient + n_weight + n_hidden
    n_items = (tl.cdiv(n_columns, WIDTH) + 1) * per_step
    item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while item < n_items:
        step = item // per_step
        sub = item % per_step
        if sub < n_gradient:
            if step * WIDTH < n_columns:
                if step >= 2:
                    wait_for(used_ptr + step - 2, n_weight + n_hidden)
                row = sub % n_blocks * BLOCK_M
                column = sub // n_blocks * BLOCK_N
                if row < n_counting:
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    for k in tl.range(0, D, BLOCK_K):
                        h = load_tile(
                            hidden, row, k, n, D, stride_hidden_row, stride_hidden_col, BLOCK_M, BLOCK_K, TMA_HIDDEN
                        )
                        w = load_tile(
                            weight, step * WIDTH + column, k, n_columns, D, stride_weight_row, stride_weight_col,
                            BLOCK_N, BLOCK_K, TMA_WEIGHT,
                        )  # fmt: skip
                        acc = tl.dot(h.to(DTYPE), w.to(DTYPE).T, acc, input_precision=PRECISION)
                    rows = row + tl.arange(0, BLOCK_M)
                    in_slice = column + tl.arange(0, BLOCK_N)
                    columns = step * WIDTH + in_slice
                    counts, inside = rows < n_counting, columns < n_columns
                    if low_hidden_ptr is not None:
                        acc = add_low_rank(
                            acc, low_hidden_ptr, low_weight_ptr, rows, counts, columns, inside, RANK, DTYPE, PRECISION
                        )
                    g = logit_gradient(
                        acc, rows, columns, counts, inside, bias_ptr, scale, column_weight_ptr, target_ptr,
                        lse_ptr, softmax_ptr, target_grad_ptr, softmax_logit_ptr, constant_ptr, factor, first_column,
                        softcap, 0.0, HAS_SOFTCAP, False, 1, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    g = tl.where(inside[None, :], g, 0.0)  # the products read whole slices
                    at = ((step % 2) * n_blocks * BLOCK_M + rows).to(tl.int64)[:, None] * WIDTH + in_slice[None, :]
                    tl.store(ring_ptr + at, g.to(DTYPE))
                signal(made_ptr + step)
        elif step > 0:
            done = step - 1
            wait_for(made_ptr + done, n_gradient)
            ring = ring_ptr + ((done % 2) * n_blocks * BLOCK_M).to(tl.int64) * WIDTH
            if sub < n_gradient + n_weight:
                i = sub - n_gradient
                row = i // N_D * BLOCK_M
                column = i % N_D * BLOCK_D
                first = done * WIDTH + row
                rows = first + tl.arange(0, BLOCK_M)
                if weight_grad_ptr is not None:
                    if first < n_weight_columns:
                        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                        for k in tl.range(0, n_counting, BLOCK_K):
                            g = load_tile(ring, k, row, n_blocks * BLOCK_M, WIDTH, WIDTH, 1, BLOCK_K, BLOCK_M, False).T
                            h = load_tile(
                                hidden_factor, k, column, n, D_OUT, stride_hidden_factor, 1, BLOCK_K,
                                BLOCK_D, TMA_HIDDEN_FACTOR,
                            )  # fmt: skip
                            acc = tl.dot(g, h.to(DTYPE), acc, input_precision=PRECISION)
                        columns = column + tl.arange(0, BLOCK_D)
                        mask = (rows < n_weight_columns)[:, None] & (columns < D_OUT)[None, :]
                        at = rows.to(tl.int64)[:, None] * D_OUT + columns[None, :]
                        acc *= unit
                        if ACCUMULATE:
                            acc += tl.load(weight_grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
                        tl.store(weight_grad_ptr + at, acc.to(weight_grad_ptr.dtype.element_ty), mask=mask)
                if bias_grad_ptr is not None:
                    if (column == 0) & (first < n_weight_columns):
                        total = tl.zeros((BLOCK_M,), tl.float32)
                        for k in tl.range(0, n_counting, BLOCK_K):
                            g = load_tile(ring, k, row, n_blocks * BLOCK_M, WIDTH, WIDTH, 1, BLOCK_K, BLOCK_M, False)
                            total += tl.sum(g.to(tl.float32), 0)
                        old = tl.load(bias_grad_ptr + rows, mask=rows < n_weight_columns, other=0.0)
                        tl.store(bias_grad_ptr + rows, old + total * unit, mask=rows < n_weight_columns)
            else:
                if sums_ptr is not None:
                    if done > 0:
                        wait_for(used_ptr + done - 1, n_weight + n_hidden)
                    i = sub - n_gradient - n_weight
                    row = i // N_D * BLOCK_M
                    column = i % N_D * BLOCK_D
                    if row < n_counting:
                        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                        for k in tl.range(0, WIDTH, BLOCK_K):
                            g = load_tile(ring, row, k, n_blocks * BLOCK_M, WIDTH, WIDTH, 1, BLOCK_M, BLOCK_K, False)
                            w = load_tile(
                                weight_factor, done * WIDTH + k, column, n_columns, D_OUT, stride_weight_factor, 1,
                            BLOCK_K, BLOCK_D, TMA_WEIGHT_FACTOR,
                            )  # fmt: skip
                            acc = tl.dot(g, w.to(DTYPE), acc, input_precision=PRECISION)
                        rows = row + tl.arange(0, BLOCK_M)
                        columns = column + tl.arange(0, BLOCK_D)
                        mask = (rows < n_counting)[:, None] & (columns < D_OUT)[None, :]
                        to = rows.to(tl.int64)
                        if row_index_ptr is not None:
                            to = tl.load(row_index_ptr + rows, mask=rows < n_counting, other=0)
                        at = to[:, None] * D_OUT + columns[None, :]
                        acc *= unit
                        if done > 0:
                            acc += tl.load(sums_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
                        tl.store(sums_ptr + at, acc, mask=mask)
            signal(used_ptr + done)
        item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@triton.jit
def _round_rows_kernel(
    dense_ptr,  # [1]
    sums_ptr,  # [N, D] fp32
    row_index_ptr,  # [N] int64 or None
    n_rows_ptr,  # [1] or None
    out_ptr,  # [N, D]
    n,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row_index] = sums, rounded."""
    if tl.load(dense_ptr) == 0:
        return
    n_counting = count_rows(n, n_rows_ptr)
    for row in range(tl.program_id(0), n_counting, tl.num_programs(0)):
        to = tl.cast(row, tl.int64)
        if row_index_ptr is not None:
            to = tl.load(row_index_ptr + row)
        for d in range(0, D, BLOCK):
            at = d + tl.arange(0, BLOCK)
            x = tl.load(sums_ptr + tl.cast(row, tl.int64) * D + at, mask=at < D, other=0.0)
            tl.store(out_ptr + to * D + at, x.to(out_ptr.dtype.element_ty), mask=at < D)


def dense_stream(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] int64, local rows, -1 for elsewhere
    lse: Tensor,  # [N]
    rows: RowGradients,
    *,
    dense: Tensor,  # [1] int32 on the device: 0 leaves everything untouched
    n_rows: Tensor | None,
    row_index: Tensor | None,  # [N] int64: row i of dE belongs there; None is i
    hidden_grad: Tensor | None,  # [N, D] out
    weight_grad: Tensor | None,  # [V, D] out, or added to with accumulate
    accumulate: bool,
    bias_grad: Tensor | None,  # [V] fp32, added to
    spare: Tensor,  # memory for sums of dE; a fresh weight_grad may be it
    low_rank_grad: Tensor | None = None,  # [N, R] fp32 out, in the order of hidden
) -> None:
    """dE, dC and dbias like `backward_dense.dense_backward`, if `dense` says so. One to a few launches."""
    n, d = hidden.shape
    n_columns = head.weight.shape[0]
    run = _Stream(hidden, head, target, lse, rows, dense, n_rows)
    if head.low_rank is not None:  # its products are narrow: they have a launch, and a recomputation, of their own
        run(low_rank_grad, None, weight_grad, bias_grad, accumulate=accumulate, low_rank=True)
        weight_grad = bias_grad = None
    if hidden_grad is None or hidden_grad.dtype == torch.float32:
        run(hidden_grad, row_index, weight_grad, bias_grad, accumulate=accumulate)
        return
    row_bytes = 4 * d
    memory = spare.view(-1).view(torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    memory = memory[: memory.numel() // 16 * 16]
    under = ceil_div(n * row_bytes, d * spare.element_size())  # columns of dC
    if spare is weight_grad and under <= n_columns // 2:
        sums = memory[memory.numel() - n * row_bytes :].view(torch.float32).view(n, d)
        stop = (n_columns - under - 1) // 16 * 16
        run(sums, None, weight_grad, bias_grad, stop=stop)
        run.round_rows(sums, row_index, hidden_grad)
        run(None, None, weight_grad, bias_grad, start=stop)
        return
    at_once = memory.numel() // row_bytes // ROW_BLOCK * ROW_BLOCK
    if not at_once:
        at_once = ROW_BLOCK
        memory = torch.empty(at_once * row_bytes, dtype=torch.uint8, device=hidden.device)
    for first in range(0, n, at_once):
        part = slice(first, min(first + at_once, n))
        sums = memory[: (part.stop - first) * row_bytes].view(torch.float32).view(-1, d)
        some = RowGradients(*(None if g is None else g[part] for g in vars(rows).values()))
        count = None if n_rows is None else (n_rows - first).clamp(min=0)
        some_head = head
        if head.low_rank is not None:
            some_head = replace(head, low_rank=replace(head.low_rank, hidden=head.low_rank.hidden[part]))
        tokens = _Stream(hidden[part], some_head, target[part], lse[part], some, dense, count)
        tokens(sums, None, None, None)
        index = None if row_index is None else row_index[part]
        tokens.round_rows(sums, index, hidden_grad if index is not None else hidden_grad[part])
    run(None, None, weight_grad, bias_grad, accumulate=accumulate)


class _Stream:
    """The launches for some tokens."""

    def __init__(self, hidden, head: Head, target, lse, rows: RowGradients, dense, n_rows):
        self.hidden, self.head, self.target, self.lse, self.rows = hidden, head, target, lse, rows
        self.dense, self.n_rows = dense, n_rows
        self.n, self.d = hidden.shape
        self.dtype = compute_dtype(hidden, head)
        self.unit = gradient_unit(rows, self.dtype)
        self.scale = scale_tensor(head)
        self.programs = multiprocessors(hidden.device)

    def __call__(
        self, sums, row_index, weight_grad, bias_grad, *, start: int = 0, stop: int | None = None, accumulate=False,
        low_rank=False,
    ) -> None:  # fmt: skip
        """dE of all columns from `start` on into `sums`; dC and dbias of those before `stop`.

        With `low_rank` these are the gradients of the second product's factors.
        """
        if sums is None and weight_grad is None and bias_grad is None:
            return
        head, rows, device = self.head, self.rows, self.hidden.device
        t = launch_parameters("gradient", device, self.dtype)
        n_blocks = ceil_div(self.n, t.block_m)
        n_columns = head.weight.shape[0] - start
        step = max(t.block_m, t.block_n)
        width = max(RING_BYTES // (2 * n_blocks * t.block_m * self.dtype.itemsize), MIN_WIDTH) // step * step
        width = min(width, ceil_div(n_columns, step) * step)
        slices = ceil_div(n_columns, width)
        ring = torch.empty(2 * n_blocks * t.block_m * width, dtype=self.dtype, device=device)
        counters = torch.zeros(1 + 2 * slices, dtype=torch.int32, device=device)
        weight = head.weight[start:]
        low_hidden, low_weight, rank = low_rank_arguments(head, slice(start, None))
        factors = (low_hidden, low_weight) if low_rank else (self.hidden, weight)
        d_out = factors[0].shape[1]
        block_d = narrowed(t.block_n, d_out)
        h, h_factor = Source(self.hidden, t.block_m, t.block_k), Source(factors[0], t.block_k, block_d)
        w, w_factor = Source(weight, t.block_n, t.block_k), Source(factors[1], t.block_k, block_d)
        dense_stream_kernel[(self.programs,)](
            self.dense, h.source, w.source, low_hidden, low_weight, h_factor.source, w_factor.source,
            _from(head.bias, start), self.scale, _from(head.column_weight, start), self.target, self.lse, rows.softmax,
            rows.target, rows.softmax_logit, rows.constant, self.unit, self.n_rows, row_index, ring, sums,
            _from(weight_grad, start), _from(bias_grad, start), counters, counters[1:], counters[1 + slices :],
            self.n, n_columns, n_columns if stop is None else stop - start, start, n_blocks, h.stride_row,
            h.stride_col, w.stride_row, w.stride_col, h_factor.stride_row, w_factor.stride_row, head.softcap or 1.0,
            D=self.d, D_OUT=d_out, RANK=rank, HAS_SOFTCAP=head.softcap is not None, ACCUMULATE=accumulate, WIDTH=width,
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, BLOCK_D=block_d, TMA_HIDDEN=h.tma,
            TMA_WEIGHT=w.tma, TMA_HIDDEN_FACTOR=h_factor.tma, TMA_WEIGHT_FACTOR=w_factor.tma,
            DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee", num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip

    def round_rows(self, sums: Tensor, row_index: Tensor | None, out: Tensor) -> None:
        _round_rows_kernel[(min(self.n, 16 * self.programs),)](
            self.dense, sums, row_index, self.n_rows, out, self.n, D=self.d, BLOCK=1024, num_warps=4
        )


def _from(part: Tensor | None, start: int) -> Tensor | None:
    return None if part is None else part[start:]
