"""Megatron models on one GPU: the kernels under Megatron's dtypes, and the head inside a CUDA graph.

Run by hand: `pytest -m gpu tests/test_megatron_gpu.py`; needs megatron-core, not Transformer Engine or Apex.
"""

import pytest

pytest.importorskip("megatron.core")

import megatron_models as models
import torch
from spawn import run_ranks

import vpcce
from vpcce.parallel import megatron

pytestmark = [pytest.mark.gpu, pytest.mark.megatron]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

VOCAB = 16384


def _model(options: dict | None, **changes):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    models.start(1)
    model_parallel_cuda_manual_seed(1)
    cfg = models.config(hidden_size=256, ffn_hidden_size=512, params_dtype=torch.bfloat16, bf16=True, **changes)
    model = models.gpt(cfg, vocab=VOCAB).cuda()
    return model if options is None else megatron.install(model, **options)


def _batch() -> dict:
    return {key: value.cuda() for key, value in models.batch(vocab=VOCAB).items()}


def _bf16(rank: int, policy: str):
    torch.cuda.set_device(0)
    backward = {"auto": "auto", "exact": vpcce.exact()}[policy]
    native, ours = _model(None), _model(dict(backward=backward))
    (our_loss, our_grads), (loss, grads) = (models.step(model, _batch()) for model in (ours, native))
    torch.testing.assert_close(our_loss, loss, rtol=2e-2, atol=2e-2)  # Megatron rounds the logits to bf16
    for name, gradient in grads.items():
        error = (our_grads[name] - gradient).float().norm() / gradient.float().norm()
        assert error < 3e-2, f"{name}: {error:.3f}"


@pytest.mark.parametrize("policy", ["exact", "auto"])
def test_bf16_step(policy):
    run_ranks(1, _bf16, policy)


def _graph(rank: int):
    """Forward and backward of layer and loss, captured once and replayed on new hidden states and labels."""
    torch.cuda.set_device(0)
    model = _model(dict(backward=vpcce.exact(), gradient_accumulation_fusion=True))
    weight = model.output_layer.weight
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    weight.grad_added_to_main_grad = False
    labels = _batch()["labels"]
    hidden = torch.randn(models.SEQ, models.BATCH, 256, device="cuda", dtype=torch.bfloat16)

    def step(inputs, ids):
        return models.head_step(model, inputs, ids)[:2]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(hidden, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad = step(hidden, labels)
    for seed in (1, 2):
        torch.manual_seed(seed)
        hidden.copy_(torch.randn_like(hidden))
        labels.copy_(torch.randint_like(labels, VOCAB))
        weight.main_grad.zero_()
        graph.replay()
        replayed = loss.clone(), grad.clone(), weight.main_grad.clone()
        weight.main_grad.zero_()
        eager = step(hidden, labels)
        torch.testing.assert_close(replayed, (*eager, weight.main_grad), rtol=1e-5, atol=1e-5)


def test_cuda_graph_of_the_head():
    run_ranks(1, _graph)
