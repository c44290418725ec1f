"""From a tile of products to the gradient of its logits, as the exact backward's kernels store it."""

import triton
import triton.language as tl

from .softcap import capped_gradient, in_registers
from .tiles import logits_of, scaled_of
from .units import LOG2E


@triton.jit
def _kept_tiles(p, onehot, counts, inside, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N]: whether the column's 128 x 128 tile has a |p - onehot| of at least eps, Cut Cross-Entropy's rule."""
    tl.static_assert(BLOCK_M == 128 and BLOCK_N % 128 == 0)
    size = tl.where(counts[:, None] & inside[None, :], tl.abs(tl.where(onehot, p - 1.0, p)), 0.0)
    largest = tl.max(tl.max(size, 0).reshape([BLOCK_N // 128, 128]), 1)
    return tl.broadcast_to((largest >= eps)[:, None], [BLOCK_N // 128, 128]).reshape([BLOCK_N])


@triton.jit
def logit_gradient(
    product,  # [BLOCK_M, BLOCK_N] hidden @ weight.T
    row,  # the tile's first
    column,  # the tile's first, of the slice
    n_counting,
    n_columns,  # of the slice
    bias_ptr,
    scale,
    column_weight_ptr,
    target_ptr,
    lse_ptr,
    softmax_ptr,
    target_grad_ptr,
    softmax_logit_ptr,
    constant_ptr,
    factor,  # every gradient is multiplied with it
    first_column,  # of the slice in the shard
    softcap,
    filter_eps,
    HAS_SOFTCAP: tl.constexpr,
    FILTER: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """G of a tile of products, fp32: `problem`'s formula. Per-row factors are multiplied before they meet the tile."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    counts, inside = rows < n_counting, columns < n_columns
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    lse = tl.load(lse_ptr + rows, mask=counts, other=float("inf")) * LOG2E
    softmax = tl.load(softmax_ptr + rows, mask=counts, other=0.0) * factor
    CAPPED: tl.constexpr = HAS_SOFTCAP and not FILTER and PER_TOKEN == 1
    if CAPPED and softmax_logit_ptr is None and constant_ptr is None:
        target = (tl.load(target_ptr + rows, mask=counts, other=-1) - first_column).to(tl.int32)
        target_grad = tl.load(target_grad_ptr + rows, mask=counts, other=0.0) * factor
        z = in_registers(scaled_of(product, bias, scale))
        g = capped_gradient(z, softcap, lse, softmax, target - column, target_grad, counts, BLOCK_M, BLOCK_N)
    else:
        x = logits_of(product, bias, scale, softcap, HAS_SOFTCAP)
        p = tl.exp2(x * LOG2E - lse[:, None])
        per_row = softmax[:, None]
        if softmax_logit_ptr is not None:
            slope = tl.load(softmax_logit_ptr + rows, mask=counts, other=0.0) * factor
            per_row = per_row + slope[:, None] * tl.where(p > 0.0, x, 0.0)
        g = p * per_row
        ragged = row + BLOCK_M > n_counting
        for k in range(PER_TOKEN):
            target = (tl.load(target_ptr + rows * PER_TOKEN + k, mask=counts, other=-1) - first_column).to(tl.int32)
            target_grad = tl.load(target_grad_ptr + rows * PER_TOKEN + k, mask=counts, other=0.0) * factor
            here = (target >= column) & (target < column + BLOCK_N)
            if FILTER:
                onehot = target[:, None] == columns[None, :]
                g = tl.where(onehot, g + target_grad[:, None], g)
                g = tl.where(_kept_tiles(p, onehot, counts, inside, filter_eps, BLOCK_M, BLOCK_N)[None, :], g, 0.0)
            elif HAS_SOFTCAP:  # a branch would keep x beside g in registers, for the slope below
                g = tl.where(target[:, None] == columns[None, :], g + target_grad[:, None], g)
            elif (tl.max(here.to(tl.int32), 0) > 0) | ragged:  # one tile in eight at 256,000 columns
                g = tl.where(target[:, None] == columns[None, :], g + target_grad[:, None], g)
                g = tl.where(counts[:, None], g, 0.0)
        if constant_ptr is not None:
            constant = (tl.load(constant_ptr + rows, mask=counts, other=0.0) * factor)[:, None]
            if column_weight_ptr is not None:
                constant = constant * tl.load(column_weight_ptr + columns, mask=inside, other=0.0)[None, :]
            g += constant
        if HAS_SOFTCAP:
            ratio = x * (1.0 / softcap)
            g *= 1.0 - ratio * ratio
        if (FILTER or HAS_SOFTCAP) and ragged:
            g = tl.where(counts[:, None], g, 0.0)
    return g
