"""Weights that are DTensors: the mesh and the placement say which rows a rank holds.

    placement of weight                       shard                                          its gradient
    Shard(0) on one mesh dimension            group of that dimension, rows as torch.chunk   DTensor, Shard(0)
    Replicate on every mesh dimension         none: each rank works on the whole             DTensor, Replicate
    anything else                             an error

Other dimensions of the mesh must replicate. `parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})` makes
such a weight, and FSDP2 on top of it hands it back inside the forward; the loss then takes no further argument:

    loss = vpcce.linear_cross_entropy(hidden, model.lm_head.weight, labels)

The gradient with respect to hidden is complete on every rank of the group, so a replicated hidden gets a replicated
gradient. Targets are plain tensors, the same on all ranks of the group.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .shard import VocabShard


def local_head(
    who: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, shard: VocabShard | None
) -> tuple[Tensor, Tensor, Tensor | None, VocabShard | None]:
    """(hidden, weight, bias, shard) as one rank holds them; autograd makes DTensors of their gradients again.

    Raises:
        ValueError: placements that split no rows, or of bias and hidden that do not fit weight's.
    """
    if isinstance(target, DTensor):
        raise ValueError(f"{who}: expected a target that is a plain tensor, got a DTensor: pass target.to_local()")
    if isinstance(weight, DTensor):
        derived = _shard_of(who, weight)
        if shard is None:
            shard = derived
        elif (shard.start, shard.stop) != (derived.start, derived.stop):
            raise ValueError(
                f"{who}: weight's placement gives this rank the rows [{derived.start}, {derived.stop}), "
                f"got a shard [{shard.start}, {shard.stop})"
            )
        else:  # it names a vocab_size below the padded one
            shard = VocabShard(derived.start, derived.stop, shard.vocab_size, derived.group, shard.check)
        if isinstance(bias, DTensor):
            if (bias.device_mesh, bias.placements) != (weight.device_mesh, weight.placements):
                raise ValueError(
                    f"{who}: expected a bias placed as the weight is, {weight.placements}, got {bias.placements}"
                )
            bias = bias.to_local()
        weight = weight.to_local()
    if isinstance(bias, DTensor):
        raise ValueError(f"{who}: bias is a DTensor and weight is not, expected both or none")
    if isinstance(hidden, DTensor):
        if not all(isinstance(placement, Replicate) for placement in hidden.placements):
            raise ValueError(
                f"{who}: expected a hidden that is replicated, or a plain tensor, got {hidden.placements}; "
                "pass hidden.to_local() with sequence_parallel=True where it is split by tokens"
            )
        hidden = hidden.to_local()
    return hidden, weight, bias, shard


def _shard_of(who: str, weight: DTensor) -> VocabShard:
    mesh, placements = weight.device_mesh, weight.placements
    dims = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    # FSDP2's strided shards are of another type; inside the forward it has gathered them.
    fits = all(type(placements[dim]) is Shard and placements[dim] == Shard(0) for dim in dims)
    if len(dims) > 1 or not fits:
        raise ValueError(
            f"{who}: expected a weight that is Shard(0) on one mesh dimension and Replicate on the others, "
            f"got {placements}"
        )
    vocab_size = weight.shape[0]
    if not dims:
        return VocabShard(0, vocab_size, vocab_size)
    shape, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    start = offset[0] if shape[0] else vocab_size
    return VocabShard(start, start + shape[0], vocab_size, mesh.get_group(dims[0]))
