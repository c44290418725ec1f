"""Ranks compare what they were asked before they work together, so that a disagreement is an error and not a hang.

Collectives of different sizes, or of which one rank knows nothing, hang or abort the process. With
`VocabShard(check=True)` a call therefore begins with a comparison:

    backend of the group      every call                            new on some rank, or different
    gloo, blocks the host     all-gather of 32 bytes per rank       descriptions through the group's store
    NCCL and others           nothing                               descriptions through the group's store

The 32 bytes are a digest of everything that must be equal, one of the rank's shard, whether the rank has agreed on
both before, and the number of the call; two processes of one machine need 0.2 ms for them. Over gloo every rank hears
at the same call of a new configuration, of a difference, and of a rank that refused its arguments; all raise, and the
group remains usable.

Over NCCL the host runs ahead of the device, and acting on other ranks' numbers would make it wait at every call. There
only a configuration's first call is compared, through the store alone: the device is not waited for. A rank that
meets a new configuration alone, or refuses its arguments alone, after a first agreement raises (the former when the
group's timeout is over, naming what changed). The others hang in their next collective until the launcher or NCCL's
own timeout ends them. Nothing is compared while a CUDA graph is captured.

The first call on a group is compared whatever `check` says, so that `check` itself is. Later nobody hears of a rank
that turns it off alone, of one that was given no shard or group, or of one that refused a DTensor's placement.
"""

import hashlib
import json
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from vpcce.parallel import collectives

Fields = Sequence[tuple[str, object]]


class _State:
    """What this rank knows of a group's comparisons."""

    def __init__(self, group: dist.ProcessGroup):
        # Groups that share no rank may share a name; and a program may destroy its groups and make them again.
        name = f"vpcce/{group.group_name}/{dist.get_process_group_ranks(group)[0]}"
        lives = dist.PrefixStore(name, _get_default_store())
        self.store = dist.PrefixStore(str(lives.add(f"lives of rank {dist.get_rank(group)}", 1)), lives)
        self.seen: set[str] = set()  # configurations, with this rank's shard, that all ranks agreed on
        self.tilings: set[tuple[int, ...]] = set()  # digests of all ranks' shards that tile the vocabulary
        self.latest: dict[str, str] = {}  # the fields of the last one
        self.calls = 0
        self.published: list[str] = []  # keys of this rank in the store


# A group that is destroyed takes its entry with it.
_states: "weakref.WeakKeyDictionary[dist.ProcessGroup, _State]" = weakref.WeakKeyDictionary()


def blocks_host(group: dist.ProcessGroup) -> bool:
    """Whether collectives make the host wait for the other ranks anyway, so that every call can be compared."""
    backends = {pair.split(":")[1] for pair in dist.get_backend_config(group).split(",")}
    return backends == {"gloo"}


def is_due(group: dist.ProcessGroup | None, check: bool) -> bool:
    """Whether this call has to be compared."""
    if group is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    return check or group not in _states


def agree(group: dist.ProcessGroup, fields: Fields, shard: tuple[int, int] | None, per_call: Fields = ()) -> None:
    """Raises on every rank when the ranks of a group were asked different things.

    Args:
        fields: (name, value) pairs that must be equal on all ranks; with `shard` they are a configuration.
        shard: (start, stop of the true ids); together the ranks must tile [0, vocab_size). None is not compared.
        per_call: (name, value) pairs that must be equal too but make no new configuration; compared over gloo only.

    Raises:
        ValueError: naming the field, the ranks and their values; or what another rank refused.
        TimeoutError: ranks that did not come to compare a new configuration, and what changed.
    """
    state = _next_call(group)
    config = repr((fields, shard))
    all_know, tiling = _all_know(group, state, repr((fields, per_call)), repr(shard), config in state.seen)
    if all_know:
        return
    described = [(name, repr(value)) for name, value in (*fields, *per_call)]
    _publish(group, state, None, described, shard)
    ranks = _collect(group, state, described)
    failed = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(ranks) if error is not None]
    if failed:
        raise ValueError("vpcce: another rank of the group refused its arguments: " + "; ".join(failed))
    for index, (name, _) in enumerate(described):
        values = [theirs[index][1] for _, theirs, _ in ranks]
        if any(value != values[0] for value in values):
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"vpcce: {name} must be equal on all ranks of the group, got {listing}")
    if shard is not None:
        _check_tiling([tuple(theirs) for _, _, theirs in ranks], int(dict(described)["vocab_size"]))
    state.seen.add(config)
    state.tilings.add(tiling)
    state.latest = dict(described)


def report_failure(group: dist.ProcessGroup | None, check: bool, error: Exception) -> None:
    """Tells the ranks that compare this call that the calling one refused its arguments."""
    if group is None or not is_due(group, check):
        return
    state = _next_call(group)
    message = f"{type(error).__name__}: {error}"
    listened_to = blocks_host(group) or not state.seen
    _all_know(group, state, message, "", False)
    _publish(group, state, message, (), None)
    if listened_to:  # stay until the others have read it: this rank may host the store
        _collect(group, state, ())


def _next_call(group: dist.ProcessGroup) -> _State:
    if group not in _states:
        _states[group] = _State(group)
    state = _states[group]
    state.calls += 1
    return state


def _all_know(
    group: dist.ProcessGroup, state: _State, compared: str, shard: str, is_known: bool
) -> tuple[bool, tuple[int, ...]]:
    """Whether all ranks ask the same and agreed on it and on their shards before; and the digests of those.

    Over NCCL: whether this rank did, and nothing.
    """
    if not blocks_host(group):
        return is_known, ()
    mine = torch.tensor([_digest(compared), _digest(shard), is_known, state.calls], dtype=torch.int64, device="cpu")
    ranks = collectives.gather_stats(mine, group).tolist()
    state.calls = max(calls for *_, calls in ranks)  # a rank may have failed before it knew its group
    tiling = tuple(theirs for _, theirs, _, _ in ranks)
    all_know = all(theirs == ranks[0][0] and known for theirs, _, known, _ in ranks)
    return all_know and tiling in state.tilings, tiling


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _publish(group: dist.ProcessGroup, state: _State, error: str | None, described: Fields, shard) -> None:
    key = f"{state.calls}/{dist.get_rank(group)}"
    state.store.set(key, json.dumps((error, described, shard)))
    state.published.append(key)


def _collect(group: dist.ProcessGroup, state: _State, described: Fields) -> list:
    """What every rank published for this call, in rank order."""
    keys = [f"{state.calls}/{rank}" for rank in range(collectives.size(group))]
    try:
        state.store.wait(keys)  # as long as the default group's timeout
    except RuntimeError as error:
        late = [rank for rank, key in enumerate(keys) if not state.store.check([key])]
        changes = [f"{name} from {state.latest.get(name)} to {new}" for name, new in described]
        changes = [
            change for change, (name, new) in zip(changes, described, strict=True) if state.latest.get(name) != new
        ]
        what = f"changed {', '.join(changes)}" if state.latest else "made its first call"
        raise TimeoutError(
            f"vpcce: rank {dist.get_rank(group)} {what} at call {state.calls} on its group, and ranks {late} did not"
        ) from error
    ranks = [json.loads(state.store.get(key)) for key in keys]
    # Whoever published for this call has read what it wanted of the calls before.
    for key in state.published[:-1]:
        state.store.delete_key(key)
    del state.published[:-1]
    return ranks


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
