"""Which tokens take part: their order, their targets, their rows of hidden and their upstream gradients.

Around the matrix products stand a few numbers per token. PyTorch would take some forty small operations for them, 10 to
20 us each on the host, which is more than a small head's products take; here they are one launch each.

    select_rows      [N] targets -> the order of the tokens, how many count, targets as rows of this shard
    take_rows        hidden in that order, zeros behind the tokens that count
    row_gradients    upstream gradients and log-sum-exp in that order, folded into `RowGradients`

Tokens that count keep their order in front, ignored ones keep theirs behind: a stable partition. Every program of
`select_rows` reads all N targets (1 MiB at 131072 tokens, from L2) to know how many count before its own block and how
many there are at all, so one launch does what a scan over blocks does in three, without atomics.

Example: N = 5, ignored = -100, this shard has the ids [10, 20)

    target         [12, -100, 31, -100, 19]
    index          [ 0, 2, 4,    1,  3]         position i of the compact order holds token index[i]
    local target   [ 2, -1, 9,  -1, -1]         id 31 lives elsewhere, the last two do not count
    count          3

How many count is known on the device only; nobody waits. hidden is copied because a TMA descriptor wants the rows of a
block to be neighbours; without an ignore_index there is no order, and nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .problem import RowGradients
from .tiles import ceil_div, count_rows

BLOCK = 1024  # tokens that one program puts in order
SCAN = 4096  # targets that it reads at a time


@triton.jit
def select_rows_kernel(
    target_ptr,  # [N] int64
    index_ptr,  # [N] int64 out, or None: every token counts
    local_ptr,  # [N] int64 out
    count_ptr,  # [] int32 out, or None with index_ptr
    divisor_ptr,  # [] int32 out: the count but at least 1; 0 where some target is no id. Or None
    n,
    ignore_index,
    start,
    stop,
    vocab_size,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    pid = tl.program_id(0)
    first = pid * BLOCK
    offs = first + tl.arange(0, BLOCK)
    inside = offs < n
    target = tl.load(target_ptr + offs, mask=inside, other=-1)
    keep = inside
    if index_ptr is not None:
        keep = inside & (target != ignore_index)
    local = tl.where(keep & (target >= start) & (target < stop), target - start, -1)
    if index_ptr is None and divisor_ptr is None:
        tl.store(local_ptr + offs, local, mask=inside)
    else:
        counted = tl.zeros((SCAN,), tl.int32)
        before = tl.zeros((SCAN,), tl.int32)
        wrong = tl.zeros((SCAN,), tl.int32)
        for scan in range(0, n, SCAN):
            offs_scan = scan + tl.arange(0, SCAN)
            seen = tl.load(target_ptr + offs_scan, mask=offs_scan < n, other=0)
            kept = offs_scan < n
            if index_ptr is not None:
                kept = kept & (seen != ignore_index)
            counted += kept.to(tl.int32)
            before += (kept & (offs_scan < first)).to(tl.int32)
            if divisor_ptr is not None:
                wrong |= (kept & ((seen < 0) | (seen >= vocab_size))).to(tl.int32)
        if index_ptr is None:
            tl.store(local_ptr + offs, local, mask=inside)
        else:
            count = tl.sum(counted, 0)
            in_front = tl.sum(before, 0) + tl.cumsum(keep.to(tl.int32), 0)  # that count, up to this token
            place = tl.where(keep, in_front - 1, count + offs - in_front)
            tl.store(index_ptr + place, offs.to(tl.int64), mask=inside)
            tl.store(local_ptr + place, local, mask=inside)
        if pid == 0:
            n_counted = tl.sum(counted, 0)
            if count_ptr is not None:
                tl.store(count_ptr, n_counted)
            if divisor_ptr is not None:
                tl.store(divisor_ptr, tl.where(tl.max(wrong, 0) > 0, 0, tl.maximum(n_counted, 1)))


@triton.jit
def take_rows_kernel(
    source_ptr,  # [N, D]
    index_ptr,  # [N] int64
    n_rows_ptr,  # [] int32
    out_ptr,  # [N, D] out
    n,
    d,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    counts = rows < count_rows(n, n_rows_ptr)
    source_row = tl.load(index_ptr + rows, mask=counts, other=0)
    source = source_ptr + source_row[:, None] * stride_row
    out = out_ptr + rows.to(tl.int64)[:, None] * d
    for start in range(0, d, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        inside = (offs_d < d)[None, :]
        at = offs_d.to(tl.int64)[None, :] * stride_col
        values = tl.load(source + at, mask=counts[:, None] & inside, other=0.0)
        tl.store(out + offs_d[None, :], values, mask=(rows < n)[:, None] & inside)


@triton.jit
def row_gradients_kernel(
    grad_lse_ptr,  # [N] or None, as are the next three
    grad_target_ptr,
    grad_entropy_ptr,
    grad_logit_sum_ptr,
    lse_ptr,  # [N]
    entropy_ptr,  # [N], or None without grad_entropy
    index_ptr,  # [N] int64 or None
    n_rows_ptr,  # [] int32, or None with index_ptr
    out_ptr,  # [5, N] out: lse, and the fields of `RowGradients`
    n,
    stride_lse,
    stride_target,
    stride_entropy,
    stride_logit_sum,
    stride_out,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = rows < n
    counts = rows < count_rows(n, n_rows_ptr)
    at = rows.to(tl.int64)
    if index_ptr is not None:
        at = tl.load(index_ptr + rows, mask=counts, other=0)
    out = out_ptr + rows.to(tl.int64)
    lse = tl.load(lse_ptr + at, mask=counts, other=0.0)
    softmax = tl.zeros((BLOCK,), tl.float32)
    target = tl.zeros((BLOCK,), tl.float32)
    if grad_lse_ptr is not None:
        softmax = tl.load(grad_lse_ptr + at * stride_lse, mask=counts, other=0.0).to(tl.float32)
    if grad_target_ptr is not None:
        target = tl.load(grad_target_ptr + at * stride_target, mask=counts, other=0.0).to(tl.float32)
    if grad_entropy_ptr is not None:
        slope = tl.load(grad_entropy_ptr + at * stride_entropy, mask=counts, other=0.0).to(tl.float32)
        softmax += slope * (lse - tl.load(entropy_ptr + at, mask=counts, other=0.0))
        tl.store(out + 3 * stride_out, -slope, mask=stored)
    if grad_logit_sum_ptr is not None:
        constant = tl.load(grad_logit_sum_ptr + at * stride_logit_sum, mask=counts, other=0.0).to(tl.float32)
        tl.store(out + 4 * stride_out, constant, mask=stored)
    tl.store(out, lse, mask=stored)
    tl.store(out + stride_out, softmax, mask=stored)
    tl.store(out + 2 * stride_out, target, mask=stored)


@dataclass(frozen=True)
class Selected:
    """The order of the tokens and their targets. The first two are None where every token counts."""

    index: Tensor | None  # [N] int64, the tokens that count in front
    count: Tensor | None  # [] int32
    divisor: Tensor | None  # [] int32, the count but at least 1, for a mean; 0 where some target is no id; with `check`
    local: Tensor  # [N] int64 in the order of index, rows of this shard; -1 for what lives elsewhere or is ignored


def select_rows(
    target: Tensor,  # [N] int64, global ids
    *,
    ignore_index: int | None,
    start: int,
    stop: int,
    vocab_size: int,
    check: bool,
) -> Selected:
    """`Selected`, for a shard with the ids start <= id < stop."""
    n = target.shape[0]
    target = target.contiguous()
    local = torch.empty(n, dtype=torch.int64, device=target.device)
    index = torch.empty_like(local) if ignore_index is not None else None
    count = torch.empty((), dtype=torch.int32, device=target.device) if ignore_index is not None else None
    divisor = torch.empty((), dtype=torch.int32, device=target.device) if check else None
    with torch.cuda.device_of(target):
        # At least one program, so that there is a count of no tokens too.
        select_rows_kernel[(max(ceil_div(n, BLOCK), 1),)](
            target, index, local, count, divisor, n, ignore_index or 0, start, stop, vocab_size,
            BLOCK=BLOCK, SCAN=SCAN, num_warps=8,
        )  # fmt: skip
    return Selected(index, count, divisor, local)


def take_rows(source: Tensor, index: Tensor, n_rows: Tensor) -> Tensor:
    """source[index], [N, D], with zeros behind the `n_rows` that count."""
    n, d = source.shape
    out = torch.empty(n, d, dtype=source.dtype, device=source.device)
    if n:
        with torch.cuda.device_of(source):
            take_rows_kernel[(ceil_div(n, 4),)](
                source, index, n_rows, out, n, d, *source.stride(), ROWS=4, BLOCK_D=1024, num_warps=4
            )
    return out


def row_gradients(
    grads: Sequence[Tensor | None],  # [N], of lse, target_logit, entropy and logit_sum
    lse: Tensor,  # [N] fp32
    entropy: Tensor | None,  # [N]
    index: Tensor | None,
    n_rows: Tensor | None,
) -> tuple[Tensor, RowGradients]:
    """(lse, upstream gradients) in the order of index; rows that do not count are 0."""
    n = lse.shape[0]
    stride = ceil_div(n, 4) * 4  # rows at multiples of 16 bytes, or kernels are compiled once more
    out = torch.empty_strided((5, n), (stride, 1), dtype=torch.float32, device=lse.device)
    g_lse, g_target, g_entropy, g_logit_sum = grads
    if n:
        with torch.cuda.device_of(lse):
            row_gradients_kernel[(ceil_div(n, BLOCK),)](
                *grads, lse, None if g_entropy is None else entropy, index, n_rows, out, n,
                *(0 if g is None else g.stride(0) for g in grads), stride, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    compact_lse, softmax, target, softmax_logit, constant = out.unbind(0)
    return compact_lse, RowGradients(
        softmax=softmax,
        target=target,
        softmax_logit=None if g_entropy is None else softmax_logit,
        constant=None if g_logit_sum is None else constant,
    )
