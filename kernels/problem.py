"""The vocabulary between the loss and its two backends: what one rank is asked to compute.

A backend (`vpcce.reference` in PyTorch, `vpcce.kernels.local` in Triton) sees one rank's shard and never another
rank. It is given a `Head`, hidden rows and LOCAL targets, and answers with `LocalStats`; in the backward it is
given the global log-sum-exp and `RowGradients`. Everything that a loss adds (means, z-loss, smoothing, entropy
bonuses, RL ratios) has already been folded into four numbers per row, so a backend knows one formula:

    z = scale * (hidden @ weight.T + bias)             x = softcap * tanh(z / softcap), or z without a softcap
    p = exp(x - lse)
    G = p * (softmax + softmax_logit * x) + sum_k onehot(target_k) * target_k + constant * column_weight
    d loss / d z = G * (1 - (x / softcap)^2)

Statistics and row gradients are fp32 (fp64 when hidden is fp64); logits are natural-log units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """A second, narrow product: z = scale * (hidden @ weight.T + low_rank.hidden @ low_rank.weight.T + bias).

    Both factors are contiguous and of one dtype, that of the first product's operands or wider. The first weight is
    frozen then: what is said of dC holds for the gradient of this weight, which is fp32.
    """

    hidden: Tensor  # [N, R], one row per row of hidden
    weight: Tensor  # [V_local, R]


@dataclass(frozen=True)
class Head:
    """One rank's rows of the output layer, and how a product becomes a logit."""

    weight: Tensor  # [V_local, D]; rows beyond the true vocabulary are already cut off, V_local may be 0
    bias: Tensor | None = None  # [V_local]
    scale: float | Tensor = 1.0  # a float, or a 0-dim fp32 tensor on weight's device
    softcap: float | None = None
    start: int = 0  # global vocabulary id of row 0
    column_weight: Tensor | None = None  # [V_local] fp32, the columns' share of `RowGradients.constant`; None is 1
    low_rank: LowRank | None = None
    weight_sum: Tensor | None = None  # [D] fp32, column_weight @ weight, where the forward has found it


def weight_factors(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """(f, w): dC = G.T @ f has the shape of w, the weight that may be trained."""
    return (hidden, head.weight) if head.low_rank is None else (head.low_rank.hidden, head.low_rank.weight)


class HotSplits(NamedTuple):
    """How the sum behind a lower bound is spread over the parts of the vocabulary that the forward takes in turn."""

    mass: Tensor  # [splits, N] fp32, log2 of at least the sum of exponentials of a split's hot columns
    columns: int  # of a split


class HotSet(NamedTuple):
    """What some columns say about every token's log-sum-exp before the forward; see `hot_set`."""

    stats: Tensor  # [3, N] fp32: max, sum of exp(x - max), its log, over the hot columns; -inf, 0, -inf without any
    splits: HotSplits | None  # None where the forward could not use it
    mean_bound: Tensor | None = None  # [N] fp32, another lower bound of the log-sum-exp, from many columns of the shard


@dataclass(frozen=True)
class Sampling:
    """Asks the forward to mark the columns that the sampled backward may keep."""

    seed: Tensor  # int64, 0-dim, on the device
    eps: float
    lower_bound: Tensor  # [N] fp32, a lower bound of each row's log-sum-exp over the WHOLE vocabulary
    hot_splits: HotSplits | None = None  # of the same hot set as lower_bound
    mean_bound: Tensor | None = None  # [N] fp32, a second lower bound, which nothing is added to


@dataclass(frozen=True)
class Marks:
    """The forward's marks; the layout of `bits` is private to the backend that wrote them."""

    bits: Tensor  # int32
    seed: Tensor  # int64, 0-dim


class StatsLayout(NamedTuple):
    """Which numbers per token travel from a shard, one row of `LocalStats.packed` each, in this order."""

    ids: int | None = None  # K of targets [N, K]; None for [N]
    entropy: bool = False
    argmax: bool = False
    topk: int = 0  # k logits, the largest first, then k global ids
    logit_sum: bool = False

    @property
    def n_targets(self) -> int:
        return 1 if self.ids is None else self.ids

    @property
    def expected_row(self) -> int:
        return 2 + self.n_targets

    @property
    def argmax_row(self) -> int:
        return self.expected_row + self.entropy

    @property
    def topk_row(self) -> int:
        return self.argmax_row + self.argmax

    @property
    def logit_sum_row(self) -> int:
        return self.topk_row + 2 * self.topk

    @property
    def n_rows(self) -> int:
        return self.logit_sum_row + self.logit_sum


@dataclass(frozen=True)
class LocalStats:
    """One shard's share of the statistics, as it travels. An empty shard has max = -inf and sum = 0."""

    packed: Tensor  # [rows of the layout, N]
    layout: StatsLayout
    start: int  # global id of the shard's first row
    marks: Marks | None = None

    @classmethod
    def pack(
        cls, top: Tensor, total: Tensor, target_logit: Tensor, start: int, *, expected: Tensor | None = None,
        argmax: Tensor | None = None, logit_sum: Tensor | None = None, marks: Marks | None = None,
        topk: tuple[Tensor, Tensor] | None = None,
    ) -> "LocalStats":  # fmt: skip
        """From one tensor per statistic; `argmax` and the ids of `topk` = (logits [N, k], ids) are local rows."""
        ids = target_logit.shape[1] if target_logit.dim() == 2 else None
        k = 0 if topk is None else topk[0].shape[1]
        layout = StatsLayout(ids, expected is not None, argmax is not None, k, logit_sum is not None)
        bits = None if argmax is None else as_float_bits(argmax + start, top.dtype)
        targets = [target_logit] if ids is None else target_logit.unbind(1)
        best = () if topk is None else (*topk[0].unbind(1), *as_float_bits(topk[1] + start, top.dtype).unbind(1))
        parts = [part for part in (top, total, *targets, expected, bits, *best, logit_sum) if part is not None]
        return cls(torch.stack(parts), layout, start, marks)

    @property
    def max(self) -> Tensor:
        """[N], what `sum` is relative to: the maximum, or with a softcap 0 where that is larger."""
        return self.packed[0]

    @property
    def sum(self) -> Tensor:
        """[N], sum of exp(x - max)"""
        return self.packed[1]

    @property
    def target_logit(self) -> Tensor:
        """[N], or [N, K] like the targets; 0 where the target lives elsewhere"""
        return self.packed[2] if self.layout.ids is None else self.packed[2 : self.layout.expected_row].T

    @property
    def expected(self) -> Tensor | None:
        """[N], sum of exp(x - max) * x"""
        return self.packed[self.layout.expected_row] if self.layout.entropy else None

    @property
    def argmax(self) -> Tensor | None:
        """[N] int64, local row of the maximum, the lowest one of equals; its bits travel as a global id"""
        return from_float_bits(self.packed[self.layout.argmax_row]) - self.start if self.layout.argmax else None

    @property
    def logit_sum(self) -> Tensor | None:
        """[N], sum of column_weight * x; a backend is asked for it only with a softcap, else it is linear"""
        return self.packed[self.layout.logit_sum_row] if self.layout.logit_sum else None

    @property
    def topk(self) -> tuple[Tensor, Tensor] | None:
        """([N, k] logits, the largest first, [N, k] int64 local rows); logits that do not exist are -inf, of any id"""
        return best_of_ranks(self.packed[None], self.layout, self.start) if self.layout.topk else None


class Merged(NamedTuple):
    """Statistics over the whole vocabulary, in the order of the caller's tokens, 0 for those that do not count."""

    lse: Tensor  # [N]
    target_logit: Tensor  # [N], or [N, K] like the targets
    entropy: Tensor | None  # [N]
    logit_sum: Tensor | None  # [N]
    argmax: Tensor | None  # [N] int64, global


def as_float_bits(ids: Tensor, dtype: torch.dtype) -> Tensor:
    return ids.to(torch.int32 if dtype == torch.float32 else torch.int64).view(dtype)


def from_float_bits(bits: Tensor) -> Tensor:
    bits = bits.contiguous()
    return bits.view(torch.int32 if bits.dtype == torch.float32 else torch.int64).to(torch.int64)


def best_of_ranks(ranks: Tensor, layout: StatsLayout, start: int = 0) -> tuple[Tensor, Tensor]:
    """(logits [N, k], ids - start [N, k] int64), the largest first, of [T, rows of the layout, N]."""
    k, first = layout.topk, layout.topk_row
    values, ids = ranks[:, first : first + k].flatten(0, 1), from_float_bits(ranks[:, first + k : first + 2 * k])
    ids = ids.flatten(0, 1)
    if ranks.shape[0] > 1:
        values, place = values.topk(k, 0)
        ids = ids.gather(0, place)
    return values.T, ids.T - start


@dataclass(frozen=True)
class RowGradients:
    """Upstream gradients per token, see the formula above."""

    softmax: Tensor  # [N]
    target: Tensor  # [N], or [N, K] like the targets: every chosen id has its own; the policy is exact then
    softmax_logit: Tensor | None = None  # [N]
    constant: Tensor | None = None  # [N]


class Policy(Protocol):
    """How one of the two gradients is computed; `vpcce.policy` makes them."""

    kind: str  # "exact", "filtered" or "sampled"
    eps: float
    sort: bool
    deterministic: bool


HiddenGradReady = Callable[[torch.Tensor], None]
