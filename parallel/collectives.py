"""The collectives of one loss: at most two small ones forward, one for dE backward.

    when       what                                      size in bytes per rank     collective
    forward    hidden, with sequence_parallel            N / T * D * itemsize       all-gather
    forward    bound of the log-sum-exp, when sampling   12 * N                     all-gather
    forward    max, sum, target logit, ...               12 * N (16 with argmax)    all-gather
    backward   hidden again, with sequence_parallel      N / T * D * itemsize       all-gather
    backward   dE in fp32                                4 * N * D                  all-reduce, or reduce-scatter
                                                                                    with sequence_parallel
    backward   da of LoRA in fp32                        4 * r * D                  all-reduce

The statistics are gathered and merged by every rank in rank order, so all ranks hold bitwise the same numbers.
A gather of 12 * N bytes costs one latency; a MAX followed by a SUM would cost two. Without a group (one rank owns
the vocabulary) every function is the identity.

Groups travel by name, because custom operators take no process groups; torch.distributed keeps the registry.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 renamed the two collectives and warns on the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_by_name: Callable[..., dist.ProcessGroup] = _resolve_process_group  # takes a str, typed as a NewType in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Configurations that the ranks of a group have compared. A group that is destroyed takes its entry with it.
_agreed: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]]" = weakref.WeakKeyDictionary()


def resolve(name: str) -> dist.ProcessGroup | None:
    """The process group of that name; "" stands for a single rank."""
    return _by_name(name) if name else None


def size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def gather_stats(packed: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[k, ...] of this rank -> [T, k, ...] of all ranks, in rank order."""
    if group is None:
        return packed[None]
    out = packed.new_empty(size(group) * packed.shape[0], *packed.shape[1:])  # as gloo wants it
    _all_gather(out, packed.contiguous(), group=group)
    return out.view(size(group), *packed.shape)


def gather_tokens(shard: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[N / T, D] of this rank -> [N, D], rank after rank."""
    if group is None:
        return shard
    out = shard.new_empty(size(group) * shard.shape[0], *shard.shape[1:])
    _all_gather(out, shard.contiguous(), group=group)
    return out


def sum_small(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of a small tensor over ranks, in a new tensor."""
    if group is None:
        return value
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value


class HiddenGradReduction:
    """The sum of dE over ranks, started as soon as a rank's part is ready and awaited after its other work.

    The backend calls the object with its part of dE, in fp32, once; `wait` returns the sum, or the calling rank's
    tokens of it when `scatter` is set. The part is consumed.
    """

    def __init__(self, group: dist.ProcessGroup | None, scatter: bool):
        self.group, self.scatter = group, scatter
        self._work: dist.Work | None = None
        self._result: Tensor | None = None

    def __call__(self, part: Tensor) -> None:
        if self.group is None:
            self._result = part
        elif self.scatter:
            self._result = part.new_empty(part.shape[0] // size(self.group), part.shape[1])
            self._part = part  # alive until the collective has read it
            self._work = _reduce_scatter(self._result, part, group=self.group, async_op=True)
        else:
            self._result = part
            self._work = dist.all_reduce(part, group=self.group, async_op=True)

    def wait(self) -> Tensor | None:
        if self._work is not None:
            self._work.wait()
        return self._result


def agree(group: dist.ProcessGroup | None, config: str, fields: Sequence[tuple[str, object]], shard: tuple[int, int]):
    """Raises on every rank when the ranks of a group were called with different settings; once per configuration.

    Args:
        config: what identifies a configuration that needs no second look.
        fields: (name, value) pairs that must be equal on all ranks.
        shard: (start, stop of the true ids); together the ranks must tile [0, vocab_size).

    Raises:
        ValueError: naming the field, the ranks and their values. It costs one host synchronisation, so it is
            skipped while a CUDA graph is captured.
    """
    if group is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    seen = _agreed.setdefault(group, set())
    if config in seen:
        return
    ranks = _exchange(group, (None, fields, shard))
    failed = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(ranks) if error is not None]
    if failed:
        raise ValueError("vpcce: another rank of the group refused its arguments: " + "; ".join(failed))
    for index, (name, _) in enumerate(fields):
        values = [theirs[index][1] for _, theirs, _ in ranks]
        if any(value != values[0] for value in values):
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"vpcce: {name} must be equal on all ranks of the group, got {listing}")
    vocab_size: Any = dict(fields)["vocab_size"]
    _check_tiling([shard for _, _, shard in ranks], vocab_size)
    seen.add(config)


def report_failure(group: dist.ProcessGroup | None, error: Exception) -> None:
    """Tells the ranks that wait in their first `agree` that this one refused its arguments.

    After a first agreement the others no longer listen, so nothing is sent: this rank raises, and the others end
    by the group's own timeout or by the launcher.
    """
    if group is not None and group not in _agreed:
        _agreed[group] = set()
        _exchange(group, (f"{type(error).__name__}: {error}", (), (0, 0)))


def forget_agreements() -> None:
    """Compare every configuration again at its next use."""
    _agreed.clear()


def _exchange(group: dist.ProcessGroup, mine: tuple) -> list:
    everyone: list = [None] * size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _check_tiling(shards: list[tuple[int, int]], vocab_size: int) -> None:
    listing = ", ".join(f"rank {rank}: [{start}, {stop})" for rank, (start, stop) in enumerate(shards))
    position = 0
    for start, stop in sorted(shard for shard in shards if shard[0] < shard[1]):
        if start != position:
            fault = "overlap" if start < position else "leave a gap"
            at = min(start, position)
            raise ValueError(f"vpcce: shards {fault} at id {at}, expected a tiling of [0, {vocab_size}), got {listing}")
        position = stop
    if position != vocab_size:
        raise ValueError(f"vpcce: shards end at id {position}, expected {vocab_size}, got {listing}")
