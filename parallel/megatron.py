"""Puts vpcce's loss into Megatron-core models, in one line, without touching Megatron.

    from vpcce.parallel import megatron
    model = megatron.install(model)          # a model, a wrapped model, or a list of model chunks

works for every `GPTModel`, `HybridModel` / `MambaModel`, `T5Model` and `BertModel` found in it, megatron-core 0.16
to 0.19. Two classes are exchanged in place, so that parameters, hooks, checkpoint keys and the names that FSDP and
Megatron-Bridge look up stay what they were:

    model.output_layer   returns `DeferredLogits` while its model computes a loss; otherwise Megatron's logits
    model                remembers whether labels came, and turns deferred logits into the loss

The labels decide. A call without labels (inference, log-probabilities of your own, `runtime_gather_output`), or with
GPTModel's `output_processor`, sees plain tensors from Megatron's own code.

    tensor          shape on a rank                     forward                      backward
    hidden          [s, b, h]                           -                            all-reduced; not with
                                                                                     disable_grad_reduce
                    [s / T, b, h] sequence parallel     gathered                     gathered, reduce-scattered
    weight          [V / T, h], own or the embedding's  -                            -
    labels, loss    [b, s], loss in fp32                one gather of 12 b s bytes   -

The loss is the one Megatron computes, token for token, except where Megatron's number has no meaning: labels outside
the vocabulary get 0, and logits gathered before the loss no longer add log(T) to it. Ways in, besides the above:

    model_cfg.pre_wrap_hooks.append(megatron.pre_wrap_hook())     # megatron.training, 0.19
    pretrain(..., megatron.model_provider(model_provider), ...)   # pretrain_gpt.py, any version
    provider.register_pre_wrap_hook(megatron.pre_wrap_hook())     # Megatron-Bridge
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vpcce.parallel import agreement, collectives
from vpcce.parallel import megatron_checks as checks
from vpcce.parallel.deferred import WHO, DeferredLogits, HeadOptions, LayerCall, Request, fused_loss
from vpcce.parallel.shard import VocabShard

Model = TypeVar("Model", nn.Module, list)


def install(model: Model, **options: Any) -> Model:
    """Gives the models inside `model` vpcce's loss; returns `model`.

    Does nothing to pipeline stages without an output layer. A second call only changes the options.

    Args:
        model: a Megatron model, wrapped (Float16Module, DistributedDataParallel, LLaVA) or not, or a list of chunks.
        backward: "auto", `vpcce.exact()`, `filtered()`, `sampled()`, or a pair (policy of dE, policy of dC).
        ignore_index: labels with this value, and those outside the vocabulary, get no loss and cost nothing. With
            None labels outside the vocabulary get no loss, at the price of any other token.
        skip_masked_tokens: tokens with loss_mask 0 become ignored ones (their loss is 0 before the mask is
            multiplied); for models that are given a loss_mask (GPTModel, HybridModel).
        label_smoothing, z_loss, softcap, logit_scale: as in `vpcce.linear_cross_entropy`. `softcap` and
            `logit_scale` also apply to the logits the model returns, unless its layer already caps them.
        vocab_size: number of true ids when the vocabulary was padded; padding then takes no part in the softmax.
            None counts it, as Megatron does.
        gradient_accumulation_fusion: add dC to weight.main_grad; None follows the layer. True needs no Apex.

    Raises:
        TypeError: an unknown model, output layer or option.
        ValueError: option values out of range; a configuration that needs stored logits
            (defer_embedding_wgrad_compute), an fp8 head, rematerialised weights (gtp_remat).
    """
    chosen = checks.options(options)
    found: list[tuple[Any, Any]] = [(m, getattr(m, "output_layer", None)) for m in checks.language_models(model)]
    heads = [(module, layer) for module, layer in found if layer is not None]
    for module, layer in heads:  # before the first one changes
        checks.head(module, layer, chosen)
    for module, layer in heads:
        if isinstance(layer, VocabParallelCCEOutputLayer):
            layer._vpcce.options, layer._vpcce.agreed = chosen, False
            continue
        state = _State(chosen)
        module._vpcce = layer._vpcce = state
        for owner, exchanged in ((layer, _output_layer_class), (module, _model_class)):
            kind: Any = type(owner)
            owner.__class__ = exchanged(kind)
    return model


def uninstall(model: Model) -> Model:
    """Undoes `install`: every class and attribute is what it was; returns `model`.

    Raises:
        ValueError: a class has been exchanged once more since, as torch's `fully_shard` does.
    """
    for module in checks.modules(model):
        if isinstance(module, (VocabParallelCCEOutputLayer, _DeferringModel)):
            kind: Any = type(module)
            if "_vpcce_base" not in vars(kind):
                raise ValueError(f"{WHO}: {kind.__name__} was wrapped after install, expected uninstall before that")
            module.__class__ = kind._vpcce_base
            del module._vpcce
    return model


def pre_wrap_hook(**options: Any) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """`install` with its options, as a hook from list of chunks to list of chunks."""
    checks.options(options)
    return functools.partial(install, **options)


def model_provider(provider: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The model provider whose models have vpcce's loss; `provider` may take any arguments."""
    checks.options(options)

    @functools.wraps(provider)
    def provide(*args: Any, **kwargs: Any) -> Any:
        return install(provider(*args, **kwargs), **options)

    return provide


@dataclass
class _State:
    """What a model and its output layer share."""

    options: HeadOptions
    labels: Tensor | None = None  # of the call in progress, when it ends in compute_language_model_loss
    agreed: bool = False  # the ranks have compared their settings once


class VocabParallelCCEOutputLayer:
    """Mixed into the class of a Megatron output layer: puts its calls off while the model computes a loss.

    Hooks run once, around the work: for the loss, or for the real logits. So what hangs on the layer's `__call__`
    (gathering parameters before it, freeing them after it) sees the call when the weight is needed.
    """

    _vpcce: _State

    def __call__(
        self,
        input_: Tensor,  # [s, b, h], or [s / T, b, h] with sequence parallelism
        weight: Tensor | None = None,  # [V / T, h], the embedding's when tied
        runtime_gather_output: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Tensor | None]:
        layer: Any = self
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        if self._vpcce.labels is None:
            return call(input_, weight, runtime_gather_output, *args, **kwargs)
        sequence_parallel = layer.sequence_parallel

        def perform(request: Request | None) -> Any:
            now, layer.sequence_parallel = layer.sequence_parallel, sequence_parallel
            try:
                if request is None:
                    return call(input_, weight, runtime_gather_output, *args, **kwargs)[0]
                return call(input_, weight, vpcce_request=request)
            finally:
                layer.sequence_parallel = now

        ranks = collectives.size(layer.tp_group)
        gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
        tokens = input_.shape[0] * (ranks if sequence_parallel else 1)
        columns = layer.output_size if gathers else layer.output_size_per_partition
        put_off = LayerCall(
            perform=perform,
            shape=torch.Size((tokens, *input_.shape[1:-1], columns)),
            shard=_shard(layer, self._vpcce),
            device=input_.device,
            gathers_output=bool(gathers),
        )
        return DeferredLogits(put_off, self._vpcce.options), layer.bias if layer.skip_bias_add else None

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *args: Any,
        vpcce_request: Request | None = None,
        **kwargs: Any,
    ) -> Any:
        layer: Any = self
        options = self._vpcce.options
        base: Any = super()
        if vpcce_request is None:
            logits, bias = base.forward(input_, weight, runtime_gather_output, *args, **kwargs)
            return (logits if checks.has_own_forward(layer) else _capped(logits, options)), bias
        weight = layer.weight if weight is None else weight
        expected = [layer.output_size_per_partition, layer.input_size]
        if weight is None or list(weight.shape) != expected:
            got = None if weight is None else list(weight.shape)
            raise ValueError(f"{WHO}: the output layer expected a weight of shape {expected}, got {got}")
        fusion = options.gradient_accumulation_fusion
        result = fused_loss(
            input_,
            weight,
            None if layer.skip_bias_add else layer.bias,
            vpcce_request,
            options,
            shard=_shard(layer, self._vpcce),
            sequence_parallel=layer.sequence_parallel,
            accumulates=layer.gradient_accumulation_fusion if fusion is None else fusion,
            reduces_hidden_grad=layer.sequence_parallel or not layer.disable_grad_reduce,
        )
        self._vpcce.agreed = True
        return result


class _DeferringModel:
    """Mixed into the class of a Megatron model: announces labels, and makes the loss of deferred logits."""

    _vpcce: _State

    def compute_language_model_loss(self, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            return super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
        model: Any = self
        # Multi-token prediction rolls the labels for each depth, and counts accepted tokens while it trains.
        is_extra_depth = labels is not self._vpcce.labels
        return logits.cross_entropy(labels, argmax=is_extra_depth and model.training and _counts_acceptance())


def _announcing(base: type, name: str) -> Callable[..., Any]:
    """The method `name` of `base`, the one that is given the labels, with the output layer told about them."""
    original = getattr(base, name)
    parameters = list(inspect.signature(original).parameters)
    label_name = "labels" if "labels" in parameters else "lm_labels"

    def argument(key: str, args: tuple, kwargs: dict) -> Any:
        if key in kwargs or key not in parameters:
            return kwargs.get(key)
        position = parameters.index(key) - 1
        return args[position] if position < len(args) else None

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = argument(label_name, args, kwargs)
        if labels is None or argument("output_processor", args, kwargs) is not None:
            return original(self, *args, **kwargs)
        state = self._vpcce
        loss_mask = argument("loss_mask", args, kwargs)
        if state.options.skip_masked_tokens and loss_mask is not None:
            labels = labels.masked_fill(loss_mask.view(labels.shape) == 0, state.options.ignore_index)
            position = parameters.index(label_name) - 1
            if position < len(args):
                args = (*args[:position], labels, *args[position + 1 :])
            else:
                kwargs[label_name] = labels
        state.labels = labels
        try:
            return original(self, *args, **kwargs)
        finally:
            state.labels = None

    return method


@functools.cache
def _output_layer_class(base: type) -> type:
    return type(base.__name__, (VocabParallelCCEOutputLayer, base), _identity(base))


@functools.cache
def _model_class(base: type) -> type:
    # GPTModel's schedule plan (overlapped expert parallelism) calls _postprocess and never forward.
    entry = "_postprocess" if hasattr(base, "_postprocess") else "forward"
    return type(base.__name__, (_DeferringModel, base), {entry: _announcing(base, entry), **_identity(base)})


def _identity(base: type) -> dict[str, Any]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return {"_vpcce_base": base, **names}


def _shard(layer: Any, state: _State) -> VocabShard:
    group, rows, vocab_size = layer.tp_group, layer.output_size_per_partition, state.options.vocab_size
    rank = 0 if group is None else torch.distributed.get_rank(group)
    vocab_size = layer.output_size if vocab_size is None else vocab_size
    # Where comparing is not free, batches of another length need no second look: each would ask the group's store.
    check = not state.agreed or (group is not None and agreement.blocks_host(group))
    return VocabShard(rank * rows, (rank + 1) * rows, vocab_size, group, check)


def _capped(logits: Tensor, options: HeadOptions) -> Tensor:
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


@functools.cache
def _counts_acceptance() -> bool:
    """Whether this megatron-core takes an argmax of the logits of multi-token prediction (0.19 and later)."""
    from megatron.core.transformer import multi_token_prediction

    return hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")
