"""Launch parameters by architecture, dtype and kernel, tuned with launch/bench/tune.py; nothing is tuned at run time.

    forward     hidden @ weight.T of one row block against all tiles of a split     128 x 256 x 64 on an H200
    gradient    the same product, once per tile, then G is stored
    product     dE and dC from G

Row blocks have 128 tokens everywhere, because marks and coins do. fp32 operands take four bytes and no tensor cores
at full precision, so their tiles are smaller.
"""

import functools

import torch

from .tiles import Tile, ceil_div

# (architecture, bytes per operand) -> kernel -> parameters
TABLE: dict[tuple[str, int], dict[str, Tile]] = {
    ("sm90", 2): {
        "forward": Tile(128, 256, 64, 8, 4),
        "gradient": Tile(128, 256, 64, 8, 3),
        "product": Tile(128, 256, 64, 8, 3),
    },
    ("sm90", 4): {
        "forward": Tile(128, 64, 16, 8, 3),
        "gradient": Tile(128, 64, 16, 8, 3),
        "product": Tile(128, 64, 16, 8, 3),
    },
    ("sm80", 2): {
        "forward": Tile(128, 128, 32, 8, 3),
        "gradient": Tile(128, 128, 32, 8, 3),
        "product": Tile(128, 128, 32, 8, 3),
    },
    ("sm80", 4): {
        "forward": Tile(128, 64, 16, 8, 3),
        "gradient": Tile(128, 64, 16, 8, 3),
        "product": Tile(128, 64, 16, 8, 3),
    },
    ("gfx9", 2): {
        "forward": Tile(128, 128, 32, 8, 2),
        "gradient": Tile(128, 128, 32, 8, 2),
        "product": Tile(128, 128, 32, 8, 2),
    },
    ("gfx9", 4): {
        "forward": Tile(128, 64, 16, 8, 2),
        "gradient": Tile(128, 64, 16, 8, 2),
        "product": Tile(128, 64, 16, 8, 2),
    },
}


@functools.cache  # a step asks for it twenty times
def capability(device: torch.device) -> int:
    """Major compute capability of NVIDIA's; 0 of AMD's; 9 for Triton's interpreter."""
    if device.type != "cuda":
        return 9
    return 0 if torch.version.hip is not None else torch.cuda.get_device_capability(device)[0]


def architecture(device: torch.device) -> str:
    """The row of the table that serves a device."""
    major = capability(device)
    return "gfx9" if major == 0 else "sm90" if major >= 9 else "sm80"


def launch_parameters(kernel: str, device: torch.device, dtype: torch.dtype) -> Tile:
    """Parameters of "forward", "gradient" or "product" for operands of `dtype`."""
    return TABLE[architecture(device), dtype.itemsize][kernel]


def sums_by_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `store_row_sum` may take the tensor cores; elsewhere its operand finds no room in shared memory."""
    return dtype != torch.float32 and capability(device) in (8, 9)


def plan_splits(n: int, n_columns: int, tile: Tile, processors: int, splits: int | None = None) -> tuple[int, int]:
    """(splits, tiles in each but the last) of the forward; `splits` asks for about so many."""
    n_tiles = ceil_div(n_columns, tile.block_n)
    tiles_per_split = ceil_div(n_tiles, splits or choose_splits(ceil_div(n, tile.block_m), n_tiles, processors))
    return ceil_div(n_tiles, tiles_per_split), tiles_per_split


@functools.lru_cache(maxsize=256)
def choose_splits(n_blocks: int, n_tiles: int, programs: int) -> int:
    """Into how many parts the forward cuts the vocabulary, so that the multiprocessors are busy to the end.

    n_blocks * splits programs run in waves of `programs`. More and shorter programs let row blocks of ignored
    tokens, which return at once, give their time to others; below 16 tiles a program's start shows.

    Example: 64 row blocks, 1000 tiles, 132 multiprocessors: 2 splits leave 4 idle, 33 fill 16 waves exactly.
    """
    most = max(1, min(n_tiles // 16, 16 * programs // max(n_blocks, 1)))
    fills = {}
    for splits in range(1, max(most, 1) + 1):
        tiles = ceil_div(n_tiles, splits)
        waves = ceil_div(n_blocks * ceil_div(n_tiles, tiles), programs)
        fills[splits] = n_blocks * n_tiles / (waves * programs * tiles)
    if n_blocks * most < programs:  # few tokens: shorter programs are better than idle multiprocessors
        most = min(n_tiles, ceil_div(programs, n_blocks))
        return max(1, most)
    best = max(fills.values())
    return max(splits for splits, fill in fills.items() if fill >= best - 0.01)
