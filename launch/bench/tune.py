"""Times candidates for the launch table on the device at hand and prints the rows of kernels/launch_table.py.

    python launch/bench/tune.py                       # bf16, Gemma 2 2B's head and Mistral NeMo's
    python launch/bench/tune.py --dtype float32 --shape 2048 32000 2048

Each kernel is timed as the library launches it: `forward` through `forward_stats`, `gradient` and `product` through
one exact backward in which only that kernel's parameters change. Candidates that do not fit the chip are reported
with their error. Times are medians over all shapes of the ratio to the first candidate, so that a large shape does
not decide alone.
"""

import argparse
import statistics
from collections.abc import Iterator

import torch
from lm_like import lm_like
from measure import free_memory, median_ms

from vpcce.kernels.backward_dense import dense_backward
from vpcce.kernels.forward import forward_stats
from vpcce.kernels.launch_table import architecture, launch_parameters
from vpcce.kernels.problem import Head, RowGradients
from vpcce.kernels.tiles import Tile

SHAPES = [(8192, 256000, 2304), (8192, 131072, 5120)]
BUDGET_S = 0.2


def candidates(kernel: str, now: Tile) -> Iterator[Tile]:
    """What is in the table first, then its neighbours."""
    yield now
    for block_n in (64, 128, 256):
        for block_k in (32, 64):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    tile = Tile(128, block_n, block_k, warps, stages)
                    if tile != now and (block_n < 256 or warps == 8):
                        yield tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("N", "V", "D"))
    parser.add_argument("--kernels", nargs="*", default=["forward", "gradient", "product"])
    parser.add_argument("--limit", type=int, default=None, help="time only the first candidates")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {options.dtype}")
    for kernel in options.kernels:
        tiles = list(candidates(kernel, launch_parameters(kernel, device, dtype)))[: options.limit]
        ratios: dict[Tile, list[float]] = {tile: [] for tile in tiles}
        for shape in options.shape or SHAPES:
            first = None
            for tile, ms in time_all(kernel, shape, dtype, tiles):
                first = first or ms
                ratios[tile].append(ms / first)
        ranked = sorted((statistics.median(found), tile) for tile, found in ratios.items() if found)
        for ratio, tile in ranked[:5]:
            print(f'("{architecture(device)}", {dtype.itemsize})  "{kernel}": {tile}   {ratio:.3f} of the present one')


def time_all(kernel: str, shape: tuple[int, int, int], dtype, tiles: list[Tile]) -> Iterator[tuple[Tile, float]]:
    n, v, d = shape
    hidden, weight, target = lm_like(n, v, d)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    head = Head(weight)
    plain = dict(n_rows=None, entropy=False, argmax=False, logit_sum=False, sampling=None)
    lse = forward_stats(hidden, head, target, **plain).max + 5
    rows = RowGradients(torch.full((n,), 1 / n, device="cuda"), torch.full((n,), -1 / n, device="cuda"))
    d_hidden, d_weight = torch.zeros_like(hidden), torch.empty_like(weight)

    def call(tile: Tile):
        if kernel == "forward":
            forward_stats(hidden, head, target, **plain, tile=tile)
            return
        others = [launch_parameters(name, hidden.device, dtype) for name in ("gradient", "product")]
        others[kernel == "product"] = tile
        dense_backward(
            hidden, head, target, lse, rows, n_rows=None, row_index=None, hidden_grad=d_hidden,
            weight_grad=d_weight, accumulate=False, bias_grad=None, hidden_grad_ready=lambda part: None,
            storage=d_weight, tiles=tuple(others),
        )  # fmt: skip

    for tile in tiles:
        try:
            call(tile)
            (ms,) = median_ms([lambda tile=tile: call(tile)], BUDGET_S)
        except Exception as error:
            print(f"{kernel} {shape} {tile}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            continue
        print(f"{kernel} {shape} {tile}: {ms:.3f} ms", flush=True)
        yield tile, ms
    free_memory()


if __name__ == "__main__":
    main()
