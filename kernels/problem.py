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
from typing import Protocol

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


def weight_factors(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """(f, w): dC = G.T @ f has the shape of w, the weight that may be trained."""
    return (hidden, head.weight) if head.low_rank is None else (head.low_rank.hidden, head.low_rank.weight)


@dataclass(frozen=True)
class Sampling:
    """Asks the forward to mark the columns that the sampled backward may keep."""

    seed: Tensor  # int64, 0-dim, on the device
    eps: float
    lower_bound: Tensor  # [N] fp32, a lower bound of each row's log-sum-exp over the WHOLE vocabulary


@dataclass(frozen=True)
class Marks:
    """The forward's marks; the layout of `bits` is private to the backend that wrote them."""

    bits: Tensor  # int32
    seed: Tensor  # int64, 0-dim


@dataclass(frozen=True)
class LocalStats:
    """One shard's share of the statistics. An empty shard has max = -inf and sum = 0."""

    max: Tensor  # [N]
    sum: Tensor  # [N], sum of exp(x - max)
    target_logit: Tensor  # [N], or [N, K] like the targets; 0 where the target lives elsewhere
    expected: Tensor | None = None  # [N], sum of exp(x - max) * x
    argmax: Tensor | None = None  # [N] int64, local row of the maximum, the lowest one of equals
    logit_sum: Tensor | None = None  # [N], sum of column_weight * x; asked for only with a softcap, else it is linear
    marks: Marks | None = None


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
