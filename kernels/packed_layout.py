"""Sizes and places of the packed backward's lists and of G: from the shapes on the host, from the marks on the device.

`backward_packed` says which two orders of work there are; `storage` given means the first, dC in place.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import pack
from .coin import ROW_BLOCK
from .marks import WORD_TILE
from .packed_table import launch_processors

SUPER_BLOCK = 4  # row blocks that share a coin
MAX_ROUNDS = 12
ARENA_BYTES = 36 << 20  # G of one round, where it has memory of its own, for each ARENA_ROWS tokens begun
ARENA_ROWS = 8192
SHORT_STEP = 2e12  # tokens x ids x D: the host needs longer for many rounds' launches than the GPU for the kernels
EXTRA_BYTES = 20 << 20  # G behind dC's storage: the last group's has no later columns to lie in
BESIDE_BYTES = 128 << 20  # at most, where dC has no room for the lists' G; the arena of short steps
RING_TOKEN_BYTES = 8192  # for a small dC: a ring of two slices of 2048 columns, see `dense_stream`
USUAL_DENSITY = 0.1  # of marked pairs
GROUP_DENSITY = 0.07  # of marked pairs, up to which the last group's G fits behind dC (to 73,000 tokens in half)
SPARSE_GROUP, DENSE_GROUP = 16384, 4096  # most columns of a group: below LARGE_VOCABULARY more of them are kept
LARGE_VOCABULARY = 100_000
SLAB_COLUMNS = 8192  # one part of the ring in `packed_stream` is a slab times BLOCK_D of D
LIST_BLOCK = 64  # words that a list kernel expands at a time
MAX_DENSITY = 0.35  # of marked pairs, above it the dense product is cheaper; `policy.DENSE` says so beforehand
MAX_DENSITY_SHORT_ROWS = 0.25  # for a small D its time shrinks, and that of a list's pair hardly
SHORT_ROW = 768
MIN_LIST = 3 << 19  # pairs that the lists always hold; 17 bytes each


@dataclass
class Layout:
    """Sizes that follow from the shapes, and the device's plan."""

    n_blocks: int
    n_super: int
    n_groups: int
    n_slabs: int
    slab_columns: int
    group_columns: int
    processors: int
    plan: Tensor  # [rounds, PLAN_FIELDS] int64
    dense: Tensor  # [1] int32
    start: Tensor  # [row blocks, groups] int64
    counts: Tensor  # [row blocks, groups] int64
    block_start: Tensor  # [row blocks] int64
    storage: Tensor
    extra: Tensor
    round_pairs: int
    list_pairs: int

    @property
    def group_words(self) -> int:
        return self.group_columns // 32

    @property
    def groups_pow2(self) -> int:
        return triton.next_power_of_2(self.n_groups)


def bytes_beside(n: int, pairs_bytes: int, storage_bytes: int, group_bytes: int) -> int:
    """Of memory behind dC's storage: what the lists' G lacks there, and what the dense fallback needs to be fast.

    G ends with this memory, and while a group of dC is written, nothing of G may lie there any more. 8192 tokens of
    V x D (MiB): 20 for 256000 x 2304 and 151936 x 1024; 64, a ring, for 32064 x 3072; 124 for 32768 x 1024.
    """
    lacking = min(pairs_bytes - storage_bytes + group_bytes, BESIDE_BYTES)
    ring = RING_TOKEN_BYTES * n
    return max(EXTRA_BYTES, lacking, ring if storage_bytes < 3 * ring else 0)


def _rounds(most: int, capacity: int, n_super: int) -> int:
    """Enough for `most` pairs where super-blocks, none of which is cut, have as many each; and one more."""
    if capacity >= most:
        return 1
    filled = max(capacity - triton.cdiv(most, n_super), 1)
    return min(MAX_ROUNDS, n_super, triton.cdiv(most, filled) + 1)


def plan_layout(bits, n_rows, n, n_columns, d, dtype, storage) -> Layout:
    device = bits.device
    n_blocks, n_words = bits.shape
    n_super = triton.cdiv(n_blocks, SUPER_BLOCK)
    row_bytes = ROW_BLOCK * dtype.itemsize
    every_pair = n_blocks * n_columns
    max_density = MAX_DENSITY if d >= SHORT_ROW else MAX_DENSITY_SHORT_ROWS
    most = min(int(max_density * every_pair) + pack.SLACK_PAIRS.value, every_pair)
    large = n_columns >= LARGE_VOCABULARY
    group_columns = SPARSE_GROUP if large else DENSE_GROUP
    if storage is not None:
        n_rounds = 1
        storage_bytes = storage.numel() * storage.element_size()
        storage_rows = storage_bytes // row_bytes
        usual = int(USUAL_DENSITY * every_pair)
        capacity = list_pairs = round_pairs = min(max(MIN_LIST, usual), most)
        wanted = min(usual, most) if large else capacity
        column_bytes = d * storage.element_size()
        extra_bytes = bytes_beside(n, wanted * row_bytes, storage_bytes, group_columns * column_bytes)
        extra_rows = min(extra_bytes // row_bytes, capacity)
        fitting = int(extra_bytes / (GROUP_DENSITY * max(n_blocks, 1) * row_bytes))
        group_columns = min(group_columns, max(1 << fitting.bit_length() >> 1, 32 * LIST_BLOCK))
    else:
        arena_bytes = ARENA_BYTES * triton.cdiv(n, ARENA_ROWS)
        if n * n_columns * d < SHORT_STEP:
            arena_bytes = max(arena_bytes, BESIDE_BYTES)
        extra_rows = capacity = round_pairs = min(arena_bytes // row_bytes, most)
        n_rounds = _rounds(most, capacity, n_super)
        list_pairs = min(n_rounds * capacity, most)
    n_groups = triton.cdiv(n_columns, group_columns)
    slab_columns = min(SLAB_COLUMNS, group_columns, max(triton.next_power_of_2(n_columns), WORD_TILE))

    def wide_ints(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=device)

    n_padded = n_super * SUPER_BLOCK
    counts, start, block_start = wide_ints(n_padded, n_groups), wide_ints(n_padded, n_groups), wide_ints(n_padded)
    plan = wide_ints(n_rounds, pack.PLAN_FIELDS)
    dense = torch.empty(1, dtype=torch.int32, device=device)
    extra = torch.empty(max(extra_rows, 1) * ROW_BLOCK, dtype=dtype, device=device)
    groups_pow2 = triton.next_power_of_2(n_groups)
    pack.count_kernel[(n_groups, n_padded)](
        bits, n_rows, counts, n_words, n_columns, n_blocks, GROUP_WORDS=group_columns // 32, num_warps=4
    )
    if storage is not None:
        pack.plan_in_place_kernel[(1,)](
            counts, n_rows, start, block_start, plan, dense, n, n_columns, n_groups, n_blocks, capacity, max_density,
            storage_rows, extra_rows, row_bytes, column_bytes, GROUP=group_columns, GROUPS=groups_pow2,
            BLOCKS=min(64, max(4, 1024 // groups_pow2)), num_warps=4,
        )  # fmt: skip
    else:
        pack.plan_rounds_kernel[(1,)](
            counts, n_rows, start, block_start, wide_ints(n_super), plan, dense, n, n_columns, n_groups, n_super,
            n_blocks, capacity, list_pairs, max_density, n_rounds, PLAN_FIELDS=pack.PLAN_FIELDS, GROUPS=groups_pow2,
            SUPERS=min(16, max(1, 256 // groups_pow2)), num_warps=4,
        )  # fmt: skip
    return Layout(
        n_blocks=n_blocks,
        n_super=n_super,
        n_groups=n_groups,
        n_slabs=triton.cdiv(n_columns, slab_columns),
        slab_columns=slab_columns,
        group_columns=group_columns,
        processors=launch_processors(device),
        plan=plan,
        dense=dense,
        start=start,
        counts=counts,
        block_start=block_start,
        storage=extra if storage is None else storage,
        extra=extra,
        round_pairs=round_pairs,
        list_pairs=list_pairs,
    )
