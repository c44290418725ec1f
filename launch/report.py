"""What a run leaves behind: metrics.jsonl, the loss plot, the head's measured memory; and two runs side by side.

    python launch/report.py runs/demo-vpcce runs/demo-megatron       the table and plot of launch/demo.sh
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-3  # largest relative difference of two runs' training losses at any step


class HeadMemory:
    """Peak memory of the head in the steps it is armed for: output layer, loss and their backward.

    Measured from the moment the output layer is called to the moment the gradient of its input exists, on top of
    what was there at the start (so: logits or workspaces, and both gradients). On CUDA the allocator's peak; on
    Linux CPUs the peak of the resident set, which the kernel resets on request (clear_refs).
    """

    def __init__(self, output_layer: torch.nn.Module):
        self.armed = False
        self.peak: int | None = None
        output_layer.register_forward_pre_hook(self._begin)

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        hidden = args[0]
        if self.armed and hidden.requires_grad:
            hidden.register_hook(self._end)
            if hidden.is_cuda:
                torch.cuda.reset_peak_memory_stats()
                self._before = torch.cuda.memory_allocated()
            elif sys.platform == "linux":
                ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc keeps would hide growth
                Path("/proc/self/clear_refs").write_text("5")
                self._before = _resident_peak()

    def _end(self, gradient: torch.Tensor) -> None:
        if gradient.is_cuda:
            peak = torch.cuda.max_memory_allocated() - self._before
        elif sys.platform == "linux":
            peak = _resident_peak() - self._before
        else:
            return
        self.peak = max(peak, self.peak or 0)


def _resident_peak() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; of a step written twice (before and after a resume) the later one."""
    records: dict[tuple, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        records[record["kind"], record["step"]] = record
    return list(records.values())


def _series(records: list[dict[str, Any]], kind: str) -> tuple[list[int], list[float]]:
    chosen = sorted((r["step"], r["loss"]) for r in records if r["kind"] == kind)
    return [step for step, _ in chosen], [loss for _, loss in chosen]


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Training and validation loss of every run over its steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=130)
    styles = ("-", "--", ":")
    for number, (name, records) in enumerate(runs.items()):
        color, style = f"C{number}", styles[number % len(styles)]
        axes.plot(*_series(records, "train"), style, color=color, linewidth=1.5, label=f"{name}, training")
        axes.plot(*_series(records, "validation"), "o", color=color, fillstyle="none", label=f"{name}, validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss [nats per token]")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _row(summary: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, str]:
    peak = summary["head_peak_bytes"]
    return {
        "training loss": f"{_series(records, 'train')[1][-1]:.4f}",
        "validation loss": f"{_series(records, 'validation')[1][-1]:.4f}",
        "tokens/s": f"{summary['tokens_per_second']:.0f}",
        "head, peak per rank (measured)": "not measured" if peak is None else f"{peak / 2**20:.0f} MiB",
        "logits per rank (computed)": f"{summary['head']['logits_bytes'] / 2**20:.0f} MiB",
    }


def compare(folders: list[Path]) -> bool:
    """Prints the runs side by side and writes their plot; True if their training losses agree at every step."""
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    names = [summary["head"]["settings"]["loss"]["implementation"] for summary in summaries]
    runs = {name: read(folder) for name, folder in zip(names, folders, strict=True)}
    rows = {name: _row(summary, runs[name]) for name, summary in zip(names, summaries, strict=True)}
    columns = list(next(iter(rows.values())))
    widths = [max(len(c), *(len(r[c]) for r in rows.values())) for c in columns]
    first = max(len("loss"), *(len(name) for name in rows))
    print("\n" + "  ".join(["loss".ljust(first), *(c.rjust(w) for c, w in zip(columns, widths, strict=True))]))
    for name, row in rows.items():
        print("  ".join([name.ljust(first), *(row[c].rjust(w) for c, w in zip(columns, widths, strict=True))]))

    picture = folders[0].parent / "loss_curves.png"
    plot(runs, picture)
    (steps, ours), (other_steps, theirs) = (_series(records, "train") for records in runs.values())
    if steps != other_steps or not steps:
        print(f"\nThe runs have different steps: {len(steps)} and {len(other_steps)}")
        return False
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    agree = worst <= TOLERANCE
    print(f"\nBoth curves: {picture}")
    print(
        f"Largest relative difference of the training losses over {len(steps)} steps: {worst:.1e}, "
        f"{'within' if agree else 'MORE than'} {TOLERANCE:.0e}"
    )
    return agree


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: report.py RUN_FOLDER RUN_FOLDER")
    sys.exit(0 if compare([Path(argument) for argument in sys.argv[1:]]) else 1)
