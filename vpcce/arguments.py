"""From what a user passes to what the operators take: checked, flattened, one dtype under autocast.

Every error names the function that was called, what it expected and what came. A rank that refuses its arguments
tells the ranks that compare theirs with it, see `vpcce.parallel.agreement`.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vpcce.lora import LoRA, check_lora
from vpcce.parallel import agreement, collectives
from vpcce.parallel.shard import VocabShard
from vpcce.policy import exact, resolve
from vpcce.settings import Settings

MAX_IDS_PER_TOKEN = 64
MAX_TOPK = 64
REDUCTIONS = ("mean", "sum", "none")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of one call, flattened to two dimensions."""

    hidden: Tensor  # [N, D] or [N / T, D]
    weight: Tensor  # [V_local, D]
    target: Tensor  # [N] int64, or [N, K]
    bias: Tensor | None
    scale: Tensor | None  # 0-dim, when logit_scale was passed as a tensor
    class_weight: Tensor | None  # [vocab_size], in the dtype of the statistics
    logit_scale: float
    softcap: float | None
    main_grad: Tensor | None
    lora: LoRA | None
    shape: torch.Size  # of the target the user passed, less a last dimension of K: that of every per-token result
    settings: Settings


def prepare(
    who: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None,
    shard: VocabShard | None,
    ignore_index: int | None,
    softcap: float | None,
    logit_scale: float | Tensor,
    backward,
    sequence_parallel: bool,
    entropy: bool = False,
    argmax: bool = False,
    topk: int | None = None,
    logit_sum: bool = False,
    class_weight: Tensor | None = None,
    several_ids: bool = False,
    main_grad: Tensor | None = None,
    reduce_hidden_grad: bool = True,
    lora: LoRA | None = None,
    upstream: str = "",
    refused: Exception | None = None,
) -> Arguments:
    """Checks the arguments of `who` and returns them as the operators want them.

    `upstream` is what the caller does with the statistics, for the comparison over ranks; `refused` is an error that it
    has found itself and that the other ranks must hear of too.

    With `several_ids`, a target with one dimension more than the tokens holds K ids for each of them.
    """
    hidden, weight, bias, shard = without_dtensors(who, hidden, weight, target, bias, shard)
    if shard is not None and not isinstance(shard, VocabShard):
        raise TypeError(f"{who}: shard must be a vpcce.VocabShard, got {type(shard).__name__}")
    group = None if shard is None else group_of(who, shard)
    try:
        if isinstance(refused, TypeError | ValueError):
            raise refused
        _check_tensors(who, hidden, weight, target, bias)
        if shard is None:
            shard = VocabShard(0, weight.shape[0], weight.shape[0])
        ranks = collectives.size(group) if sequence_parallel else 1
        per_token = _ids_per_token(who, hidden, target, ranks) if several_ids else None
        tokens = target if per_token is None else target[..., 0]
        _check_sizes(who, hidden, weight, tokens, bias, shard, collectives.size(group), sequence_parallel)
        check_options(who, ignore_index, softcap, logit_scale)
        _check_topk(who, topk, shard.vocab_size)
        if isinstance(logit_scale, Tensor) and logit_scale.device != weight.device:
            raise ValueError(f"{who}: logit_scale is on {logit_scale.device}, expected weight's {weight.device}")
        _check_main_grad(who, main_grad, weight)
        check_lora(who, lora, hidden, weight, main_grad, FLOATS)
        _check_class_weight(who, class_weight, shard.vocab_size, hidden.device)
        policies = resolve(who, backward, hidden.dtype, hidden.device, shard.vocab_size)
        if per_token is not None:
            policies = exact(), exact()
        if refused is not None:  # something that the checks above say more clearly, if they see it
            raise refused
    except Exception as error:
        if shard is not None and not torch.compiler.is_compiling():
            agreement.report_failure(group, shard.check, error)
        raise
    if torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in (hidden.dtype, weight.dtype):
        compute = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(compute), weight.to(compute)
    hidden_grad, weight_grad, bias_grad, scale_grad, *lora_grads = (
        isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled()
        for t in (hidden, weight, bias, logit_scale, *(() if lora is None else (lora.a, lora.b)))
    )
    wants_grad = hidden_grad or weight_grad or bias_grad or scale_grad or any(lora_grads)
    settings = Settings(
        who=who,
        start=shard.start,
        stop=shard.stop,
        vocab_size=shard.vocab_size,
        group=group.group_name if group is not None else "",
        check=shard.check,
        sequence_parallel=sequence_parallel and group is not None,
        ignore_index=ignore_index,
        entropy=entropy,
        argmax=argmax,
        topk=topk or 0,
        logit_sum=logit_sum,
        marks=wants_grad and any(policy.kind != "exact" for policy in policies),
        hidden_grad=hidden_grad,
        scale_grad=scale_grad,
        lora_grad=any(lora_grads[:1]),
        gathers_again=wants_grad and sequence_parallel and group is not None,
        reduce_hidden_grad=reduce_hidden_grad,
        upstream=upstream,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        hidden_policy=policies[0].text,
        weight_policy=policies[1].text,
    )
    return Arguments(
        hidden=hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        target=_flat(target, per_token).to(torch.int64).contiguous(),
        bias=None if bias is None else bias.contiguous(),
        scale=logit_scale if isinstance(logit_scale, Tensor) else None,
        class_weight=None
        if class_weight is None
        else class_weight.detach().to(_stats_dtype(hidden, weight)).contiguous(),
        logit_scale=1.0 if isinstance(logit_scale, Tensor) else logit_scale,
        softcap=softcap,
        main_grad=main_grad,
        lora=lora if lora is None else lora._replace(scale=float(lora.scale)),
        shape=tokens.shape,
        settings=settings,
    )


def _flat(target: Tensor, per_token: int | None) -> Tensor:
    """[N], or [N, K]; a target that has that shape is handed on as it is, since a view takes host time too."""
    if target.dim() == (1 if per_token is None else 2):
        return target
    return target.reshape(-1) if per_token is None else target.reshape(-1, per_token)


def without_dtensors(who: str, hidden, weight, target, bias, shard: VocabShard | None):
    """(hidden, weight, bias, shard) where DTensors have become this rank's tensors and their shard."""
    if not any(hasattr(tensor, "device_mesh") for tensor in (hidden, weight, target, bias)):
        return hidden, weight, bias, shard
    from vpcce.parallel.dtensor import local_head  # takes half a second to import

    return local_head(who, hidden, weight, target, bias, shard)


def _check_tensors(who: str, hidden, weight, target, bias) -> None:
    named = {"hidden": hidden, "weight": weight, "target": target}
    if bias is not None:
        named["bias"] = bias
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a torch.Tensor, got {type(value).__name__}")
        if value.device != hidden.device:
            raise ValueError(f"{who}: {name} is on {value.device}, expected hidden's device {hidden.device}")
        if value.layout != torch.strided or value.is_nested:
            layout = "a nested tensor" if value.is_nested else value.layout
            raise TypeError(f"{who}: {name} must be a dense tensor, got {layout}")
        if name != "target" and value.dtype not in FLOATS:
            raise TypeError(f"{who}: {name} must be bfloat16, float16, float32 or float64, got {value.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{who}: target must hold int64 or int32 vocabulary ids, got {target.dtype}")
    if hidden.device.type == "meta":
        raise ValueError(f"{who}: expected tensors with data, got hidden on meta")
    if hidden.device.type == "cuda" and torch.float64 in (hidden.dtype, weight.dtype):
        raise TypeError(
            f"{who}: float64 is supported on the CPU only, got hidden {hidden.dtype}, weight {weight.dtype}"
        )
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{who}: expected hidden [..., D] and weight [V_local, D], got {_shape(hidden)} and {_shape(weight)}"
        )
    if hidden.shape[-1] == 0:
        raise ValueError(f"{who}: expected D of at least 1, got a hidden of {_shape(hidden)}")


def _ids_per_token(who: str, hidden: Tensor, target: Tensor, ranks: int) -> int | None:
    """K of a target [..., K], None where there is one id per token. hidden holds 1 / ranks of the tokens."""
    n_tokens = hidden.shape[:-1].numel() * ranks
    if target.dim() != hidden.dim() or target.shape[:-1].numel() != n_tokens:
        return None
    if ranks == 1 and target.shape[:-1] != hidden.shape[:-1]:
        return None
    if not 1 <= target.shape[-1] <= MAX_IDS_PER_TOKEN:
        raise ValueError(f"{who}: expected 1 to {MAX_IDS_PER_TOKEN} ids per token, got a target of {_shape(target)}")
    return target.shape[-1]


def _check_sizes(who, hidden, weight, target, bias, shard: VocabShard, ranks: int, sequence_parallel: bool) -> None:
    n_tokens = hidden.shape[:-1].numel()
    expected = n_tokens * (ranks if sequence_parallel else 1)
    if target.numel() != expected:
        held = f" on each of {ranks} ranks (sequence_parallel)" if sequence_parallel else ""
        raise ValueError(
            f"{who}: hidden {_shape(hidden)} holds {n_tokens} tokens{held}, "
            f"expected a target of {expected} ids, got {_shape(target)}"
        )
    leading = list(hidden.shape[:-1])
    if sequence_parallel and leading:
        leading[0] *= ranks
    if list(target.shape) != leading and target.dim() != 1:
        gathered = ", the first one over all ranks" if sequence_parallel else ""
        raise ValueError(
            f"{who}: expected a target of shape {leading} (hidden's leading dimensions{gathered}) "
            f"or a flat one, got {_shape(target)}"
        )
    if weight.shape[0] != shard.n_rows:
        raise ValueError(
            f"{who}: shard [{shard.start}, {shard.stop}) owns {shard.n_rows} rows, "
            f"got a weight of {weight.shape[0]} rows"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{who}: expected a bias of shape [{weight.shape[0]}], got {_shape(bias)}")


def check_options(who: str, ignore_index, softcap, logit_scale) -> None:
    """Options of the logits and the target, as far as they can be judged without the tensors."""
    if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
        raise TypeError(f"{who}: ignore_index must be an int or None, got {type(ignore_index).__name__}")
    if ignore_index is not None and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"{who}: ignore_index must fit into int64, got {ignore_index}")
    if softcap is not None:
        _check_number(who, "softcap", softcap, "a float or None")
        if not 1e-30 <= softcap <= 1e30:  # kernels divide by it in fp32
            raise ValueError(f"{who}: softcap must lie between 1e-30 and 1e30, or be None, got {softcap}")
    if isinstance(logit_scale, Tensor):
        if logit_scale.dim() != 0 or logit_scale.dtype not in FLOATS:
            raise ValueError(
                f"{who}: logit_scale must be a float or a 0-dim tensor of floats, "
                f"got shape {_shape(logit_scale)} of {logit_scale.dtype}"
            )
    else:
        _check_number(who, "logit_scale", logit_scale, "a float or a 0-dim tensor")
        if not -math.inf < logit_scale < math.inf:
            raise ValueError(f"{who}: logit_scale must be finite, got {logit_scale}")


def _check_topk(who: str, k, vocab_size: int) -> None:
    if k is None:
        return
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"{who}: k must be an int, got {type(k).__name__}")
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"{who}: expected 1 <= k <= {MAX_TOPK}, got {k}")
    if k > vocab_size:
        raise ValueError(f"{who}: expected k of at most the vocabulary's {vocab_size} ids, got {k}")


def check_loss_options(who: str, reduction, label_smoothing=0.0, z_loss=0.0) -> None:
    """What a loss does with the statistics."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{who}: reduction must be one of {REDUCTIONS}, got {reduction!r}")
    _check_number(who, "label_smoothing", label_smoothing, "a float")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{who}: label_smoothing must be in [0, 1], got {label_smoothing}")
    _check_number(who, "z_loss", z_loss, "a float")
    if not -math.inf < z_loss < math.inf:
        raise ValueError(f"{who}: z_loss must be finite, got {z_loss}")


def _check_number(who: str, name: str, value, expected: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be {expected}, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > 2**1000:
        raise ValueError(f"{who}: {name} must be {expected}, got an int of {value.bit_length()} bits")


def _check_main_grad(who: str, main_grad, weight: Tensor) -> None:
    if main_grad is None:
        return
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"{who}: main_grad must be a torch.Tensor, got {type(main_grad).__name__}")
    if main_grad.shape != weight.shape or main_grad.device != weight.device or not main_grad.is_contiguous():
        raise ValueError(
            f"{who}: expected a contiguous main_grad of shape {_shape(weight)} on {weight.device}, "
            f"got {_shape(main_grad)} on {main_grad.device}, strides {list(main_grad.stride())}"
        )
    if main_grad.dtype not in (torch.float32, torch.bfloat16, weight.dtype):
        raise TypeError(f"{who}: main_grad must be float32, bfloat16 or weight's {weight.dtype}, got {main_grad.dtype}")
    if not torch.compiler.is_compiling() and main_grad.numel() and main_grad.data_ptr() == weight.data_ptr():
        raise ValueError(f"{who}: main_grad must have memory of its own, got weight's")


def _check_class_weight(who: str, class_weight, vocab_size: int, device: torch.device) -> None:
    if class_weight is None:
        return
    if not isinstance(class_weight, Tensor) or class_weight.dtype not in FLOATS:
        got = class_weight.dtype if isinstance(class_weight, Tensor) else type(class_weight).__name__
        raise TypeError(f"{who}: class_weight must be a tensor of floats, got {got}")
    if class_weight.shape != (vocab_size,) or class_weight.device != device:
        raise ValueError(
            f"{who}: expected a class_weight of shape [{vocab_size}] (the whole vocabulary) on {device}, "
            f"got {_shape(class_weight)} on {class_weight.device}"
        )


def _stats_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def group_of(who: str, shard: VocabShard) -> dist.ProcessGroup | None:
    """The group whose ranks must be asked, or None where this rank owns the whole vocabulary."""
    if shard.group is None and shard.is_whole:
        return None
    if not dist.is_initialized():
        raise ValueError(
            f"{who}: shard [{shard.start}, {shard.stop}) is a part of a vocabulary of {shard.vocab_size}, expected an "
            "initialised process group, got none (call torch.distributed.init_process_group first)"
        )
    group = shard.group if shard.group is not None else dist.group.WORLD
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise ValueError(f"{who}: the calling rank is not a member of the shard's group")
    if ranks == 1:
        if not shard.is_whole:
            raise ValueError(
                f"{who}: the group has one rank, expected its shard to be [0, {shard.vocab_size}), "
                f"got [{shard.start}, {shard.stop})"
            )
        return None
    return group


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
