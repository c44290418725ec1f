"""Megatron's protocol for a weight gradient that is added to `main_grad` instead of being returned.

With `gradient_accumulation_fusion` a layer adds its weight gradient to `weight.main_grad`, a buffer that
DistributedDataParallel owns and that spans all micro-batches. Autograd still has to see a gradient: DDP's hook runs
when one arrives, counts the parameter as ready for the reduction, and drops it. So after the accumulation:

    weight.grad_added_to_main_grad = True     the hook must not add weight.grad once more
    returned gradient                         a tensor of the right shape whose values nobody reads, except
                                              with weight.zero_out_wgrad: zeros, because another layer (a tied
                                              embedding) adds its own gradient to it and the hook reads the sum

vpcce's operator adds dC to the buffer and returns no gradient for the weight. `through_main_grad` is an identity put
between weight and operator; autograd runs its backward after the operator's, and there the dummy is made. Neither
Apex nor Transformer Engine takes part, so the protocol also works where Megatron's own layers cannot use it.

Not used: Megatron-FSDP expects `main_grad` to be overwritten, and copies an ordinary gradient there itself; a
frozen or detached weight has no gradient; buffers in other dtypes than fp32 and bf16 get an ordinary gradient.
"""

import torch
from torch import Tensor


def through_main_grad(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The weight to hand to the operator, and the buffer its gradient goes to.

    Returns:
        (alias of weight, main_grad), or (weight, None) where the gradient is to be returned as usual.
    """
    main_grad = getattr(weight, "main_grad", None)
    if (
        main_grad is None
        or main_grad.dtype not in (torch.float32, torch.bfloat16)
        or not weight.requires_grad
        or not torch.is_grad_enabled()
        or hasattr(weight, "__fsdp_param__")
    ):
        return weight, None
    return _AddedToMainGrad.apply(weight), main_grad


class _AddedToMainGrad(torch.autograd.Function):
    """Identity forward; backward reports that main_grad holds the gradient."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.weight = weight  # the parameter itself, for its attributes; its values are not needed
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(weight.shape, dtype=weight.dtype, device=weight.device)
