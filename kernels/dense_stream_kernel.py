"""The exact backward in one launch that the device may refuse; `dense_stream` starts it.

Slices of the vocabulary pass through two kinds of work, cut into items that programs take in the order of a ticket
counter; G of two slices has room at a time:

    step k    gradient    G of slice k, into the half k % 2               waits for the products of slice k - 2
              products    dC and dE of slice k - 1                        wait for its gradient, and dE's sum for k - 2

What an item waits for has a smaller ticket, so a running program has taken it: waits end, however many programs run
at once. G is read and written through L2 by ordinary loads and stores, ordered by the counters. dE is summed in
the order of the slices: no atomics on data, bitwise repeatable. Where dE has 16 bits, they hold the upper half of its
fp32 sum until the last slice.
"""

import triton
import triton.language as tl

from .logit_gradient import logit_gradient
from .tickets import signal, wait_for
from .tiles import add_low_rank, count_rows, load_scale, load_tile


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
    hidden_grad_ptr,  # [N, D_OUT] out, dE, or None
    lower_half_ptr,  # [N, D_OUT] int16, of the bits of dE's sum; None for an fp32 dE, which is its own sum
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
    if hidden_grad_ptr is not None:
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
                    inside = columns < n_columns
                    if low_hidden_ptr is not None:
                        counts = rows < n_counting
                        acc = add_low_rank(
                            acc, low_hidden_ptr, low_weight_ptr, rows, counts, columns, inside, RANK, DTYPE, PRECISION
                        )
                    g = logit_gradient(
                        acc, row, step * WIDTH + column, n_counting, n_columns, bias_ptr, scale, column_weight_ptr,
                        target_ptr, lse_ptr, softmax_ptr, target_grad_ptr, softmax_logit_ptr, constant_ptr, factor,
                        first_column, softcap, 0.0, HAS_SOFTCAP, False, 1, BLOCK_M, BLOCK_N,
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
                if hidden_grad_ptr is not None:
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
                        if lower_half_ptr is None:
                            if done > 0:
                                acc += tl.load(hidden_grad_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
                            tl.store(hidden_grad_ptr + at, acc, mask=mask)
                        else:
                            upper_half = hidden_grad_ptr.to(tl.pointer_type(tl.int16)) + at
                            if done > 0:
                                upper = tl.load(upper_half, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
                                lower = tl.load(lower_half_ptr + at, mask=mask, other=0, cache_modifier=".cg")
                                bits = (upper << 16) | (lower.to(tl.int32) & 0xFFFF)
                                acc += bits.to(tl.float32, bitcast=True)
                            if (done + 1) * WIDTH < n_columns:
                                bits = acc.to(tl.int32, bitcast=True)
                                tl.store(upper_half, (bits >> 16).to(tl.int16), mask=mask)
                                tl.store(lower_half_ptr + at, bits.to(tl.int16), mask=mask)
                            else:
                                tl.store(hidden_grad_ptr + at, acc.to(hidden_grad_ptr.dtype.element_ty), mask=mask)
            signal(used_ptr + done)
        item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
