"""How the exact backward cuts the vocabulary into slices, and where the gradient G of each slice lies.

While dC is being made, the part of its storage that no slice has reached yet is free: G lies at its end, so early
slices are wide and few, and a small workspace serves the last ones. Pure arithmetic on sizes, done once per shape.
"""

import functools

from .tiles import ceil_div

WORTH = 1.025  # a larger workspace has to save this factor of the estimated time
SMALL = 128 << 20  # a workspace may have as many bytes, or half of what dE and a fresh dC take


@functools.lru_cache(maxsize=256)
def plan_slices(
    n: int,
    d: int,
    n_columns: int,
    itemsize: int,  # of G
    column_bytes: int,  # that a finished column of dC takes from the front of the storage
    storage_bytes: int,
    workspace_bytes: int,  # or twice, four times, ... as many, where slices are so narrow that summing dE takes long
    step: int,  # columns of one tile
    programs: int,
) -> tuple[tuple[int, int, bool], ...]:
    """(start, stop, whether G lies at the end of the storage) of each slice, widest first.

    Example, in columns: dC takes 1 byte a column and G 4, 100 bytes of storage, a workspace of 20. The first slice may
    have 100 / 5 = 20 columns, the next (100 - 20) / 5 = 16, then 12, 10, 8, 6; after that the workspace's 5 are more.
    """
    sizes = [workspace_bytes]
    while 2 * sizes[-1] <= max(SMALL, (storage_bytes + n * d * itemsize) // 2):
        sizes.append(2 * sizes[-1])
    plans = [_plan(n, d, n_columns, itemsize, column_bytes, storage_bytes, size, step, programs) for size in sizes]
    times = [sum(_time(n, d, stop - start, step, programs) for start, stop, _ in plan) for plan in plans]
    return next(plan for plan, time in zip(plans, times, strict=True) if time <= WORTH * min(times))


def _plan(n, d, n_columns, itemsize, column_bytes, storage_bytes, workspace_bytes, step, programs):
    in_workspace = max(workspace_bytes // (max(n, 1) * itemsize) // step * step, step)
    slices = []
    start = 0
    while start < n_columns:
        free = storage_bytes - start * column_bytes - 16
        in_storage = max(0, free) // (column_bytes + n * itemsize) // step * step
        lent = in_storage > in_workspace
        most = in_storage if lent else in_workspace
        # The width whose tiles keep the multiprocessors busiest, per column.
        widths = range(most, max(most // 2, step) - 1, -step)
        width = min(widths, key=lambda width: _time(n, d, width, step, programs) / width)
        stop = min(start + width, n_columns)
        slices.append((start, stop, lent))
        start = stop
    return tuple(slices)


def _time(n: int, d: int, width: int, step: int, programs: int) -> float:
    """Estimated time of a slice, in steps of one element of K on a tile of 128 x `step`, 16 clocks of an H200.

    G's tiles run in waves. Those of dE and dC share one launch, which ends within half a tile of the longer kind.
    dE's fp32 sums are read and written once, 2.5 KB a clock.
    """
    gradient = ceil_div(ceil_div(n, 128) * ceil_div(width, step), programs) * d
    weight = ceil_div(width, 128) * ceil_div(d, step) * n
    hidden = ceil_div(n, 128) * ceil_div(d, step) * width
    return gradient + (weight + hidden) / programs + max(n, width) / 2 + n * d / 5000
