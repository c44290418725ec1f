"""A Megatron GPTModel trained with one loss over two tensor-parallel ranks. Started by megatron_h200x2.py.

    torchrun --nproc-per-node 2 launch/bench/megatron_train.py --loss vpcce --vocabulary 131072 --out rows.jsonl

12 layers of width 2048, untied, bf16 with fp32 main gradients, sequence parallel, Megatron's distributed optimiser,
micro-batches of 2048 tokens a sequence. The text is the array of token ids that tokenise.py writes; without one, pairs
of bytes of Python's own sources stand for tokens. Attention is PyTorch's fused one, because Megatron's own needs
Transformer Engine, and without it stores the scores. Both losses see the same initial weights and the same batches.

`--loss megatron` is Megatron's fastest, `cross_entropy_loss_fusion` with the native implementation. vpcce adds dC to
main_grad; Megatron could do so only with Apex.

A row: losses of all steps, median step_ms after the first ten, peak_mb of the allocator, logits_mb of one copy of
the logits on a rank. `--grow` goes on with larger and larger micro-batches; where memory ends, a row has an `error`.
"""

import argparse
import json
import os
import statistics
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

LAYERS, WIDTH, HEADS, SEQUENCE = 12, 2048, 16, 2048


def norm(config, hidden_size: int, eps: float = 1e-5, **_):
    """Megatron's own norms need Apex or Transformer Engine under sequence parallelism; the flag is all they add."""
    module = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=device())
    module.weight.sequence_parallel = config.sequence_parallel
    return module


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def make_model(arguments, tp: int):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    class FusedAttention(DotProductAttention):
        def forward(self, query, key, value, *args, **kwargs):  # [s, b, heads, d]
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.permute(2, 0, 1, 3).flatten(2)

    torch_norm.WrappedTorchNorm.__new__ = lambda cls, *args, **kwargs: norm(*args, **kwargs)
    on_gpu = torch.cuda.is_available()
    config = TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.width,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=True,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        use_cpu_initialization=not on_gpu,
        cross_entropy_loss_fusion=arguments.loss == "megatron",
        cross_entropy_fusion_impl="native",
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    torch.manual_seed(1234)
    model = GPTModel(
        config,
        spec,
        vocab_size=arguments.vocabulary,
        max_sequence_length=arguments.sequence,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(device())
    if arguments.loss == "vpcce":
        from vpcce.parallel import megatron

        megatron.install(model, gradient_accumulation_fusion=True)
    return model


def wrap(model, arguments):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config, sharded = model.config, torch.cuda.is_available()  # the distributed optimiser does not run on CPU
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded),
        Float16Module(config, model) if config.bf16 else model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=arguments.learning_rate,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
        ),
        [ddp],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return ddp, optimizer


def tokens_of(arguments) -> np.ndarray:
    if arguments.corpus is not None:
        stored = np.load(arguments.corpus)
        ids = stored[stored.files[0]] if hasattr(stored, "files") else stored
        return ids.astype(np.int64) % arguments.vocabulary
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")))
    pairs = np.frombuffer(text[: len(text) // 2 * 2], dtype=np.uint16).astype(np.int64)
    return pairs % arguments.vocabulary


def train(arguments, record) -> None:
    from megatron.core import parallel_state

    tp = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1234)
    ddp, optimizer = wrap(make_model(arguments, tp), arguments)
    tokens = tokens_of(arguments)
    measurements = [("train", arguments.micro_batch, arguments.steps), *(("grow", size, 3) for size in arguments.grow)]
    for arguments.part, size, n_steps in measurements:
        steps(arguments, ddp, optimizer, tokens, size, n_steps, partial(record, part=arguments.part))


def steps(arguments, ddp, optimizer, tokens, size: int, n_steps: int, record) -> None:
    """Trains with micro-batches of `size` sequences and records one row."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    length, tp = arguments.sequence, dist.get_world_size()
    starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, (n_steps, size))
    positions = torch.arange(length, device=device()).expand(size, length)

    def forward(batch, model):
        ids = batch.to(device())
        return model(ids[:, :-1], positions, None, labels=ids[:, 1:].contiguous()), mean

    def mean(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    losses, seconds = [], []
    for step in range(n_steps):
        if step == 2 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        rate = arguments.learning_rate * min(1.0, (step + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts[step]]))
        synchronize()
        began = time.perf_counter()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        done = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=batch, model=[ddp], num_microbatches=1, seq_length=length,
            micro_batch_size=size, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(done[0]["loss"].item())
    bytes_each = 2 if torch.cuda.is_available() else 4
    record(
        micro_batch=size,
        losses=[round(loss, 5) for loss in losses],
        step_ms=statistics.median(seconds[10:] or seconds) * 1e3,
        tokens_per_second=size * length / statistics.median(seconds[10:] or seconds),
        peak_mb=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        logits_mb=size * length * arguments.vocabulary // tp * bytes_each / 2**20,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loss", choices=["vpcce", "megatron"], required=True)
    parser.add_argument("--corpus", type=Path, help="written by tokenise.py")
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--grow", type=int, nargs="*", default=[], help="then micro-batches of three steps, a row each")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    from megatron_cpu import use_cpu

    use_cpu()

    def record(**values) -> None:
        row = dict(
            part=arguments.part, loss=arguments.loss, vocabulary=arguments.vocabulary, sequence=arguments.sequence,
            steps=arguments.steps, layers=arguments.layers, width=arguments.width,
            corpus=arguments.corpus.name if arguments.corpus else "byte pairs of the standard library",
        )  # fmt: skip
        with arguments.out.open("a") as f:
            f.write(json.dumps(row | values) + "\n")

    try:
        train(arguments, lambda **values: record(**values) if dist.get_rank() == 0 else None)
    except torch.OutOfMemoryError as error:
        record(error=f"OutOfMemoryError on rank {dist.get_rank()}: {error}"[:200])
        os._exit(3)  # the other rank waits in a collective; torchrun ends it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
