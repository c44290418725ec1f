"""Small Megatron models on CPU, one batch, and one training step: what the Megatron tests share.

Each test builds the same model twice from the same seed (`use_cpu_initialization` makes a weight whole and cuts it,
so the model does not depend on the TP size either), installs vpcce into one of them, and compares a step of both.
"""

import contextlib
import warnings

import spawn
import torch
from torch import Tensor

warnings.filterwarnings("ignore")
# Importing Megatron takes two seconds; once, in the server that forks the ranks, is enough.
spawn._context.set_forkserver_preload(
    ["torch.distributed", "vpcce", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.T5.t5_model",
     "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.dist_checkpointing.serialization"]
)  # fmt: skip

VOCAB, HIDDEN, SEQ, BATCH = 64, 32, 8, 2


def start(tp: int = 1, **parallel) -> None:
    """Prepares this rank for Megatron: the CPU stands for its GPU, groups are made."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))
    from megatron_cpu import use_cpu

    use_cpu()
    torch.cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()  # asked for by recomputation
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **parallel)


def config(tp: int = 1, **changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = dict(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=64, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return TransformerConfig(**(settings | changes))


def gpt(cfg, *, tied: bool = False, seed: int = 1234, vocab: int = VOCAB, **kwargs):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(seed)
    spec = get_gpt_layer_local_spec()
    if cfg.context_parallel_size > 1:
        spec.submodules.self_attention.submodules.core_attention = _attention_within_the_rank()
        kwargs["position_embedding_type"] = "learned_absolute"  # the rotary one pins memory
    if cfg.mtp_num_layers:
        kwargs["mtp_block_spec"] = get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=False)
    settings = dict(max_sequence_length=16, position_embedding_type="rope") | kwargs
    return GPTModel(cfg, spec, vocab_size=vocab, share_embeddings_and_output_weights=tied, **settings)


def _attention_within_the_rank():
    """Context parallel attention needs Transformer Engine; the head does not care what the tokens have seen."""
    import copy

    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LocalAttention(DotProductAttention):
        def __init__(self, config, *args, **kwargs):
            config = copy.copy(config)
            config.context_parallel_size = 1
            super().__init__(config, *args, **kwargs)

    return LocalAttention


def batch(seed: int = 7, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Arguments of a GPTModel call; two labels are masked, one of them outside the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, (BATCH, SEQ), generator=generator)
    loss_mask = torch.ones(BATCH, SEQ)
    labels[0, 3] = -100
    loss_mask[0, 3] = loss_mask[1, 5] = 0
    return dict(
        input_ids=torch.randint(0, vocab, (BATCH, SEQ), generator=generator),
        position_ids=torch.arange(SEQ).expand(BATCH, SEQ),
        attention_mask=torch.ones(1, 1, SEQ, SEQ).triu(1).bool().expand(BATCH, 1, SEQ, SEQ),
        labels=labels,
        loss_mask=loss_mask,
    )


def step(model, arguments: dict[str, Tensor], loss_mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The token losses, masked, and every gradient of their sum, weighted so that tokens differ."""
    model.zero_grad()
    loss_mask = arguments["loss_mask"] if loss_mask is None else loss_mask
    weights = torch.linspace(0.5, 1.5, loss_mask.numel(), device=loss_mask.device).view(loss_mask.shape)
    output = model(**arguments)
    loss = (output[0] if isinstance(output, tuple) else output) * loss_mask
    (loss * weights).sum().backward()
    return loss.detach().clone(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, what: str = "", k: float = 1.0) -> None:
    """Equal up to fp32 rounding: sums in another order, so approximate, relative to the tensor's largest value."""
    (our_loss, our_grads), (their_loss, their_grads) = ours, theirs
    assert our_loss.dtype == their_loss.dtype and our_loss.shape == their_loss.shape
    torch.testing.assert_close(our_loss, their_loss, rtol=2e-6, atol=2e-6, msg=lambda m: f"{what} loss: {m}")
    assert our_grads.keys() == their_grads.keys(), what
    for name, theirs in their_grads.items():
        assert theirs.abs().max() > 0, f"{what} {name}: a zero gradient proves nothing"
        bound = k * 5e-6 * theirs.abs().max().item()
        error = (our_grads[name] - theirs).abs().max().item()
        assert error <= bound, f"{what} {name}: error {error:.2e} > {bound:.2e}"


@contextlib.contextmanager
def counted_collectives():
    """A list of (name, numel) of the collectives over the tensor-parallel group that run inside."""
    import torch.distributed as dist

    from vpcce.parallel import collectives

    seen: list[tuple[str, int]] = []
    undo = []

    def watch(module, name: str, index: int) -> None:
        original = getattr(module, name)

        def counting(*args, **kwargs):
            seen.append((name.lstrip("_"), args[index].numel()))
            return original(*args, **kwargs)

        setattr(module, name, counting)
        undo.append((module, name, original))

    watch(collectives, "_all_gather", 1)
    watch(collectives, "_reduce_scatter", 1)
    watch(dist, "all_reduce", 0)
    try:
        yield seen
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


@contextlib.contextmanager
def counted_real_logits():
    """A list that grows whenever Megatron's output layer computes logits."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    seen = []
    original = ColumnParallelLinear.forward

    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if self.output_size >= VOCAB and output[0].shape[-1] in (
            self.output_size,
            self.output_size_per_partition,
        ):
            if self.weight is None or getattr(self.weight, "is_embedding_or_output_parameter", False):
                seen.append(tuple(output[0].shape))
        return output

    ColumnParallelLinear.forward = forward
    try:
        yield seen
    finally:
        ColumnParallelLinear.forward = original


def head_step(model, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dE, dC) of the output layer alone, called the way the model calls it; rows outside the mask dropped."""
    from vpcce.parallel.megatron import VocabParallelCCEOutputLayer

    model.zero_grad()
    hidden = hidden.clone().requires_grad_()
    if isinstance(model.output_layer, VocabParallelCCEOutputLayer):
        model._vpcce.labels = labels
    logits, _ = model.output_layer(hidden)
    loss = model.compute_language_model_loss(labels, logits) * (labels >= 0)
    if isinstance(model.output_layer, VocabParallelCCEOutputLayer):
        model._vpcce.labels = None
    loss.sum().backward()
    return loss.detach(), hidden.grad, model.output_layer.weight.grad


def collectives_of_head(model, hidden: Tensor, labels: Tensor) -> list[tuple[str, int]]:
    with counted_collectives() as seen:
        head_step(model, hidden, labels)
    return seen


def has_option(name: str) -> bool:
    """Whether this megatron-core's TransformerConfig has a field of that name."""
    import dataclasses

    from megatron.core.transformer.transformer_config import TransformerConfig

    return name in {field.name for field in dataclasses.fields(TransformerConfig)}


def has_output_processor() -> bool:
    import inspect

    from megatron.core.models.gpt.gpt_model import GPTModel

    return "output_processor" in inspect.signature(GPTModel.forward).parameters


def hybrid(cfg, *, tied: bool = False, mtp_depths: int = 0):
    """HybridModel (MambaModel before 0.18) of attention layers; Mamba's own layers need CUDA kernels."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    torch.manual_seed(1234)
    common = dict(vocab_size=VOCAB, max_sequence_length=16, share_embeddings_and_output_weights=tied)
    layer = get_gpt_layer_local_spec()
    try:
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel
        from megatron.core.ssm import mamba_block
        from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

        mamba_block.TENorm = WrappedTorchNorm
        stack = ModuleSpec(module=MambaStack, submodules=MambaStackSubmodules(attention_layer=layer))
        return MambaModel(cfg, mamba_stack_spec=stack, hybrid_override_pattern="**", **common)
    hybrid_block.TENorm = WrappedTorchNorm  # the stack's last norm is hard-coded to Transformer Engine's
    submodules = HybridStackSubmodules(attention_layer=layer)
    if mtp_depths:
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.transformer import multi_token_prediction as mtp

        norm = LocalSpecProvider().layer_norm()
        depth = mtp.MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=LocalSpecProvider().column_parallel_linear(), mtp_model_layer=None,
            layer_norm=norm,
        )  # fmt: skip
        submodules.mtp_block_spec = ModuleSpec(
            module=mtp.MultiTokenPredictionBlock,
            submodules=mtp.MultiTokenPredictionBlockSubmodules(
                layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=depth)]
            ),
        )
    stack = ModuleSpec(module=HybridStack, submodules=submodules)
    return HybridModel(cfg, stack, hybrid_layer_pattern="**" + "/*" * mtp_depths, **common)


def t5(cfg, *, tied: bool):
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    torch.manual_seed(1234)
    encoder = get_t5_encoder_with_local_block_spec(cfg.num_layers)
    decoder = get_t5_decoder_with_local_block_spec(cfg.num_layers)
    settings = dict(vocab_size=VOCAB, max_sequence_length=16, share_embeddings_and_output_weights=tied)
    model = T5Model(cfg, cfg, encoder, decoder, **settings)
    return random_bias(model)


def bert(cfg, *, tied: bool):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    torch.manual_seed(1234)
    model = BertModel(
        cfg, 0, bert_layer_local_spec, vocab_size=VOCAB, max_sequence_length=16, add_binary_head=False,
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip
    return random_bias(model)


def random_bias(model):
    """Megatron starts biases at zero, where a forgotten one would go unnoticed."""
    if model.output_layer.bias is not None:
        torch.manual_seed(50 + torch.distributed.get_rank())
        model.output_layer.bias.data.normal_()
    return model


def llava(cfg):
    """A GPTModel inside LLaVA, for batches without images."""
    import copy

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal import llava_model

    llava_model.CLIPViTModel = lambda *args, **kwargs: torch.nn.Identity()  # never called
    torch.manual_seed(1234)
    language, vision = copy.copy(cfg), copy.copy(cfg)
    language.language_model_type, vision.vision_model_type = "gpt", "clip"
    layer = get_gpt_layer_local_spec()
    return llava_model.LLaVAModel(
        language, layer, VOCAB, 16, vision, layer, False, cfg, mlp_submodules(layer), img_h=28, img_w=28, patch_dim=14,
        language_position_embedding_type="rope",
    )  # fmt: skip


def mlp_submodules(layer):
    """The parts of a layer's MLP; a spec before 0.19, a partial function since."""
    mlp = layer.submodules.mlp
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]


def encoder_or_decoder():
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def context_parallel_part(arguments: dict[str, Tensor], cp: int) -> dict[str, Tensor]:
    """This rank's two pieces of the sequence, the first and the last of 2 * cp in turn, as Megatron deals them."""
    if cp == 1:
        return arguments
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    pieces = torch.arange(SEQ).chunk(2 * cp)
    index = torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]])
    part = {key: value[:, index] for key, value in arguments.items() if key != "attention_mask"}
    return part | dict(attention_mask=arguments["attention_mask"][..., index, :][..., index])


def inference_mode():
    """0.19 says explicitly that it infers; before, a context and eval mode said so."""
    try:
        from megatron.core.inference.utils import InferenceMode
    except ImportError:
        return contextlib.nullcontext()
    return InferenceMode.active()
