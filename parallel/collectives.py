"""The collectives of one loss: at most two small ones forward, one for dE backward.

    when       what                                      size in bytes per rank     collective
    forward    what was asked for, over gloo with check  24                         all-gather
    forward    hidden, with sequence_parallel            N / T * D * itemsize       all-gather
    forward    bound of the log-sum-exp, when sampling   12 * N                     all-gather
    forward    max, sum, target logit, ...               12 * N (16 with argmax,    all-gather
                                                         8 * k * N more with topk)
    backward   hidden again, with sequence_parallel      N / T * D * itemsize       all-gather
    backward   dE in hidden's dtype                      N * D * itemsize           all-reduce, or reduce-scatter
                                                                                    with sequence_parallel
    backward   da of LoRA in fp32                        4 * r * D                  all-reduce

The first one is `vpcce.parallel.agreement`'s, apart from the loss; `VocabShard(check=False)` removes it. Elsewhere than
over gloo it does not exist.

dE's parts are rounded to hidden's dtype before they are summed, as in Megatron: in bf16 its error grows with T, more so
where the rows of the weight share a direction, which the parts hold and their sum does not.

The statistics are gathered and merged by every rank in rank order, so all ranks hold bitwise the same numbers.
A gather of 12 * N bytes costs one latency; a MAX followed by a SUM would cost two. Without a group (one rank owns
the vocabulary) every function is the identity.

Groups travel by name, because custom operators take no process groups; torch.distributed keeps the registry.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 renamed the two collectives and warns on the old names; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_by_name: Callable[..., dist.ProcessGroup] = _resolve_process_group  # takes a str, typed as a NewType in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    The backend calls the object with its part of dE once; `wait` returns the sum, or the calling rank's
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
