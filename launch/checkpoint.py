"""Checkpoints of a run through Megatron-core's dist_checkpointing: each rank writes its shards in parallel."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class State:
    """What a step changes, tied to the folder that checkpoints go to."""

    def __init__(self, model: Any, optimizer: Any, schedule: Any, folder: Path):
        self.model, self.optimizer, self.schedule, self.folder = model, optimizer, schedule, folder

    def save(self, step: int) -> None:
        """Writes folder/step_<step>; it gets its name when all ranks have written their part."""
        from megatron.core import dist_checkpointing

        final = self.folder / f"step_{step:08d}"
        unfinished = self.folder / f"unfinished_{step:08d}"
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self._sharded(is_loading=False) | {"step": step}, str(unfinished))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
        dist.barrier()

    def load(self) -> int:
        """Restores the newest checkpoint; returns its step."""
        from megatron.core import dist_checkpointing

        found = sorted(self.folder.glob("step_*"))
        if not found:
            raise ValueError(f"--resume: no checkpoint in {self.folder}")
        loaded = dist_checkpointing.load(self._sharded(is_loading=True), str(found[-1]))
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.schedule.load_state_dict(loaded["schedule"])
        _set_random_states(loaded["random"])
        return loaded["step"]

    def _sharded(self, is_loading: bool) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        model = self.model.sharded_state_dict()
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading),
            "schedule": self.schedule.state_dict(),
            "random": ShardedObject("random", _random_states(), (dist.get_world_size(),), (dist.get_rank(),)),
        }


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        states |= {"cuda": torch.cuda.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(states["cuda"])
        get_cuda_rng_tracker().set_states(states["tracker"])
