"""softcap * tanh(z / softcap), and what the two large kernels do with it, at little cost beside the matrix product.

An exponential and a reciprocal per logit would take as long as a tenth of the product. With u = z / softcap,
tanh(u) / u is a polynomial in u^2: of degree 3 where no |u| of a tile exceeds 0.5, of degree 6 up to 1.25. Its
arithmetic and the softmax' exponential keep different units busy, if they alternate: `tl.map_elementwise` has the
compiler emit them element by element, where it would finish one operation for the whole tile before the next.
"""

import triton
import triton.language as tl

from .marks import mark_words
from .units import LOG2E

map_elementwise = tl.map_elementwise
if triton.knobs.runtime.interpret:  # it has none; functions without branches do the same to tensors as to elements

    def map_elementwise(function, *args):
        return function(*args)


SMALL: tl.constexpr = tl.constexpr(0.5)
MEDIUM: tl.constexpr = tl.constexpr(1.25)


@triton.jit
def largest_of(u):
    return tl.max(tl.max(tl.abs(u), 1), 0)


@triton.jit
def small_ratio(u, factor):
    """factor * tanh(u) / u, relative error 6e-7 up to |u| = SMALL."""
    square = u * u
    r = (-0.04440222680568695 * factor) * square + 0.13190296292304993 * factor
    r = r * square - 0.33326318860054016 * factor
    return r * square + 0.999999463558197 * factor


@triton.jit
def medium_ratio(u, factor):
    """factor * tanh(u) / u, relative error 7e-7 up to |u| = MEDIUM."""
    square = u * u
    r = (0.0005844939150847495 * factor) * square - 0.004626904614269733 * factor
    r = r * square + 0.01822912134230137 * factor
    r = r * square - 0.052205439656972885 * factor
    r = r * square + 0.1329064816236496 * factor
    r = r * square - 0.3332934081554413 * factor
    return r * square + 0.9999994039535522 * factor


@triton.jit
def any_tanh(u):
    """Absolute error 1.2e-7: for tiles that hold a |u| above MEDIUM, whose logit has an error as large."""
    root = tl.rsqrt(1.0 + tl.exp2(u * (2.0 * LOG2E)))
    return 1.0 - 2.0 * (root * root)


@triton.jit
def tanh(u):
    """Of a single number or few, whatever their size."""
    return tl.where(tl.abs(u) <= MEDIUM, medium_ratio(u, 1.0) * u, any_tanh(u))


@triton.jit
def soft_capped(z, softcap):
    return tanh(z * (1.0 / softcap)) * softcap


@triton.jit
def _small_exponential(u, to_base_2, shift):
    return tl.exp2(small_ratio(u, to_base_2) * u - shift)


@triton.jit
def _medium_exponential(u, to_base_2, shift):
    return tl.exp2(medium_ratio(u, to_base_2) * u - shift)


@triton.jit
def _any_exponential(u, to_base_2, shift):
    return tl.exp2(any_tanh(u) * to_base_2 - shift)


@triton.jit
def _sums(e, inside, threshold, EVEN: tl.constexpr, MARK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """([BLOCK_M] sums over the columns, [8, 8] marks or zeros)."""
    words = tl.zeros((8, 8), tl.int32)
    if MARK:
        words = mark_words(e, threshold, BLOCK_M, BLOCK_N)
    return tl.sum(e if EVEN else tl.where(inside[None, :], e, 0.0), 1), words


@triton.jit
def capped_exponentials(
    u, inside, to_base_2, shift, threshold, EVEN: tl.constexpr, MARK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums over the columns and marks of e = 2^(tanh(u) * to_base_2 - shift).

    Both are inside the branches: the exponentials would live beside u behind them, in twice the registers.
    """
    largest = largest_of(u)
    if largest <= SMALL:
        e = map_elementwise(_small_exponential, u, to_base_2, shift[:, None])
        s, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    elif largest <= MEDIUM:
        e = map_elementwise(_medium_exponential, u, to_base_2, shift[:, None])
        s, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    else:
        e = map_elementwise(_any_exponential, u, to_base_2, shift[:, None])
        s, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    return s, words


@triton.jit
def _small_gradient(u, to_base_2, lse, softmax):
    t = small_ratio(u, 1.0) * u
    return tl.exp2(t * to_base_2 - lse) * softmax * (1.0 - t * t)


@triton.jit
def _gradient(t, to_base_2, lse, softmax, target, target_grad, column):
    g = tl.exp2(t * to_base_2 - lse) * softmax
    return tl.where(target == column, g + target_grad, g) * (1.0 - t * t)


@triton.jit
def _medium_gradient(u, to_base_2, lse, softmax, target, target_grad, column):
    return _gradient(medium_ratio(u, 1.0) * u, to_base_2, lse, softmax, target, target_grad, column)


@triton.jit
def _any_gradient(u, to_base_2, lse, softmax, target, target_grad, column):
    return _gradient(any_tanh(u), to_base_2, lse, softmax, target, target_grad, column)


@triton.jit
def capped_gradient(u, to_base_2, lse, softmax, target, target_grad, tile_column, BLOCK_N: tl.constexpr):
    """(p * softmax + onehot * target_grad) * (1 - tanh(u)^2) of a tile, p = 2^(tanh(u) * to_base_2 - lse)."""
    has_target = (target >= tile_column) & (target < tile_column + BLOCK_N)  # one tile in eight at 256,000 columns
    largest = largest_of(u)
    lse, softmax, target, target_grad = lse[:, None], softmax[:, None], target[:, None], target_grad[:, None]
    column = (tile_column + tl.arange(0, BLOCK_N))[None, :]
    if (largest <= SMALL) & (tl.max(has_target.to(tl.int32), 0) == 0):
        g = map_elementwise(_small_gradient, u, to_base_2, lse, softmax)
    elif largest <= MEDIUM:
        g = map_elementwise(_medium_gradient, u, to_base_2, lse, softmax, target, target_grad, column)
    else:
        g = map_elementwise(_any_gradient, u, to_base_2, lse, softmax, target, target_grad, column)
    return g
