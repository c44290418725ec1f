"""Several gloo ranks: results equal one rank's, ranks agree bitwise, collectives are counted, faults are errors."""

import copy
import dataclasses
import datetime
import pickle
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import truth
from spawn import run_ranks
from torch.distributed.distributed_c10d import _get_default_store

import vpcce
from vpcce.parallel import agreement, collectives

OPTIONS = dict(softcap=20.0, logit_scale=0.7, label_smoothing=0.1, z_loss=1e-3)


def uneven(rank: int, world: int, v: int) -> vpcce.VocabShard:
    """Shards of 1, 2, 3, ... parts of the vocabulary, the last one takes what is left."""
    parts = world * (world + 1) // 2
    edges = [v * (r * (r + 1) // 2) // parts for r in range(world + 1)]
    return vpcce.VocabShard(edges[rank], edges[rank + 1], v)


def sharded_loss(rank, world, v, sequence_parallel, options, even, dtype=torch.float64):
    hidden, weight, bias, target = truth.problem(24, v, 6, dtype, bias=True, ignored=0.2)
    shard = vpcce.VocabShard.split(v) if even else uneven(rank, world, v)
    rows = slice(shard.start, shard.stop)
    mine = hidden.detach()
    if sequence_parallel:
        mine = mine.view(world, -1, 6)[rank]
    leaves = [t.clone().requires_grad_() for t in (mine, weight.detach()[rows], bias.detach()[rows])]
    if rank == world - 1:
        time.sleep(0.3)  # a late rank must change nothing
    loss = vpcce.linear_cross_entropy(
        leaves[0],
        leaves[1],
        target,
        bias=leaves[2],
        shard=shard,
        sequence_parallel=sequence_parallel,
        **options,
    )
    grads = torch.autograd.grad(loss, leaves)
    stats = vpcce.linear_stats(
        leaves[0], leaves[1], target, bias=leaves[2], shard=shard, sequence_parallel=sequence_parallel, entropy=True,
        argmax=True,
    )  # fmt: skip
    return [t.detach().numpy() for t in (loss, *grads, stats.lse, stats.entropy, stats.argmax)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "world, v, even", [(2, 128, True), (4, 505, True), (3, 100, False), (4, 3, True), (2, 1, True)]
)
def test_equals_one_rank(world, v, even, sequence_parallel):
    """505 ids on 4 ranks are uneven; 3 ids leave the last of 4 ranks with none, 1 id the last of 2."""
    outputs = run_ranks(world, sharded_loss, world, v, sequence_parallel, OPTIONS, even)
    outputs = [[torch.from_numpy(t) for t in rank] for rank in outputs]
    hidden, weight, bias, target = truth.problem(24, v, 6, bias=True, ignored=0.2)
    plain = truth.cross_entropy(hidden, weight, target, bias=bias, **OPTIONS)
    d_hidden, d_weight, d_bias = torch.autograd.grad(plain, (hidden, weight, bias))
    x = truth.logits_of(hidden, weight, bias)
    kept = target >= 0
    for rank, (loss, e, c, b, lse, entropy, argmax) in enumerate(outputs):
        torch.testing.assert_close(loss, plain.detach())
        shard = uneven(rank, world, v)
        if even:
            width = -(-v // world)
            shard = slice(min(rank * width, v), min((rank + 1) * width, v))
        else:
            shard = slice(shard.start, shard.stop)
        torch.testing.assert_close(c, d_weight[shard])
        torch.testing.assert_close(b, d_bias[shard])
        mine = d_hidden.view(world, -1, 6)[rank] if sequence_parallel else d_hidden
        torch.testing.assert_close(e, mine)
        torch.testing.assert_close(lse[kept], x.logsumexp(-1)[kept])
        torch.testing.assert_close(entropy[kept], torch.distributions.Categorical(logits=x).entropy()[kept])
        assert torch.equal(argmax[kept], x.argmax(-1)[kept])
        for ours, first in zip((loss, lse, entropy, argmax), [outputs[0][i] for i in (0, 4, 5, 6)], strict=True):
            assert torch.equal(ours, first)  # bitwise: every rank merges the same numbers in the same order
        if not sequence_parallel:
            assert torch.equal(e, outputs[0][1])  # bitwise: one all-reduce


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_size_changes_nothing_beyond_rounding(dtype, common):
    """dE is a sum of parts in hidden's dtype: no further from the truth than PyTorch's own products of parts."""
    hidden, weight, target = shared_direction(dtype, common)
    x = hidden.double() @ weight.double().T
    g = (x.softmax(-1) - torch.nn.functional.one_hot(target, 512)) / len(target)
    d_hidden = g @ weight.double()
    losses = []
    for world in (1, 2, 4):
        loss, ours = map(torch.from_numpy, run_ranks(world, loss_and_hidden_grad, world, dtype, common)[0])
        losses.append(loss)
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0.0)
        parts = zip(g.to(dtype).split(512 // world, 1), weight.split(512 // world), strict=True)
        plain = sum((a @ b for a, b in parts), torch.zeros((), dtype=dtype))
        error = (ours.double() - d_hidden).norm() / d_hidden.norm()
        assert error <= 1.1 * (plain.double() - d_hidden).norm() / d_hidden.norm() + 1e-6, (world, error)


def shared_direction(dtype, common):
    hidden, weight, _, target = truth.problem(24, 512, 16, dtype)
    weight = weight.detach().float()
    return hidden, (weight + common * weight.std() * weight[0] / weight[0].norm()).to(dtype), target


def loss_and_hidden_grad(rank, world, dtype, common):
    hidden, weight, target = shared_direction(dtype, common)
    shard = vpcce.VocabShard.split(512)
    part = weight.detach()[shard.start : shard.stop].requires_grad_()
    loss = vpcce.linear_cross_entropy(hidden, part, target, shard=shard)
    return [loss.detach().numpy(), torch.autograd.grad(loss, hidden)[0].float().numpy()]


def learned_scale(rank, world):
    hidden, weight, bias, target = truth.problem(24, 60, 6, bias=True)
    shard = vpcce.VocabShard.split(60)
    rows = slice(shard.start, shard.stop)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    results = []
    for sequence_parallel in (False, True):
        mine = hidden.detach().view(world, -1, 6)[rank] if sequence_parallel else hidden.detach()
        loss = vpcce.linear_cross_entropy(
            mine, weight.detach()[rows], target, bias=bias.detach()[rows], shard=shard, logit_scale=scale,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        results.append(torch.autograd.grad(loss, scale)[0].item())
    return results


def test_learned_scale_has_the_whole_gradient_on_every_rank():
    hidden, weight, bias, target = truth.problem(24, 60, 6, bias=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(truth.cross_entropy(hidden, weight, target, bias=bias, logit_scale=scale), scale)
    for results in run_ranks(2, learned_scale, 2):
        assert results == pytest.approx([expected.item()] * 2)


def count_collectives(rank, world, sequence_parallel, frozen, check):
    hidden, weight, _, target = truth.problem(24, 64, 6)
    shard = dataclasses.replace(vpcce.VocabShard.split(64), check=check)
    part = weight.detach()[shard.start : shard.stop].requires_grad_(not (frozen and rank == 0))
    mine = hidden.detach().view(world, -1, 6)[rank] if sequence_parallel else hidden.detach()
    mine = mine.clone().requires_grad_()
    names = ["_all_gather", "_reduce_scatter"]
    calls: list[str] = []

    def counting(name, inner):
        def call(*args, **kwargs):
            calls.append(name)
            return inner(*args, **kwargs)

        return call

    vpcce.linear_cross_entropy(mine, part, target, shard=shard, sequence_parallel=sequence_parallel)  # ranks agree once
    with mock.patch.multiple(collectives, **{n: counting(n, getattr(collectives, n)) for n in names}):
        with mock.patch.object(dist, "all_reduce", counting("all_reduce", dist.all_reduce)):
            loss = vpcce.linear_cross_entropy(mine, part, target, shard=shard, sequence_parallel=sequence_parallel)
            forward, calls[:] = list(calls), []
            loss.backward()
    assert part.grad is None or part.requires_grad
    return forward, calls


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("frozen", [False, True], ids=["all train", "weight frozen on rank 0"])
def test_number_of_collectives(frozen, check):
    """A rank whose weight is frozen takes part in the same ones, or the others would hang; the comparison adds one."""
    compared = ["_all_gather"] if check else []
    for forward, backward in run_ranks(2, count_collectives, 2, False, frozen, check):
        assert (forward, backward) == ([*compared, "_all_gather"], ["all_reduce"])
    for forward, backward in run_ranks(2, count_collectives, 2, True, frozen, check):
        assert (forward, backward) == ([*compared, *["_all_gather"] * 2], ["_all_gather", "_reduce_scatter"])


def unreduced(rank, world):
    hidden, weight, _, target = truth.problem(24, 64, 6)
    shard = vpcce.VocabShard.split(64)
    part = weight.detach()[shard.start : shard.stop]
    loss = vpcce.linear_cross_entropy(hidden, part, target, shard=shard, reduce_hidden_grad=False)
    return torch.autograd.grad(loss, hidden)[0].numpy()


def test_hidden_grad_can_be_left_to_the_caller():
    hidden, weight, _, target = truth.problem(24, 64, 6)
    (expected,) = torch.autograd.grad(truth.cross_entropy(hidden, weight, target), hidden)
    torch.testing.assert_close(torch.from_numpy(sum(run_ranks(2, unreduced, 2))), expected)


def disagree(rank, world, fault):
    n, v, d = 8, 64, 6
    hidden, weight, target = torch.randn(n, d), torch.randn(v // world, d), torch.zeros(n, dtype=torch.int64)
    shard = vpcce.VocabShard.split(v)
    options: dict = {}
    if rank == 1:
        if fault == "tokens":
            hidden, target = hidden[:4], target[:4]
        elif fault == "dtype":
            hidden = hidden.bfloat16()
        elif fault == "option":
            options["softcap"] = 30.0
        elif fault == "ignored":
            options["ignore_index"] = None
        elif fault == "reduction":
            options["reduction"] = "sum"
        elif fault == "target":
            target = target + v
        elif fault == "ids":
            target = target.float()
        elif fault == "unknown":
            options["reduction"] = "avg"
        elif fault == "overlap":
            shard = vpcce.VocabShard(shard.start - 2, shard.stop - 2, v)
        elif fault == "gap":
            shard = vpcce.VocabShard(shard.start + 2, shard.stop + 2, v + 2)
        elif fault == "refused":
            weight = weight[:5]
    if fault == "gap" and rank == 0:
        shard = vpcce.VocabShard(shard.start, shard.stop, v + 2)
    try:
        vpcce.linear_cross_entropy(hidden, weight, target, shard=shard, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    "fault, message",
    [
        ("tokens", "the number of tokens must be equal on all ranks of the group, got rank 0: 8, rank 1: 4"),
        (
            "dtype",
            "hidden's dtype must be equal on all ranks of the group, got rank 0: torch.float32, rank 1",
        ),
        ("option", "softcap must be equal on all ranks of the group, got rank 0: None, rank 1: 30.0"),
        ("ignored", "ignore_index must be equal on all ranks of the group, got rank 0: -100, rank 1: None"),
        ("reduction", "(reduction, label_smoothing, z_loss, shift, class_weight) must be equal on all ranks"),
        (
            "overlap",
            "shards overlap at id 30, expected a tiling of [0, 64), got rank 0: [0, 32), rank 1: [30, 62)",
        ),
        ("gap", "shards leave a gap at id 32, expected a tiling of [0, 66)"),
    ],
)
def test_ranks_that_disagree_get_an_error_not_a_hang(fault, message):
    for got in run_ranks(2, disagree, 2, fault, timeout=30):
        assert message in got


@pytest.mark.parametrize(
    "fault, message",
    [
        ("refused", "ValueError: linear_cross_entropy: shard [32, 64) owns 32 rows, got a weight of 5 rows"),
        ("target", "ValueError: linear_cross_entropy: target 64 at position 0 is outside [0, 64)"),
        ("ids", "TypeError: linear_cross_entropy: target must hold int64 or int32 vocabulary ids, got torch.float32"),
        ("unknown", "ValueError: linear_cross_entropy: reduction must be one of ('mean', 'sum', 'none'), got 'avg'"),
    ],
)
def test_a_rank_that_refuses_its_arguments_tells_the_others(fault, message):
    first, second = run_ranks(2, disagree, 2, fault, timeout=30)
    assert f"another rank of the group refused its arguments: rank 1: {message}" in first
    assert message in second


def disagree_later(rank, world, fault):
    """A valid call, one with a fault on rank 1, and a valid one: the second's errors, and whether the others agree."""
    v, d = 64, 6
    generator = torch.Generator().manual_seed(0)
    shard = vpcce.VocabShard.split(v)
    hidden = torch.randn(8, d, generator=generator, requires_grad=True)
    weight = torch.randn(v // world, d, generator=generator, requires_grad=True)
    scale = torch.tensor(0.7, requires_grad=True)
    target = torch.arange(8)
    target[2] = -100

    def call(function=vpcce.linear_cross_entropy, **changed):
        given = dict(hidden=hidden, weight=weight, target=target, shard=shard, logit_scale=scale) | changed
        loss = function(**given)
        loss.sum().backward()
        return loss.sum().item()

    faults = {
        "tokens": dict(hidden=hidden[:4], target=target[:4]),
        "hidden's dtype": dict(hidden=hidden.bfloat16()),
        "weight's dtype": dict(weight=weight.bfloat16()),
        "option": dict(softcap=30.0),
        "reduction": dict(reduction="sum"),
        "function": dict(function=vpcce.linear_logprobs),
        "scale": dict(logit_scale=0.7),
        "frozen scale": dict(logit_scale=scale.detach()),
        "frozen hidden": dict(hidden=hidden.detach()),
        "ignored": dict(target=target.where(torch.arange(8) != 5, -100)),
        "other target": dict(target=target.flip(0)),
        "out of range": dict(target=target + v),
        "refused": dict(weight=weight[:5]),
        "unknown": dict(reduction="avg"),
        "sequences": dict(shift=True, cu_seqlens=torch.tensor([[0, 8]])),
        "shard": dict(shard=vpcce.VocabShard(30 * rank, 30 * rank + 32, v)),
        "class weight": dict(class_weight=torch.ones(v)),
        "scale's value": dict(logit_scale=scale.detach().add(1).requires_grad_()),
        "colliding target": dict(target=torch.tensor([0, 8, -100, 0, 4, 5, 6, 7])),  # sum of (2 i + 1) * id is the same
        "sparse": dict(hidden=hidden.detach().to_sparse().requires_grad_()),
        "too few dimensions": dict(hidden=hidden[0], shift=True),
        "beyond a float": dict(softcap=10**400),
    }
    losses = [call()]
    said = "no error"
    try:
        call(**(faults[fault] if rank == 1 else {}))
    except (TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    losses += [call(), call(softcap=20.0)]  # a known configuration, and a new one
    return said, losses


@pytest.mark.parametrize(
    "fault, message",
    [
        ("tokens", "the number of tokens must be equal on all ranks of the group, got rank 0: 8, rank 1: 4"),
        ("hidden's dtype", "hidden's dtype must be equal on all ranks"),
        ("weight's dtype", "weight's dtype must be equal on all ranks"),
        ("option", "softcap must be equal on all ranks of the group, got rank 0: None, rank 1: 30.0"),
        ("reduction", "(reduction, label_smoothing, z_loss, shift, class_weight) must be equal on all ranks"),
        ("function", "the function that is called must be equal on all ranks"),
        ("scale", "logit_scale must be equal on all ranks"),
        ("frozen scale", "whether logit_scale requires a gradient must be equal on all ranks"),
        ("frozen hidden", "whether hidden requires a gradient must be equal on all ranks"),
        ("ignored", "the number of ignored ids must be equal on all ranks of the group, got rank 0: 1, rank 1: 2"),
        ("other target", "the target (here its checksum) must be equal on all ranks"),
        ("shard", "shards overlap at id 30, expected a tiling of [0, 64)"),
        ("out of range", "linear_cross_entropy: target 64 at position 0 is outside [0, 64)"),
        ("refused", "ValueError: linear_cross_entropy: shard [32, 64) owns 32 rows, got a weight of 5 rows"),
        ("unknown", "linear_cross_entropy: reduction must be one of ('mean', 'sum', 'none'), got 'avg'"),
        ("sequences", "linear_cross_entropy: expected cu_seqlens of shape [sequences + 1]"),
        ("class weight", "(reduction, label_smoothing, z_loss, shift, class_weight) must be equal on all ranks"),
        ("scale's value", "logit_scale (here its shape, dtype and checksum) must be equal on all ranks"),
        ("colliding target", "the target (here its checksum) must be equal on all ranks"),
        ("sparse", "TypeError: linear_cross_entropy: hidden must be a dense tensor, got torch.sparse_coo"),
        ("too few dimensions", "linear_cross_entropy: "),
        ("beyond a float", "linear_cross_entropy: softcap must be a float or None, got an int of 1329 bits"),
    ],
)
def test_ranks_that_disagree_after_they_agreed_get_an_error_too(fault, message):
    """On all ranks; then the group is as it was."""
    for said, (first, third, _) in run_ranks(2, disagree_later, 2, fault, timeout=30):
        assert message in said
        assert third == first


def shards_known_apart(rank, world):
    """Two tilings that were agreed on; then one rank takes its shard from the first, the other from the second."""
    said = []
    for cut in (4, 5, 5 - rank):
        rows = (slice(0, cut), slice(cut, 8))[rank]
        try:
            shard = vpcce.VocabShard(rows.start, rows.stop, 8)
            vpcce.linear_cross_entropy(torch.ones(6, 4), torch.ones(8, 4)[rows], torch.arange(6), shard=shard)
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return said


def test_shards_that_only_overlap_together():
    for first, second, third in run_ranks(2, shards_known_apart, 2, timeout=30):
        assert first == second == "no error" and "shards overlap at id 4" in third


def unchecked_on_one_rank(rank, world):
    shard = dataclasses.replace(vpcce.VocabShard.split(64), check=rank == 0)
    try:
        vpcce.linear_cross_entropy(torch.randn(8, 6), torch.randn(32, 6), torch.arange(8), shard=shard)
    except ValueError as error:
        return str(error)
    return "no error"


def test_check_itself_is_compared_at_first():
    for said in run_ranks(2, unchecked_on_one_rank, 2, timeout=30):
        assert "check must be equal on all ranks of the group, got rank 0: True, rank 1: False" in said


def groups_made_again(rank, world):
    """The store outlives the groups, and holds what was compared in an earlier life of a group of the same name."""
    said = []
    for life in range(3):
        group = dist.new_group([0, 1], backend="gloo", group_desc="tp") if life else dist.group.WORLD
        time.sleep(0.2 * rank)
        with (
            mock.patch.object(type(group), "group_name", "tp"),
            mock.patch.object(agreement, "blocks_host", lambda group: False),
        ):
            agreement.agree(group, [("vocab_size", 8), ("life", life)], (4 * rank, 4 * rank + 4))
        said.append(len(agreement._states))
    return said


def test_a_new_group_of_an_old_name_is_not_taken_for_the_old_one():
    assert run_ranks(2, groups_made_again, 2, timeout=30) == [[1, 2, 3]] * 2


def without_header(rank, world):
    """What ranks over NCCL do, where only the store is asked: agree once, then rank 1 alone is asked something new."""
    group, said = dist.group.WORLD, []
    _get_default_store().set_timeout(datetime.timedelta(seconds=2))

    def agree(n, error=None):
        try:
            if error is not None:
                agreement.report_failure(group, True, error)
            else:
                agreement.agree(group, [("vocab_size", 8), ("N", n)], (4 * rank, 4 * rank + 4))
            said.append("agreed")
        except (ValueError, TimeoutError) as fault:
            said.append(f"{type(fault).__name__}: {fault}")

    with mock.patch.object(agreement, "blocks_host", return_value=False):
        agree(16)
        agree(32 + rank)
        agree(32, ValueError("refused") if rank == 1 else None)
        agree(32)
        began = time.monotonic()
        agree(16)
        seconds = time.monotonic() - began
        agree(64 if rank == 1 else 16)
    dist.barrier()
    store = agreement._states[group].store
    left = [key for key in (f"{call}/{rank}" for call in range(1, 7)) if store.check([key])]
    return said, seconds, left


def test_comparison_through_the_store():
    (first, seconds, left), (second, _, _) = run_ranks(2, without_header, 2, timeout=30)
    assert first[0] == second[0] == "agreed"
    assert (
        first[1]
        == second[1]
        == "ValueError: vpcce: N must be equal on all ranks of the group, got rank 0: 32, rank 1: 33"
    )
    assert "another rank of the group refused its arguments: rank 1: ValueError: refused" in first[2]
    assert first[3:] == ["agreed"] * 3 and second[3:5] == ["agreed"] * 2
    assert (
        "TimeoutError: vpcce: rank 1 changed N from 32 to 64 at call 6 on its group, and ranks [0] did not" in second[5]
    )
    assert left == ["4/0"], "what all ranks have read is removed"
    assert seconds < 0.1, "a known configuration asks nobody"


def pickled(rank, world):
    shard = vpcce.VocabShard.split(8)
    assert copy.copy(shard) is shard and copy.deepcopy(shard) is shard
    with pytest.raises(TypeError, match="a shard is pickled without its process group, expected group=None, got"):
        pickle.dumps(shard)


def test_shard_of_a_group_says_why_it_is_not_pickled():
    run_ranks(2, pickled, 2)


def dies(rank, world):
    if rank == 1:
        raise RuntimeError("rank 1 fails on purpose")
    return disagree(rank, world, "none")


def test_the_harness_reports_a_rank_that_dies():
    with pytest.raises(AssertionError, match="rank . failed"):
        run_ranks(2, dies, 2, timeout=30)
