"""Pretrains a Megatron-core GPTModel on text, with vpcce's loss or Megatron's own.

    torchrun --nproc-per-node 2 launch/pretrain_gpt.py tiny                          a config of launch/configs
    ... launch/pretrain_gpt.py my.yaml loss.implementation=megatron run.steps=200    overrides (see settings.py)
    ... launch/pretrain_gpt.py tiny --resume                                         goes on from the last checkpoint

Everything but the loss is Megatron-core's: model, DDP, optimiser, schedule, datasets, distributed checkpoints. On a
machine without CUDA it runs on CPU over gloo (megatron_cpu.py). A run writes to runs/<run.name>/

    metrics.jsonl       a line per step and per validation
    loss.png            both losses over the steps
    settings.json       what the run began with; --resume compares
    summary.json        settings, tokens/s, measured memory of the head
    checkpoints/        parameters, optimiser, schedule, random states; the step says where the data goes on

A resumed run repeats the losses of one that never stopped, bit for bit: the data are a function of the step.
When a rank dies torchrun ends the others; each says which rank it is, the step, and what it saw.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import checkpoint
import corpus
import gpt
import report
import settings as settings_module
import torch
import torch.distributed as dist
from megatron_cpu import use_cpu


class Trainer:
    """One rank's part of a run."""

    def __init__(self, settings: settings_module.Settings, on_cpu: bool):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        run, sequence = settings.run, settings.model.sequence_length
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.parallelism.tensor,
            distributed_timeout_minutes=-(-run.timeout_seconds // 60),
        )
        self.settings, self.step = settings, 0
        self.last = run.steps if run.stop_after is None else min(run.steps, run.stop_after)
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.group = parallel_state.get_data_parallel_group()
        self.replica, self.replicas = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.micro_batches, rest = divmod(run.global_batch, run.micro_batch * self.replicas)
        if rest or not self.micro_batches:
            raise ValueError(
                f"run.global_batch: expected a multiple of run.micro_batch x data-parallel ranks = "
                f"{run.micro_batch * self.replicas}, got {run.global_batch}"
            )
        tokenizer = corpus.make_tokenizer(settings.data.tokenizer, settings.model.vocab_size)
        self.train_set, self.validation_set = corpus.datasets(
            corpus.prepare(settings.data, tokenizer),
            tokenizer,
            sequence,
            run.seed,
            run.steps * run.global_batch,
            max(1, run.validation_batches) * run.micro_batch * self.replicas,
        )
        if not on_cpu:
            model_parallel_cuda_manual_seed(run.seed)
        model = gpt.make_model(settings, on_cpu).to(self.device)
        self.head_memory = report.HeadMemory(model.output_layer)
        self.model, self.optimizer, self.schedule = gpt.wrap(model, settings)
        self.folder = Path("runs") / run.name
        self.state = checkpoint.State(model, self.optimizer, self.schedule, self.folder / "checkpoints")
        self.seconds: list[float] = []

    def batches(self, dataset: Any, first: int) -> Iterator[dict[str, torch.Tensor]]:
        """Micro-batches of this replica; `first` counts the micro-batches that all replicas have used before."""
        size = self.settings.run.micro_batch
        while True:
            start = (first * self.replicas + self.replica) * size
            samples = [dataset[index] for index in range(start, start + size)]
            keys = ("tokens", "labels", "loss_mask", "position_ids")
            yield {key: torch.stack([sample[key] for sample in samples]).to(self.device) for key in keys}
            first += 1

    def run_batches(self, batches: Iterator, count: int, train: bool) -> float:
        """Forward, and backward when training, of `count` micro-batches; their mean loss over all replicas."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(data: Iterator, model: torch.nn.Module) -> tuple:
            batch = next(data)
            token_losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])  # [b, s]
            mask = batch["loss_mask"]

            def mean(losses: torch.Tensor) -> tuple:
                loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
                return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place

            return token_losses, mean

        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=count,
            seq_length=self.settings.model.sequence_length,
            micro_batch_size=self.settings.run.micro_batch,
            forward_only=not train,
        )
        mean = torch.stack([item["loss"] for item in losses]).mean()
        dist.all_reduce(mean, group=self.group)
        return mean.item() / self.replicas

    def train_step(self) -> dict[str, Any]:
        began = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self.batches(self.train_set, self.step * self.micro_batches)
        loss = self.run_batches(batches, self.micro_batches, train=True)
        updated, gradient_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError(f"step {self.step + 1}: the optimiser found an infinite or NaN gradient")
        self.schedule.step(increment=1)
        self.step += 1
        self.seconds.append(time.perf_counter() - began)
        rate = self.optimizer.param_groups[0]["lr"]
        return {
            "kind": "train",
            "step": self.step,
            "loss": loss,
            "gradient_norm": float(gradient_norm),
            "learning_rate": rate,
            "seconds": self.seconds[-1],
        }

    def validate(self) -> dict[str, Any]:
        self.model.eval()
        with torch.no_grad():
            count = self.settings.run.validation_batches
            loss = self.run_batches(self.batches(self.validation_set, 0), count, train=False)
        self.model.train()
        return {"kind": "validation", "step": self.step, "loss": loss}

    def train(self) -> None:
        """Steps until the last, with progress, metrics, validation and checkpoints."""
        from tqdm import tqdm

        run, first = self.settings.run, self.step
        is_writer = dist.get_rank() == 0
        bar = tqdm(
            total=run.steps,
            initial=first,
            desc=f"{run.name} [{self.settings.loss.implementation}]",
            disable=not is_writer,
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        )
        losses: dict[str, str] = {}
        with open(self.folder / "metrics.jsonl" if is_writer else os.devnull, "a") as metrics:

            def write(record: dict[str, Any]) -> None:
                metrics.write(json.dumps(record) + "\n")
                metrics.flush()
                losses[record["kind"]] = f"{record['loss']:.4f}"
                bar.set_postfix(losses, refresh=False)

            while self.step < self.last:
                self.head_memory.armed = self.step == first + 1  # once, when buffers have their size
                write(self.train_step())
                bar.update()
                if self.step == self.last or (run.validate_every and self.step % run.validate_every == 0):
                    write(self.validate())
                if self.step == self.last or (run.save_every and self.step % run.save_every == 0):
                    self.state.save(self.step)
        bar.close()
        self.finish(is_writer)

    def finish(self, is_writer: bool) -> None:
        run, gathered = self.settings.run, [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.head_memory.peak)
        if not is_writer:
            return
        peaks = [peak for peak in gathered if peak is not None]
        steady = self.seconds[2:] or self.seconds  # the first steps allocate and are measured
        summary = {
            "tokens_per_second": (
                run.global_batch * self.settings.model.sequence_length / statistics.median(steady)
            ),
            "head_peak_bytes": max(peaks) if peaks else None,
            "head": gpt.head_sizes(self.settings),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        report.plot({run.name: report.read(self.folder)}, self.folder / "loss.png")


def start(settings: settings_module.Settings) -> bool:
    """Joins the ranks that torchrun, mpirun or Slurm started; True on CPU."""
    timeout = datetime.timedelta(seconds=settings.run.timeout_seconds)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    world = dist.get_world_size()
    if world % settings.parallelism.tensor:
        tensor = settings.parallelism.tensor
        raise ValueError(f"parallelism.tensor: expected a divisor of the {world} ranks, got {tensor}")
    on_cpu = use_cpu()
    if on_cpu and settings.run.precision != "fp32":
        raise ValueError(f"run.precision: only fp32 runs on CPU, got {settings.run.precision!r}")
    return on_cpu


# What may change when a run goes on; the other settings decide its data, its model or its state.
RESUMABLE = {
    "loss": None,  # all of it
    "run": {"steps", "stop_after", "validate_every", "validation_batches", "save_every", "timeout_seconds"},
    "data": {"cache"},
}


def check_resumed(began: dict[str, Any], asked: dict[str, Any]) -> None:
    """ValueError where a run would not go on as it began."""
    for section, values in asked.items():
        free = RESUMABLE.get(section, set())
        if free is None:
            continue
        before = began[section]
        if not isinstance(values, dict):
            before, values = {section: before}, {section: values}
        for name, now in values.items():
            if name not in free and before.get(name) != now:
                setting = name if name == section else f"{section}.{name}"
                raise ValueError(f"--resume: {setting} was {before.get(name)} when the run began, got {now}")


def prepare(config: str, overrides: list[str], resume: bool) -> Trainer:
    """The trainer of this rank, at the step where training starts."""
    settings = settings_module.load(config, overrides)
    trainer = Trainer(settings, start(settings))
    began_with = trainer.folder / "settings.json"
    asked = dataclasses.asdict(settings) | {"ranks": dist.get_world_size()}
    if resume:
        if began_with.exists():
            check_resumed(json.loads(began_with.read_text()), asked)
        trainer.step = trainer.state.load()
        if trainer.step >= trainer.last:
            name, step = settings.run.name, trainer.step
            raise ValueError(f"{name} is at step {step} already; raise run.steps or run.stop_after")
    elif trainer.state.folder.exists():
        raise ValueError(f"{trainer.folder} holds a run: pass --resume, name another (run.name=), or remove it")
    elif dist.get_rank() == 0:
        trainer.folder.mkdir(parents=True, exist_ok=True)
        (trainer.folder / "metrics.jsonl").write_text("")
        began_with.write_text(json.dumps(asked, indent=2) + "\n")
    dist.barrier()
    return trainer


def leave(message: str) -> NoReturn:
    """Ends this process at once: an orderly exit would wait for ranks that may be gone."""
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", help="a YAML file, or the name of one in launch/configs")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of run.name")
    options = parser.parse_intermixed_args(arguments)
    warnings.filterwarnings("ignore")  # Megatron's, about optional packages and its own deprecations
    logging.getLogger("megatron").setLevel(logging.ERROR)

    rank = int(os.environ.get("RANK", "0"))
    try:
        trainer = prepare(options.config, options.overrides, options.resume)
    except ValueError as error:  # every rank found the same mistake in what it was asked to do
        if rank:
            time.sleep(5)  # the first to leave makes torchrun end the others: let rank 0 speak
        leave(f"pretrain_gpt: {error}")
    except BaseException as error:  # torch's CheckpointException is no Exception
        leave(f"{traceback.format_exc()}pretrain_gpt: rank {rank} failed to start: {error!r}")
    try:
        trainer.train()
    except Exception as error:
        leave(f"{traceback.format_exc()}pretrain_gpt: rank {rank} failed at step {trainer.step + 1}: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
