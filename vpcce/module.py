"""The loss as a module, for code that composes modules."""

from typing import Any

import torch
from torch import Tensor, nn

from vpcce.arguments import check_loss_options, check_options
from vpcce.lora import LoRA
from vpcce.loss import linear_cross_entropy
from vpcce.parallel.shard import VocabShard
from vpcce.policy import resolve


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options fixed, for code that composes modules.

    Equals ``linear_cross_entropy(hidden, weight, target, bias=bias, cu_seqlens=cu_seqlens, lora=lora, **options)``; the
    options are that function's keyword arguments, checked here. `class_weight` is a buffer that moves with the module
    and is not saved. A `logit_scale` that is an nn.Parameter is the module's parameter, another tensor a buffer that is
    saved.
    """

    class_weight: Tensor | None
    logit_scale: float | Tensor

    def __init__(
        self,
        *,
        shard: VocabShard | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        class_weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        return_z_loss: bool = False,
        softcap: float | None = None,
        logit_scale: float | Tensor = 1.0,
        backward="auto",
        sequence_parallel: bool = False,
        shift: bool = False,
    ):
        super().__init__()
        who = "LinearCrossEntropy"
        if shard is not None and not isinstance(shard, VocabShard):
            raise TypeError(f"{who}: shard must be a vpcce.VocabShard, got {type(shard).__name__}")
        check_options(who, ignore_index, softcap, logit_scale)
        check_loss_options(who, reduction, label_smoothing, z_loss)
        resolve(who, backward, torch.float32, torch.device("cpu"))
        if isinstance(logit_scale, Tensor) and not isinstance(logit_scale, nn.Parameter):
            self.register_buffer("logit_scale", logit_scale)
        else:
            self.logit_scale = logit_scale
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options = dict(
            shard=shard, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            z_loss=z_loss, return_z_loss=return_z_loss, softcap=softcap, backward=backward,
            sequence_parallel=sequence_parallel, shift=shift,
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        lora: LoRA | None = None,
    ) -> Any:  # what the function returns
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, class_weight=self.class_weight, logit_scale=self.logit_scale,
            cu_seqlens=cu_seqlens, lora=lora, **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shown = dict(self.options)
        if not isinstance(self.logit_scale, Tensor):
            shown["logit_scale"] = self.logit_scale
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
