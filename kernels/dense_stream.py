"""The exact backward as one launch that the device may refuse: what the sampled one falls back to.

Whether there are too many marks for lists is known on the device only, so every sampled step enqueues this kernel, and
nearly always each program reads `dense == 0` and leaves. One launch, small memory and no host time matter here; where
the exact policy is asked for, `backward_dense` is faster.

Where dE is fp32 it is its own sum. Otherwise it holds the upper 16 bits of its sums; the lower ones lie in `spare`, or
where dC will be, at the end of its storage, and the columns of dC under them follow in a second launch.
"""

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

RING_BYTES = 32 << 20  # G of two slices; half as many beside main_grad, where every buffer is memory beyond dE
MIN_WIDTH = 512  # columns of a slice, whatever they take: every slice reads and writes dE's sums


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
    spare: Tensor,  # memory that nobody needs any more; a fresh weight_grad may be it
    low_rank_grad: Tensor | None = None,  # [N, R] fp32 out, in the order of hidden
) -> None:
    """dE, dC and dbias like `backward_dense.dense_backward`, if `dense` says so. One launch or two."""
    run = _Stream(hidden, head, target, lse, rows, dense, n_rows)
    if head.low_rank is not None:  # its products are narrow: a launch, and a recomputation, of their own; dE is fp32
        run(low_rank_grad, None, weight_grad, bias_grad, accumulate=accumulate, low_rank=True)
        weight_grad = bias_grad = None
    if hidden_grad is None or hidden_grad.dtype == torch.float32:
        run(hidden_grad, row_index, weight_grad, bias_grad, accumulate=accumulate)
        return
    in_weight_grad = spare is weight_grad
    lower_half = _at_the_end(spare, hidden_grad.shape, most=spare.nbytes // 2 if in_weight_grad else spare.nbytes)
    if lower_half is None:
        lower_half = torch.empty(hidden_grad.shape, dtype=torch.int16, device=hidden.device)
        in_weight_grad = False
    stop = None
    if in_weight_grad:
        stop = (lower_half.data_ptr() - weight_grad.data_ptr()) // (weight_grad.shape[1] * weight_grad.element_size())
        stop = stop // 16 * 16
    run(hidden_grad, row_index, weight_grad, bias_grad, lower_half=lower_half, stop=stop, accumulate=accumulate)
    if stop is not None:
        run(None, None, weight_grad, bias_grad, start=stop)


def _at_the_end(spare: Tensor, shape: torch.Size, most: int) -> Tensor | None:
    """int16 of that shape at the end of spare's memory, 16-byte aligned; None if it takes more than `most` bytes."""
    memory = spare.view(-1).view(torch.uint8)
    size = 2 * shape.numel()
    start = memory.numel() - size
    start -= (memory.data_ptr() + start) % 16
    if start < 0 or memory.numel() - start > most:
        return None
    return memory[start : start + size].view(torch.int16).view(shape)


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
        self, hidden_grad, row_index, weight_grad, bias_grad, *, lower_half: Tensor | None = None, start: int = 0,
        stop: int | None = None, accumulate=False, low_rank=False,
    ) -> None:  # fmt: skip
        """dE of all columns from `start` on; dC and dbias of those before `stop`.

        With `low_rank` these are the gradients of the second product's factors.
        """
        if hidden_grad is None and weight_grad is None and bias_grad is None:
            return
        head, rows, device = self.head, self.rows, self.hidden.device
        t = launch_parameters("gradient", device, self.dtype)
        n_blocks = ceil_div(self.n, t.block_m)
        n_columns = head.weight.shape[0] - start
        step = max(t.block_m, t.block_n)
        ring_bytes = RING_BYTES // 2 if accumulate else RING_BYTES
        width = max(ring_bytes // (2 * n_blocks * t.block_m * self.dtype.itemsize), MIN_WIDTH) // step * step
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
            rows.target, rows.softmax_logit, rows.constant, self.unit, self.n_rows, row_index, ring, hidden_grad,
            lower_half, _from(weight_grad, start), _from(bias_grad, start), counters, counters[1:],
            counters[1 + slices :], self.n, n_columns, n_columns if stop is None else stop - start, start, n_blocks,
            h.stride_row, h.stride_col, w.stride_row, w.stride_col, h_factor.stride_row, w_factor.stride_row,
            head.softcap or 1.0,
            D=self.d, D_OUT=d_out, RANK=rank, HAS_SOFTCAP=head.softcap is not None, ACCUMULATE=accumulate, WIDTH=width,
            BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=t.block_k, BLOCK_D=block_d, TMA_HIDDEN=h.tma,
            TMA_WEIGHT=w.tma, TMA_HIDDEN_FACTOR=h_factor.tma, TMA_WEIGHT_FACTOR=w_factor.tma,
            DTYPE=TL_DTYPE[self.dtype], PRECISION="ieee", num_warps=t.num_warps, num_stages=t.num_stages,
        )  # fmt: skip


def _from(part: Tensor | None, start: int) -> Tensor | None:
    return None if part is None else part[start:]
