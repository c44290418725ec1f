"""A synthetic language-model head whose softmax is as sparse as a trained model's.

The sampled and filtered backwards do work where |softmax - onehot| is large, so random hidden states and
weights would time the wrong thing. Here logits are a Zipf unigram prior, carried by one direction of the
hidden space that every token shares, plus for each token a few candidates drawn from that prior, plus noise.
Targets are drawn from the resulting softmax.

    kind        sigma  candidates  peak
    "default"   1.6    24          9     about as sparse as Qwen2.5's head on real text
    "peaked"    1.2    12          14    sparser than Gemma 3's
    "flat"      1.6    24          9     the first one at a hundredth of the logits, a model's before its training
    "noise"     5      0                 no prior either: in a block of tokens next to every column matters

Everything of size [N, V] or [N, D] in fp32 is made a slice of tokens at a time.
"""

import torch

KINDS = {
    "default": dict(sigma=1.6, candidates=24, peak=9.0),
    "peaked": dict(sigma=1.2, candidates=12, peak=14.0),
    "flat": dict(sigma=1.6, candidates=24, peak=9.0, scale=0.01),
    "noise": dict(sigma=5.0, candidates=1, peak=0.0, prior=0.0),
}


@torch.no_grad()
def lm_like(
    n: int, v: int, d: int, *, kind: str = "default", dtype=torch.bfloat16, device="cuda", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden [n, d], weight [v, d] and target [n] int64; the same seed gives the same head."""
    options = KINDS[kind]
    g = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device=device)

    shared = randn(d)
    shared /= shared.norm()
    rank = torch.empty(v, device=device)
    rank[torch.randperm(v, generator=g, device=device)] = torch.arange(1, v + 1, device=device).float()
    log_prior = -(rank + 2.7).log()
    weight = randn(v, d).mul_(d**-0.5)
    weight = weight.addr_(weight @ shared, shared, alpha=-1)  # rows of norm 1, orthogonal to `shared`

    hidden = torch.empty(n, d, device=device, dtype=dtype)
    target = torch.empty(n, device=device, dtype=torch.int64)
    prior = log_prior.softmax(0)
    final_weight = torch.addr(weight, log_prior - log_prior.mean(), shared).to(dtype)
    for rows in torch.arange(n).split(1024):
        rows = slice(int(rows[0]), int(rows[-1]) + 1)
        m = rows.stop - rows.start
        x = randn(m, d).mul_(options["sigma"])
        x = x.addr_(options.get("prior", 1.0) - x @ shared, shared)
        ids = torch.multinomial(prior, m * options["candidates"], replacement=True, generator=g).view(m, -1)
        strength = options["peak"] * torch.rand(ids.shape, generator=g, device=device)
        for j in range(ids.shape[1]):
            x.addcmul_(strength[:, j : j + 1], weight[ids[:, j]])
        hidden[rows] = (x * options.get("scale", 1.0)).to(dtype)
        softmax = (hidden[rows] @ final_weight.T).float().softmax(-1)
        target[rows] = torch.multinomial(softmax, 1, generator=g)[:, 0]
    return hidden, final_weight, target


@torch.no_grad()
def density(hidden, weight, target, *, eps: float = 2**-12, block: int = 128) -> dict[str, float]:
    """How sparse the softmax is, per block of `block` tokens.

    columns: part of the (block, column) pairs with an entry |softmax - onehot| >= eps.
    kept: expected part of them that sampling keeps, the mean of min(1, largest entry / eps).
    tiles: part of the block x 128 tiles with such an entry, which a tile filter computes.
    """
    v = weight.shape[0]
    columns = kept = tiles = 0.0
    parts = list(zip(hidden.split(block), target.split(block), strict=True))
    for rows, own in parts:
        g = (rows @ weight.T).float().softmax(-1)
        g[torch.arange(len(own), device=g.device), own] -= 1
        largest = g.abs_().amax(0)
        columns += (largest >= eps).float().mean().item()
        kept += (largest / eps).clamp(max=1).mean().item()
        tiles += (largest[: v // 128 * 128].view(-1, 128).amax(1) >= eps).float().mean().item()
    return dict(columns=columns / len(parts), kept=kept / len(parts), tiles=tiles / len(parts))
