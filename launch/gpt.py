"""A Megatron-core GPTModel, its loss, its optimiser and schedule, from Settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from settings import Loss, Settings


def make_model(settings: Settings, on_cpu: bool) -> torch.nn.Module:
    """The GPTModel, the same whatever the number of ranks, with vpcce's or Megatron's loss. Not yet wrapped."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, parallelism, half = settings.model, settings.parallelism, settings.run.precision == "bf16"
    activation = {"swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu}[model.activation]
    optional: dict[str, Any] = {"num_query_groups": model.num_query_groups, "kv_channels": model.head_dim}
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        normalization="RMSNorm",
        activation_func=activation,
        gated_linear_unit=model.activation != "gelu",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallelism.tensor,
        sequence_parallel=parallelism.sequence,
        use_cpu_initialization=on_cpu,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        **{name: value for name, value in optional.items() if value is not None},
    )
    torch.manual_seed(settings.run.seed)
    gpt: torch.nn.Module = GPTModel(
        config,
        _layer_spec(),
        vocab_size=model.vocab_size,
        max_sequence_length=model.sequence_length,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
    )
    if settings.loss.implementation == "vpcce":
        from vpcce.parallel import megatron

        megatron.install(
            gpt,
            backward=_backward(settings.loss),
            softcap=model.final_softcap,
            z_loss=settings.loss.z_loss,
            label_smoothing=settings.loss.label_smoothing,
        )
    return gpt


def _layer_spec() -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if torch.cuda.is_available() and specs.HAVE_TE:
        return specs.get_gpt_layer_with_transformer_engine_spec()
    return specs.get_gpt_layer_local_spec(normalization="RMSNorm")


def _backward(loss: Loss) -> Any:
    import vpcce

    named: dict[str, Any] = {
        "auto": "auto",
        "exact": vpcce.exact(),
        "filtered": vpcce.filtered(),
        "sampled": vpcce.sampled(),
    }
    if loss.backward_weight is None:
        return named[loss.backward]
    return named[loss.backward], named[loss.backward_weight]


def wrap(gpt: Any, settings: Settings) -> tuple[Any, Any, Any]:
    """(data-parallel model, optimiser, learning-rate schedule), all Megatron's own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module

    config, chosen, half = gpt.config, settings.optimiser, settings.run.precision == "bf16"
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
        Float16Module(config, gpt) if half else gpt,
    )
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=chosen.learning_rate,
            min_lr=chosen.min_learning_rate,
            weight_decay=chosen.weight_decay,
            adam_beta1=chosen.beta1,
            adam_beta2=chosen.beta2,
            clip_grad=chosen.clip_grad,
            bf16=half,
            params_dtype=config.params_dtype,
        ),
        [model],
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=chosen.learning_rate,
        min_lr=chosen.min_learning_rate,
        lr_warmup_steps=chosen.warmup_steps,
        lr_decay_steps=max(settings.run.steps, chosen.warmup_steps + 1),
        lr_decay_style="cosine",
        start_wd=chosen.weight_decay,
        end_wd=chosen.weight_decay,
        wd_incr_steps=settings.run.steps,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, schedule


def head_sizes(settings: Settings) -> dict[str, Any]:
    """What the head works on, per rank and forward: tokens, ids, and the bytes of the logits it would store."""
    tokens = settings.run.micro_batch * settings.model.sequence_length
    ids = settings.model.vocab_size // settings.parallelism.tensor
    bytes_each = 2 if settings.run.precision == "bf16" else 4
    return {
        "tokens": tokens,
        "vocabulary_per_rank": ids,
        "hidden_size": settings.model.hidden_size,
        "logits_bytes": tokens * ids * bytes_each,
        "settings": dataclasses.asdict(settings),
    }
