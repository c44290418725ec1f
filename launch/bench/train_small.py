"""Does the sampled gradient train? A small GPT from scratch on real text, under several policies.

    python launch/bench/tokenise.py corpus.npz FOLDER...          once, needs mistral-common
    python launch/bench/train_small.py corpus.npz                 nine runs, three at a time
    python launch/bench/train_small.py corpus.npz --save-head head.pt     and a trained head for head.py --head

A decoder of 4 layers of width 512 with a head of 131,072 entries that is not tied to the embedding: most of
the work is in the head, and rare tokens get little but the small gradients that a biased filter would drop.
A seed fixes the initial weights, the order of the batches and the coins; policies differ in nothing else. The
validation loss is the plain cross-entropy of held-out blocks of text.

Writes launch/bench/results/h200-train-small.json (curves and final losses) and .png.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vpcce

RESULTS = Path(__file__).parent / "results" / "h200-train-small.json"
POLICIES = {
    "exact": vpcce.exact,
    "sampled": vpcce.sampled,
    "filtered": vpcce.filtered,
    "sampled, dC exact": lambda: (vpcce.sampled(), vpcce.exact()),
}


@dataclass(frozen=True)
class Config:
    vocabulary: int = 131072
    width: int = 512
    layers: int = 4
    heads: int = 8
    context: int = 512
    batch: int = 16
    steps: int = 1250
    warmup: int = 100
    learning_rate: float = 6e-4
    clip: float = 1.0  # largest norm of all gradients together
    validate_every: int = 125
    validation_blocks: int = 128


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)
        self.up = nn.Linear(c.width, 4 * c.width, bias=False)
        self.down = nn.Linear(4 * c.width, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Everything below the head; `head` is the weight that the loss gets."""

    def __init__(self, c: Config):
        super().__init__()
        self.token = nn.Embedding(c.vocabulary, c.width)
        self.position = nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Parameter(torch.empty(c.vocabulary, c.width))
        self.reset()

    def reset(self) -> None:
        """New initial values from the default generator, in place: one compiled model serves all runs."""
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.ones_(p)
            else:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 * (2 * len(self.blocks)) ** -0.5 if last else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def split_blocks(tokens: np.ndarray, c: Config) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation blocks of context + 1 tokens; the held-out ones are spread over the text."""
    n = len(tokens) // (c.context + 1)
    blocks = tokens[: n * (c.context + 1)].reshape(n, c.context + 1)
    held_out = np.zeros(n, dtype=bool)
    held_out[np.linspace(0, n - 1, min(c.validation_blocks, n // 4)).astype(int)] = True
    return blocks[~held_out], blocks[held_out]


@torch.no_grad()
def validation_loss(body, head: Tensor, blocks: Tensor, c: Config, device: str) -> float:
    """Plain PyTorch: fp32 cross-entropy of bf16 logits; the same for every policy."""
    total = count = 0.0
    for part in blocks.split(c.batch):
        ids = part.to(device).long()
        with torch.autocast(device, torch.bfloat16):
            hidden = body(ids[:, :-1])
        for rows, target in zip(hidden.flatten(0, 1).split(2048), ids[:, 1:].flatten().split(2048), strict=True):
            logits = rows.bfloat16() @ head.bfloat16().T
            total += F.cross_entropy(logits.float(), target, reduction="sum").item()
            count += len(target)
    return total / count


def batches(blocks: Tensor, c: Config, seed: int):
    """Epoch after epoch, each in its own order."""
    g = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(c.steps):
        while len(order) < c.batch:
            order = torch.cat([order, torch.randperm(len(blocks), generator=g)])
        yield blocks[order[: c.batch]]
        order = order[c.batch :]


def train(
    policy: str, seed: int, model: GPT, body, training: Tensor, validation: Tensor, c: Config, device: str
) -> dict:
    """One run; `body` is the model or its compiled form."""
    torch.manual_seed(seed)
    model.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.learning_rate, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=device == "cuda")  # fmt: skip
    torch.manual_seed(seed)
    backward = POLICIES[policy]()
    curve, losses, started = [], [], time.monotonic()
    for step, block in enumerate(batches(training, c, seed)):
        rate = min((step + 1) / c.warmup, 0.55 + 0.45 * math.cos(math.pi * step / c.steps))
        for group in optimizer.param_groups:
            group["lr"] = c.learning_rate * rate
        ids = block.to(device, non_blocking=True).long()
        with torch.autocast(device, torch.bfloat16):
            hidden = body(ids[:, :-1])
        loss = vpcce.linear_cross_entropy(
            hidden.bfloat16(), model.head.bfloat16(), ids[:, 1:].contiguous(), backward=backward
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % c.validate_every == 0 or step + 1 == c.steps:
            recent = torch.stack(losses).mean().item()
            losses = []
            value = validation_loss(body, model.head, validation, c, device)
            curve.append(dict(step=step + 1, training=round(recent, 4), validation=round(value, 4)))
    seconds = time.monotonic() - started
    print(f"{policy:20} seed {seed}  validation {curve[-1]['validation']:.4f}  {seconds:.1f} s", flush=True)
    return dict(policy=policy, seed=seed, seconds=round(seconds, 1), final=curve[-1]["validation"], curve=curve)


@torch.no_grad()
def save_head(model: GPT, blocks: Tensor, c: Config, path: str, device: str, n: int = 8192) -> None:
    """Hidden states of `n` held-out tokens, the head and the targets, for head.py --head."""
    ids = blocks[: n // c.context].to(device).long()
    with torch.autocast(device, torch.bfloat16):
        hidden = model(ids[:, :-1]).flatten(0, 1)
    torch.save(
        dict(
            hidden=hidden.bfloat16().cpu(),
            weight=model.head.bfloat16().cpu(),
            target=ids[:, 1:].flatten().cpu(),
        ),
        path,
    )


def runs_of_seed(
    seed: int, policies: list[str], training: Tensor, validation: Tensor, c: Config, device: str, compiled: bool,
    head_path: str | None,
) -> list[dict]:  # fmt: skip
    """One run per policy; the first one of seed 0 leaves its head."""
    model = GPT(c).to(device)
    body = torch.compile(model) if compiled else model
    runs = []
    for policy in policies:
        runs.append(train(policy, seed, model, body, training, validation, c, device))
        if head_path and seed == 0 and policy == policies[0]:
            save_head(model, validation, c, head_path, device)
    return runs


def summarise(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Mean and spread (largest minus smallest) of the final validation loss of each policy."""
    table: dict[str, list[float]] = {}
    for run in runs:
        table.setdefault(run["policy"], []).append(run["final"])
    return {
        policy: dict(mean=round(statistics.mean(finals), 4), spread=round(max(finals) - min(finals), 4))
        for policy, finals in table.items()
    }


def plot(runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    colours = {policy: f"C{i}" for i, policy in enumerate(dict.fromkeys(run["policy"] for run in runs))}
    named = set()
    for run in runs:
        label = run["policy"] if run["policy"] not in named else None
        named.add(run["policy"])
        steps, values = zip(*((p["step"], p["validation"]) for p in run["curve"]), strict=True)
        axis.plot(steps, values, color=colours[run["policy"]], label=label, linewidth=1, alpha=0.8)
    axis.set(xlabel="step", ylabel="validation loss, nats", title="GPT from scratch, head of 131,072 entries")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help=".npz or .npy of token ids")
    parser.add_argument("--policies", nargs="*", default=["exact", "sampled", "filtered"], choices=POLICIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=3, help="seeds that are trained at the same time")
    parser.add_argument("--save-head", metavar="PATH")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-compile", action="store_true", help="run the decoder eagerly")
    for name, value in asdict(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args(argv)
    c = Config(**{name: getattr(arguments, name) for name in asdict(Config())})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = np.load(arguments.corpus)
    tokens = loaded if isinstance(loaded, np.ndarray) else loaded["tokens"]
    training, validation = (torch.from_numpy(part.astype(np.int32)) for part in split_blocks(tokens, c))
    result = dict(
        hardware=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        versions=dict(torch=torch.__version__),
        date=datetime.date.today().isoformat(),
        command="python launch/bench/train_small.py " + " ".join(argv),
        config=asdict(c),
        tokens=len(tokens),
        runs=[],
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    train_seed = partial(
        runs_of_seed, policies=arguments.policies, training=training, validation=validation, c=c, device=device,
        compiled=not arguments.no_compile, head_path=arguments.save_head,
    )  # fmt: skip
    # The host is slower than the GPU at this size, so several processes share one.
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(train_seed, seed) for seed in range(arguments.seeds)]):
            result["runs"] = sorted(result["runs"] + finished.result(), key=lambda run: run["seed"])
            result["summary"] = summarise(result["runs"])
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result["runs"], arguments.out.with_suffix(".png"))
    for policy, values in result["summary"].items():
        print(f"{policy:20} mean {values['mean']:.4f}  spread over seeds {values['spread']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
