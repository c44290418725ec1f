"""What all kernels share: loading a tile, and the steps from a product to a logit.

A logit goes through the same steps everywhere, in this order, each of which costs nothing when it is off:

    z = scale * (product + bias)        x = softcap * tanh(z / softcap)        x = -inf beyond the vocabulary

Masking comes last: a softcap would turn -inf into -softcap and padding lanes into probability.

Tiles come through TMA descriptors where the hardware has them and the layout allows (rows contiguous, address and
row stride multiples of 16 bytes), through masked loads at int64 addresses otherwise. Both give 0 beyond the edges.
Columns and tiles are numbered on grid axis 0: the others end at 65535, which row blocks alone stay below.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .problem import Head, RowGradients
from .softcap import soft_capped

ROW_BLOCK = 128
HIDDEN_CACHE_BYTES = 40 << 20  # of L2, for hidden rows that are read again and again; an H200 has 60 MB


@triton.jit
def load_tile(
    source,  # TMA descriptor, or pointer
    row,
    col,
    n_rows,
    n_cols,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
):
    """source[row : row + ROWS, col : col + COLS], 0 beyond [n_rows, n_cols]."""
    if TMA:
        tile = source.load([row, col])
    else:
        offs_row = row + tl.arange(0, ROWS)
        offs_col = col + tl.arange(0, COLS)
        at = offs_row.to(tl.int64)[:, None] * stride_row + offs_col.to(tl.int64)[None, :] * stride_col
        tile = tl.load(source + at, mask=(offs_row < n_rows)[:, None] & (offs_col < n_cols)[None, :], other=0.0)
    return tile


@triton.jit
def scaled_of(product, bias, scale):
    """z of a tile of products, before a softcap; `bias` broadcasts over rows; it and `scale` may be None."""
    z = product
    if bias is not None:
        z += bias
    if scale is not None:
        z = z * scale
    return z


@triton.jit
def logits_of(product, bias, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Natural-log logits of a tile of products."""
    x = scaled_of(product, bias, scale)
    if HAS_SOFTCAP:
        x = soft_capped(x, softcap)
    return x


@triton.jit
def add_low_rank(
    product,  # [rows, columns]
    hidden_ptr,  # [N, RANK]
    weight_ptr,  # [V, RANK]
    rows,
    valid_rows,
    columns,
    valid_columns,
    RANK: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """product + hidden[rows] @ weight[columns].T.

    The tile loop around it must not be flattened: the compiler then fails for sm_100 and spills on sm_90 (Triton 3.6).
    """
    BLOCK: tl.constexpr = 16  # wider ones leave the gradient kernel no shared memory for its third stage
    for k in tl.static_range(0, RANK, BLOCK):
        offs_k = k + tl.arange(0, BLOCK)
        inside = offs_k < RANK
        hidden = hidden_ptr + rows.to(tl.int64)[:, None] * RANK + offs_k[None, :]
        weight = weight_ptr + columns.to(tl.int64)[None, :] * RANK + offs_k[:, None]
        h = tl.load(hidden, mask=valid_rows[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight, mask=valid_columns[None, :] & inside[:, None], other=0.0)
        product = tl.dot(h.to(DTYPE), w.to(DTYPE), product, input_precision=PRECISION)
    return product


@triton.jit
def store_row_sum(tile, out_ptr, width, DTYPE: tl.constexpr, BY_PRODUCT: tl.constexpr):
    """out[j] = sum of tile[:, j] for j < width, of the tile rounded to DTYPE if BY_PRODUCT.

    A product with ones needs no shuffles, which took 8% of the gradient kernel. It takes part after part, each rounded
    when its turn comes: the compiler gives all that are there memory of their own, and sm_90 has some for one.
    """
    if BY_PRODUCT and tile.shape[1] > 64:
        left, right = tl.split(tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute(0, 2, 1))
        store_row_sum(left, out_ptr, width, DTYPE, BY_PRODUCT)
        store_row_sum(right, out_ptr + tile.shape[1] // 2, width - tile.shape[1] // 2, DTYPE, BY_PRODUCT)
    else:
        columns = tl.arange(0, tile.shape[1])
        if BY_PRODUCT:
            ones = tl.full((16, tile.shape[0]), 1.0, tl.float32).to(DTYPE)
            total = tl.dot(ones, tile.to(DTYPE))
            first = tl.arange(0, 16) == 0
            at = tl.broadcast_to((out_ptr + columns)[None, :], total.shape)
            tl.store(at, total, mask=first[:, None] & (columns < width)[None, :])
        else:
            tl.store(out_ptr + columns, tl.sum(tile, 0), mask=columns < width)


@triton.jit
def load_scale(scale_ptr):
    """The scale of the logits, or None."""
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    return scale


@triton.jit
def count_rows(n, n_rows_ptr):
    """How many leading rows count: n, or fewer as the device says."""
    if n_rows_ptr is not None:
        n = tl.minimum(n, tl.load(n_rows_ptr))
    return n


@triton.jit
def grouped(item, n_blocks, n_tiles, group):
    """(row block, column tile) of an item: `group` row blocks meet all tiles before the next group does.

    Neighbouring items share a tile of the weight, and a group's hidden rows stay in cache while it lasts.
    """
    first = item // (group * n_tiles) * group
    size = tl.minimum(group, n_blocks - first)
    item -= first * n_tiles
    return first + item % size, item // size


def rows_in_cache(n: int, d: int, itemsize: int) -> int:
    """How many row blocks make a group: their hidden rows fit into HIDDEN_CACHE_BYTES, and groups are alike in size.

    Example: 32768 x 2304 in bf16 are 256 blocks of 0.56 MiB: 4 groups of 64.
    """
    n_blocks = max(1, ceil_div(n, ROW_BLOCK))
    most = max(1, HIDDEN_CACHE_BYTES // (ROW_BLOCK * d * itemsize))
    return ceil_div(n_blocks, ceil_div(n_blocks, most))


def ceil_div(a: int, b: int) -> int:
    """`triton.cdiv` takes 3 us a call on the host; plans make thousands."""
    return -(-a // b)


@dataclass(frozen=True)
class Tile:
    """Launch parameters of one matrix-product kernel: [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N] a step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def of_depth(self, d: int) -> "Tile":
        """For a product over d elements: stages beyond its steps and one more only take shared memory."""
        return replace(self, num_stages=min(self.num_stages, ceil_div(d, self.block_k) + 1))


class Source:
    """A matrix as kernels take it: descriptor or pointer, with its strides."""

    def __init__(self, matrix: Tensor, rows: int, cols: int):
        self.tma = has_tma(matrix.device) and fits_tma(matrix)
        self.stride_row, self.stride_col = matrix.stride()
        self.source = TensorDescriptor.from_tensor(matrix, [rows, cols]) if self.tma else matrix


@functools.cache
def has_tma(device: torch.device) -> bool:
    if triton.knobs.runtime.interpret:
        return True
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def fits_tma(matrix: Tensor) -> bool:
    size = matrix.element_size()
    return (
        matrix.stride(1) == 1
        and matrix.data_ptr() % 16 == 0
        and matrix.stride(0) * size % 16 == 0
        and matrix.stride(0) >= matrix.shape[1]
        and min(matrix.shape) > 0
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of one per multiprocessor run side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def scale_tensor(head: Head) -> Tensor | None:
    """0-dim fp32 on the device, so that one kernel serves fixed and learned scales; None for 1."""
    if isinstance(head.scale, Tensor):
        return head.scale
    if head.scale == 1.0:
        return None
    return torch.full((), head.scale, dtype=torch.float32, device=head.weight.device)


def compute_dtype(hidden: Tensor, head: Head) -> torch.dtype:
    """What operands are converted to before a product, tile by tile."""
    if hidden.dtype == head.weight.dtype:
        return hidden.dtype
    return torch.promote_types(hidden.dtype, head.weight.dtype)


def narrowed(block: int, width: int) -> int:
    """A block's extent along a dimension of `width`, at least the 16 of a matrix instruction."""
    return min(block, max(16, triton.next_power_of_2(width)))


def low_rank_arguments(head: Head, columns: slice = slice(None)) -> tuple[Tensor | None, Tensor | None, int]:
    """(hidden, weight, RANK) of the second product as kernels take it."""
    low = head.low_rank
    return (None, None, 0) if low is None else (low.hidden, low.weight[columns], low.hidden.shape[1])


TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def gradient_unit(rows: RowGradients, head: Head, dtype: torch.dtype) -> Tensor | None:
    """0-dim fp32: what G is stored in multiples of, so that fp16 has room for it; None for other dtypes.

    The mean over 8192 tokens multiplies gradients with 1e-4, and fp16 ends at 6e-8.
    """
    if dtype != torch.float16:
        return None
    given = [part for part in (rows.softmax, rows.target, rows.softmax_logit, rows.constant) if part is not None]
    largest = torch.stack([part.abs().amax() for part in given]).amax().clamp(min=1e-30)
    scale = head.scale.abs() if isinstance(head.scale, Tensor) else abs(head.scale)
    return (largest * scale).clamp(min=1e-36)
