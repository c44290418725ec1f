"""The two operators of a vocabulary-parallel head as one differentiable function."""

import torch

from vpcce.operators import Outputs, head_stats_backward_op, head_stats_op
from vpcce.settings import Settings


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx, grad, *sources):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("vpcce: second derivatives are not implemented, expected one backward through the loss")


class HeadStats(torch.autograd.Function):
    """The two operators as one differentiable function. main_grad is no operand: it only receives."""

    @staticmethod
    def forward(
        ctx, hidden, weight, target, bias, scale, column_weight, lora_a, lora_b, logit_scale, softcap, lora_scale,
        settings, wanted, main_grad,
    ):  # fmt: skip
        operands = (hidden, weight, target, bias, scale, column_weight, lora_a, lora_b)
        options = (logit_scale, softcap, lora_scale, settings)
        with torch.autocast(hidden.device.type, enabled=False):
            given = iter(head_stats_op(*operands, *options))
        output = Outputs(*(next(given) if want else None for want in wanted))
        ctx.save_for_backward(*operands, output.lse, output.entropy, output.marks, output.seed, output.weight_sum)
        ctx.options, ctx.main_grad = options, main_grad
        detached = (*output[output._fields.index("argmax") :],)
        ctx.mark_non_differentiable(*(part for part in detached if part is not None))
        ctx.set_materialize_grads(False)
        return tuple(output)

    @staticmethod
    def backward(ctx, grad_lse, grad_target_logit, grad_entropy, grad_logit_sum, *_):
        saved = ctx.saved_tensors
        need = ctx.needs_input_grad
        letters = (("h", 0), ("w", 1), ("b", 3), ("s", 4), ("A", 6), ("B", 7))
        needs = "".join(letter for letter, index in letters if need[index])
        upstream = (grad_lse, grad_target_logit, grad_entropy, grad_logit_sum)
        create_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        with torch.no_grad(), torch.autocast(saved[0].device.type, enabled=False):
            grads = head_stats_backward_op(*upstream, *saved, ctx.main_grad, needs, *ctx.options)
        if create_graph:
            sources = [t for t in (*upstream, *saved[:2], *saved[6:8]) if t is not None]
            grads = tuple(_NoSecondDerivative.apply(grad, *sources) for grad in grads)
        into_main = ctx.main_grad is not None
        return (
            grads[0] if need[0] else None,
            grads[1] if need[1] and not into_main else None,
            None,
            grads[2] if need[3] else None,
            grads[3] if need[4] else None,
            None,
            grads[4] if need[6] else None,
            grads[5] if need[7] else None,
            *(None,) * 6,
        )


def head_stats(
    hidden, weight, target, *, settings: Settings, bias=None, scale=None, column_weight=None, logit_scale=1.0,
    softcap=None, main_grad=None, lora=None,
) -> Outputs:  # fmt: skip
    """Runs `HeadStats` on flattened arguments that `vpcce.arguments` has checked."""
    a, b, lora_scale = (None, None, 1.0) if lora is None else lora
    outputs = HeadStats.apply(
        hidden, weight, target, bias, scale, column_weight, a, b, logit_scale, softcap, lora_scale, settings.encode(),
        Outputs.wanted(settings, softcap), main_grad,
    )  # fmt: skip
    return Outputs(*outputs)
