"""Which tokens take part, and where their targets live.

Ignored tokens are moved behind the others before anything is computed. How many count stays on the device, and
kernels read it there, so that nobody waits. On the CPU ignored tokens are left out.
"""

import torch
from torch import Tensor

from vpcce.settings import Settings


def uses_kernels(tensor: Tensor) -> bool:
    """Whether Triton computes, on a device or in its interpreter on CPU tensors; PyTorch does otherwise."""
    return tensor.device.type != "cpu" or _interpreting()


def _interpreting() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return triton.knobs.runtime.interpret


class Rows:
    """Which tokens count, in front of the others or without them, and their targets.

    On the CPU `index` lists the tokens that count. On a device their number stays there: `index` is a permutation
    with the tokens that count in front, and `count` [] int32 says how many there are. Both are None where every token
    counts, `index` also where the CPU found that.
    """

    def __init__(self, target: Tensor, how: Settings, check: bool = False):
        """`check` asserts on a device that all targets are ids; see `check_targets` for the CPU."""
        self.n = target.shape[0]
        self.index: Tensor | None = None
        self.count: Tensor | None = None
        self._divisor: Tensor | None = None
        self.by_kernels = uses_kernels(target) and target.dim() == 1
        if self.by_kernels:
            from vpcce.kernels.rows import select_rows

            found = select_rows(
                target, ignore_index=how.ignore_index, start=how.start, stop=how.start + how.n_valid,
                vocab_size=how.vocab_size, check=check,
            )  # fmt: skip
            self.index, self.count, self._divisor, self.local = found.index, found.count, found.divisor, found.local
            if found.divisor is not None:  # 0 where some target is no id
                torch._assert_async(found.divisor, f"{how.who}: a target is {_range(how)}")
            return
        if how.ignore_index is not None:
            counts = target != how.ignore_index
            if target.dim() == 2:
                counts = counts.any(1)
            if uses_kernels(target):
                self.index = torch.argsort(counts, descending=True, stable=True)
                self.count = counts.sum(dtype=torch.int32)
            else:
                index = counts.nonzero()[:, 0]
                self.index = None if index.shape[0] == self.n else index
        self.local = self._local(target, how)

    @property
    def on_device(self) -> bool:
        """Whether `index` is a permutation, which kernels follow themselves."""
        return self.count is not None

    def divisor(self) -> Tensor:
        """[] int32: how many tokens count, but at least 1."""
        if self._divisor is not None:
            return self._divisor
        if self.count is not None:
            return self.count.clamp(min=1)
        n = self.n if self.index is None else self.index.shape[0]
        return torch.full((), max(n, 1), dtype=torch.int32, device=self.local.device)

    def take(self, rows: Tensor) -> Tensor:
        """The rows that count, in front; behind them zeros, which no product turns into NaN."""
        if self.index is None:
            return rows
        if self.count is not None and rows.dim() == 2 and rows.is_floating_point():
            from vpcce.kernels.rows import take_rows

            return take_rows(rows, self.index, self.count)
        return self._clear_late(rows.index_select(0, self.index))

    def spread(self, rows: Tensor) -> Tensor:
        """The inverse of `take`; tokens that do not count get 0."""
        if self.index is None:
            return rows
        return rows.new_zeros(self.n, *rows.shape[1:]).index_copy_(0, self.index, self._clear_late(rows))

    def _clear_late(self, rows: Tensor) -> Tensor:
        if self.count is None:
            return rows
        late = torch.arange(self.n, device=rows.device) >= self.count
        return rows.masked_fill_(late.view(-1, *(1,) * (rows.dim() - 1)), 0)

    def _local(self, target: Tensor, how: Settings) -> Tensor:
        """Global ids -> rows of this rank's weight, -1 for what lives elsewhere or does not count."""
        target = self.take(target)
        mine = (target >= how.start) & (target < how.start + how.n_valid)
        if self.count is not None:
            mine &= (torch.arange(self.n, device=target.device) < self.count)[:, None]
        if target.dim() == 2 and how.ignore_index is not None:
            mine &= target != how.ignore_index  # rows with an id that counts are not left out
        return torch.where(mine, target - how.start, -1)


def check_targets(target: Tensor, how: Settings) -> None:
    """On a device the check is an assertion there, so that nobody waits for it; for [N] `Rows` makes it."""
    if uses_kernels(target) and target.dim() == 1:
        return
    valid = (target >= 0) & (target < how.vocab_size)
    if how.ignore_index is not None:
        valid |= target == how.ignore_index
    if target.device.type != "cpu":
        torch._assert_async(valid.all(), f"{how.who}: a target is {_range(how)}")
    elif not valid.all():
        place = (~valid).nonzero()[0].tolist()
        position = place[0] if target.dim() == 1 else place
        raise ValueError(f"{how.who}: target {target[tuple(place)].item()} at position {position} is {_range(how)}")


def _range(how: Settings) -> str:
    ignored = "" if how.ignore_index is None else f" and is not ignore_index {how.ignore_index}"
    return f"outside [0, {how.vocab_size}){ignored}"
