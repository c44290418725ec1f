"""The exact backward in a launch that the device may refuse; `dense_stream` starts it.

Slices of the vocabulary pass through two kinds of work, cut into items that programs take in the order of a ticket
counter; the ring has room for G of `slots` slices, two or more:

    step k    dC of slice k - 1                          waits for its gradient
              G of slice k, into slot k % slots          waits for the products of slice k - slots
              dE of slice k - 1                          waits for its gradient, and dE's sum for k - 2

dC comes first: its items are few and long, all tokens each (107 us for 8192 on an H200, where a slice of 1024 columns
and D = 1024 takes 78), and their slot is needed again. What an item waits for has a smaller ticket, so a running
program has taken it: waits end, however many programs run at once. What a program has once seen complete it does not
ask for again.

G is read and written through L2 by ordinary loads and stores, ordered by the counters. dE is summed in the order of
the slices: no atomics on data, bitwise repeatable. Where dE has 16 bits, they hold the upper half of its fp32 sum
until the last slice. The sum may continue one of an earlier launch, and a later one may continue it.

A launch may have some of the rows only: every pointer but n_rows_ptr is to its first row then. Example: rows 256 to 383
of 384, of which 300 count: first_row = 256, n = 128, and 44 rows count here.
"""

import triton
import triton.language as tl

from .logit_gradient import logit_gradient
from .tickets import signal, wait_for
from .tiles import add_low_rank, count_rows, grouped, load_scale, load_tile

PART = tl.constexpr(64)  # columns of a tile of dE or dC that are stored at a time
GROUP = tl.constexpr(16)  # row blocks whose G is made before the next ones': 128 programs read 16 of them and 8 tiles


@triton.jit
def _load_gradient(slot_ptr, row, col, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of a slice's G. Slots have whole tiles only; an int64 scalar and int32 offsets take few registers."""
    offs = tl.arange(0, ROWS)[:, None] * width + tl.arange(0, COLS)[None, :]
    return tl.load(slot_ptr + (width.to(tl.int64) * row + col) + offs)


@triton.jit
def _halves(tile):
    """Its left and its right columns."""
    return tl.split(tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute(0, 2, 1))


@triton.jit
def _put_weight_grad(tile, rows, column, out_ptr, n_rows, D: tl.constexpr, ACCUMULATE: tl.constexpr):
    if ACCUMULATE and tile.shape[1] > PART:
        left, right = _halves(tile)
        _put_weight_grad(left, rows, column, out_ptr, n_rows, D, ACCUMULATE)
        _put_weight_grad(right, rows, column + tile.shape[1] // 2, out_ptr, n_rows, D, ACCUMULATE)
    else:
        columns = column + tl.arange(0, tile.shape[1])
        mask = (rows < n_rows)[:, None] & (columns < D)[None, :]
        at = rows.to(tl.int64)[:, None] * D + columns[None, :]
        if ACCUMULATE:
            tile += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _put_hidden_grad(tile, rows, to, column, out_ptr, lower_half_ptr, n_rows, adds, ends, D: tl.constexpr):
    """Adds the tile to dE's sum if there `adds` one, and rounds it if it `ends` here."""
    if tile.shape[1] > PART:
        left, right = _halves(tile)
        _put_hidden_grad(left, rows, to, column, out_ptr, lower_half_ptr, n_rows, adds, ends, D)
        column += tile.shape[1] // 2
        _put_hidden_grad(right, rows, to, column, out_ptr, lower_half_ptr, n_rows, adds, ends, D)
    else:
        columns = column + tl.arange(0, tile.shape[1])
        mask = (rows < n_rows)[:, None] & (columns < D)[None, :]
        at = to[:, None] * D + columns[None, :]
        if lower_half_ptr is None:
            if adds:
                tile += tl.load(out_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, tile, mask=mask)
        else:
            upper_half = out_ptr.to(tl.pointer_type(tl.int16)) + at
            lower_half = lower_half_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
            if adds:
                upper = tl.load(upper_half, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
                lower = tl.load(lower_half, mask=mask, other=0, cache_modifier=".cg")
                bits = (upper << 16) | (lower.to(tl.int32) & 0xFFFF)
                tile += bits.to(tl.float32, bitcast=True)
            if ends:
                tl.store(out_ptr + at, tile.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                bits = tile.to(tl.int32, bitcast=True)
                tl.store(upper_half, (bits >> 16).to(tl.int16), mask=mask)
                tl.store(lower_half, bits.to(tl.int16), mask=mask)


# These differ between the launches of one backward, which share one compiled kernel.
@triton.jit(
    do_not_specialize=[
        "n", "first_row", "n_columns", "n_weight_columns", "first_column", "n_blocks", "slots", "continues", "goes_on",
    ]
)  # fmt: skip
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
    n_rows_ptr,  # [1] int32 or None, counted from the first row of all
    row_index_ptr,  # [N] int64 where row i of dE belongs, or None
    ring_ptr,  # [slots, row blocks * BLOCK_M, width], G
    hidden_grad_ptr,  # [N, D_OUT] out, dE, or None
    lower_half_ptr,  # [N, D_OUT] int16, of dE's sum, in the order of hidden; None for an fp32 dE, its own sum
    weight_grad_ptr,  # [V, D_OUT] out, or None
    bias_grad_ptr,  # [V] fp32, added to, or None
    ticket_ptr,  # [1] int32, zero
    made_ptr,  # [slices] int32, zeros: items of G that are done
    weight_done_ptr,  # [slices] int32, zeros: items of dC that are done
    hidden_done_ptr,  # [slices] int32, zeros: items of dE that are done
    n,
    first_row,
    n_columns,
    n_weight_columns,  # dC is made for these leading columns
    first_column,
    n_blocks,
    slots,
    width,  # columns of a slice, a multiple of BLOCK_M and BLOCK_N
    continues,  # not 0: dE's sum is there, of earlier columns
    goes_on,  # not 0: dE's sum lacks later columns
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
    n_counting = tl.maximum(count_rows(first_row + n, n_rows_ptr) - first_row, 0)
    if weight_grad_ptr is None or ACCUMULATE:
        if n_counting == 0:
            return
    scale = load_scale(scale_ptr)
    factor = 1.0 if scale is None else scale
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
        factor = factor / unit
    N_D: tl.constexpr = (D_OUT + BLOCK_D - 1) // BLOCK_D
    n_tiles = width // BLOCK_N
    n_gradient = n_blocks * n_tiles
    n_weight = 0
    if weight_grad_ptr is not None or bias_grad_ptr is not None:
        n_weight = width // BLOCK_M * N_D
    n_hidden = 0
    if hidden_grad_ptr is not None:
        n_hidden = n_blocks * N_D
    per_step = n_gradient + n_weight + n_hidden
    n_items = (tl.cdiv(n_columns, width) + 1) * per_step
    n_free = 0  # leading slices whose products this program has seen done,
    n_made = 0  # whose G,
    n_summed = 0  # whose share of dE
    item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while item < n_items:
        step = item // per_step
        sub = item % per_step
        if (sub >= n_weight) & (sub < n_weight + n_gradient):
            if step * width < n_columns:
                if step - slots >= n_free:
                    wait_for(weight_done_ptr + step - slots, n_weight)
                    wait_for(hidden_done_ptr + step - slots, n_hidden)
                    n_free = step - slots + 1
                row_block, tile = grouped(sub - n_weight, n_blocks, n_tiles, GROUP)
                row = row_block * BLOCK_M
                column = tile * BLOCK_N
                if (row < n_counting) & (step * width + column < n_columns):
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    for k in tl.range(0, D, BLOCK_K):
                        h = load_tile(
                            hidden, row, k, n, D, stride_hidden_row, stride_hidden_col, BLOCK_M, BLOCK_K, TMA_HIDDEN
                        )
                        w = load_tile(
                            weight, step * width + column, k, n_columns, D, stride_weight_row, stride_weight_col,
                            BLOCK_N, BLOCK_K, TMA_WEIGHT,
                        )  # fmt: skip
                        acc = tl.dot(h.to(DTYPE), w.to(DTYPE).T, acc, input_precision=PRECISION)
                    rows = row + tl.arange(0, BLOCK_M)
                    in_slice = column + tl.arange(0, BLOCK_N)
                    columns = step * width + in_slice
                    inside = columns < n_columns
                    if low_hidden_ptr is not None:
                        counts = rows < n_counting
                        acc = add_low_rank(
                            acc, low_hidden_ptr, low_weight_ptr, rows, counts, columns, inside, RANK, DTYPE, PRECISION
                        )
                    g = logit_gradient(
                        acc, row, step * width + column, n_counting, n_columns, bias_ptr, scale, column_weight_ptr,
                        target_ptr, lse_ptr, softmax_ptr, target_grad_ptr, softmax_logit_ptr, constant_ptr, factor,
                        first_column, softcap, 0.0, HAS_SOFTCAP, False, 1, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    g = tl.where(inside[None, :], g, 0.0)  # dE's product reads whole steps of columns
                    at = ((step % slots) * n_blocks * BLOCK_M + rows).to(tl.int64)[:, None] * width + in_slice[None, :]
                    tl.store(ring_ptr + at, g.to(DTYPE))
                signal(made_ptr + step)
        elif step > 0:
            done = step - 1
            if done >= n_made:
                wait_for(made_ptr + done, n_gradient)
                n_made = done + 1
            ring = ring_ptr + ((done % slots) * n_blocks * BLOCK_M).to(tl.int64) * width
            if sub < n_weight:
                row = sub // N_D * BLOCK_M
                column = sub % N_D * BLOCK_D
                first = done * width + row
                rows = first + tl.arange(0, BLOCK_M)
                if weight_grad_ptr is not None:
                    if first < n_weight_columns:
                        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                        for k in tl.range(0, n_counting, BLOCK_K):
                            g = _load_gradient(ring, k, row, width, BLOCK_K, BLOCK_M).T
                            h = load_tile(
                                hidden_factor, k, column, n, D_OUT, stride_hidden_factor, 1, BLOCK_K,
                                BLOCK_D, TMA_HIDDEN_FACTOR,
                            )  # fmt: skip
                            acc = tl.dot(g, h.to(DTYPE), acc, input_precision=PRECISION)
                        acc *= unit
                        _put_weight_grad(acc, rows, column, weight_grad_ptr, n_weight_columns, D_OUT, ACCUMULATE)
                if bias_grad_ptr is not None:
                    if (column == 0) & (first < n_weight_columns):
                        total = tl.zeros((BLOCK_M,), tl.float32)
                        for k in tl.range(0, n_counting, BLOCK_K):
                            g = _load_gradient(ring, k, row, width, BLOCK_K, BLOCK_M)
                            total += tl.sum(g.to(tl.float32), 0)
                        old = tl.load(bias_grad_ptr + rows, mask=rows < n_weight_columns, other=0.0)
                        tl.store(bias_grad_ptr + rows, old + total * unit, mask=rows < n_weight_columns)
                signal(weight_done_ptr + done)
            else:
                if hidden_grad_ptr is not None:
                    if done > n_summed:
                        wait_for(hidden_done_ptr + done - 1, n_hidden)
                        n_summed = done
                    i = sub - n_gradient - n_weight
                    row = i // N_D * BLOCK_M
                    column = i % N_D * BLOCK_D
                    if row < n_counting:
                        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                        for k in tl.range(0, tl.minimum(width, n_columns - done * width), BLOCK_K):
                            g = _load_gradient(ring, row, k, width, BLOCK_M, BLOCK_K)
                            w = load_tile(
                                weight_factor, done * width + k, column, n_columns, D_OUT, stride_weight_factor, 1,
                                BLOCK_K, BLOCK_D, TMA_WEIGHT_FACTOR,
                            )  # fmt: skip
                            acc = tl.dot(g, w.to(DTYPE), acc, input_precision=PRECISION)
                        rows = row + tl.arange(0, BLOCK_M)
                        to = rows.to(tl.int64)
                        if row_index_ptr is not None:
                            to = tl.load(row_index_ptr + rows, mask=rows < n_counting, other=0)
                        acc *= unit
                        adds = (done > 0) | (continues != 0)
                        ends = ((done + 1) * width >= n_columns) & (goes_on == 0)
                        _put_hidden_grad(
                            acc, rows, to, column, hidden_grad_ptr, lower_half_ptr, n_counting, adds, ends, D_OUT
                        )
                signal(hidden_done_ptr + done)
        item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
