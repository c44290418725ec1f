"""What a call asks for beyond its tensors, as a value and as text, and the comparison of it over ranks.

Custom operators take tensors, numbers and strings. `Settings` goes through them as a string, so that torch.compile,
which traces the encoding too, and the ranks that compare their settings see one constant.
"""

import ast
import functools
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vpcce.parallel import agreement
from vpcce.policy import BackwardPolicy


class Settings(NamedTuple):
    """What a call asks for beyond its tensors; travels through the operators as text."""

    who: str  # the function that was called
    start: int
    stop: int
    vocab_size: int
    group: str  # name of the process group, "" for a single rank
    check: bool
    sequence_parallel: bool
    ignore_index: int | None  # None: every token counts
    entropy: bool
    argmax: bool
    topk: int  # k, 0 for none
    logit_sum: bool
    marks: bool  # a sampled or filtered backward will follow
    hidden_grad: bool  # these four decide which collectives the backward has
    scale_grad: bool
    lora_grad: bool
    gathers_again: bool
    reduce_hidden_grad: bool
    upstream: str  # what the loss does with the statistics
    deterministic: bool  # torch.use_deterministic_algorithms
    hidden_policy: str  # `BackwardPolicy.text`
    weight_policy: str

    @property
    def n_valid(self) -> int:
        return max(0, min(self.stop, self.vocab_size) - self.start)

    @property
    def policies(self) -> tuple[BackwardPolicy, BackwardPolicy]:
        """Of dE and dC."""
        made = (BackwardPolicy.from_text(self.hidden_policy), BackwardPolicy.from_text(self.weight_policy))
        if self.deterministic:
            made = (replace(made[0], deterministic=True), replace(made[1], deterministic=True))
        return made

    def encode(self) -> str:
        return repr(tuple(self))


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> Settings:
    return Settings(*ast.literal_eval(text))


# What a user would call a field.
NAMES = {
    "who": "the function that is called",
    "marks": "whether a sampled gradient is wanted",
    "hidden_grad": "whether hidden requires a gradient",
    "scale_grad": "whether logit_scale requires a gradient",
    "lora_grad": "whether lora's a requires a gradient",
    "gathers_again": "whether anything requires a gradient (with sequence_parallel)",
    "hidden_policy": "the policy of dE",
    "weight_policy": "the policy of dC",
    "upstream": "(reduction, label_smoothing, z_loss, shift, class_weight)",
}


def check_agreement(
    group, how: Settings, hidden, weight, target, bias, options: Sequence[tuple[str, object]],
    same_tensors: Sequence[tuple[str, Tensor | None]] = (),
) -> None:  # fmt: skip
    """Every rank must ask the same question of the same tokens; only the rows of the weight differ."""
    if not agreement.is_due(group, how.check):
        return
    if not how.check:
        agreement.agree(group, [("check", False)], None)
        return
    same = how._replace(start=0, stop=0, group="")._asdict()
    fields = [
        *((NAMES.get(name, name), same.pop(name)) for name in ("check", "who")),
        ("the number of tokens", target.shape[0]),
        ("the number of ids per token", target.shape[1:].numel()),
        ("hidden's shape", tuple(hidden.shape)),
        ("hidden's dtype", hidden.dtype),
        ("hidden's device", hidden.device.type),
        ("weight's dtype", weight.dtype),
        ("the bias' dtype", None if bias is None else bias.dtype),
        *options,
        *((NAMES.get(name, name), value) for name, value in same.items()),
    ]
    per_call = _per_call(target, how.ignore_index, same_tensors)
    agreement.agree(group, fields, (how.start, how.start + how.n_valid), per_call)


def fingerprint(tensor: Tensor | None) -> object:
    """What ranks compare of a tensor that must be equal on all: its numbers where reading waits for no device."""
    if tensor is None:
        return None
    about = (tuple(tensor.shape), str(tensor.dtype))
    if tensor.device.type != "cpu":
        return about
    return (*about, zlib.crc32(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data))


def _per_call(target: Tensor, ignore_index: int | None, same: Sequence[tuple[str, Tensor | None]]) -> list:
    """What identifies the numbers of a call."""
    fields = [(f"{name} (here its shape, dtype and checksum)", fingerprint(tensor)) for name, tensor in same]
    if target.device.type == "cpu":
        ignored = 0 if ignore_index is None else int((target == ignore_index).sum())
        fields += [("the number of ignored ids", ignored), ("the target (here its checksum)", fingerprint(target))]
    return fields
