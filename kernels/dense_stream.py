"""The exact backward as a few launches that the device may refuse: what the sampled one falls back to.

Whether there are too many marks for lists is known on the device only, so every sampled step enqueues these kernels,
and nearly always each program reads `dense == 0` and leaves. Few launches, small memory and little host time matter
here; where the exact policy is asked for, `backward_dense` is faster.

dE is summed over slices of the vocabulary, and each of them reads and writes the sum. Where dE is fp32 it is its own
sum. Otherwise it holds the upper 16 bits of its sums and the lower ones lie elsewhere until the last slice. Wide slices
keep that cheap, or few rows. The arena of the sampled backward's G serves as memory, which is free by then:

- A fresh dC: its own storage too, until it is written. dE's lower halves lie at its end and a ring of SLOTS wide
  slices of G before them.

      launch    dE of columns    dC and dbias of columns    ring
      1         [0, a)           [0, a)                     over dC of [a, b)
      2         [a, V)           [a, b)                     the arena, or RING_BYTES of its own and narrow
      3                          [b, V), under the halves   the same

  Example: 8192 x 256000 x 2304 in bf16 has a = 218672 and b = 247808, and slices of 4096 and 1024 columns.
- Sums of dC in fp32: the rows go through the kernel in chunks, each of which adds to them; dE's sums stay in L2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .dense_stream_kernel import dense_stream_kernel
from .launch_table import launch_parameters
from .problem import Head, RowGradients
from .tiles import (
    TL_DTYPE,
    Source,
    ceil_div,
    compute_dtype,
    gradient_unit,
    low_rank_arguments,
    multiprocessors,
    narrowed,
    scale_tensor,
)

RING_BYTES = 32 << 20  # a ring in memory of its own beside a fresh dC; half as many where `accumulate`
MIN_WIDTH = 512  # columns of a slice, whatever they take
WIDE = 4096  # columns of a slice, however much memory there is, unless RING_BYTES have room for more
SLOTS = 2  # slices in a ring; three narrower ones take longer
SUM_BYTES = 36 << 20  # dE's sum of a chunk, which every slice reads and writes: part of L2
CHUNK_ROWS = 2048
MAX_CHUNKS = 16  # each is a launch, nearly always an idle one
ALIGNMENT = 64  # bytes, of parts of given memory; all memory of PyTorch has it, so slices never depend on an address


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
    weight_grad: Tensor | None,  # [V, D] out, or fp32 and added to with accumulate
    accumulate: bool,
    bias_grad: Tensor | None,  # [V] fp32, added to
    arena: Tensor,  # memory that nobody needs if `dense` is not 0
    low_rank_grad: Tensor | None = None,  # [N, R] fp32 out, in the order of hidden
) -> None:
    """dE, dC and dbias like `backward_dense.dense_backward`, if `dense` says so. One to MAX_CHUNKS + 1 launches."""
    run = _Stream(hidden, head, target, lse, rows, dense, n_rows)
    if weight_grad is not None and not accumulate and hidden_grad is not None and head.low_rank is None:
        _in_storage_of_weight_grad(run, hidden_grad, row_index, weight_grad, bias_grad, arena)
        return
    free = _bytes_of(arena)
    own_bytes = RING_BYTES // 2 if accumulate else RING_BYTES
    if head.low_rank is not None:  # its products are narrow: a launch, and a recomputation, of their own; dE is fp32
        ring = run.ring_in(free, run.n, own_bytes)
        run(low_rank_grad, None, weight_grad, bias_grad, ring, accumulate=accumulate, low_rank=True)
        weight_grad = bias_grad = None
    if hidden_grad is None:
        if weight_grad is not None or bias_grad is not None:
            run(None, None, weight_grad, bias_grad, run.ring_in(free, run.n, own_bytes), accumulate=accumulate)
        return
    size = run.chunk_rows(free.numel())
    lower_half = None
    if hidden_grad.dtype != torch.float32:
        lower_half, free = run.lower_half_in(free, size)
    ring = run.ring_in(free, size, own_bytes)
    for first in range(0, run.n, size):
        run(
            hidden_grad, row_index, weight_grad, bias_grad, ring, rows=(first, min(first + size, run.n)),
            lower_half=lower_half, accumulate=accumulate,
        )  # fmt: skip


def _in_storage_of_weight_grad(run: "_Stream", hidden_grad, row_index, weight_grad: Tensor, bias_grad, arena) -> None:
    """The three launches of the table above, or those of them that have columns; one in a large arena."""
    n_columns = weight_grad.shape[0]
    lower_bytes = 0 if hidden_grad.dtype == torch.float32 else 2 * hidden_grad.numel()
    if arena.nbytes >= 2 * lower_bytes + RING_BYTES + ALIGNMENT:
        lower_half, free = run.lower_half_in(_bytes_of(arena), run.n) if lower_bytes else (None, _bytes_of(arena))
        ring = run.ring_in(free, run.n, RING_BYTES)
        run(hidden_grad, row_index, weight_grad, bias_grad, ring, lower_half=lower_half)
        return
    column_bytes = weight_grad.shape[1] * weight_grad.element_size()
    free = _bytes_of(weight_grad)
    lower_half, wide_stop, stop = None, 0, n_columns
    if hidden_grad.dtype != torch.float32:
        fits = 2 * hidden_grad.numel() + ALIGNMENT <= free.numel() // 2
        lower_half, rest = run.lower_half_in(free if fits else None, run.n)
        if rest is not None:
            free, stop = rest, _whole_columns(rest, column_bytes)
    arena = _bytes_of(arena)
    narrow = run.ring_in(arena if arena.numel() > RING_BYTES else None, run.n, RING_BYTES)
    # A wider ring leaves more columns to narrow slices; this width makes the fewest slices of both kinds.
    at_most = free.numel() // run.column_bytes(run.n)
    width = min(WIDE, math.isqrt(narrow.width * at_most)) // run.step * run.step
    memory, before = _from_the_end(free, width * run.column_bytes(run.n))
    if width > narrow.width and _whole_columns(before, column_bytes) >= SLOTS * width:
        wide_stop = _whole_columns(before, column_bytes)
        wide = Ring(memory.view(run.dtype), width)
        run(
            hidden_grad, row_index, weight_grad, bias_grad, wide, columns=(0, wide_stop), lower_half=lower_half,
            goes_on=True,
        )  # fmt: skip
    run(
        hidden_grad, row_index, weight_grad, bias_grad, narrow, columns=(wide_stop, n_columns), weight_stop=stop,
        lower_half=lower_half, continues=wide_stop > 0,
    )  # fmt: skip
    if stop < n_columns:
        run(None, None, weight_grad, bias_grad, narrow, columns=(stop, n_columns))


class Ring(NamedTuple):
    """Memory for G of SLOTS slices of `width` columns."""

    memory: Tensor
    width: int


class _Stream:
    """The launches for some tokens."""

    def __init__(self, hidden, head: Head, target, lse, rows: RowGradients, dense, n_rows):
        self.hidden, self.head, self.target, self.lse, self.rows = hidden, head, target, lse, rows
        self.dense, self.n_rows = dense, n_rows
        self.n, self.d = hidden.shape
        self.dtype = compute_dtype(hidden, head)
        self.unit = gradient_unit(rows, head, self.dtype)
        self.scale = scale_tensor(head)
        self.programs = multiprocessors(hidden.device)
        self.tile = launch_parameters("gradient", hidden.device, self.dtype)
        self.step = max(self.tile.block_m, self.tile.block_n)  # widths are multiples of it
        n_counters = 1 + 3 * ceil_div(head.weight.shape[0], MIN_WIDTH)
        counters = torch.zeros(MAX_CHUNKS + 1, n_counters, dtype=torch.int32, device=hidden.device)
        self.counters = iter(counters.unbind())  # a launch's each

    def chunk_rows(self, arena_bytes: int) -> int:
        """Rows of a chunk, whole row blocks: 2048 of 8192 x 2304, 4096 of 65536; more where the arena has wide slices
        of them, all of 8192 x 1024 with 128 MiB."""
        rows = max(CHUNK_ROWS, arena_bytes // (SLOTS * WIDE * self.dtype.itemsize))
        rows = max(min(rows, SUM_BYTES // (4 * self.d)), ceil_div(self.n, MAX_CHUNKS))
        rows = ceil_div(self.n, ceil_div(self.n, rows))  # chunks of one size
        return min(ceil_div(rows, self.tile.block_m) * self.tile.block_m, self.n)

    def column_bytes(self, n: int) -> int:
        """Of a ring for n rows, per column of a slice."""
        return SLOTS * ceil_div(n, self.tile.block_m) * self.tile.block_m * self.dtype.itemsize

    def lower_half_in(self, free: Tensor | None, n: int) -> tuple[Tensor, Tensor | None]:
        """([n, D] int16, what is left of free memory); memory of its own, and None, where it does not fit."""
        memory, rest = (None, None) if free is None else _from_the_end(free, 2 * n * self.d)
        if memory is None:
            return torch.empty(n, self.d, dtype=torch.int16, device=self.hidden.device), None
        return memory.view(torch.int16).view(n, self.d), rest

    def ring_in(self, free: Tensor | None, n: int, own_bytes: int) -> Ring:
        """For n rows in free memory, or in own_bytes of its own, or more, where that has no room for MIN_WIDTH."""
        n_columns = ceil_div(self.head.weight.shape[0], self.step) * self.step
        per_column = self.column_bytes(n)
        if free is not None:
            width = min(free.numel() // per_column, max(WIDE, RING_BYTES // per_column), n_columns)
            if width >= min(MIN_WIDTH, n_columns):
                width = width // self.step * self.step
                memory, _ = _from_the_end(free, width * per_column)
                if memory is not None:
                    return Ring(memory.view(self.dtype), width)
        width = min(max(own_bytes // per_column, MIN_WIDTH), n_columns) // self.step * self.step
        memory = torch.empty(width * per_column // self.dtype.itemsize, dtype=self.dtype, device=self.hidden.device)
        return Ring(memory, width)

    def __call__(
        self, hidden_grad, row_index, weight_grad, bias_grad, ring: Ring, *, columns: tuple[int, int] | None = None,
        rows: tuple[int, int] | None = None, weight_stop: int | None = None, lower_half: Tensor | None = None,
        continues=False, goes_on=False, accumulate=False, low_rank=False,
    ) -> None:  # fmt: skip
        """dE, dC and dbias of some columns and rows; dC and dbias of the columns before weight_stop only.

        dE's sum `continues` that of an earlier launch, and `goes_on` in a later one. With `low_rank` these are the
        gradients of the second product's factors.
        """
        head, t = self.head, self.tile
        start, stop = columns or (0, head.weight.shape[0])
        first, last = rows or (0, self.n)
        n, n_columns = last - first, stop - start
        n_weight_columns = n_columns if weight_stop is None else weight_stop - start
        n_slices = ceil_div(n_columns, ring.width)
        counters = next(self.counters)
        ticket, made, weight_done, hidden_done = (counters[at:] for at in (0, 1, 1 + n_slices, 1 + 2 * n_slices))
        hidden, weight = _part(self.hidden, first, last), _part(head.weight, start, stop)
        low_hidden, low_weight, rank = low_rank_arguments(head, slice(start, stop))
        low_hidden = _part(low_hidden, first, last)
        factors = (low_hidden, low_weight) if low_rank else (hidden, weight)
        d_out = factors[0].shape[1]
        block_d = narrowed(t.block_n, d_out)
        h, h_factor = Source(hidden, t.block_m, t.block_k), Source(factors[0], t.block_k, block_d)
        w, w_factor = Source(weight, t.block_n, t.block_k), Source(factors[1], t.block_k, block_d)
        target, lse, softmax, target_grad, softmax_logit, constant, row_index = (
            _part(per_row, first, last)
            for per_row in (
                self.target, self.lse, self.rows.softmax, self.rows.target, self.rows.softmax_logit,
                self.rows.constant, row_index,
            )
        )  # fmt: skip
        if row_index is None:
            hidden_grad = _part(hidden_grad, first, last)
        dense_stream_kernel[(self.programs,)](
            self.dense, h.source, w.source, low_hidden, low_weight, h_factor.source, w_factor.source,
            _part(head.bias, start, stop), self.scale, _part(head.column_weight, start, stop), target, lse, softmax,
            target_grad, softmax_logit, constant, self.unit, self.n_rows, row_index, ring.memory, hidden_grad,
            lower_half, _part(weight_grad, start, stop), _part(bias_grad, start, stop), ticket, made, weight_done,
            hidden_done, n, first, n_columns, n_weight_columns, start, ceil_div(n, t.block_m), SLOTS, ring.width,
            int(continues), int(goes_on), h.stride_row, h.stride_col, w.stride_row, w.stride_col, h_factor.stride_row,
            w_factor.stride_row, head.softcap or 1.0,
            D=self.d, D_OUT=d_out, RANK=rank, HAS_SOFTCAP=head.softcap is not None, ACCUMULATE=accumulate,
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, BLOCK_D=block_d, TMA_HIDDEN=h.tma,
            TMA_WEIGHT=w.tma, TMA_HIDDEN_FACTOR=h_factor.tma, TMA_WEIGHT_FACTOR=w_factor.tma,
            DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee", num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip


def _part(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return tensor if tensor is None or (start, stop) == (0, tensor.shape[0]) else tensor[start:stop]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _whole_columns(free: Tensor, column_bytes: int) -> int:
    """Columns of dC in `free`, its beginning: a multiple of 16, so that what follows them is aligned."""
    return free.numel() // column_bytes // 16 * 16


def _from_the_end(free: Tensor, size: int) -> tuple[Tensor | None, Tensor]:
    """(`size` bytes at the end that begin at a multiple of ALIGNMENT, what lies before them), or (None, free)."""
    start = free.numel() - size
    start -= (free.data_ptr() + start) % ALIGNMENT
    if start < 0:
        return None, free
    return free[start : start + size], free[:start]
