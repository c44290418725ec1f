"""A lower bound of every token's log-sum-exp from a few columns, known before the forward starts.

The forward marks a column when its logit comes close to the log-sum-exp of some token. Its own running sum starts
empty in each split, and marking against that alone marks 19% of the columns where 3.4% are kept in the end; with
the log-sum-exp over the batch's 1024 most frequent targets it is 5.1% (measured, 8192 x 256000 x 2304). Half as many,
HOT_COLUMNS, take the same time in all.

While the forward runs it learns more: the sums of the splits that are finished (`marks.finished_bound`). They count
the hot columns in them again, so the sum of each split's hot columns is tabulated too; from bf16 numbers rounded up,
which makes the bound lower, and is a product with a matrix of ones and zeros.

Any set of distinct columns gives a lower bound, so nothing depends on which ones are chosen: a batch with fewer
distinct targets fills up with arbitrary columns. Products are fp32 sums rounded nowhere else; what remains of
rounding is covered by the slack in `marks.mark_shift`.

Few columns say little about a flat softmax, a model's at the start of its training. There the mean of many logits
does, since exp is convex: log-sum-exp >= log n + mean of n logits, and that mean is one product with the mean row
of the weight's first MEAN_COLUMNS. At logits of a standard deviation s it is s^2 / 2 too low. The mean row has two
rows in the weight's dtype, itself and what its rounding left, and these take part in the hot set's product. Behind a
softcap the mean of logits is no product, so there is none.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .beside import Beside
from .launch_table import launch_parameters, plan_splits
from .marks import FAR
from .problem import Head, HotSet, HotSplits
from .row_sum import mean_parts, write_mean_row
from .tiles import ceil_div, compute_dtype, load_scale, logits_of, multiprocessors, scale_tensor
from .units import LOG2E

HOT_COLUMNS = 512  # two of them are the mean's
MEAN_COLUMNS = 32768
ROWS, BLOCK = 16, 128  # tokens of a program, and hot columns at a time
MAX_ROWS = 16384  # tokens per [tokens, HOT_COLUMNS] block of fp32 logits: 32 MiB


@triton.jit
def _hot_logits(
    product_ptr, bias_ptr, scale_ptr, rows, columns, n, n_hot, stride_row, softcap, HAS_SOFTCAP: tl.constexpr
):  # fmt: skip
    inside = columns < n_hot
    mask = (rows < n)[:, None] & inside[None, :]
    x = tl.load(product_ptr + rows.to(tl.int64)[:, None] * stride_row + columns[None, :], mask=mask, other=0.0)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    x = logits_of(x, bias, load_scale(scale_ptr), softcap, HAS_SOFTCAP)
    return tl.where(inside[None, :], x, -float("inf"))


@triton.jit
def hot_stats_kernel(
    product_ptr,  # [N, n_hot] fp32, with mean_bound two more columns
    bias_ptr,  # [n_hot], likewise, or None
    scale_ptr,  # [] fp32 or None
    hot_ptr,  # [n_hot] int64, their columns
    out_ptr,  # [N] out: maxima; sums lie stride_out behind them, log-sum-exps twice that
    mass_ptr,  # [splits, N] out, see `HotSplits`, or None
    mean_bound_ptr,  # [N] out or None
    n,
    n_hot,
    splits,
    split_columns,
    stride_row,
    stride_out,
    softcap,
    log_mean_columns,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,  # tabulated at a time
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.arange(0, BLOCK)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    for first in range(0, n_hot, BLOCK):
        x = _hot_logits(
            product_ptr, bias_ptr, scale_ptr, rows, first + offs, n, n_hot, stride_row, softcap, HAS_SOFTCAP
        )
        top = tl.maximum(top, tl.max(x, 1))
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros((ROWS,), tl.float32)
    offs_split = tl.arange(0, SPLITS)
    for first_split in range(0, splits, SPLITS):
        split = first_split + offs_split
        begin = split * split_columns
        mass = tl.zeros((ROWS, SPLITS), tl.float32)
        for first in range(0, n_hot, BLOCK):
            columns = first + offs
            x = _hot_logits(product_ptr, bias_ptr, scale_ptr, rows, columns, n, n_hot, stride_row, softcap, HAS_SOFTCAP)
            e = tl.exp(x - shift[:, None])
            if first_split == 0:
                total += tl.sum(e, 1)
            if mass_ptr is not None:
                hot = tl.load(hot_ptr + columns, mask=columns < n_hot, other=-1).to(tl.int32)
                offset = hot[:, None] - begin[None, :]
                in_split = ((offset >= 0) & (offset < split_columns)).to(tl.bfloat16)
                mass = tl.dot((e * (1 + 2.0**-7)).to(tl.bfloat16), in_split, mass)
        if mass_ptr is not None:
            at = mass_ptr + split.to(tl.int64)[None, :] * stride_out + rows[:, None]
            log_mass = shift[:, None] * LOG2E + tl.log2(mass)
            tl.store(at, log_mass, mask=(rows < n)[:, None] & (split < splits)[None, :])
    out = out_ptr + rows.to(tl.int64)
    tl.store(out, top, mask=rows < n)
    tl.store(out + stride_out, total, mask=rows < n)
    tl.store(out + 2 * stride_out, shift + tl.log(total), mask=rows < n)
    if mean_bound_ptr is not None:
        at = product_ptr + rows.to(tl.int64) * stride_row + n_hot
        x = tl.load(at, mask=rows < n, other=0.0) + tl.load(at + 1, mask=rows < n, other=0.0)
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + n_hot).to(tl.float32) + tl.load(bias_ptr + n_hot + 1).to(tl.float32)
        bound = logits_of(x, bias, load_scale(scale_ptr), softcap, False) + log_mean_columns
        tl.store(mean_bound_ptr + rows, tl.where(tl.abs(bound) < FAR, bound, -FAR), mask=rows < n)


def hot_set(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] int64, local rows, -1 for elsewhere and for tokens that do not count
) -> HotSet:
    """Statistics of the batch's most frequent targets, and the mean's bound."""
    n, n_columns = hidden.shape[0], head.weight.shape[0]
    out = torch.empty(3, n, dtype=torch.float32, device=hidden.device)
    if n == 0 or n_columns == 0:
        out[::2], out[1] = -torch.inf, 0.0
        return HotSet(out, None)
    processors = multiprocessors(hidden.device)
    tile = launch_parameters("forward", hidden.device, compute_dtype(hidden, head))
    splits, tiles_per_split = plan_splits(n, n_columns, tile, processors)
    low = head.low_rank
    n_mean = 0 if head.softcap is not None else min(n_columns, MEAN_COLUMNS)
    mean_bound = torch.empty(n, dtype=torch.float32, device=hidden.device) if n_mean else None
    matrices = (head.weight, None if head.bias is None else head.bias[:, None], None if low is None else low.weight)
    hot, (weight, bias, low_weight) = _rows(matrices, target, n_mean)
    by_split = None
    # AMD's compiler drops `volatile`, so a program there might wait for a number that its cache keeps from it.
    waits = torch.version.hip is None
    in_turn = splits > 1 and splits * ceil_div(n, tile.block_m) > processors  # else none is finished when one starts
    if waits and in_turn:
        mass = torch.empty(splits, n, dtype=torch.float32, device=hidden.device)
        by_split = HotSplits(mass, tiles_per_split * tile.block_n)
    scale = scale_tensor(head)
    log_n = math.log(n_mean) if n_mean else 0.0
    for start in range(0, n, MAX_ROWS):
        part = hidden if n <= MAX_ROWS else hidden[start : start + MAX_ROWS]
        x = _product(part, weight)
        if low is not None:
            x += _product(low.hidden[start : start + MAX_ROWS], low_weight)
        rows = x.shape[0]
        with torch.cuda.device_of(x):
            hot_stats_kernel[(ceil_div(rows, ROWS),)](
                x, bias, scale, hot, _from(out, start), None if by_split is None else _from(by_split.mass, start),
                None if mean_bound is None else _from(mean_bound, start), rows, len(hot), splits if by_split else 1,
                by_split.columns if by_split else 1, x.stride(0), n, head.softcap or 1.0, log_n,
                HAS_SOFTCAP=head.softcap is not None, ROWS=ROWS, BLOCK=BLOCK, SPLITS=64, num_warps=4,
            )  # fmt: skip
    return HotSet(out, by_split, mean_bound)


def _rows(
    matrices: Sequence[Tensor | None], target: Tensor, n_mean: int
) -> tuple[Tensor, list[Tensor | None]]:
    """(hot, m[hot] of each matrix [V, ..]); where n_mean is not 0 two more rows, whose sum is the mean of m[:n_mean].

    Choosing the hot columns takes many short kernels, beside which the means are computed.
    """
    n_columns = matrices[0].shape[0]
    n_hot = min(HOT_COLUMNS - 2 * (n_mean > 0), n_columns)
    rows = [None if m is None else m.new_empty(n_hot + 2 * (n_mean > 0), m.shape[1]) for m in matrices]
    pairs = [(m, r) for m, r in zip(matrices, rows, strict=True) if m is not None]
    tops = [m[:n_mean] for m, _ in pairs] if n_mean else []
    parts = [mean_parts(top) for top in tops]
    with Beside(target.device) as beside:
        if n_mean:
            with beside.stream():
                for top, memory, (_, out) in zip(tops, parts, pairs, strict=True):
                    write_mean_row(top, memory, out[n_hot:])
        hot = _most_frequent(target, n_columns, n_hot)
        for matrix, out in pairs:
            torch.index_select(matrix, 0, hot, out=out[:n_hot])
    return hot, rows


def _from(table: Tensor, start: int) -> Tensor:
    """table[..., start:], without the 2 us of a view where it is all."""
    return table[..., start:] if start else table


def _most_frequent(target: Tensor, n_columns: int, n_hot: int) -> Tensor:
    """[n_hot] distinct local columns, without waiting for the device."""
    counts = torch.zeros(n_columns + 1, dtype=torch.int32, device=target.device)  # the first one counts -1
    counts.scatter_add_(0, target + 1, torch.ones_like(target, dtype=torch.int32))
    return counts[1:].topk(n_hot, sorted=False).indices


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T, fp32. What is no half-precision product is made in fp64, which no user allows to be TF32."""
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    if hidden.is_cuda and half and weight.dtype == hidden.dtype:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return (hidden.double() @ weight.double().T).float()
