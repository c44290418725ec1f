"""softcap * tanh(z / softcap), and what the two large kernels do with it, at little cost beside the matrix product.

An exponential and a reciprocal per logit would take as long as a tenth of the product. Where no |z| of a tile exceeds
softcap / 2, tanh(u) / u is a polynomial in u^2. Its arithmetic and the softmax' exponential keep different units busy,
if they alternate: `tl.map_elementwise` has the compiler emit them element by element, where it would finish one
operation for the whole tile before the next.
"""

import triton
import triton.language as tl

from .units import LOG2E

map_elementwise = tl.map_elementwise
if triton.knobs.runtime.interpret:  # it has none; functions without branches do the same to tensors as to elements

    def map_elementwise(function, *args):
        return function(*args)


@triton.jit
def has_small(u):
    """Whether `small_tanh` serves the whole tile."""
    return tl.max(tl.abs(u)) <= 0.5


@triton.jit
def small_tanh(u):
    """Relative error 6e-7 up to |u| = 0.5."""
    square = u * u
    t = -0.04440222680568695 * square + 0.13190296292304993
    t = t * square - 0.33326318860054016
    return (t * square + 0.999999463558197) * u


@triton.jit
def any_tanh(u):
    """The same numbers as `small_tanh` where both hold: whichever a kernel takes, forward and backward agree."""
    root = tl.rsqrt(1.0 + tl.exp2(u * (2.0 * LOG2E)))
    return tl.where(tl.abs(u) <= 0.5, small_tanh(u), 1.0 - 2.0 * root * root)


@triton.jit
def soft_capped(z, softcap):
    u = z * (1.0 / softcap)
    if has_small(u):
        x = small_tanh(u) * softcap
    else:
        x = any_tanh(u) * softcap
    return x


@triton.jit
def _small_exponential(u, to_base_2, shift):
    return tl.exp2(small_tanh(u) * to_base_2 - shift)


@triton.jit
def _any_exponential(u, to_base_2, shift):
    return tl.exp2(any_tanh(u) * to_base_2 - shift)


@triton.jit
def capped_exponentials(u, inside, to_base_2, shift, EVEN: tl.constexpr):
    """[rows]: sum over the columns of 2^(tanh(u) * to_base_2 - shift).

    The sum is inside the branches: the exponentials would live beside u behind them, in twice the registers.
    """
    if has_small(u):
        e = map_elementwise(_small_exponential, u, to_base_2, shift[:, None])
        s = tl.sum(e if EVEN else tl.where(inside[None, :], e, 0.0), 1)
    else:
        e = map_elementwise(_any_exponential, u, to_base_2, shift[:, None])
        s = tl.sum(e if EVEN else tl.where(inside[None, :], e, 0.0), 1)
    return s


@triton.jit
def _small_gradient(u, to_base_2, lse, softmax):
    t = small_tanh(u)
    return tl.exp2(t * to_base_2 - lse) * softmax * (1.0 - t * t)


@triton.jit
def _any_gradient(u, to_base_2, lse, softmax, target, target_grad, column):
    t = any_tanh(u)
    g = tl.exp2(t * to_base_2 - lse) * softmax
    return tl.where(target == column, g + target_grad, g) * (1.0 - t * t)


@triton.jit
def capped_gradient(u, to_base_2, lse, softmax, target, target_grad, tile_column, BLOCK_N: tl.constexpr):
    """(p * softmax + onehot * target_grad) * (1 - tanh(u)^2) of a tile, p = 2^(tanh(u) * to_base_2 - lse)."""
    lse, softmax = lse[:, None], softmax[:, None]
    column = tile_column + tl.arange(0, BLOCK_N)
    has_target = (target >= tile_column) & (target < tile_column + BLOCK_N)  # one tile in eight at 256,000 columns
    if has_small(u) & (tl.max(has_target.to(tl.int32), 0) == 0):
        g = map_elementwise(_small_gradient, u, to_base_2, lse, softmax)
    else:
        g = map_elementwise(
            _any_gradient, u, to_base_2, lse, softmax, target[:, None], target_grad[:, None], column[None, :]
        )
    return g
