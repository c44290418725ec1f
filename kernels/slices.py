"""How the exact backward cuts the vocabulary into slices, and where the gradient G of each slice lies.

While dC is being made, the part of its storage that no slice has reached yet is free: G lies at its end, so early
slices are wide and few, and a small workspace serves the last ones. Pure arithmetic on sizes, done once per shape.
"""

import functools

from .tiles import ceil_div


@functools.lru_cache(maxsize=256)
def plan_slices(
    n: int,
    d: int,
    n_columns: int,
    itemsize: int,  # of G
    column_bytes: int,  # that a finished column of dC takes from the front of the storage
    storage_bytes: int,
    workspace_bytes: int,
    step: int,  # columns of one tile
    programs: int,
) -> tuple[tuple[int, int, bool], ...]:
    """(start, stop, whether G lies at the end of the storage) of each slice, widest first.

    Example, in columns: dC takes 1 byte a column and G 4, 100 bytes of storage, a workspace of 20. The first slice may
    have 100 / 5 = 20 columns, the next (100 - 20) / 5 = 16, then 12, 10, 8, 6; after that the workspace's 5 are more.
    """
    in_workspace = max(workspace_bytes // (max(n, 1) * itemsize) // step * step, step)
    slices = []
    start = 0
    while start < n_columns:
        free = storage_bytes - start * column_bytes - 16
        in_storage = max(0, free) // (column_bytes + n * itemsize) // step * step
        lent = in_storage > in_workspace
        width = _filling_width(n, d, in_storage if lent else in_workspace, step, programs)
        stop = min(start + width, n_columns)
        slices.append((start, stop, lent))
        start = stop
    return tuple(slices)


def _filling_width(n: int, d: int, most: int, step: int, programs: int) -> int:
    """The width up to `most` whose tiles keep the multiprocessors busiest, per column.

    G's tiles run in waves. Those of dE and dC share one launch, which ends within half a tile of the longer kind.
    """

    def cost(width: int) -> float:
        gradient = ceil_div(ceil_div(n, 128) * ceil_div(width, step), programs) * d
        weight = ceil_div(width, 128) * ceil_div(d, step) * n
        hidden = ceil_div(n, 128) * ceil_div(d, step) * width
        return (gradient + (weight + hidden) / programs + max(n, width) / 2) / width

    return min(range(most, max(most // 2, step) - 1, -step), key=cost)
