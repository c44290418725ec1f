"""Runs a function on several gloo ranks and brings back what each returned, or the first rank's error.

Ranks are forked from a server process that has done no tensor work (a fork of a process that has used autograd or
OpenMP threads hangs), meet through a file, and are killed when one of them fails or time is up.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

# A forked process cannot use CUDA once its server has touched it.
_context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
# Imports cost every rank a second or two otherwise; the first call of a custom operator imports torch._dynamo.
if _context.get_start_method() == "forkserver":
    _context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "pytest", "hypothesis", "vpcce"])


def run_ranks(world: int, function: Callable, *args, timeout: float = 120.0) -> list:
    """[function(rank, *args) for rank in range(world)], each in its own process of one gloo group.

    `function` and `args` must be picklable. The default process group is initialised before and destroyed after.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or naming the ranks that did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(world):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(rank, world, f"file://{folder}/store", sender, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            ranks.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.join(0.2)
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: list, deadline: float) -> list:
    results: dict[int, object] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise AssertionError(f"ranks {missing} did not end in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failure, value = pipe.recv()
            except EOFError:
                failure, value = "the process died without a word", None
            if failure is not None:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(rank: int, world: int, store: str, pipe, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        value = function(rank, *args)
        dist.destroy_process_group()
        pipe.send((None, value))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
