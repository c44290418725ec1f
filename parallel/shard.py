"""Which rows of the output layer a rank owns.

    tensor     global shape    shape on a rank            rank r of a group of T holds
    weight     [V, D]          [stop - start, D]          rows start <= v < stop
    bias       [V]             [stop - start]             the same rows
    target     [N]             [N]                        every token, as global ids
    hidden     [N, D]          [N, D], or [N / T, D] with sequence_parallel

Shards may be uneven. A weight that was padded to a convenient size has rows at or beyond `vocab_size`: `stop` may
exceed `vocab_size`, and those rows take no part in the softmax and get a zero gradient.

Example: 10 ids on 4 ranks give [0, 3) [3, 6) [6, 9) [9, 10), as `torch.chunk` and DTensor's `Shard(0)` do.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class VocabShard:
    """Rows start <= v < stop of a vocabulary of `vocab_size` ids, one of the shards of `group`.

    Args:
        start: first global id of this rank's rows.
        stop: one past the last; may exceed `vocab_size` when the weight is padded.
        vocab_size: number of true ids over all ranks; targets lie in [0, vocab_size).
        group: the tensor-parallel process group. None is the default group where the shard is a part of the
            vocabulary, and no group at all where it is the whole.
        check: compare shapes, dtypes, options and, on the CPU, targets over the ranks, so that a disagreement is an
            error and not a hang; must be equal on all ranks. Over gloo this costs a gather of 32 bytes per call, over
            NCCL a round trip to the group's store when a configuration is new, see `vpcce.parallel.agreement`.

    A shard of a group cannot be pickled, since the group belongs to its process; copies share the group.

    Raises:
        TypeError, ValueError: bounds that are no integers or out of order.
    """

    start: int
    stop: int
    vocab_size: int
    group: dist.ProcessGroup | None = None
    check: bool = True

    def __post_init__(self):
        for name in ("start", "stop", "vocab_size"):
            _check_int(f"VocabShard: {name}", getattr(self, name))
        _check_group("VocabShard", self.group)
        if not isinstance(self.check, bool):
            raise TypeError(f"VocabShard: check must be a bool, got {type(self.check).__name__}")
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard: vocab_size must be at least 1, got {self.vocab_size}")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard: expected 0 <= start <= stop, got start={self.start}, stop={self.stop}")

    def __deepcopy__(self, memo):
        return self  # immutable, and a process group has no copies

    def __copy__(self):
        return self

    def __reduce__(self):
        if self.group is not None:
            raise TypeError(
                "VocabShard: a shard is pickled without its process group, expected group=None, got group "
                f"{self.group.group_name!r}: pickle start, stop and vocab_size, and make the shard anew"
            )
        return VocabShard, (self.start, self.stop, self.vocab_size, None, self.check)

    @classmethod
    def split(cls, vocab_size: int, group: dist.ProcessGroup | None = None, index: int | None = None) -> "VocabShard":
        """The shard of one rank when `vocab_size` ids are dealt out as `torch.chunk` does.

        Args:
            vocab_size: number of ids over all ranks.
            group: the tensor-parallel group; None is the default group.
            index: which shard; None is the calling rank's.

        Raises:
            TypeError, ValueError: no process group, or an index outside the group.
        """
        _check_int("VocabShard.split: vocab_size", vocab_size)
        _check_group("VocabShard.split", group)
        if index is not None:
            _check_int("VocabShard.split: index", index)
        if not dist.is_initialized():
            raise ValueError(
                "VocabShard.split: expected an initialised process group, got none "
                "(call torch.distributed.init_process_group first)"
            )
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError("VocabShard.split: the calling rank is not a member of the given group")
        index = rank if index is None else index
        if not 0 <= index < size:
            raise ValueError(f"VocabShard.split: expected an index in [0, {size}), got {index}")
        width = -(-vocab_size // size)
        bounds = min(index * width, vocab_size), min((index + 1) * width, vocab_size)
        # With fewer ids than ranks one shard may be whole; it must still answer the ranks that hold none.
        return cls(*bounds, vocab_size, dist.group.WORLD if group is None else group)

    @property
    def is_whole(self) -> bool:
        """Whether one rank owns every true id, so that no other rank is needed."""
        return self.start == 0 and self.stop >= self.vocab_size

    @property
    def n_rows(self) -> int:
        """Rows of the weight on this rank, padding included."""
        return self.stop - self.start

    @property
    def n_valid(self) -> int:
        """Rows that are true ids: the leading `n_valid` rows of the weight take part in the softmax."""
        return max(0, min(self.stop, self.vocab_size) - self.start)


def _check_int(what: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {type(value).__name__}")


def _check_group(who: str, group) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{who}: group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
