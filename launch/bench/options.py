"""What each option of the loss costs, relative to plain loss + gradient.

    python launch/bench/options.py             about 1 minute on an H200

At the first shape of head.py, exact and sampled. Rows go into launch/bench/results/h200-options.json: forward_ms and
total_ms of the option, and their ratios to the plain loss, which is timed again right before each option.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import vpcce

sys.path.insert(0, str(Path(__file__).parent))

import head  # noqa: E402
import measure  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "h200-options.json"
POLICIES = {"exact": vpcce.exact, "sampled": vpcce.sampled}


def options(v: int, d: int, device: str) -> dict[str, Callable[..., Tensor]]:
    """Name of an option -> scalar(hidden, weight, target, backward)."""
    bias = torch.zeros(v, device=device, dtype=head.DTYPE, requires_grad=True)
    scale = torch.ones((), device=device, requires_grad=True)
    a = torch.randn(16, d, device=device, dtype=head.DTYPE).mul_(d**-0.5).requires_grad_()
    lora = vpcce.LoRA(a, torch.zeros(v, 16, device=device, dtype=head.DTYPE, requires_grad=True))

    def with_options(**values):
        return lambda h, w, t, backward: vpcce.linear_cross_entropy(h, w, t, backward=backward, **values)

    def with_stats(use, **values):
        return lambda h, w, t, backward: use(vpcce.linear_stats(h, w, t, backward=backward, **values))

    def logprobs(h, w, t, backward):
        return -vpcce.linear_logprobs(h, w, t, backward=backward).mean()

    def adapted(h, w, t, backward):  # plain has dC, this has the two narrow gradients in its place
        return vpcce.linear_cross_entropy(h, w.detach(), t, backward=backward, lora=lora)

    return {
        "bias": with_options(bias=bias),
        "softcap": with_options(softcap=30.0),
        "logit_scale": with_options(logit_scale=0.9),
        "learned logit_scale": with_options(logit_scale=scale),
        "label_smoothing": with_options(label_smoothing=0.1),
        "z_loss": with_options(z_loss=1e-4),
        "label_smoothing and softcap": with_options(label_smoothing=0.1, softcap=30.0),
        "linear_logprobs": logprobs,
        "entropy": with_stats(lambda s: (s.lse - s.target_logit - 0.01 * s.entropy).mean(), entropy=True),
        "argmax": with_stats(lambda s: (s.lse - s.target_logit).mean(), argmax=True),
        "topk, k = 8": with_stats(lambda s: (s.lse - s.target_logit).mean(), topk=8),
        "lora, rank 16, weight frozen": adapted,
    }


def compare(option, plain, hidden: Tensor, weight: Tensor, budget_s: float) -> dict[str, object]:
    """Measurements of `option` and their ratios to those of `plain`, one right after the other."""
    base = measure.measure(plain, hidden, weight, budget_s=budget_s)
    row = measure.measure(option, hidden, weight, budget_s=budget_s)
    ratios = {f"{stage}_ratio": row[f"{stage}_ms"] / base[f"{stage}_ms"] for stage in ("forward", "total")}
    return row | ratios


def run(
    shape: tuple[int, int, int], budget_s: float, command: str, out: Path, only: list[str] | None = None
) -> list[dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, target = head.make_head(head.Case("", *shape), device)
    tensors = (hidden, weight, target)
    rows = []
    for policy, make in POLICIES.items():
        plain = partial(vpcce.linear_cross_entropy, *tensors, backward=make())
        for name, option in options(*shape[1:], device).items():
            if only and not any(part in name for part in only):
                continue
            row = dict(
                hardware=torch.cuda.get_device_name() if device == "cuda" else "CPU",
                versions=dict(torch=torch.__version__),
                date=datetime.date.today().isoformat(),
                command=command,
                shape="x".join(map(str, shape)),
                policy=policy,
                option=name,
                error=None,
            )
            try:
                row |= compare(partial(option, *tensors, make()), plain, hidden, weight, budget_s)
                text = f"forward {row['forward_ms']:8.3f} ms, {row['forward_ratio']:.3f} of plain   "
                text += f"total {row['total_ms']:8.3f} ms, {row['total_ratio']:.3f} of plain"
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:600]
                text = row["error"].splitlines()[0][:110]
            print(f"{policy:8} {name:28} {text}", flush=True)
            rows.append(row)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, default=(8192, 256000, 2304), metavar=("N", "V", "D"))
    parser.add_argument("--options", nargs="*", default=[], help="parts of option names; default: all")
    parser.add_argument("--budget", type=float, default=0.15, help="seconds per timing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    command = " ".join(["python", "launch/bench/options.py", *argv])
    run(tuple(arguments.shape), arguments.budget, command, arguments.out, arguments.options)


if __name__ == "__main__":
    main(sys.argv[1:])
