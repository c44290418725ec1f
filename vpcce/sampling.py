"""The sampled and the filtered backward's decisions in plain PyTorch; `vpcce.kernels.coin` explains the coin.

    sampled    m[b, v] = max over the tokens of row block b of p, 1 where v is the target of one
               keep iff coin < m * 2^24 / eps, scale by 1 / q, q = min(ceil(m * 2^24 / eps), 2^24) / 2^24
    filtered   a tile of one row block and 128 columns is dropped when all its |p - onehot| < eps

Given the same seed the coin equals the kernels' bit for bit. Decisions then differ only where the two backends'
p round to different sides of the coin.
"""

import torch
from torch import Tensor

from vpcce.kernels.problem import Head

ROW_BLOCK = 128  # tokens that share a decision
COIN_BLOCKS = 4  # row blocks that share a coin
TILE_COLUMNS = 128
LEVELS = 2**24
_MASK = 0xFFFFFFFF


def coin(seed: Tensor, row_block: Tensor, column: Tensor) -> Tensor:
    """[blocks, columns] int64 in [0, 2^24); `column` holds global vocabulary ids."""
    group = row_block // COIN_BLOCKS
    key = _mix(_mix((group + _mix(seed & _MASK)) & _MASK) ^ ((seed >> 32) & _MASK))
    second_key = _mix(key ^ 0x9E3779B9)
    return _mix((_mix(column[None, :] ^ key[:, None]) + second_key[:, None]) & _MASK) >> 8


def keep_scale(m: Tensor, eps: float, seed: Tensor, row_block: Tensor, column: Tensor) -> Tensor:
    """1 / q of the kept (block, column) pairs, 0 of the dropped ones; `m` is [blocks, columns]."""
    y = m * (LEVELS / eps)
    q = y.ceil().clamp(max=LEVELS)
    return torch.where(y <= coin(seed, row_block, column), 0.0, LEVELS / q)


def sampled_scale(size: Tensor, eps: float, seed: Tensor, first_column: int) -> Tensor:
    """[blocks, columns]: what G's columns of a slice are multiplied with; `size` is p, and 1 at targets, [N, columns].

    `first_column` is the global id of the slice's first column.
    """
    m = _block_max(size)
    blocks = torch.arange(m.shape[0], device=m.device)
    columns = torch.arange(first_column, first_column + m.shape[1], device=m.device)
    return keep_scale(m, eps, seed, blocks, columns)


def filtered_scale(softmax_error: Tensor, eps: float) -> Tensor:
    """[blocks, columns]: 1 in the 128x128 tiles with an entry of at least eps, 0 elsewhere.

    Tiles start at the slice's first column; sort the columns before slicing for the paper's vocabulary order.
    """
    m = _block_max(softmax_error)
    n_columns = m.shape[1]
    padded = torch.nn.functional.pad(m, (0, -n_columns % TILE_COLUMNS))
    tiles = padded.unflatten(1, (padded.shape[1] // TILE_COLUMNS, TILE_COLUMNS)).amax(2) >= eps
    return tiles.repeat_interleave(TILE_COLUMNS, 1)[:, :n_columns].to(m.dtype)


def column_order(hidden: Tensor, head: Head) -> Tensor:
    """Columns by descending mean logit, so that large entries share tiles (Cut Cross-Entropy, section 4.3)."""
    mean_logit = head.weight @ hidden.mean(0, dtype=torch.float32).to(head.weight.dtype)
    if head.low_rank is not None:
        mean_logit = mean_logit + head.low_rank.weight @ head.low_rank.hidden.mean(0)
    return mean_logit.argsort(descending=True, stable=True)


def scale_columns(grad: Tensor, scale: Tensor) -> Tensor:
    """grad [N, columns] times scale [blocks, columns], each row of which serves 128 rows of grad.

    Dropped columns are written as 0, not multiplied: 0 * inf would be NaN.
    """
    rows = scale.repeat_interleave(ROW_BLOCK, 0)[: grad.shape[0]]
    return torch.where(rows == 0, 0.0, grad * rows)


def _block_max(softmax_error: Tensor) -> Tensor:
    n, n_columns = softmax_error.shape
    size = softmax_error.abs()
    padded = torch.nn.functional.pad(size, (0, 0, 0, -n % ROW_BLOCK))
    return padded.view(-1, ROW_BLOCK, n_columns).amax(1)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser on int64 values in [0, 2^32); products wrap, their low 32 bits are right."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
