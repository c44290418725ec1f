"""Prints the result file of head.py as the README's tables, and checks the project's own limits against it.

    python launch/bench/table.py                          the tables and the limits
    python launch/bench/table.py --only limits            exit code 1 when a "must" does not hold

A limit that was not measured counts as neither held nor missed. A peer "without logits" needs less than a tenth
of the N x V bf16 logits beyond the gradients.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "h200-head.json"
FIRST = "8192x256000x2304"
BIG_VOCABULARIES = {
    "Gemma 2 2B": FIRST,
    "Gemma 2 9B": "8192x256000x3584",
    "Qwen 2.5 7B": "8192x152064x3584",
    "Mistral NeMo": "8192x131072x5120",
    "Llama 3 8B": "8192x128256x4096",
}
PHI = "8192x32064x3072"
DENSE = (FIRST, PHI, "8192x131072x512", "8192x50304x768", "8192x16384x2048")  # also where next to no column is small
# As the Cut Cross-Entropy paper's table A2; PyTorch's kernels in a vpcce step choose and multiply the hot set. A part
# of dC runs beside dE, so these two times overlap a little.
STAGES = {
    "target logit": ("target_logit",),
    "hot set": ("hot_stats", "topk", "TopK", "nvjet", "gemm", "index", "scatter", "part_sums", "mean_of"),
    "forward": ("forward_kernel", "merge_", "thresholds"),
    "recompute": ("packed_gradient", "gradient_kernel"),
    "dE": ("packed_hidden_grad",),
    "dC": ("packed_stream", "packed_direct", "packed_weight_grad"),
    "dE and dC": ("products_kernel", "dense_stream"),
    "pack": ("count_kernel", "plan_", "list_kernel", "keep_kernel", "union", "column_kinds", "hot_pairs"),
}


class Rows:
    """The rows of a result file; a value that was not measured is None."""

    def __init__(self, rows: list[dict]):
        self.rows = rows

    def row(self, shape: str, method: str, head: str = "default", ignored: float = 0.0) -> dict | None:
        for row in self.rows:
            same = (row["shape"], row["method"], row["head"], row["ignored"]) == (
                shape,
                method,
                head,
                ignored,
            )
            if same and not row["error"]:
                return row
        return None

    def value(self, field: str, shape: str, method: str, head: str = "default", ignored: float = 0.0) -> float | None:
        row = self.row(shape, method, head, ignored)
        return row and row[field]

    def ratio(self, field: str, shape: str, method: str, other: str, other_field: str | None = None, **case):
        top, bottom = (
            self.value(field, shape, method, **case),
            self.value(other_field or field, shape, other, **case),
        )
        return top / bottom if top is not None and bottom else None

    def to_gemm(self, field: str, shape: str, method: str, **case) -> float | None:
        return self.ratio(field, shape, method, method, "gemm_ms", **case)

    def fastest_without_logits(self, shape: str) -> dict | None:
        n, v, _ = map(int, shape.split("x"))
        logits_mb = 2 * n * v / 2**20
        small = [
            row
            for row in self.rows
            if (row["shape"], row["head"], row["ignored"]) == (shape, "default", 0.0)
            and not row["error"]
            and not row["method"].startswith("vpcce")
            and row["peak_mb"] is not None
            and row["peak_mb"] - row["lower_bound_mb"] < logits_mb / 10
        ]
        return min(small, key=lambda row: row["total_ms"], default=None)


@dataclass(frozen=True)
class Limit:
    text: str
    value: Callable[[Rows], float | None]
    must: float
    aim: float
    at_least: bool = False

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        better = (lambda a, b: a >= b) if self.at_least else (lambda a, b: a <= b)
        return "aim" if better(value, self.aim) else "must" if better(value, self.must) else "MISSED"


def limits() -> list[Limit]:
    exact, sampled, compiled = "vpcce exact", "vpcce sampled", "torch.compile"

    def to_gemm(text, field, shape, method, must, aim, **case):
        return Limit(f"{text} / gemm", lambda rows: rows.to_gemm(field, shape, method, **case), must, aim)

    def ratio(text, field, shape, method, other, must, aim, at_least=False, **case):
        return Limit(text, lambda rows: rows.ratio(field, shape, method, other, **case), must, aim, at_least)

    def own(text, value, method, must, aim):
        return Limit(text, lambda rows: value(rows, method), must, aim)

    large = {"N = 2048": "2048x256000x2304", "N = 32768": "32768x256000x2304", "Phi 3.5 mini": PHI}
    return [
        *(
            to_gemm(f"forward, {name}", "forward_ms", shape, exact, 1.10, 1.02)
            for name, shape in {**BIG_VOCABULARIES, **large}.items()
        ),
        to_gemm("forward, N = 512", "forward_ms", "512x256000x2304", exact, 1.30, 1.10),
        to_gemm("exact loss + gradient", "total_ms", FIRST, exact, 4.4, 4.1),
        ratio("exact loss + gradient / torch.compile", "total_ms", FIRST, exact, compiled, 1.30, 1.15),
        own("exact: peak memory / gradients", _memory, exact, 1.15, 1.05),
        own("exact: half ignored / none ignored", _half, exact, 0.58, 0.52),
        ratio("Apple FullC / exact", "total_ms", FIRST, "Apple CCE FullC", exact, 2.2, 2.5, at_least=True),
        to_gemm("sampled loss + gradient", "total_ms", FIRST, sampled, 1.50, 1.25),
        to_gemm("the same, peaked head", "total_ms", FIRST, sampled, 1.50, 1.25, head="peaked"),
        *(
            ratio(f"sampled / torch.compile, {name}", "total_ms", shape, sampled, compiled, 0.55, 0.40)
            for name, shape in BIG_VOCABULARIES.items()
        ),
        ratio("sampled / torch.compile, Phi 3.5 mini", "total_ms", PHI, sampled, compiled, 0.80, 0.60),
        *(
            own(f"sampled / fastest peer without logits, {name}", _fastest, shape, 0.48, 0.35)
            for name, shape in BIG_VOCABULARIES.items()
        ),
        ratio("forward with marks / without", "forward_ms", FIRST, sampled, exact, 1.07, 1.03),
        own("sampled: peak memory / gradients", _memory, sampled, 1.10, 1.03),
        own("sampled, main_grad: MiB beyond dE", _beyond, f"{sampled}, main_grad", 96, 32),
        own("sampled: half ignored / none ignored", _half, sampled, 0.58, 0.52),
        *(
            ratio(f"sampled / exact, {head} head, {shape}", "total_ms", shape, sampled, exact, 1.3, 1.1, head=head)
            for shape in DENSE
            for head in ("flat", "noise")
        ),
        ratio("error of dE, sampled / exact", "error_dE", FIRST, sampled, exact, 1.3, 1.3),
        ratio("error of dC, sampled / exact", "error_dC", FIRST, sampled, exact, 2.5, 2.5),
    ]


def _memory(rows: Rows, method: str) -> float | None:
    return rows.ratio("peak_mb", FIRST, method, method, "lower_bound_mb")


def _beyond(rows: Rows, method: str) -> float | None:
    row = rows.row(FIRST, method)
    return row and row["peak_mb"] - row["lower_bound_mb"]


def _half(rows: Rows, method: str) -> float | None:
    half, full = rows.value("total_ms", FIRST, method, ignored=0.5), rows.value("total_ms", FIRST, method)
    return half / full if half and full else None


def _fastest(rows: Rows, shape: str) -> float | None:
    peer, ours = rows.fastest_without_logits(shape), rows.value("total_ms", shape, "vpcce sampled")
    return ours / peer["total_ms"] if peer and ours else None


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_case(rows: list[dict]) -> None:
    first = rows[0]
    sparsity = first.get("density", {})
    print(f"### {first['model']}: {first['shape']}, {first['dtype']}, {first['head']} head", end="")
    print(f", {first['ignored']:.0%} of the tokens ignored" if first["ignored"] else "")
    versions = {name: v for name, v in first["versions"].items() if name != "package"}
    print(
        f"\n{first['hardware']}, {', '.join(f'{k} {v}' for k, v in versions.items())}, {first['date']}",
        end="",
    )
    print("".join(f"; {k} {v:.1%}" for k, v in sparsity.items()))
    print("\n| method | gradient | loss ms | loss + gradient ms | / gemm | peak MiB | error dE | error dC |")
    print("|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["error"] is not None, row.get("total_ms", 0))):
        name = row["method"] if row["method"].startswith("vpcce") else f"{row['method']} ({row['versions']['package']})"
        if row["error"]:
            reason = " ".join(row["error"].split()).replace("|", "/")[:100]
            print(f"| {name} | {row['policy']} | {reason} | | | | | |")
            continue
        print(
            f"| {name} | {row['policy']} | {number(row['forward_ms'])} | {number(row['total_ms'])} | "
            f"{number(row['total_ms'] / row['gemm_ms'], 2)} | {number(row['peak_mb'], 0)} | "
            f"{row['error_dE']:.4f} | {row['error_dC']:.4f} |"
        )
    gemms = [row["gemm_ms"] for row in rows if not row["error"]]
    bounds = [row["lower_bound_mb"] for row in rows if not row["error"]]
    if gemms:
        print(f"| bare matrix product, cuBLAS | | {number(sorted(gemms)[len(gemms) // 2])} | | 1 | | | |")
        print(f"| the two gradients | | | | | {number(max(bounds), 0)} | | |")
    print()


def stages(kernels_ms: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each stage of a step, from the names of its kernels; a name belongs to the first that matches."""
    times = dict.fromkeys((*STAGES, "other"), 0.0)
    for name, ms in kernels_ms.items():
        times[next((stage for stage, parts in STAGES.items() if any(p in name for p in parts)), "other")] += ms
    return {stage: ms for stage, ms in times.items() if ms}


def print_kernels(rows: list[dict]) -> None:
    for row in rows:
        if row.get("kernels_ms"):
            print(f"### kernels of {row['method']}, {row['shape']}, {row['head']} head, ms per step\n")
            print("| stage | ms |\n|---|---|")
            for stage, ms in stages(row["kernels_ms"]).items():
                print(f"| {stage} | {ms:.2f} |")
            print("\n| kernel | ms |\n|---|---|")
            for name, ms in row["kernels_ms"].items():
                print(f"| `{name}` | {ms:.3f} |")
            print()


def print_limits(rows: Rows) -> bool:
    print("| | measured | must | aim | |\n|---|---|---|---|---|")
    held = True
    for limit in limits():
        value = limit.value(rows)
        verdict = limit.verdict(value)
        held &= verdict != "MISSED"
        print(f"| {limit.text} | {number(value, 3)} | {limit.must} | {limit.aim} | {verdict} |")
    return held


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=("tables", "kernels", "limits"))
    arguments = parser.parse_args(argv)
    rows = json.loads(arguments.results.read_text())
    if arguments.only in (None, "tables"):
        cases: dict[tuple, list[dict]] = {}
        for row in rows:
            cases.setdefault((row["shape"], row["head"], row["ignored"], row["dtype"]), []).append(row)
        for case in cases.values():
            print_case(case)
    if arguments.only in (None, "kernels"):
        print_kernels(rows)
    return 0 if arguments.only in ("tables", "kernels") or print_limits(Rows(rows)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
