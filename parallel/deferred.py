"""Logits that do not exist yet: what the output layer hands to a Megatron model that will ask for the loss.

A Megatron model calls its output layer, may scale the logits, and passes them to `compute_language_model_loss`;
multi-token prediction does the same once per depth and then takes an argmax. `DeferredLogits` travels that road in
the logits' place and knows what they would have been made of:

    logits = scale * (hidden @ weight.T + bias)         [s, b, V / T], or [s, b, V] when they would be gathered

    what happens to it            what it does                                          products with weight
    times or divided by a number  remembers the factor (MuP's output multiplier)        none
    cross_entropy(labels)         the fused loss                                        one forward
    argmax, max                   the ids, found in the loss's own pass when `cross_
                                  entropy` was asked for them, else in one more         none, or one
    anything else                 the layer's real logits, made by Megatron's code      one, and the memory

So code that does not know about it (a logger, a new scaling rule) gets a correct number and pays for it. It is not a
tensor: an autograd.Function would not see through it, which is why the layer defers only inside a model call that
ends in `compute_language_model_loss`, see `vpcce.parallel.megatron`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vpcce.loss import linear_cross_entropy, linear_stats
from vpcce.parallel import collectives
from vpcce.parallel.shard import VocabShard
from vpcce.parallel.wgrad import through_main_grad

WHO = "vpcce.parallel.megatron"


@dataclass(frozen=True)
class HeadOptions:
    """What `vpcce.parallel.megatron.install` accepts; described there."""

    backward: Any = "auto"
    ignore_index: int | None = None
    skip_masked_tokens: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    gradient_accumulation_fusion: bool | None = None


@dataclass(frozen=True)
class Request:
    """What the layer is asked to compute instead of logits, once that is known."""

    target: Tensor  # [s * b] int64, in the order of hidden's tokens
    ignore_index: int | None
    scale: float  # of the logits, on top of the options' own
    argmax: bool


@dataclass(frozen=True)
class LayerCall:
    """A call of the output layer that has been put off."""

    perform: Callable[[Request | None], Any]  # the layer's __call__, hooks included; its real logits for None
    shape: torch.Size  # of the real logits
    shard: VocabShard
    device: torch.device
    gathers_output: bool  # the real logits would span the whole vocabulary


class DeferredLogits:
    """Stands for `scale * (hidden @ weight.T + bias)`; see the module's table."""

    def __init__(self, call: LayerCall, options: HeadOptions, scale: float = 1.0, greedy: Tensor | None = None):
        self._call = call
        self._options = options
        self._scale = scale
        self._greedy = greedy  # [s * b] int64 global ids, once a pass has found them

    def cross_entropy(self, labels: Tensor, *, argmax: bool = False) -> Tensor:
        """The loss of each token, fp32 [b, s].

        Labels outside the vocabulary have loss 0 and no gradient: Megatron gives them a finite loss without meaning
        and leaves it to the loss mask to remove it. They cost nothing where the options name an `ignore_index`.

        Args:
            labels: [b, s] int64, global ids.
            argmax: find the ids for `argmax` and `max` in the same pass where possible.
        """
        ids = labels.transpose(0, 1).reshape(-1)  # token order of hidden
        unknown = (ids < 0) | (ids >= self._call.shard.vocab_size)
        ignored = self._options.ignore_index
        target = ids.masked_fill(unknown, 0 if ignored is None else ignored)
        # Smoothing needs the sum of all logits, which comes without an argmax; ignored tokens come with id 0.
        argmax = argmax and self._options.label_smoothing == 0 and (ignored is None or ignored < 0)
        loss, self._greedy = self._call.perform(Request(target, ignored, self._scale, argmax))
        if ignored is None:
            loss = loss.masked_fill(unknown, 0)
        return loss.view(labels.shape[::-1]).transpose(0, 1).contiguous()

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Ids of the largest logits; local rows where the real logits would be a shard, like theirs."""
        if dim not in (-1, 2) or keepdim or not self._spans_vocabulary():
            return self.materialize().argmax(dim, keepdim)
        return self._greedy_ids()

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """`max(dim=-1)` without gradients, for Megatron's search over shards: (rank of the shard, local row).

        Megatron compares the shards' values only to find the shard that holds the token's largest logit. That shard
        answers +inf and the others -inf, so the values decide the comparison and cannot be taken for logits.
        """
        if torch.is_grad_enabled() or args or kwargs not in ({"dim": -1}, {"dim": 2}) or self._spans_vocabulary():
            return self.materialize().max(*args, **kwargs)
        shard = self._call.shard
        row = self._greedy_ids() - shard.start
        mine = (row >= 0) & (row < shard.n_rows)
        value = torch.where(mine, torch.inf, -torch.inf)
        return torch.return_types.max((value, row.clamp(0, max(shard.n_rows - 1, 0))))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def shape(self) -> torch.Size:
        return self._call.shape

    def materialize(self) -> Tensor:
        """The real logits, as Megatron's layer computes them."""
        logits = self._call.perform(None)
        return logits if self._scale == 1.0 else logits * self._scale

    def _times(self, factor: float) -> DeferredLogits:
        return DeferredLogits(self._call, self._options, self._scale * factor, self._greedy)

    def __mul__(self, other: Any) -> Any:
        # A cap after which the factor would come does not commute with it.
        if isinstance(other, (int, float)) and other > 0 and self._options.softcap is None:
            return self._times(float(other))
        return self.materialize() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, (int, float)) and other > 0:
            return self * (1.0 / other)
        return self.materialize() / other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before __init__ has run, as in copying
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __reduce__(self) -> Any:  # Megatron's config logger saves what it is given
        return torch.clone, (self.materialize().detach(),)

    def __getitem__(self, index: Any) -> Tensor:
        return self.materialize()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.argmax and isinstance(args[0], cls):
            return args[0].argmax(*args[1:], **kwargs)
        if func is torch.mul and isinstance(args[0], cls):
            return args[0] * args[1]
        args, kwargs = tree_map(lambda a: a.materialize() if isinstance(a, cls) else a, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _spans_vocabulary(self) -> bool:
        return self._call.gathers_output or collectives.size(self._call.shard.group) == 1

    def _greedy_ids(self) -> Tensor:
        tokens = self.shape[:-1]
        if self._greedy is None:
            target = torch.zeros(tokens.numel(), dtype=torch.int64, device=self._call.device)
            with torch.no_grad():
                _, self._greedy = self._call.perform(Request(target, None, self._scale, True))
        assert self._greedy is not None
        return self._greedy.view(tokens)


def _of_real_logits(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.materialize(), name)(*args)


# Python looks operators up on the class, past __getattr__.
for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "neg",
    "pow",
    "matmul",
    "rtruediv",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "len",
):
    setattr(DeferredLogits, f"__{_name}__", _of_real_logits(f"__{_name}__"))


def fused_loss(
    hidden: Tensor,  # [s, b, h], or [s / T, b, h] with sequence_parallel
    weight: Tensor,  # [V / T, h], the layer's own or the embedding's
    bias: Tensor | None,  # [V / T]
    request: Request,
    options: HeadOptions,
    *,
    shard: VocabShard,
    sequence_parallel: bool,
    accumulates: bool,
    reduces_hidden_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """The losses of flattened tokens, and their argmax where it was asked for.

    Args:
        accumulates: dC goes to weight.main_grad.
        reduces_hidden_grad: False leaves each rank its own part of dE.
    """
    weight, main_grad = through_main_grad(weight) if accumulates else (weight, None)
    arguments: dict[str, Any] = dict(
        bias=bias, shard=shard, ignore_index=request.ignore_index, softcap=options.softcap,
        logit_scale=request.scale * options.logit_scale, backward=options.backward,
        sequence_parallel=sequence_parallel, main_grad=main_grad, reduce_hidden_grad=reduces_hidden_grad,
    )  # fmt: skip
    if not request.argmax:
        loss = linear_cross_entropy(
            hidden, weight, request.target, reduction="none", label_smoothing=options.label_smoothing,
            z_loss=options.z_loss, **arguments,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss, None
    stats = linear_stats(hidden, weight, request.target, argmax=True, **arguments)
    return stats.lse - stats.target_logit + options.z_loss * stats.lse.square(), stats.argmax
