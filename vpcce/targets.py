"""Causal labels: each token predicts the next one of its sequence, and only the targets move.

Copying hidden[..., :-1, :] would cost N * D numbers, and the slice's gradient as many again; moving N ids costs
nothing. The last token of a sequence gets `ignore_index`, so the loss skips it like any other ignored token.

Example: two packed sequences [a b c] and [d e], cu_seqlens = [0, 3, 5], ignored = -100

    position    0    1    2      3    4
    target      a    b    c      d    e
    label       b    c    -100   e    -100
"""

import torch
from torch import Tensor


def next_tokens(
    who: str,
    hidden: Tensor,  # [..., D]
    target: Tensor,  # [...]
    shift: bool,
    cu_seqlens: Tensor | None,
    ignore_index: int | None,
    sequence_parallel: bool,
) -> Tensor:
    """The labels that `shift` and `cu_seqlens` ask for; `target` itself where shift is off. Never waits for a device.

    Raises:
        TypeError, ValueError: cu_seqlens without shift, beside a target that is not flat, or (on the CPU) that are not
            its bounds; no id to mark the last token with; a flat target that hides where sequences end.
    """
    if not shift:
        if cu_seqlens is not None:
            raise ValueError(f"{who}: cu_seqlens says where shift stops, expected shift=True, got shift={shift}")
        return target
    for name, value in (("hidden", hidden), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if ignore_index is None:
        raise ValueError(f"{who}: shift marks the last token of a sequence, expected an ignore_index, got None")
    if cu_seqlens is not None:
        return _shift_packed(who, target, cu_seqlens, ignore_index)
    if target.dim() == 1 and hidden.dim() > 2:
        raise ValueError(
            f"{who}: shift cannot see where sequences end in a flat target of {target.numel()} ids, expected a target "
            f"with hidden's leading dimensions {list(hidden.shape[:-1])}, or cu_seqlens"
        )
    if sequence_parallel and target.dim() > 1 and target.shape[-1:] != hidden.shape[-2:-1]:
        raise ValueError(
            f"{who}: shift moves ids along the last dimension, which sequence_parallel must not split: expected a "
            f"target of shape [..., {hidden.shape[-2]}], got {list(target.shape)}"
        )
    last = torch.full_like(target[..., :1], ignore_index)
    return torch.cat([target[..., 1:], last], -1)


def _shift_packed(who: str, target: Tensor, cu_seqlens: Tensor, ignore_index: int) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{who}: cu_seqlens must be a tensor of int32 or int64, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.device != target.device:
        raise ValueError(
            f"{who}: expected cu_seqlens of shape [sequences + 1] on {target.device}, "
            f"got {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    if max(target.shape, default=0) != target.numel():
        raise ValueError(f"{who}: cu_seqlens belongs to a flat target, got {list(target.shape)}")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would wait for the device
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != target.numel() or (cu_seqlens.diff() < 0).any():
            raise ValueError(
                f"{who}: expected cu_seqlens that ascend from 0 to the {target.numel()} tokens, "
                f"got {cu_seqlens[:8].tolist()}{'...' if cu_seqlens.shape[0] > 8 else ''}, ending at {last}"
            )
    flat = target.flatten()
    if not flat.numel():
        return target
    label = flat.roll(-1)
    label[-1:] = ignore_index
    # An empty sequence ends where the one before it does; -1, in front of the first, is the last token of all.
    label.index_fill_(0, (cu_seqlens[1:].long() - 1) % flat.numel(), ignore_index)
    return label.view(target.shape)
