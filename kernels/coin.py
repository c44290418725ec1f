"""The coin of the sampled backward: a pure function of (seed, rows, column), so that two kernels toss it alike.

A column v of row block b (128 tokens) has m = max over the block's tokens of p, and m = 1 where it is the target of
one of them. It is kept with probability q and scaled by 1 / q, where q is min(1, m / eps) rounded up to a multiple of
2^-24. The coin is an integer k in [0, 2^24), a mixing hash of seed, coin group and GLOBAL column id:

    y = m * 2^24 / eps        keep iff k < y        q = min(ceil(y), 2^24) / 2^24

For an integer k, k < y says k < ceil(y), so the probability is exactly q and the expectation of the scaled gradient
is exact for every column, however small; m = 0 is dropped and was 0. Targets are not judged by |p - 1|: it rounds to 0
for a sure one, whose column a z-loss or an entropy bonus may still move.

- A coin group is four row blocks (512 tokens). Sharing the coin nests the kept sets of its blocks, so dC is added to
  once per group and column; marginals, and with them the expectation, do not change. 1024 tokens would make dC's
  error three times that of bf16 rounding (measured on a Gemma 3 head), 512 leaves it at 2.4 times.
- The forward knows only an upper bound of m. It marks a column when k <= bound * 2^24 / eps, that is when
  exp(x - lower_bound_of_lse) >= k * 2^-24 * eps for some token. The right-hand side depends on coin group and column
  alone: `coin_thresholds` tabulates it once, 4 bytes per (group, column), and the forward's tile pays one load per
  column instead of a hash in each of the 32 threads that hold a part of the column.
- The hash is two rounds of a 32-bit finaliser (multiply, xor-shift; full avalanche), keyed twice, so that two groups
  or two seeds never share a shifted sequence. `vpcce.sampling` has the same arithmetic in PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_BLOCK = 128  # tokens that share a mark
COIN_BLOCKS = 4  # row blocks that share a coin

# Constants of kernels must be constexpr to be visible in them.
COIN_LEVELS: tl.constexpr = tl.constexpr(16777216.0)


@triton.jit
def _mix(x):  # uint32
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def coin_key(seed, group):
    """Two 32-bit keys of a coin group; `seed` is int64, `group` an integer."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    key = _mix(_mix(group.to(tl.uint32) + _mix(low)) ^ high)
    return key, _mix(key ^ 0x9E3779B9)


@triton.jit
def coin(key, second_key, column):
    """k in [0, 2^24) as fp32, exactly; `column` holds global ids."""
    x = _mix(_mix(column.to(tl.uint32) ^ key) + second_key)
    return (x >> 8).to(tl.int32).to(tl.float32)


@triton.jit
def keep_scale(m, k, eps):
    """1 / q where the column is kept, else 0. A NaN gradient is kept, so that it is seen."""
    y = m * (COIN_LEVELS / eps)
    q = tl.minimum(tl.ceil(y), COIN_LEVELS)
    return tl.where(y <= k, 0.0, COIN_LEVELS / q)


@triton.jit
def _thresholds_kernel(
    seed_ptr,  # [] int64
    out_ptr,  # [n_groups, n_columns] fp32
    first_column,
    n_columns,
    eps,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, second_key = coin_key(tl.load(seed_ptr), group)
    k = coin(key, second_key, first_column + offs)
    threshold = k * (eps / COIN_LEVELS)  # k = 0: marked whatever the logit
    tl.store(out_ptr + group.to(tl.int64) * n_columns + offs, threshold, mask=offs < n_columns)


def coin_thresholds(seed: Tensor, eps: float, n_rows: int, first_column: int, n_columns: int) -> Tensor:
    """[coin groups, n_columns] fp32: u * eps, the probability from which on a token marks the column."""
    n_groups = triton.cdiv(n_rows, ROW_BLOCK * COIN_BLOCKS)
    out = torch.empty(n_groups, n_columns, dtype=torch.float32, device=seed.device)
    if out.numel():
        grid = (triton.cdiv(n_columns, 1024), n_groups)
        _thresholds_kernel[grid](seed, out, first_column, n_columns, eps, BLOCK=1024, num_warps=4)
    return out
