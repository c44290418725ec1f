"""DTensor weights on 1, 2 and 3 gloo ranks: shards, gradients and errors, and torch's own tensor parallelism."""

import pytest
import torch
import truth
from spawn import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import vpcce

V = 61  # 3 ranks hold 21, 21 and 19 rows


def placed(rank, world, placement, replicated_hidden):
    mesh = init_device_mesh("cpu", (world,))
    hidden, weight, bias, target = truth.problem(24, V, 6, bias=True, ignored=0.2)
    w, b = (distribute_tensor(t.detach(), mesh, [placement]).requires_grad_() for t in (weight, bias))
    e = hidden.detach().requires_grad_()
    if replicated_hidden:
        e = DTensor.from_local(hidden.detach(), mesh, [Replicate()]).requires_grad_()
    loss = vpcce.linear_cross_entropy(e, w, target, bias=b, label_smoothing=0.1)
    loss.backward()
    assert isinstance(w.grad, DTensor) and w.grad.placements == w.placements
    top = vpcce.linear_topk(e, w, 5, bias=b)
    d_hidden = e.grad.full_tensor() if replicated_hidden else e.grad
    return [t.detach().numpy() for t in (loss, d_hidden, w.grad.full_tensor(), b.grad.full_tensor(), top.ids)]


@pytest.mark.parametrize(
    "world, placement, replicated_hidden",
    [(3, Shard(0), False), (2, Shard(0), True), (1, Shard(0), False), (2, Replicate(), False)],
)
def test_placements(world, placement, replicated_hidden):
    hidden, weight, bias, target = truth.problem(24, V, 6, bias=True, ignored=0.2)
    plain = truth.cross_entropy(hidden, weight, target, bias=bias, label_smoothing=0.1)
    expected = (plain.detach(), *torch.autograd.grad(plain, (hidden, weight, bias)))
    ids = truth.logits_of(hidden, weight, bias).topk(5).indices
    for output in run_ranks(world, placed, world, placement, replicated_hidden):
        for ours, theirs in zip(output, (*expected, ids), strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs)


def tensor_parallel(rank, world):
    """A head on the second dimension of a mesh, sharded by torch's own style, with a padded vocabulary."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    hidden, weight, bias, target = truth.problem(24, 64, 6, bias=True)
    target %= V
    head = nn.Linear(6, 64, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    parallelize_module(head, mesh["tp"], ColwiseParallel())
    rows = 64 // world
    shard = vpcce.VocabShard(rank * rows, (rank + 1) * rows, V)
    loss = vpcce.linear_cross_entropy(hidden, head.weight, target, bias=head.bias, shard=shard)
    loss.backward()
    return [t.detach().numpy() for t in (loss, hidden.grad, head.weight.grad.full_tensor())]


def test_a_head_that_torch_made_parallel():
    hidden, weight, bias, target = truth.problem(24, 64, 6, bias=True)
    plain = truth.cross_entropy(hidden, weight[:V], target % V, bias=bias[:V])
    expected = (plain.detach(), *torch.autograd.grad(plain, (hidden, weight)))
    for output in run_ranks(2, tensor_parallel, 2):
        for ours, theirs in zip(output, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs)


class Head(nn.Linear):
    def forward(self, hidden, target):
        return vpcce.linear_cross_entropy(hidden, self.weight, target, bias=self.bias)


def fully_sharded(rank, world):
    """2 x 2 ranks: the vocabulary over "tp", every shard over "dp" once more, gathered by FSDP2 for the call."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hidden, weight, bias, target = truth.problem(24, 64, 6, bias=True)
    head = Head(6, 64, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    parallelize_module(head, mesh["tp"], ColwiseParallel(use_local_output=False))
    head._forward_pre_hooks.clear()  # the style's hooks place inputs and outputs of a linear layer
    head._forward_hooks.clear()
    fully_shard(head, mesh=mesh["dp"])
    half = slice(12 * mesh["dp"].get_local_rank(), 12 * (mesh["dp"].get_local_rank() + 1))
    e = hidden[half].detach().requires_grad_()
    loss = head(e, target[half])
    loss.backward()
    return [t.detach().numpy() for t in (loss, e.grad, head.weight.grad.full_tensor(), head.bias.grad.full_tensor())]


def test_a_head_that_fsdp2_gathers():
    hidden, weight, bias, target = truth.problem(24, 64, 6, bias=True)
    halves = [truth.cross_entropy(hidden[h], weight, target[h], bias=bias) for h in (slice(0, 12), slice(12, 24))]
    mean = sum(halves) / 2  # FSDP2 takes the mean over replicas
    expected = torch.autograd.grad(mean, (hidden, weight, bias))
    outputs = run_ranks(4, fully_sharded, 4)
    for rank, (loss, d_hidden, *others) in enumerate(outputs):
        half = rank // 2
        torch.testing.assert_close(torch.from_numpy(loss), halves[half].detach())
        torch.testing.assert_close(torch.from_numpy(d_hidden), 2 * expected[0][12 * half : 12 * half + 12])
        for ours, theirs in zip(others, expected[1:], strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs)


def refused(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (world, 1))
    hidden, weight, target = torch.randn(6, 4), torch.randn(10, 4), torch.arange(6)
    rows = distribute_tensor(weight, mesh, [Shard(0)])
    calls = [
        (hidden, distribute_tensor(weight, mesh, [Shard(1)]), target, {}),
        (hidden, distribute_tensor(weight, square, [Shard(0), Shard(0)]), target, {}),
        (hidden, rows, target, dict(bias=distribute_tensor(torch.ones(10), mesh, [Replicate()]))),
        (hidden, rows, target, dict(shard=vpcce.VocabShard(0, 3, 10))),
        (hidden, rows, distribute_tensor(target, mesh, [Replicate()]), {}),
        (distribute_tensor(hidden, mesh, [Shard(0)]), rows, target, {}),
    ]
    messages = []
    for e, w, x, options in calls:
        with pytest.raises(ValueError) as caught:
            vpcce.linear_cross_entropy(e, w, x, **options)
        messages.append(str(caught.value))
    return messages


def test_messages():
    expected = [
        "expected a weight that is Shard(0) on one mesh dimension and Replicate on the others, got (Shard(dim=1),)",
        "expected a weight that is Shard(0) on one mesh dimension and Replicate on the others, got (Shard(dim=0), S",
        "expected a bias placed as the weight is, (Shard(dim=0),), got (Replicate(),)",
        "weight's placement gives this rank the rows [",
        "expected a target that is a plain tensor, got a DTensor",
        "expected a hidden that is replicated, or a plain tensor, got (Shard(dim=0),)",
    ]
    for messages in run_ranks(2, refused, 2):
        for message, part in zip(messages, expected, strict=True):
            assert part in message and message.startswith("linear_cross_entropy: ")
