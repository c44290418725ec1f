"""What each option of the loss costs, relative to plain loss + gradient.

    python launch/bench/options.py             about 4 minutes on an H200, most of it compilation

At the first shape of head.py, exact and sampled. Rows go into launch/bench/results/h200-options.json: forward_ms and
total_ms of the option, and their ratios to the plain loss, which takes turns with each option. The exit code is 1 where
an option fails or costs more than `limit` allows.

What the sampled gradient costs depends on how sparse the softmax is, so no option may change the logits: a scale of 2
meets hidden / 2, which is exact, and a softcap of 1000 moves a logit of 10 by 3e-4. One of 30, half of which some tiles
exceed, is compared with exact() only; so is label smoothing with a softcap, which is computed exactly anyway.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterable
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
EXACT_ONLY = ("softcap of 30", "label_smoothing and softcap")


def limit(name: str) -> float:
    """Total time relative to the plain loss: entropy needs a sum per tile, top-k a forward of its own."""
    return 1.1 if name == "entropy" or "topk" in name else 1.03


def options(hidden: Tensor, v: int, device: str) -> dict[str, tuple[Callable[..., Tensor], Tensor]]:
    """Name of an option -> (scalar(hidden, weight, target, backward), the hidden it takes)."""
    d = hidden.shape[1]
    half = (hidden.detach() / 2).requires_grad_()
    bias = torch.zeros(v, device=device, dtype=head.DTYPE, requires_grad=True)
    scale = torch.full((), 2.0, device=device, requires_grad=True)
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

    made = {
        "bias": with_options(bias=bias),
        "softcap": with_options(softcap=1000.0),
        "logit_scale": with_options(logit_scale=2.0),
        "learned logit_scale": with_options(logit_scale=scale),
        "label_smoothing": with_options(label_smoothing=0.1),
        "z_loss": with_options(z_loss=1e-4),
        EXACT_ONLY[0]: with_options(softcap=30.0),
        EXACT_ONLY[1]: with_options(label_smoothing=0.1, softcap=1000.0),
        "linear_logprobs": logprobs,
        "entropy": with_stats(lambda s: (s.lse - s.target_logit - 0.01 * s.entropy).mean(), entropy=True),
        "argmax": with_stats(lambda s: (s.lse - s.target_logit).mean(), argmax=True),
        "topk, k = 8": with_stats(lambda s: (s.lse - s.target_logit).mean(), topk=8),
        "lora, rank 16, weight frozen": adapted,
    }
    return {name: (option, half if "logit_scale" in name else hidden) for name, option in made.items()}


def compare(option, plain, tensors: tuple[Tensor, Tensor, Tensor], own: Tensor, budget_s: float) -> dict[str, object]:
    """Times of `option` on its own hidden and their ratios to those of `plain`; all take turns."""
    hidden, weight, target = tensors

    def step(loss_of, leaf):
        leaf.grad = weight.grad = None
        loss_of().backward()

    losses = partial(plain, *tensors), partial(option, own, weight, target)
    steps = partial(step, losses[0], hidden), partial(step, losses[1], own)
    for warm_up in (*steps, *steps):
        warm_up()
    hidden.grad = own.grad = weight.grad = None
    row: dict[str, object] = dict(peak_mb=measure.peak_mb(steps[1]))
    plain_forward, forward, plain_total, total = measure.median_ms((*losses, *steps), 4 * budget_s)
    hidden.grad = own.grad = weight.grad = None
    row |= dict(forward_ms=forward, total_ms=total)
    return row | dict(forward_ratio=forward / plain_forward, total_ratio=total / plain_total)


def exceeding(rows: list[dict]) -> list[str]:
    """A line for each row that failed or is above its limit."""
    found = []
    for row in rows:
        if row["error"]:
            found.append(f"{row['policy']} {row['option']}: {row['error'].splitlines()[0][:110]}")
        elif row["total_ratio"] > limit(row["option"]):
            found.append(
                f"{row['policy']} {row['option']}: {row['total_ratio']:.3f} of plain, limit {limit(row['option'])}"
            )
    return found


def run(
    shape: tuple[int, int, int],
    budget_s: float,
    command: str,
    out: Path,
    only: list[str] | None = None,
    policies: Iterable[str] = tuple(POLICIES),
) -> list[dict]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, target = head.make_head(head.Case("", *shape), device)
    tensors = (hidden, weight, target)
    rows = []
    for policy in policies:
        backward = POLICIES[policy]()
        plain = partial(vpcce.linear_cross_entropy, backward=backward)
        for name, (option, own) in options(hidden, shape[1], device).items():
            if (only and not any(part in name for part in only)) or (name in EXACT_ONLY and policy != "exact"):
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
                row |= compare(partial(option, backward=backward), plain, tensors, own, budget_s)
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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, default=(8192, 256000, 2304), metavar=("N", "V", "D"))
    parser.add_argument("--options", nargs="*", default=[], help="parts of option names; default: all")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--budget", type=float, default=0.25, help="seconds per timing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    command = " ".join(["python", "launch/bench/options.py", *argv])
    rows = run(tuple(arguments.shape), arguments.budget, command, arguments.out, arguments.options, arguments.policies)
    found = exceeding(rows)
    print("\n".join(["above the limit:", *found] if found else ["no option is above its limit"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
