"""How the exact backward cuts the vocabulary: the memory and the shapes of README's tables."""

import pytest

from vpcce.kernels.backward_dense import WORKSPACE_BYTES
from vpcce.kernels.slices import SMALL, plan_slices

MIB = 1 << 20


def workspace(n: int, v: int, d: int, fresh: bool = True) -> int:
    """Bytes of G that lie in no storage, bf16 on 132 multiprocessors; the slices follow each other."""
    lent = dict(column_bytes=2 * d, storage_bytes=2 * v * d) if fresh else dict(column_bytes=0, storage_bytes=0)
    plan = plan_slices(n, d, v, itemsize=2, workspace_bytes=WORKSPACE_BYTES, step=256, programs=132, **lent)
    assert [start for start, _, _ in plan] == [0, *(stop for _, stop, _ in plan[:-1])] and plan[-1][1] == v
    for start, stop, in_storage in plan:  # neither on finished columns of dC nor on those of the slice itself
        assert not in_storage or 2 * n * (stop - start) <= 2 * d * (v - stop)
    return max((2 * n * (stop - start) for start, stop, in_storage in plan if not in_storage), default=0)


def test_a_larger_workspace_where_it_is_worth_it():
    assert workspace(8192, 256000, 2304) <= 32 * MIB  # its slices lie in dC's storage but for the last ones
    assert 64 * MIB < workspace(8192, 32064, 3072) <= 128 * MIB
    assert 256 * MIB < workspace(32768, 256000, 2304) <= 512 * MIB


@pytest.mark.parametrize("shape", [(8192, 256000, 2304), (131072, 256000, 2304), (512, 4096, 64), (1, 1, 1)])
def test_no_more_than_half_of_the_gradients_or_a_small_amount(shape):
    n, v, d = shape
    assert workspace(n, v, d) <= max(SMALL, d * (n + v), 512 * n)  # 512 n: one tile of columns has to fit
    assert workspace(n, v, d, fresh=False) <= max(SMALL, d * n, 512 * n)
