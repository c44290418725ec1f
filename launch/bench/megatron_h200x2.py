"""vpcce inside Megatron-core on two H200s: the head alone, then a GPTModel trained with both losses.

    python launch/bench/megatron_h200x2.py --corpus corpus.npz                       everything, about 8 minutes
    python launch/bench/megatron_h200x2.py head                                      the head alone, about 2 minutes
    python launch/bench/megatron_h200x2.py train --corpus corpus.npz --steps 100     both losses, both vocabularies

Each measurement is a torchrun of megatron_head.py or megatron_train.py. A training run goes on with larger and larger
micro-batches until the memory ends, or GROW: rows of part `largest`. Rows go into results/h200x2-megatron.json here,
replacing older rows of the same measurement; loss curves into the .png beside it. Needs megatron-core; Apple's CCE
takes part where its main branch is installed.

NVLink multicast is off in NCCL (NCCL_NVLS_ENABLE=0), and CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron asks for.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "h200x2-megatron.json"
IDENTITY = ("part", "model", "method", "loss", "vocabulary", "micro_batch")
LOSSES = ("megatron", "vpcce")
GROW = (24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 136, 144, 152, 160)
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "4",
}


def torchrun(script: str, *options: object, timeout: int) -> list[dict]:
    """The rows that `script` wrote on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29543"]
        command += [str(HERE / script), "--out", str(rows), *map(str, options)]
        print("$", " ".join(command[3:]), flush=True)
        try:
            code = subprocess.run(command, env=os.environ | ENVIRONMENT, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            code = f"no end within {timeout} s"
        written = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    if code != 0:
        print(f"{script} ended with {code}", flush=True)
    return written


def head(arguments) -> None:
    save(torchrun("megatron_head.py", "--repeats", arguments.repeats, timeout=arguments.timeout))


def train_rows(arguments, loss: str, vocabulary: int) -> list[dict]:
    options = ["--loss", loss, "--vocabulary", vocabulary, "--steps", arguments.steps]
    options += ["--micro-batch", arguments.micro_batch, "--grow", *arguments.grow]
    if arguments.corpus:
        options += ["--corpus", arguments.corpus]
    rows = torchrun("megatron_train.py", *options, timeout=arguments.timeout)
    for row in rows:
        print({key: value for key, value in row.items() if key != "losses"}, flush=True)
    return rows


def train(arguments) -> None:
    for vocabulary in arguments.vocabularies:
        for loss in LOSSES:
            rows = train_rows(arguments, loss, vocabulary)
            save([row for row in rows if row["part"] == "train"])
            grown = [row for row in rows if row["part"] == "grow"]
            if not grown:
                continue
            fitting = [row for row in grown if "error" not in row]
            best = max(fitting, key=lambda row: row["micro_batch"], default={})
            size, peak = best.get("micro_batch"), best.get("peak_mb")
            largest = dict(part="largest", loss=loss, vocabulary=vocabulary, largest_micro_batch=size, peak_mb=peak)
            save([largest | dict(memory_ended=len(fitting) < len(grown))])
    plot()


def save(rows: list[dict]) -> None:
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    about = dict(
        hardware=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        if torch.cuda.is_available()
        else "CPU",
        versions={name: version(name) for name in ("torch", "triton", "megatron-core", "cut-cross-entropy")},
        date=datetime.date.today().isoformat(),
        command="python launch/bench/megatron_h200x2.py " + " ".join(sys.argv[1:]),
    )

    def key(row: dict) -> tuple:
        return tuple(row.get(name) for name in IDENTITY)

    new = {key(row) for row in rows}
    stored = [row for row in stored if key(row) not in new] + [row | about for row in rows]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def plot() -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib: the losses are in the results, the plot is left out")
        return
    rows = [row for row in json.loads(RESULTS.read_text()) if row["part"] == "train" and "losses" in row]
    figure, axes = plt.subplots(1, len({row["vocabulary"] for row in rows}), figsize=(10, 4), squeeze=False)
    for axis, vocabulary in zip(axes[0], sorted({row["vocabulary"] for row in rows}), strict=True):
        for row in rows:
            if row["vocabulary"] == vocabulary:
                style = "-" if row["loss"] == "megatron" else "--"
                axis.plot(row["losses"], style, label=f"{row['loss']}, {row['step_ms']:.0f} ms a step")
        axis.set(title=f"V = {vocabulary:,}", xlabel="step", ylabel="training loss")
        axis.legend()
    figure.tight_layout()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["head", "train"], help="head, train")
    parser.add_argument("--corpus", type=Path, help="written by tokenise.py")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[131072, 262144])
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--grow", type=int, nargs="*", default=GROW, help="micro-batches that are tried after training")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one measurement")
    arguments = parser.parse_args()
    parts = {"head": head, "train": train}
    unknown = set(arguments.parts) - set(parts)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; expected some of {', '.join(parts)}")
    for part in arguments.parts:
        parts[part](arguments)


if __name__ == "__main__":
    main()
