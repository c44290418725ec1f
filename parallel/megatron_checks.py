"""What `vpcce.parallel.megatron.install` refuses, and how it says so: before anything has been changed.

A head works when its logits are nothing but `input @ weight.T + bias`, and a model when it takes the loss of these
logits from Megatron's own `compute_language_model_loss`. Whatever needs the stored logits, another arithmetic, or a
weight that is not there, is an error here rather than a wrong number in training.

Classes are recognised by module and name, so that nothing of Megatron is imported that the model has not imported.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from vpcce.arguments import check_loss_options, check_options
from vpcce.parallel.deferred import WHO, HeadOptions
from vpcce.policy import resolve

COLUMN_PARALLEL_LINEAR = "megatron.core.tensor_parallel.layers.ColumnParallelLinear"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module.LanguageModule"
MODELS = {
    "megatron.core.models.gpt.gpt_model.GPTModel",
    "megatron.core.models.mamba.mamba_model.MambaModel",
    "megatron.core.models.hybrid.hybrid_model.HybridModel",
    "megatron.core.models.T5.t5_model.T5Model",
    "megatron.core.models.bert.bert_model.BertModel",
}
NAMES = ", ".join(sorted(name.rsplit(".", 1)[1] for name in MODELS))


def options(given: dict[str, Any]) -> HeadOptions:
    """The options as `install` got them, checked."""
    known = [field.name for field in fields(HeadOptions)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{WHO}: unknown option {', '.join(unknown)}; expected some of {', '.join(known)}")
    chosen = HeadOptions(**given)
    resolve(WHO, chosen.backward, torch.float32, torch.device("cpu"))
    check_options(WHO, chosen.ignore_index, chosen.softcap, 1.0)
    check_loss_options(WHO, "none", chosen.label_smoothing, chosen.z_loss)
    if not isinstance(chosen.logit_scale, (int, float)) or not chosen.logit_scale > 0:
        raise ValueError(f"{WHO}: logit_scale must be a positive number, got {chosen.logit_scale!r}")
    if chosen.skip_masked_tokens and chosen.ignore_index is None:
        chosen = replace(chosen, ignore_index=-100)
    return chosen


def modules(model: Any) -> list[nn.Module]:
    """Every module inside a model or a list of model chunks."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise TypeError(f"{WHO}: expected a torch.nn.Module or a list of them, got {type(chunk).__name__}")
    return [module for chunk in chunks for module in chunk.modules()]


def language_models(model: Any) -> list[nn.Module]:
    """The Megatron language models inside `model`, all of a kind that takes its loss from deferred logits."""
    found = [module for module in modules(model) if LANGUAGE_MODULE in _names(module)]
    if not found:
        chunks = model if isinstance(model, (list, tuple)) else [model]
        kinds = ", ".join(sorted({type(chunk).__name__ for chunk in chunks}))
        raise TypeError(f"{WHO}: expected a model that contains one of {NAMES}, got {kinds or 'no model'}")
    for module in found:
        if not MODELS & _names(module):
            raise TypeError(f"{WHO}: expected one of {NAMES}, got the language model {type(module).__name__}")
        owner = next(cls for cls in _megatron_mro(module) if "compute_language_model_loss" in vars(cls))
        if _name(owner) != LANGUAGE_MODULE:
            raise TypeError(
                f"{WHO}: {owner.__name__} has its own compute_language_model_loss, which would be replaced; "
                f"expected one of {NAMES} or a subclass that keeps Megatron's"
            )
    return found


def head(model: Any, layer: Any, chosen: HeadOptions) -> None:
    """Refuses an output layer whose logits are not a plain product, or are needed after the loss."""
    kind = type(layer).__name__
    if kind == "TELMHeadColumnParallelLinear" or getattr(layer, "fp8", False):
        raise TypeError(
            f"{WHO}: the output layer is a {kind}, which multiplies in fp8; expected a ColumnParallelLinear "
            "(keep the output projection in bf16, or leave vpcce out)"
        )
    if COLUMN_PARALLEL_LINEAR not in _names(layer):
        raise TypeError(
            f"{WHO}: the output layer is a {kind}, expected a ColumnParallelLinear "
            "(an adapter on the output layer has to be merged first, or to leave it out)"
        )
    if has_own_forward(layer) and chosen.softcap is None:
        raise TypeError(
            f"{WHO}: {kind} has a forward of its own, expected Megatron's; "
            "if all it does is to cap the logits, pass the same softcap to install"
        )
    config = layer.config
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            f"{WHO}: defer_embedding_wgrad_compute computes the weight gradient from stored logit gradients, "
            "which vpcce never has; expected it to be off"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError(
            f"{WHO}: the output layer's weight is rematerialised over {layer.gtp_remat_size} ranks (gtp_remat), "
            "expected a whole tensor-parallel shard"
        )
    if chosen.softcap is not None and getattr(config, "use_mup", False) and config.mup_output_mult != 1.0:
        raise ValueError(
            f"{WHO}: softcap={chosen.softcap} would come before MuP's factor {config.mup_output_mult}, "
            "expected one of them"
        )
    if chosen.vocab_size is not None and not 1 <= chosen.vocab_size <= layer.output_size:
        raise ValueError(
            f"{WHO}: vocab_size must be in [1, {layer.output_size}], the rows of the output layer, "
            f"got {chosen.vocab_size}"
        )


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a subclass of ColumnParallelLinear computes something else."""
    owner = next(cls for cls in _megatron_mro(layer) if "forward" in vars(cls))
    return _name(owner) != COLUMN_PARALLEL_LINEAR


def _megatron_mro(module: nn.Module) -> list[type]:
    """The classes of a module without those that `install` has mixed in."""
    return [cls for cls in type(module).__mro__ if not cls.__module__.startswith("vpcce.")]


def _names(module: nn.Module) -> set[str]:
    return {_name(cls) for cls in type(module).__mro__}


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
