"""Launch parameters of the packed backward, by architecture and bytes per operand; measured on an H200.

    gradient   recompute of 128 tokens x BLOCK_N listed columns; the weight rows are gathered
    hidden     dE, 128 tokens x BLOCK_D
    weight     dC into fp32, BLOCK_N columns x BLOCK_D
    candidates the same product for the k largest logits (`topk`); in fp32 a BLOCK_K of 32 spills
    stream     dC in half precision through the ring of parts; its BLOCK_D is a part's width
    direct     dC in half precision of columns that need no sums in memory, BLOCK_N of them x BLOCK_D; PARTS times that
               where one super-block keeps them. Where G's rows are waited for, five stages are three buffers of it.

Two small blocks per multiprocessor beat one large one in `hidden` (1.20 ms against 1.50, 8192 x 256000 x 2304 on an
H200) and `stream` (2.27 against 2.47): one block's atomics and epilogue run under the other's products. `direct`, whose
hot items are long, is the other way round (0.78 against 0.88).
The parts of a ring take RING * SLAB_COLUMNS * BLOCK_D * 4 = 32 MiB, which stays in L2.
"""

import functools

import torch

from . import launch_table

RING, LAG = 8, 4
SLOTS = 4  # add items of a super-block and a part; each takes every SLOTS-th tile of columns
ROUND_ROWS, ROUND_STEP = 256, 64  # columns of a round item, and of one of its steps

# fp32 products take no tensor cores; their tiles are only there to bound shared memory.
FP32 = {
    "gradient": dict(BLOCK_N=64, BLOCK_K=32, num_warps=8, num_stages=2, per_processor=2),
    "candidates": dict(BLOCK_N=64, BLOCK_K=16, num_warps=8, num_stages=2, per_processor=2),
    "hidden": dict(BLOCK_K=32, BLOCK_D=64, num_warps=8, num_stages=2, per_processor=2),
    "weight": dict(BLOCK_N=64, BLOCK_K=32, BLOCK_D=64, num_warps=8, num_stages=2, per_processor=2),
}
TABLE = {
    ("sm90", 2): {
        "gradient": dict(BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=6, per_processor=1),
        "candidates": dict(BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=5, per_processor=1),
        "hidden": dict(BLOCK_K=64, BLOCK_D=128, num_warps=4, num_stages=4, per_processor=2),
        "weight": dict(BLOCK_N=128, BLOCK_K=64, BLOCK_D=256, num_warps=8, num_stages=3, per_processor=1),
        "stream": dict(BLOCK_N=128, BLOCK_K=64, BLOCK_D=128, num_warps=4, num_stages=3, per_processor=2),
        "direct": dict(BLOCK_N=128, BLOCK_K=64, BLOCK_D=256, PARTS=3, num_warps=8, num_stages=5, per_processor=1),
    },
    ("sm80", 2): {
        "gradient": dict(BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=3, per_processor=2),
        "candidates": dict(BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=3, per_processor=2),
        "hidden": dict(BLOCK_K=32, BLOCK_D=128, num_warps=8, num_stages=3, per_processor=2),
        "weight": dict(BLOCK_N=128, BLOCK_K=32, BLOCK_D=128, num_warps=8, num_stages=3, per_processor=2),
        "stream": dict(BLOCK_N=128, BLOCK_K=32, BLOCK_D=128, num_warps=8, num_stages=3, per_processor=2),
        "direct": dict(BLOCK_N=128, BLOCK_K=32, BLOCK_D=128, PARTS=6, num_warps=8, num_stages=5, per_processor=2),
    },
    ("gfx9", 2): {
        "gradient": dict(BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=2, per_processor=2),
        "candidates": dict(BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=2, per_processor=2),
        "hidden": dict(BLOCK_K=32, BLOCK_D=128, num_warps=8, num_stages=2, per_processor=2),
        "weight": dict(BLOCK_N=128, BLOCK_K=32, BLOCK_D=128, num_warps=8, num_stages=2, per_processor=2),
        "stream": dict(BLOCK_N=128, BLOCK_K=32, BLOCK_D=128, num_warps=8, num_stages=2, per_processor=2),
        "direct": dict(BLOCK_N=128, BLOCK_K=32, BLOCK_D=128, PARTS=6, num_warps=8, num_stages=2, per_processor=2),
    },
}


def packed_launch(kernel: str, device: torch.device, dtype: torch.dtype) -> tuple[int, dict]:
    """(number of programs, launch parameters) of a kernel for operands of `dtype`."""
    row = FP32 if dtype == torch.float32 else TABLE[launch_table.architecture(device), dtype.itemsize]
    parameters = dict(row[kernel])
    processors = parameters.pop("per_processor")
    return processors * launch_processors(device), parameters


@functools.cache
def launch_processors(device: torch.device) -> int:
    """Multiprocessors; Triton's interpreter runs programs one after another and needs no more than two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
