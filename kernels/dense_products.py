"""The products of the exact backward on one slice of G: dE and dC.

Both products run in one launch of one program per multiprocessor. Tiles of dE come first; their number rarely fills
the last wave, and the programs that it leaves idle start on dC at once, with as many tiles more as last as long.
Programs that share a strip of G run side by side (tiles of D are numbered fastest), so G is read from memory once.
"""

import triton
import triton.language as tl

from .tiles import count_rows, load_tile


@triton.jit
def products_kernel(
    grad_rows,  # G [N, width], descriptor of [BLOCK_M, BLOCK_K] tiles, or pointer
    weight,  # [width, D] descriptor or pointer
    hidden_base_ptr,  # [N, D] what dE's product is added to, or None
    hidden_out_ptr,  # [N, D], or None: no dE
    row_index_ptr,  # [N] int64 where row i of dE belongs in hidden_out, or None
    grad_columns,  # G again, descriptor of [BLOCK_K, BLOCK_M] tiles, or pointer
    hidden,  # [N, D] descriptor or pointer
    weight_base_ptr,  # [width, D] what dC's product is added to, or None
    weight_out_ptr,  # [width, D], or None: no dC
    unit_ptr,  # [] or None
    n_rows_ptr,  # [1] int32 or None
    n,
    width,
    stride_grad,
    stride_weight_row,
    stride_weight_col,
    stride_hidden_row,
    stride_hidden_col,
    programs,
    D: tl.constexpr,
    FLATTEN_HIDDEN: tl.constexpr,  # loads of the next tile run under the end of this one; takes shared memory for both
    FLATTEN_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_GRAD: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n_counting = count_rows(n, n_rows_ptr)
    unit = 1.0
    if unit_ptr is not None:
        unit = tl.load(unit_ptr)
    N_D: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    busy = 0  # programs with one tile of dE more than the others
    if hidden_out_ptr is not None:
        n_items = tl.cdiv(n_counting, BLOCK_M) * N_D
        busy = n_items % programs
        for item in tl.range(program, n_items, programs, flatten=FLATTEN_HIDDEN):
            row = item // N_D * BLOCK_M
            column = item % N_D * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in tl.range(0, width, BLOCK_K):
                g = load_tile(grad_rows, row, k, n_counting, width, stride_grad, 1, BLOCK_M, BLOCK_K, TMA_GRAD)
                w = load_tile(
                    weight, k, column, width, D, stride_weight_row, stride_weight_col, BLOCK_K, BLOCK_N, TMA_WEIGHT
                )
                acc = tl.dot(g, w.to(DTYPE), acc, input_precision=PRECISION)
            rows = row + tl.arange(0, BLOCK_M)
            columns = column + tl.arange(0, BLOCK_N)
            inside = rows < n_counting
            mask = inside[:, None] & (columns < D)[None, :]
            at = rows.to(tl.int64)[:, None] * D + columns[None, :]
            if unit_ptr is not None:
                acc *= unit
            if hidden_base_ptr is not None:
                acc += tl.load(hidden_base_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if row_index_ptr is not None:
                at = tl.load(row_index_ptr + rows, mask=inside, other=0)[:, None] * D + columns[None, :]
            tl.store(hidden_out_ptr + at, acc.to(hidden_out_ptr.dtype.element_ty), mask=mask)
    if weight_out_ptr is not None:
        n_items = tl.cdiv(width, BLOCK_M) * N_D
        idle = programs - busy
        place = (program + idle) % programs  # of the programs that dE left idle first
        early = 0
        if hidden_out_ptr is not None:
            if (busy > 0) & (place < idle):
                early = (width + n_counting // 2) // n_counting  # tiles of dC that last as long as one of dE
        shared = tl.where(busy > 0, (width + n_counting // 2) // tl.maximum(n_counting, 1) * idle, 0)
        early = tl.minimum(early, tl.cdiv(tl.maximum(n_items - place, 0), idle))
        late = tl.cdiv(tl.maximum(n_items - shared - place, 0), programs)
        for i in tl.range(0, early + late, flatten=FLATTEN_WEIGHT):
            item = tl.where(i < early, place + i * idle, shared + place + (i - early) * programs)
            row = item // N_D * BLOCK_M
            column = item % N_D * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in tl.range(0, n_counting, BLOCK_K):
                g = load_tile(grad_columns, k, row, n_counting, width, stride_grad, 1, BLOCK_K, BLOCK_M, TMA_GRAD).T
                h = load_tile(
                    hidden, k, column, n, D, stride_hidden_row, stride_hidden_col, BLOCK_K, BLOCK_N, TMA_HIDDEN
                )
                acc = tl.dot(g, h.to(DTYPE), acc, input_precision=PRECISION)
            rows = row + tl.arange(0, BLOCK_M)
            columns = column + tl.arange(0, BLOCK_N)
            mask = (rows < width)[:, None] & (columns < D)[None, :]
            at = rows.to(tl.int64)[:, None] * D + columns[None, :]
            if unit_ptr is not None:
                acc *= unit
            if weight_base_ptr is not None:
                acc += tl.load(weight_base_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(weight_out_ptr + at, acc.to(weight_out_ptr.dtype.element_ty), mask=mask)
