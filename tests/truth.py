"""The same losses written plainly: materialised logits, `torch.nn.functional`, any dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_of(hidden, weight, bias=None, logit_scale=1.0, softcap=None) -> Tensor:
    """[N, V] in fp32, or fp64 for fp64 arguments."""
    wide = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))
    x = hidden.flatten(0, -2).to(wide) @ weight.to(wide).T
    if bias is not None:
        x = x + bias.to(wide)
    x = x * logit_scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def cross_entropy(
    hidden, weight, target, *, bias=None, logit_scale=1.0, softcap=None, ignore_index=-100, reduction="mean",
    class_weight=None, label_smoothing=0.0, z_loss=0.0,
):  # fmt: skip
    """What `vpcce.linear_cross_entropy` says it equals, on one rank."""
    x = logits_of(hidden, weight, bias, logit_scale, softcap)
    flat = target.flatten().long()
    options = dict(weight=class_weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    loss = F.cross_entropy(x, flat, reduction="none", **options)
    kept = flat != ignore_index
    z_term = torch.where(kept, z_loss * x.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return (loss + z_term).view(target.shape)
    if reduction == "sum":
        return loss.sum() + z_term.sum()
    counted = kept.sum() if class_weight is None else class_weight[flat[kept]].sum()
    mean = F.cross_entropy(x, flat, **options) if counted != 0 else loss.sum()  # PyTorch says NaN for 0
    return mean + z_term.sum() / kept.sum().clamp(min=1)


def problem(n, v, d, dtype=torch.float64, *, bias=False, seed=0, ignored=0.0, device="cpu", scale=1.0):
    """hidden, weight, bias or None, target, with gradients wanted; the softmax is neither flat nor one-hot."""
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(n, d, generator=g, dtype=torch.float64)).to(dtype)
    weight = (3 * torch.randn(v, d, generator=g, dtype=torch.float64) / d**0.5).to(dtype)
    offset = torch.randn(v, generator=g, dtype=torch.float64).to(dtype) if bias else None
    target = torch.randint(0, v, (n,), generator=g)
    target[torch.rand(n, generator=g) < ignored] = -100
    leaves = [t if t is None else t.to(device).requires_grad_() for t in (hidden, weight, offset)]
    return *leaves, target.to(device)


def logprobs_of_ids(hidden, weight, ids, *, ignore_index=-100, **options) -> Tensor:
    """What `vpcce.linear_logprobs` says it equals for ids [N, K], on one rank."""
    kept = ids != ignore_index
    logprobs = logits_of(hidden, weight, **options).log_softmax(-1)
    return torch.where(kept, logprobs.gather(1, torch.where(kept, ids, 0)), 0.0)


def several_ids(n, k, v, seed=3):
    """[n, k] ids; some ignored, some chosen twice, one token with none."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, v, (n, k), generator=g)
    ids[torch.rand(n, k, generator=g) < 0.2] = -100
    ids[::3, -1] = ids[::3, 0]
    ids[n // 2] = -100
    return ids
