"""softcap * tanh(z / softcap), and what the two large kernels do with it, at little cost beside the matrix product.

An exponential and a reciprocal per logit would take as long as a tenth of the product. With u = z / softcap,
tanh(u) / u is a polynomial in u^2: of degree 2 where no |u| of a tile exceeds 0.26, of degree 3 up to 0.5, of degree 6
up to 1.25; beyond, a tile takes the exponential. Factors, and the powers of the softcap, go into the coefficients. In
the gradient everything is the exponent's where it is small: the logarithm of the slope 1 - tanh(u)^2 is a polynomial in
u^2 too, of degree 2 and 3, and fills the even places between the odd powers of the logit's. The polynomials' arithmetic
and the softmax' exponential keep different units busy, if they alternate: `tl.map_elementwise` has the compiler emit
them element by element, where it would finish one operation for the whole tile before the next.

Which formula serves a tile takes its largest |z|, whoever's token it is: a token's last bits depend on its row block's
others. Where no capped logit of a tile can exceed WINDOW in base 2, as with any softcap below 38, exponentials relative
to 0 neither overflow nor vanish, and the tile's maxima per token need not be known.
"""

import triton
import triton.language as tl

from .marks import mark_bound, mark_shift, mark_words
from .units import LOG2E

map_elementwise = tl.map_elementwise
if triton.knobs.runtime.interpret:  # it has none; functions without branches do the same to tensors as to elements

    def map_elementwise(function, *args):
        return function(*args)


TINY: tl.constexpr = tl.constexpr(0.26)
SMALL: tl.constexpr = tl.constexpr(0.5)
MEDIUM: tl.constexpr = tl.constexpr(1.25)
WINDOW: tl.constexpr = tl.constexpr(55.0)  # 2^(2 * 55) times a tile's 256 columns is finite
LEAST_SOFTCAP: tl.constexpr = tl.constexpr(1e-4)  # whose inverse has a finite seventh power
MOST_SOFTCAP: tl.constexpr = tl.constexpr(256.0)  # its 13th power and its inverse's are normal numbers

# tanh(u) = u * (c0 + c1 u^2 + ...); log(1 - tanh(u)^2) = c0 u^2 + c1 u^4 + ..., absolute errors 5.1e-7 and 4.0e-7
TINY_TANH: tl.constexpr = tl.constexpr((0.9999995009792644, -0.33320007666927764, 0.12802710566975598))
SMALL_TANH: tl.constexpr = tl.constexpr(
    (0.999999463558197, -0.33326318860054016, 0.13190296292304993, -0.04440222680568695)
)
TINY_SLOPE: tl.constexpr = tl.constexpr((-0.99991529498916806, 0.1625806847092931))
SMALL_SLOPE: tl.constexpr = tl.constexpr((-0.99996738960835141, 0.16585673821796733, -0.038631052538038689))

# Flags of a tile
NOT_TINY: tl.constexpr = tl.constexpr(1)
NOT_SMALL: tl.constexpr = tl.constexpr(2)
NOT_MEDIUM: tl.constexpr = tl.constexpr(4)
WIDE: tl.constexpr = tl.constexpr(8)  # a capped logit may exceed WINDOW
SPECIAL: tl.constexpr = tl.constexpr(16)  # has a target, a negative softmax, or a row that does not count
ALWAYS: tl.constexpr = tl.constexpr(32)  # as the compiler does not know


@triton.jit
def in_registers(product):
    """The product itself. Without an operation of its own here, each branch that reads it would wait for the tensor
    cores anew, and for that the assembler makes all their operations wait for each other."""
    return product.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)


@triton.jit
def _largest(z, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, 4] largest |z|, each of what one thread holds of a row in the tensor cores' layout."""
    return tl.max(tl.max(tl.abs(z).reshape([BLOCK_M, BLOCK_N // 8, 4, 2]), 3), 1)


@triton.jit
def _range(largest, softcap):
    """Flags: which polynomials do not serve. The powers of the softcap in their coefficients must be finite, and
    the medium one's normal numbers."""
    cap = tl.where(softcap < LEAST_SOFTCAP, -1.0, softcap)
    medium_cap = tl.where((softcap < 1.0 / MOST_SOFTCAP) | (softcap > MOST_SOFTCAP), -1.0, softcap)
    flags = tl.where(largest <= TINY * cap, 0, NOT_TINY)
    flags |= tl.where(largest <= SMALL * cap, 0, NOT_SMALL)
    return flags | tl.where(largest <= MEDIUM * medium_cap, 0, NOT_MEDIUM)


@triton.jit
def _of_tile(flags, BLOCK_M: tl.constexpr):
    """[] the union of [BLOCK_M, 4] flags. Bits, unlike maxima, meet in one instruction per warp."""
    return tl.reduce_or(flags.reshape([BLOCK_M * 4]), 0)


@triton.jit
def tiny_ratio(z, a, factor):
    """factor * tanh(u) / u with u^2 = a * z^2; relative error 6e-7 up to |u| = TINY."""
    square = z * z
    r = (TINY_TANH[2] * factor * a * a) * square + TINY_TANH[1] * factor * a
    return r * square + TINY_TANH[0] * factor


@triton.jit
def small_ratio(z, a, factor):
    """The same up to |u| = SMALL; relative error 7e-7."""
    square = z * z
    r = (SMALL_TANH[3] * factor * a * a * a) * square + SMALL_TANH[2] * factor * a * a
    r = r * square + SMALL_TANH[1] * factor * a
    return r * square + SMALL_TANH[0] * factor


@triton.jit
def medium_ratio(z, a, factor):
    """The same up to |u| = MEDIUM; relative error 9e-7."""
    square = z * z
    b = a * a
    c = b * a
    r = (0.0005844939150847495 * factor * c * c) * square - 0.004626904614269733 * factor * b * c
    r = r * square + 0.01822912134230137 * factor * b * b
    r = r * square - 0.052205439656972885 * factor * c
    r = r * square + 0.1329064816236496 * factor * b
    r = r * square - 0.3332934081554413 * factor * a
    return r * square + 0.9999994039535522 * factor


@triton.jit
def tanh(u):
    """Of any size; relative error 6e-7."""
    root = tl.rsqrt(1.0 + tl.exp2(u * (2.0 * LOG2E)))  # its square loses digits where u is small
    return tl.where(tl.abs(u) <= SMALL, small_ratio(u, 1.0, 1.0) * u, 1.0 - 2.0 * (root * root))


@triton.jit
def soft_capped(z, softcap):
    return tanh(z * (1.0 / softcap)) * softcap


@triton.jit
def _tiny_exponential(z, a, shift):
    return tl.exp2(tiny_ratio(z, a, LOG2E) * z - shift)


@triton.jit
def _small_exponential(z, a, shift):
    return tl.exp2(small_ratio(z, a, LOG2E) * z - shift)


@triton.jit
def _medium_exponential(z, a, shift):
    return tl.exp2(medium_ratio(z, a, LOG2E) * z - shift)


@triton.jit
def _any_exponential(z, inverse, to_base_2, shift):
    return tl.exp2(tanh(z * inverse) * to_base_2 - shift)


@triton.jit
def _sums(e, inside, threshold, EVEN: tl.constexpr, MARK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """([BLOCK_M] sums over the columns, [8, 8] marks or zeros)."""
    words = tl.zeros((8, 8), tl.int32)
    if MARK:
        words = mark_words(e, threshold, BLOCK_M, BLOCK_N)
    return tl.sum(e if EVEN else tl.where(inside[None, :], e, 0.0), 1), words


@triton.jit
def capped_update(
    z,  # [BLOCK_M, BLOCK_N], from `in_registers`
    softcap,
    inside,  # [BLOCK_N]
    m,  # [BLOCK_M] what the sums are relative to, base 2
    s,  # [BLOCK_M] sums
    lower_bound,  # [BLOCK_M], see `marks`
    threshold,  # [BLOCK_N], see `marks`
    EVEN: tl.constexpr,  # every column is inside
    MARK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(m, s) with the tile's columns, and their marks or zeros.

    Sums and marks are inside the branches: the exponentials would live beside z behind them, in twice the registers.
    The compiler moves what the last two branches have in common behind them, hence a last one that no tile takes.
    """
    inverse, to_base_2 = 1.0 / softcap, softcap * LOG2E
    largest = _largest(z, BLOCK_M, BLOCK_N)
    flags = _range(largest, softcap) | tl.where(tl.minimum(largest, softcap) <= WINDOW / LOG2E, 0, WIDE)
    flags = _of_tile(flags | ALWAYS, BLOCK_M)
    if (flags & WIDE) == 0:
        m_new = tl.maximum(m, 0.0)
        shift = m_new
        if MARK:
            shift = mark_shift(mark_bound(lower_bound, m, s), -WINDOW, 2 * WINDOW)
    else:
        top = tl.max(z if EVEN else tl.where(inside[None, :], z, -float("inf")), 1)
        peak = tanh(top * inverse) * to_base_2  # tanh is monotonous
        m_new = tl.maximum(m, peak)
        shift = m_new
        if MARK:  # m_new may be a 0 that no logit reaches; one was above -WINDOW then
            shift = mark_shift(tl.maximum(mark_bound(lower_bound, m, s), peak), m_new - 60.0, m_new + 60.0)
    if (flags & NOT_TINY) == 0:
        e = map_elementwise(_tiny_exponential, z, inverse * inverse, shift[:, None])
        s_tile, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    elif (flags & NOT_SMALL) == 0:
        e = map_elementwise(_small_exponential, z, inverse * inverse, shift[:, None])
        s_tile, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    elif (flags & NOT_MEDIUM) == 0:
        e = map_elementwise(_medium_exponential, z, inverse * inverse, shift[:, None])
        s_tile, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    elif (flags & ALWAYS) > 0:
        e = map_elementwise(_any_exponential, z, inverse, to_base_2, shift[:, None])
        s_tile, words = _sums(e, inside, threshold, EVEN, MARK, BLOCK_M, BLOCK_N)
    else:
        s_tile, words = tl.zeros_like(s), tl.zeros((8, 8), tl.int32)
    return m_new, s * tl.exp2(m - m_new) + s_tile * tl.exp2(shift - m_new), words


@triton.jit
def _gradient(t, to_base_2, shift):
    return tl.exp2(t * to_base_2 - shift) * (1.0 - t * t)


@triton.jit
def _tiny_gradient(z, a, shift):
    """The capped logit's odd powers and the even ones of its slope's logarithm in one polynomial."""
    r = (TINY_TANH[2] * LOG2E * a * a) * z + TINY_SLOPE[1] * LOG2E * a * a
    r = r * z + TINY_TANH[1] * LOG2E * a
    r = r * z + TINY_SLOPE[0] * LOG2E * a
    r = r * z + TINY_TANH[0] * LOG2E
    return tl.exp2(r * z - shift)


@triton.jit
def _small_gradient(z, a, shift):
    b = a * a
    r = (SMALL_TANH[3] * LOG2E * a * b) * z + SMALL_SLOPE[2] * LOG2E * a * b
    r = r * z + SMALL_TANH[2] * LOG2E * b
    r = r * z + SMALL_SLOPE[1] * LOG2E * b
    r = r * z + SMALL_TANH[1] * LOG2E * a
    r = r * z + SMALL_SLOPE[0] * LOG2E * a
    r = r * z + SMALL_TANH[0] * LOG2E
    return tl.exp2(r * z - shift)


@triton.jit
def _medium_gradient(z, a, inverse, to_base_2, shift):
    return _gradient(medium_ratio(z, a, inverse) * z, to_base_2, shift)


@triton.jit
def _any_gradient(z, inverse, to_base_2, shift):
    return _gradient(tanh(z * inverse), to_base_2, shift)


@triton.jit
def _tanh_of_range(flags, z, inverse):
    """tanh(z / softcap) by the formula that serves the tile with these flags, in the forward too."""
    a = inverse * inverse
    t = tl.where((flags & NOT_TINY) == 0, tiny_ratio(z, a, inverse), small_ratio(z, a, inverse)) * z
    t = tl.where((flags & NOT_SMALL) == 0, t, medium_ratio(z, a, inverse) * z)
    return tl.where((flags & NOT_MEDIUM) == 0, t, tanh(z * inverse))


@triton.jit
def capped_gradient(
    z,  # [BLOCK_M, BLOCK_N], from `in_registers`
    softcap,
    lse,  # [BLOCK_M] base 2
    softmax,  # [BLOCK_M]
    target,  # [BLOCK_M] columns of the tile, or outside of it
    target_grad,  # [BLOCK_M]
    counts,  # [BLOCK_M]; elsewhere softmax is 0 and z anything
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(p * softmax + onehot * target_grad) * (1 - tanh(z / softcap)^2) of a tile, 0 in rows that do not count.

    |softmax| is a summand of the exponent, which may cost digits that a target's p - 1 needs (1e-6 of p): the targets'
    elements are computed apart, once per token. The few tiles that have one (one in eight at 256,000 columns) share a
    pass with those that have a negative softmax, or rows that do not count.
    """
    inverse, to_base_2 = 1.0 / softcap, softcap * LOG2E
    shift = (lse - tl.log2(tl.abs(softmax)))[:, None]
    special = (target >= 0) & (target < BLOCK_N) | (softmax < 0.0) | ~counts
    flags = _range(_largest(z, BLOCK_M, BLOCK_N), softcap) | tl.where(special, SPECIAL, 0)[:, None]
    flags = _of_tile(flags, BLOCK_M)
    at_target = tl.zeros_like(lse)
    if (flags & SPECIAL) > 0:
        z_target = tl.sum(tl.where(target[:, None] == tl.arange(0, BLOCK_N)[None, :], z, 0.0), 1)
        t = _tanh_of_range(flags, z_target, inverse)
        at_target = (tl.exp2(t * to_base_2 - lse) * softmax + target_grad) * (1.0 - t * t)
    if (flags & NOT_TINY) == 0:
        g = map_elementwise(_tiny_gradient, z, inverse * inverse, shift)
    elif (flags & NOT_SMALL) == 0:
        g = map_elementwise(_small_gradient, z, inverse * inverse, shift)
    elif (flags & NOT_MEDIUM) == 0:
        g = map_elementwise(_medium_gradient, z, inverse * inverse, inverse, to_base_2, shift)
    else:
        g = map_elementwise(_any_gradient, z, inverse, to_base_2, shift)
    if (flags & SPECIAL) > 0:
        g = tl.where(softmax < 0.0, -1.0, 1.0)[:, None] * g
        g = tl.where(target[:, None] == tl.arange(0, BLOCK_N)[None, :], at_target[:, None], g)
        g = tl.where(counts[:, None], g, 0.0)
    return g
