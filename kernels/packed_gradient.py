"""Recomputes the logits of the marked columns, decides which stay, and writes their gradient.

    x = logits of 128 tokens and the listed columns        p = exp(x - lse)
    m = max over tokens of p, 1 for a target               keep and 1 / q from `coin`
    G = (p * (softmax + softmax_logit * x) + onehot * target) * d x / d z * scale / q

`RowGradients.constant` is not in G: it is no function of p, so sampling it would only add noise; the caller adds it
as a product of two vectors. q depends on p and the targets, never on upstream gradients: they multiply an unbiased
matrix, whatever they are.

Weight rows are gathered by pointer, 4.6 KB each at D = 2304, so the gather runs at the speed of a dense load. All
row blocks work on the same group of columns at the same time: frequent columns come from L2.
"""

import triton
import triton.language as tl

from .coin import coin, coin_key, keep_scale
from .pack import (
    PLAN_BASE,
    PLAN_EXTRA_SHIFT,
    PLAN_FIRST,
    PLAN_LAST,
    PLAN_SPILL,
    PLAN_STORAGE_SHIFT,
)
from .softcap import soft_capped
from .tiles import add_low_rank, store_row_sum
from .units import LOG2E


@triton.jit
def load_arena(plan_ptr):
    """What `arena_rows` needs of the plan; to be loaded outside of pipelined loops."""
    spill = tl.load(plan_ptr + PLAN_SPILL)
    return spill, tl.load(plan_ptr + PLAN_STORAGE_SHIFT), tl.load(plan_ptr + PLAN_EXTRA_SHIFT)


@triton.jit
def arena_rows(storage_ptr, extra_ptr, arena, pair):
    """Pointers to G's rows of 128 gradients; `pair` counts from the round's first."""
    spill, storage_shift, extra_shift = arena
    return tl.where(pair < spill, storage_ptr + (pair + storage_shift) * 128, extra_ptr + (pair + extra_shift) * 128)


@triton.jit
def packed_gradient_kernel(
    hidden,  # [N, D] descriptor or pointer
    weight_ptr,  # [V, D]
    low_hidden_ptr,  # [N, RANK] or None
    low_weight_ptr,  # [V, RANK] or None
    bias_ptr,  # [V] or None
    target_ptr,  # [N] int64, local columns
    lse_ptr,  # [N]
    softmax_ptr,  # [N]
    target_grad_ptr,  # [N]
    softmax_logit_ptr,  # [N] or None
    n_rows_ptr,  # [1] or None
    seed_ptr,  # [] int64
    scale_ptr,  # [] fp32, also where it is 1: without this product Triton 3.9 spills registers
    unit_ptr,  # [] fp32 or None: G is stored in multiples of it, so that fp16 does not underflow
    start_ptr,  # [row blocks, groups] int64
    counts_ptr,  # [row blocks, groups] int64
    plan_ptr,  # this round's row of the plan
    list_ptr,  # [pairs] int32
    keep_ptr,  # [pairs of a round] int8 out
    pair_sum_ptr,  # [pairs of a round] fp32 out, or None: sums of G, rounded if SUMS_BY_PRODUCT
    storage_ptr,  # G, first part
    extra_ptr,  # G, second part
    n,
    stride_hidden,
    stride_weight,
    first_column,
    n_groups,
    eps,
    softcap,
    D: tl.constexpr,
    RANK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS_BY_PRODUCT: tl.constexpr,
):
    first = tl.load(plan_ptr + PLAN_FIRST).to(tl.int32)
    n_blocks = tl.load(plan_ptr + PLAN_LAST).to(tl.int32) - first
    base = tl.load(plan_ptr + PLAN_BASE)
    arena = load_arena(plan_ptr)
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    seed = tl.load(seed_ptr)
    scale = tl.load(scale_ptr)
    factor = scale
    if unit_ptr is not None:
        factor = scale / tl.load(unit_ptr)
    dtype = extra_ptr.dtype.element_ty
    offs_m = tl.arange(0, 128)
    offs_k = tl.arange(0, BLOCK_K)
    for item in range(tl.program_id(0), n_blocks * n_groups, PROGRAMS):
        row_block = first + item % n_blocks
        group = item // n_blocks
        rows = row_block * 128 + offs_m
        valid = rows < n
        lse = tl.load(lse_ptr + rows, mask=valid, other=float("inf")).to(tl.float32) * LOG2E
        target = tl.load(target_ptr + rows, mask=valid, other=-1).to(tl.int32)
        softmax = tl.load(softmax_ptr + rows, mask=valid, other=0.0).to(tl.float32)
        target_grad = tl.load(target_grad_ptr + rows, mask=valid, other=0.0).to(tl.float32)
        key, second_key = coin_key(seed, row_block // 4)
        first_pair = tl.load(start_ptr + row_block * n_groups + group)
        n_pairs = tl.load(counts_ptr + row_block * n_groups + group).to(tl.int32)
        for t in range(0, n_pairs, BLOCK_N):
            offs_n = t + tl.arange(0, BLOCK_N)
            inside = offs_n < n_pairs
            pair = first_pair + offs_n
            column = tl.load(list_ptr + pair, mask=inside, other=0)
            weight = weight_ptr + column.to(tl.int64)[None, :] * stride_weight + offs_k[:, None]
            if bias_ptr is not None:  # loaded before the product, which hides how long a gather takes
                bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            acc = tl.zeros((128, BLOCK_N), tl.float32)
            for k in range(0, D, BLOCK_K):
                if TMA_HIDDEN:
                    h = hidden.load([row_block * 128, k])
                else:
                    at = hidden + rows.to(tl.int64)[:, None] * stride_hidden + (k + offs_k)[None, :]
                    if D % BLOCK_K == 0:
                        h = tl.load(at, mask=valid[:, None], other=0.0)
                    else:
                        h = tl.load(at, mask=valid[:, None] & (offs_k < D - k)[None, :], other=0.0)
                if D % BLOCK_K == 0:
                    w = tl.load(weight + k)
                else:
                    w = tl.load(weight + k, mask=(offs_k < D - k)[:, None], other=0.0)
                acc = tl.dot(h.to(dtype), w.to(dtype), acc, input_precision=PRECISION)
            if low_hidden_ptr is not None:
                acc = add_low_rank(
                    acc, low_hidden_ptr, low_weight_ptr, rows, valid, column, inside, RANK, dtype, PRECISION
                )
            if bias_ptr is not None:
                acc += bias[None, :]
            x = acc * scale
            if HAS_SOFTCAP:
                x = soft_capped(x, softcap)
            if row_block * 128 + 128 > n:  # rows that do not count
                x = tl.where(valid[:, None], x, 0.0)
            p = tl.exp2(x * LOG2E - lse[:, None])
            onehot = target[:, None] == column[None, :]
            size = tl.where(onehot, 1.0, p)
            k24 = coin(key, second_key, first_column + column)
            gain = keep_scale(tl.max(size, 0), k24, eps)
            tl.store(keep_ptr + (pair - base), (gain != 0.0).to(tl.int8), mask=inside)
            per_row = softmax[:, None]
            if softmax_logit_ptr is not None:
                slope = tl.load(softmax_logit_ptr + rows, mask=valid, other=0.0).to(tl.float32)
                per_row += slope[:, None] * tl.where(p > 0.0, x, 0.0)
            g = p * per_row
            g = tl.where(onehot, g + target_grad[:, None], g)
            if HAS_SOFTCAP:
                ratio = x * (1.0 / softcap)
                g *= 1.0 - ratio * ratio
            g *= (gain * factor)[None, :]
            if pair_sum_ptr is not None:
                store_row_sum(g, pair_sum_ptr + (first_pair - base + t), n_pairs - t, dtype, SUMS_BY_PRODUCT)
            out = arena_rows(storage_ptr, extra_ptr, arena, pair - base)
            tl.store(out[None, :] + offs_m[:, None], g.to(dtype), mask=inside[None, :])
