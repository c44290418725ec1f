"""Which tokens take part, and where their targets live.

Ignored tokens are moved behind the others before anything is computed. How many count stays on the device, and
kernels read it there, so that nobody waits.
"""

import torch
from torch import Tensor

from vpcce.settings import Settings


class Rows:
    """Which tokens count. Ignored ones are moved behind the others, or left out where that needs no waiting.

    On the CPU `index` lists the tokens that count. On a device their number stays there: `index` is a permutation
    with the tokens that count in front, and `count` [1] int32 says how many there are.
    """

    def __init__(self, index: Tensor | None, count: Tensor | None, n: int):
        self.index, self.count, self.n = index, count, n

    @classmethod
    def select(cls, target: Tensor, ignore_index: int | None) -> "Rows":
        n = target.shape[0]
        if ignore_index is None:
            return cls(None, None, n)
        counts = target != ignore_index
        if target.dim() == 2:
            counts = counts.any(1)
        if target.device.type == "cpu":
            index = counts.nonzero()[:, 0]
            return cls(None if index.shape[0] == n else index, None, n)
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order, counts.sum(dtype=torch.int32)[None], n)

    def take(self, rows: Tensor) -> Tensor:
        """The rows that count, in front; behind them zeros, which no product turns into NaN."""
        if self.index is None:
            return rows
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


def check_targets(target: Tensor, how: Settings) -> None:
    """On a device the check is an assertion there, so that nobody waits for it."""
    valid = (target >= 0) & (target < how.vocab_size)
    if how.ignore_index is not None:
        valid |= target == how.ignore_index
    ignored = "" if how.ignore_index is None else f" and is not ignore_index {how.ignore_index}"
    if target.device.type != "cpu":
        torch._assert_async(valid.all(), f"{how.who}: a target is outside [0, {how.vocab_size}){ignored}")
    elif not valid.all():
        place = (~valid).nonzero()[0].tolist()
        position = place[0] if target.dim() == 1 else place
        raise ValueError(
            f"{how.who}: target {target[tuple(place)].item()} at position {position} is outside "
            f"[0, {how.vocab_size}){ignored}"
        )


def local_target(target: Tensor, how: Settings, rows: Rows) -> Tensor:
    """Global ids -> rows of this rank's weight, -1 for what lives elsewhere or does not count."""
    mine = (target >= how.start) & (target < how.start + how.n_valid)
    if rows.count is not None:
        counts = torch.arange(target.shape[0], device=target.device) < rows.count
        mine &= counts if target.dim() == 1 else counts[:, None]
    if target.dim() == 2 and how.ignore_index is not None:
        mine &= target != how.ignore_index  # rows with an id that counts are not left out
    return torch.where(mine, target - how.start, -1)


def largest_target_logit(target_logit: Tensor, target: Tensor, how: Settings) -> Tensor:
    """[N]: the largest logit among a token's targets, both [N, K]; ignored ones have none."""
    if target.dim() == 1:
        return target_logit[:, 0]
    if how.ignore_index is not None:
        target_logit = target_logit.masked_fill(target == how.ignore_index, -torch.inf)
    return target_logit.amax(1)
