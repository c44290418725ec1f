"""The loss as a module, for code that composes modules."""

from typing import Any

from torch import Tensor, nn

from vpcce.lora import LoRA
from vpcce.loss import REDUCTIONS, linear_cross_entropy
from vpcce.parallel.shard import VocabShard


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options fixed, for code that composes modules.

    Equals ``linear_cross_entropy(hidden, weight, target, bias=bias, cu_seqlens=cu_seqlens, lora=lora, **options)``; the
    options are that function's keyword arguments. `class_weight` is a buffer that moves with the module and is not
    saved.
    """

    class_weight: Tensor | None

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
        if reduction not in REDUCTIONS:
            raise ValueError(f"LinearCrossEntropy: reduction must be one of {REDUCTIONS}, got {reduction!r}")
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options = dict(
            shard=shard, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            z_loss=z_loss, return_z_loss=return_z_loss, softcap=softcap, logit_scale=logit_scale, backward=backward,
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
            hidden, weight, target, bias=bias, class_weight=self.class_weight, cu_seqlens=cu_seqlens, lora=lora,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
