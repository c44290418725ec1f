"""Let megatron-core 0.16 to 0.19 build, train and checkpoint a GPTModel on CPU over gloo.

Megatron-core assumes CUDA in a handful of places that have nothing to do with the mathematics: it asks for the
current device to allocate a buffer, keeps dropout states per GPU, and waits for streams. `use_cpu()` answers those
questions with "cpu" and changes no arithmetic, so that one laptop can run the code that a cluster runs. It does
nothing where CUDA exists. What it replaces, and who asks:

    torch.cuda.current_device     rotary embedding, global memory buffer, DDP gradient buffers
    device="cuda" arguments       gradient clipping, the optimiser's overflow flags, dist_checkpointing's barriers
    torch.cuda.synchronize        pipeline schedules, checkpointing
    torch.cuda.*_stream           DDP's gradient reduction
    Tensor.cuda                   embeddings tied over pipeline stages
    CudaRNGStatesTracker.fork     dropout inside tensor-parallel regions: one CPU generator serves all
    clip_grad_by_total_norm_fp32  insists on the type name "torch.cuda.FloatTensor"
    WrappedTorchNorm              refuses sequence_parallel=True; what is missing is the flag that makes Megatron
                                  all-reduce the norm's gradients over the TP group, so the flag is set here

Not possible on CPU: Megatron's DistributedOptimizer and mixed-precision optimiser, fused (TE, Apex) kernels.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_device_mode: TorchFunctionMode | None = None


class _CudaMeansCpu(TorchFunctionMode):
    """Redirect factory calls such as torch.zeros(1, device="cuda") to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
    make = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = make(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _clip(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    if max_norm < total_norm + 1e-6:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / (total_norm + 1e-6))


def use_cpu() -> bool:
    """Apply the replacements once per process; True if this process now runs Megatron on CPU.

    Call it after `torch.distributed.init_process_group("gloo")` or before, but before a model is built.
    """
    global _device_mode
    if torch.cuda.is_available():
        return False
    if _device_mode is not None:
        return True

    from megatron.core.optimizer import optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm

    stream = SimpleNamespace(
        wait_stream=lambda other: None,
        wait_event=lambda event: None,
        record_event=lambda event=None: None,
        synchronize=lambda: None,
    )
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tracker: Any = random.CudaRNGStatesTracker
    tracker.fork = lambda self, name=None: contextlib.nullcontext()
    torch_norm.WrappedTorchNorm.__new__ = _norm
    optimizer.clip_grad_by_total_norm_fp32 = _clip
    _device_mode = _CudaMeansCpu()
    _device_mode.__enter__()
    return True
