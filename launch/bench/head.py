"""Speed, memory and error of the head alone: vpcce and its peers in one run.

    python launch/bench/head.py                                  everything, about 8 minutes on an H200
    python launch/bench/head.py --cases first --methods vpcce    a part; its rows replace older ones
    python launch/bench/head.py --cases first --methods vpcce --kernels    adds the time of each kernel

Rows go into launch/bench/results/h200-head.json; launch/bench/table.py prints them. A case is a shape, a
synthetic head (lm_like.py) and a share of ignored tokens; all its methods see the same tensors in one process,
and the bare matrix product `hidden @ weight.T` is timed right before each method. Units are ms and MiB:

    forward_ms     loss, with what the backward needs     peak_mb          allocator's peak beyond the inputs
    total_ms       loss and both gradients                lower_bound_mb   the gradients themselves
    gemm_ms        the bare matrix product, cuBLAS        error_dE, _dC    relative to fp32 truth (measure.py)

The measurements run in a worker process. A method that raises gets a row with the error; one that breaks the
CUDA context, hangs or dies costs its row and a new worker, and the others still come.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch

import vpcce

sys.path.insert(0, str(Path(__file__).parent))

import lm_like  # noqa: E402
import measure  # noqa: E402
from peers import PEERS  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "h200-head.json"
IGNORED = -100
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    model: str
    n: int
    v: int
    d: int
    head: str = "default"  # a kind of lm_like.py, or the path of a saved head
    ignored: float = 0.0  # share of the tokens

    @property
    def shape(self) -> str:
        return f"{self.n}x{self.v}x{self.d}"


@dataclass(frozen=True)
class Ours:
    policy: str
    backward: Callable[[], object]
    main_grad: bool = False  # dC is accumulated into an fp32 buffer that exists before


OURS = {
    "vpcce sampled": Ours("sampled", vpcce.sampled),
    "vpcce exact": Ours("exact", vpcce.exact),
    "vpcce sampled, dC exact": Ours("dE sampled, dC exact", lambda: (vpcce.sampled(), vpcce.exact())),
    "vpcce filtered": Ours("tile filter", vpcce.filtered),
    "vpcce filtered, sorted": Ours("tile filter, sorted", lambda: vpcce.filtered(sort=True)),
    "vpcce FullC": Ours("dE tile filter, dC exact", lambda: (vpcce.filtered(), vpcce.exact())),
    "vpcce sampled, deterministic": Ours("sampled", lambda: vpcce.sampled(deterministic=True)),
    "vpcce sampled, main_grad": Ours("sampled", vpcce.sampled, main_grad=True),
    "vpcce exact, main_grad": Ours("exact", vpcce.exact, main_grad=True),
}
FEW = ("vpcce sampled", "vpcce exact", "torch.compile")
SOME = (*FEW, "vpcce sampled, dC exact", "Apple CCE", "Liger Triton", "Liger CuTe", "Liger scaled", "verl")

FIRST = Case("Gemma 2 2B", 8192, 256000, 2304)
PLAN: dict[str, tuple[tuple[Case, tuple[str, ...]], ...]] = {
    "first": ((FIRST, (*OURS, *PEERS)),),
    "peaked": ((Case("Gemma 2 2B", 8192, 256000, 2304, head="peaked"), (*FEW, "vpcce sampled, main_grad")),),
    "dense": tuple(
        (Case(name, *shape, head=kind), ("vpcce sampled", "vpcce exact"))
        for name, *shape in (
            ("Gemma 2 2B", 8192, 256000, 2304),
            ("Phi 3.5 mini", 8192, 32064, 3072),
            ("small", 8192, 131072, 512),
            ("small", 8192, 50304, 768),
            ("small", 8192, 16384, 2048),
        )
        for kind in ("flat", "noise")
    ),
    "ignored": ((Case("Gemma 2 2B", 8192, 256000, 2304, ignored=0.5), ("vpcce sampled", "vpcce exact")),),
    "models": (
        (Case("Gemma 2 9B", 8192, 256000, 3584), SOME),
        (Case("Qwen 2.5 7B", 8192, 152064, 3584), SOME),
        (Case("Mistral NeMo", 8192, 131072, 5120), (*SOME, "Apple CCE FullC")),
        (Case("Llama 3 8B", 8192, 128256, 4096), SOME),
        (Case("Phi 3.5 mini", 8192, 32064, 3072), SOME),
    ),
    "tokens": tuple((Case("Gemma 2 2B", n, 256000, 2304), FEW) for n in (512, 2048, 32768)),
}


def make_head(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if case.head in lm_like.KINDS:
        hidden, weight, target = lm_like.lm_like(
            case.n, case.v, case.d, kind=case.head, dtype=DTYPE, device=device, seed=0
        )
    else:
        saved = torch.load(case.head, map_location=device)
        hidden, weight, target = saved["hidden"].to(DTYPE), saved["weight"].to(DTYPE), saved["target"]
    if case.ignored:
        g = torch.Generator(device=device).manual_seed(1)
        target = target.masked_fill(torch.rand(case.n, generator=g, device=device) < case.ignored, IGNORED)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def run_method(name: str, hidden, weight, target, *, budget_s: float, truth, kernels: bool) -> dict[str, object]:
    """One row's measurements."""
    torch.manual_seed(0)
    element = hidden.element_size()
    bound = hidden.numel() * element / measure.MIB
    main_grad = None
    if name in OURS:
        ours = OURS[name]
        if ours.main_grad:
            main_grad = torch.zeros(weight.shape, device=weight.device)
        else:
            bound += weight.numel() * element / measure.MIB
        backward = ours.backward()

        def loss_of():
            return vpcce.linear_cross_entropy(
                hidden, weight, target, ignore_index=IGNORED, backward=backward, main_grad=main_grad
            )
    else:
        bound += weight.numel() * element / measure.MIB
        loss = PEERS[name].build()

        def loss_of():
            return loss(hidden, weight, target)

    row = measure.measure(loss_of, hidden, weight, budget_s=budget_s, truth=truth, main_grad=main_grad, kernels=kernels)
    return dict(lower_bound_mb=bound, **row)


def work(items: list[dict], rows_path: Path, *, budget_s: float, kernels: bool) -> None:
    """Measures the items in order and appends a line per row; leaves when the device is broken."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case_fields, group in groupby(items, key=lambda item: item["case"]):
        case = Case(**case_fields)
        hidden, weight, target = make_head(case, device)
        truth = measure.truth_of(hidden, weight, target, IGNORED)
        sparsity = lm_like.density(hidden, weight, target.clamp(min=0))
        for item in group:
            measure.free_memory()
            row = describe(item)
            row["density"] = sparsity
            broken = False
            try:
                row |= run_method(
                    item["method"], hidden, weight, target, budget_s=budget_s, truth=truth, kernels=kernels
                )
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:600]
                hidden.grad = weight.grad = None
                broken = not device_works()
            with rows_path.open("a") as f:
                f.write(json.dumps(row) + "\n")
            if broken:
                os._exit(1)
        del hidden, weight, target, truth


def device_works() -> bool:
    try:
        measure.synchronize()
    except Exception:
        return False
    return True


def describe(item: dict) -> dict[str, object]:
    """The fields of a row that are known before it is measured."""
    case, name = Case(**item["case"]), item["method"]
    versions = dict(torch=torch.__version__)
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    if name in OURS:
        versions["package"], policy = "vpcce", OURS[name].policy
    else:
        versions["package"], policy = PEERS[name].version(), PEERS[name].policy
    return dict(
        hardware=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        versions=versions,
        date=datetime.date.today().isoformat(),
        command=item["command"],
        model=case.model,
        shape=case.shape,
        head=case.head if case.head in lm_like.KINDS else "trained",
        ignored=case.ignored,
        dtype=str(DTYPE).removeprefix("torch."),
        method=name,
        policy=policy,
        error=None,
    )


KEY = ("shape", "head", "ignored", "dtype", "method")


def merge(path: Path, rows: list[dict]) -> None:
    """Writes the rows into the file, in place of older rows of the same case and method.

    The profiler slows what follows it in its process: a row with kernel times only adds them to a row that exists.
    """
    old = json.loads(path.read_text()) if path.exists() else []
    table = {tuple(row[k] for k in KEY): row for row in old}
    for row in rows:
        key = tuple(row[k] for k in KEY)
        before = table.get(key, dict(error=""))
        if "kernels_ms" in row and before["error"] is None:
            row = before | dict(kernels_ms=row["kernels_ms"])
        elif "kernels_ms" in before:
            row = dict(kernels_ms=before["kernels_ms"]) | row
        table[key] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in table.values()) + "\n]\n")


def supervise(items: list[dict], out: Path, arguments: argparse.Namespace) -> None:
    """Runs workers until every item has a row or the time is up; rows are saved as they come."""
    end = time.monotonic() + arguments.deadline
    pending = list(items)
    with tempfile.TemporaryDirectory() as folder:
        while pending and time.monotonic() < end:
            rows, failure = run_worker(pending, Path(folder), out, arguments, end)
            pending = pending[len(rows) :]
            if failure and pending and time.monotonic() < end:
                row = describe(pending.pop(0)) | dict(error=f"worker: {failure}")
                merge(out, [row])
                print(summary(row), flush=True)
    if pending:
        print(f"not run within {arguments.deadline:.0f} s: {', '.join(item['method'] for item in pending)}")


def run_worker(
    pending: list[dict], folder: Path, out: Path, arguments: argparse.Namespace, end: float
) -> tuple[list[dict], str | None]:
    """The rows of one worker, and what kept it from the next one; a worker that left after an error has said so."""
    plan, rows_path, log_path = (folder / name for name in ("plan.json", "rows.jsonl", "log.txt"))
    plan.write_text(json.dumps(pending))
    rows_path.write_text("")
    command = [sys.executable, __file__, "--worker", str(plan), str(rows_path), "--budget", str(arguments.budget)]
    with log_path.open("w") as log:
        worker = subprocess.Popen(command + ["--kernels"] * arguments.kernels, stderr=log)
        rows: list[dict] = []
        patience = time.monotonic() + arguments.patience
        running = True
        while running and time.monotonic() < min(end, patience):
            time.sleep(0.2)
            running = worker.poll() is None
            lines = [line for line in rows_path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            new = [json.loads(line) for line in lines[len(rows) :]]
            if new:
                merge(out, new)
                print("\n".join(map(summary, new)), flush=True)
                rows += new
                patience = time.monotonic() + arguments.patience
        if running:
            worker.kill()
            worker.wait()
            return rows, f"no result in {arguments.patience:.0f} s"
    if worker.returncode == 0 or (rows and rows[-1]["error"]):
        return rows, None
    last_words = log_path.read_text().strip().splitlines()[-1:]
    return rows, f"exit code {worker.returncode}: {' '.join(last_words)[:400]}"


def summary(row: dict) -> str:
    where = f"{row['shape']:18} {row['head'][:8]:8} {row['ignored']:3} {row['method']:30}"
    if row["error"]:
        return f"{where} {row['error'].splitlines()[0][:110]}"
    peak = "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}"
    return (
        f"{where} forward {row['forward_ms']:8.3f} total {row['total_ms']:8.3f} "
        f"gemm {row['gemm_ms']:7.3f} ms  peak {peak} of {row['lower_bound_mb']:.0f} MiB  "
        f"dE {row['error_dE']:.1e} dC {row['error_dC']:.1e}"
    )


def items_of(arguments: argparse.Namespace, command: str) -> list[dict]:
    """Every (case, method) asked for, cases together; `--methods` are parts of names."""
    sections = dict(PLAN)
    if arguments.head:
        saved = torch.load(arguments.head, map_location="cpu", mmap=True)
        (n, d), v = saved["hidden"].shape, saved["weight"].shape[0]
        case = Case("trained from scratch", n, v, d, head=str(arguments.head))
        sections = {"trained": ((case, (*FEW, "vpcce filtered")),)}
    if arguments.shape:
        sections = {"shape": ((Case("custom", *arguments.shape), (*OURS, *PEERS)),)}
    return [
        dict(case=asdict(case), method=method, command=command)
        for name, pairs in sections.items()
        if not arguments.cases or name in arguments.cases
        for case, methods in pairs
        for method in methods
        if not arguments.methods or any(part in method for part in arguments.methods)
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[], help=f"some of {', '.join(PLAN)}; default: all")
    parser.add_argument("--methods", nargs="*", default=[], help="parts of method names; default: all")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("N", "V", "D"), help="this shape instead")
    parser.add_argument("--head", help="a head saved by train_small.py instead")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per timing")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything")
    parser.add_argument("--patience", type=float, default=90, help="seconds without a row before a worker is ended")
    parser.add_argument("--kernels", action="store_true", help="also the time of each kernel, from the profiler")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, metavar=("PLAN", "ROWS"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    if arguments.worker:
        plan, rows = map(Path, arguments.worker)
        work(json.loads(plan.read_text()), rows, budget_s=arguments.budget, kernels=arguments.kernels)
        return
    items = items_of(arguments, "python launch/bench/head.py " + shlex.join(argv))
    supervise(items, arguments.out, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
