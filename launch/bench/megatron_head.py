"""The head alone over two tensor-parallel ranks: vpcce, Megatron's losses, Apple's CCE. See megatron_h200x2.py.

    torchrun --nproc-per-node 2 launch/bench/megatron_head.py --out rows.jsonl

A step is loss and both gradients of 8,192 tokens: hidden is whole on both ranks, each holds half of the weight's rows,
dE is all-reduced. Every method sees the same synthetic head (lm_like.py) and runs the same fixed number of times, so
that ranks stay together. A row has, in ms and MiB,

    forward_ms, total_ms    median over the repeats of the slower rank
    peak_mb                 the allocator's peak beyond hidden and weight, gradients included, of the larger rank
    gradients_mb            dE and dC themselves
    error_dE, error_dC      |x - truth| / |truth|, truth the fp32 softmax (measure.py), of rank 0's rows
    overlap                 of the profiled step: ms of NCCL kernels, and ms of them while another kernel runs
    timeline                kernels of at least 0.05 ms of that step on rank 0: name, start and end in ms, stream
    one_gpu_ms              total_ms of the same method with the whole vocabulary on one GPU (vpcce only)
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import lm_like  # noqa: E402
import measure  # noqa: E402

import vpcce  # noqa: E402

SHAPES = {"Gemma 2 2B": (8192, 256000, 2304), "Mistral NeMo": (8192, 131072, 5120), "tiny": (256, 512, 64)}
WARM_UP, REPEATS = 3, 15


def ours(backward, main_grad: bool = False) -> Callable:
    def build(weight, shard):
        buffer = torch.zeros(weight.shape, device=weight.device) if main_grad else None
        return lambda hidden, target: vpcce.linear_cross_entropy(  # no token is ignored, as in Megatron's own loss
            hidden, weight, target, shard=shard, backward=backward, main_grad=buffer, ignore_index=None
        )

    return build


def megatron(name: str) -> Callable:
    """Megatron's output layer and one of its losses, in the order in which GPTModel calls them."""

    def build(weight, shard):
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        def loss(hidden, target):
            logits = linear_with_grad_accumulation_and_async_allreduce(
                hidden[:, None], weight, None, False, True, False, tp_group=shard.group
            )
            target = target[:, None]
            if name == "fused":
                return fused_vocab_parallel_cross_entropy(logits, target, shard.group).mean()
            return vocab_parallel_cross_entropy(logits, target, tp_group=shard.group).mean()

        return loss

    return build


def apple(**options) -> Callable:
    def build(weight, shard):
        from cut_cross_entropy import VocabParallelOptions, linear_cross_entropy

        split = VocabParallelOptions(shard.start, shard.stop, group=shard.group)
        return lambda hidden, target: linear_cross_entropy(
            hidden, weight, target, vocab_parallel_options=split, **options
        )

    return build


METHODS = {
    "vpcce": ours("auto"),
    "vpcce, main_grad": ours("auto", main_grad=True),
    "vpcce exact": ours(vpcce.exact()),
    "Megatron fused": megatron("fused"),
    "Megatron": megatron("plain"),
    "Apple CCE": apple(),
    "Apple CCE FullC": apple(impl="cce_kahan_full_c"),
}


def slower(value: float | None) -> float | None:
    """The larger of both ranks' numbers."""
    if value is None:
        return None
    both = [None] * dist.get_world_size()
    dist.all_gather_object(both, value)
    return max(both)


def times(f: Callable[[], object], repeats: int) -> float:
    for _ in range(WARM_UP):
        f()
    dist.barrier()
    measured = measure.call_ms([f], repeats + 1)[0][1:]  # enqueued back to back; the collectives keep ranks in step
    return slower(statistics.median(measured))


def profiled(step: Callable[[], object]) -> dict[str, object]:
    """How much of the collectives' time passes while another kernel runs, and the timeline that shows it."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        measure.synchronize()
    kernels = sorted(record.events(), key=lambda e: e.time_range.start)
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name.lower()) for e in kernels]
    began = spans[0][0]
    timeline = [
        [e.name[:48], round((start - began) / 1e3, 3), round((end - began) / 1e3, 3), stream_of(e)]
        for e, (start, end, _) in zip(kernels, spans, strict=True)
        if end - start >= 50
    ]
    work = sorted((start, end) for start, end, is_nccl in spans if not is_nccl and end > start)
    collective = covered = 0.0
    for start, end, is_nccl in spans:
        if not is_nccl:
            continue
        collective += end - start
        reached = start
        for other_start, other_end in work:
            low, high = max(other_start, reached), min(other_end, end)
            if high > low:
                covered += high - low
                reached = high
    return dict(overlap=dict(collective_ms=collective / 1e3, under_other_work_ms=covered / 1e3), timeline=timeline)


def stream_of(event) -> int:
    return getattr(event, "device_resource_id", event.thread)  # older profilers call it a thread


def one_gpu_ms(name: str, hidden, whole, target, repeats: int) -> float:
    """Loss and gradients with all rows of the weight on each GPU."""
    weight = whole.detach().requires_grad_()
    loss_of = METHODS[name](weight, None)

    def step():
        hidden.grad = weight.grad = None
        loss_of(hidden, target).backward()

    return times(step, repeats)


def run(name: str, hidden, weight, target, shard, repeats: int, truth) -> dict[str, object]:
    loss_of = METHODS[name](weight, shard)

    def step():
        hidden.grad = weight.grad = None
        loss = loss_of(hidden, target)
        loss.backward()
        return loss

    step()
    row: dict[str, object] = {}
    if truth is not None:
        row["error_dE"] = measure.relative_error(hidden.grad, truth.hidden)
        if weight.grad is not None:
            row["error_dC"] = measure.relative_error(weight.grad, truth.weight[shard.start : shard.stop])
    hidden.grad = weight.grad = None
    row["peak_mb"] = slower(measure.peak_mb(step))
    gradients = hidden.numel() + (0 if "main_grad" in name else weight.numel())
    row["gradients_mb"] = gradients * hidden.element_size() / measure.MIB
    row["forward_ms"] = times(lambda: loss_of(hidden, target), repeats)
    row["total_ms"] = times(step, repeats)
    row |= profiled(step)
    hidden.grad = weight.grad = None
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["Gemma 2 2B", "Mistral NeMo"], choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--no-truth", action="store_true", help="leave the errors out")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def write(row: dict) -> None:
        if rank == 0:
            with arguments.out.open("a") as f:
                f.write(json.dumps(row) + "\n")
            print({key: value for key, value in row.items() if key != "part"}, flush=True)

    for model in arguments.shapes:
        n, v, d = SHAPES[model]
        dtype = torch.bfloat16 if on_gpu else torch.float32
        hidden, whole, target = lm_like.lm_like(n, v, d, dtype=dtype, device=device)
        for tensor in (hidden, whole, target):  # two chips may round, and then draw, differently
            dist.broadcast(tensor, 0)
        shard = vpcce.VocabShard.split(v, dist.group.WORLD)
        hidden.requires_grad_()
        truth = None if arguments.no_truth else measure.truth_of(hidden, whole, target)
        weight = whole[shard.start : shard.stop].clone().requires_grad_()
        for name in arguments.methods:
            measure.free_memory()
            row = dict(part="head", model=model, shape=f"{n}x{v}x{d}", method=name, ranks=ranks)
            try:
                row |= run(name, hidden, weight, target, shard, arguments.repeats, truth)
                if name.startswith("vpcce"):
                    row["one_gpu_ms"] = one_gpu_ms(name, hidden, whole, target, arguments.repeats)
            except (ImportError, AttributeError, TypeError, NotImplementedError) as error:  # alike on all ranks
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            hidden.grad = weight.grad = None
            write(row)
        del hidden, whole, weight, target, truth
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
