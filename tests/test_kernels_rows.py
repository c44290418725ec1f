"""The small kernels per token in Triton's interpreter, against the PyTorch formulas that serve the CPU.

Order, targets and copies are compared bitwise; merged statistics and row gradients to a few fp32 roundings, because
exp and log are others.
"""

import math

import pytest
import torch
import triton
import truth
from interpreter import poison_empty
from spawn import run_ranks

import vpcce
from vpcce import row_terms, tokens
from vpcce.kernels import rows as kernels
from vpcce.kernels.hot_set import hot_set
from vpcce.kernels.merge import merge_bounds, merge_ranks
from vpcce.kernels.problem import Head, LocalStats, LowRank, StatsLayout, as_float_bits
from vpcce.settings import Settings

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
START, STOP, VOCAB = 100, 250, 400  # of the shard; targets live before it, in it and behind it
SIZES = {"one token": 1, "part of a block": 130, "a block": 1024, "part of a third block": 2050, "two scans": 4100}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_empty(monkeypatch)


def settings(ignore_index: int | None, **options) -> Settings:
    plain = dict(
        who="test", start=START, stop=STOP, vocab_size=VOCAB, group="", check=False, sequence_parallel=False,
        entropy=False, argmax=False, topk=0, logit_sum=False, marks=False, hidden_grad=True, scale_grad=False,
        lora_grad=False, gathers_again=False, reduce_hidden_grad=True, upstream="", deterministic=False,
        hidden_policy=vpcce.exact().text, weight_policy=vpcce.exact().text,
    )  # fmt: skip
    return Settings(ignore_index=ignore_index, **(plain | options))


def targets(n: int, ignored: float, ignore_index: int = -100) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    target = torch.randint(0, VOCAB, (n,), generator=g)
    target[torch.rand(n, generator=g) < ignored] = ignore_index
    return target


def plain_rows(target: torch.Tensor, how: Settings, monkeypatch) -> tokens.Rows:
    """`Rows` as PyTorch makes it on the CPU: without the tokens that do not count."""
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_interpreting", lambda: False)
        return tokens.Rows(target, how)


@pytest.mark.parametrize("ignore_index", [-100, 1, 120, None])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0], ids="{:.0%} ignored".format)
@pytest.mark.parametrize("n", SIZES.values(), ids=SIZES)
def test_order_and_targets(n, ignored, ignore_index):
    """A stable partition; an id of this shard or 1, a constant to the compiler, may mean "ignored" as well."""
    target = targets(n, ignored, 0 if ignore_index is None else ignore_index)
    found = kernels.select_rows(target, ignore_index=ignore_index, start=START, stop=STOP, vocab_size=VOCAB, check=True)
    mine = (target >= START) & (target < STOP)
    if ignore_index is None:
        assert found.index is found.count is None and found.divisor == max(n, 1)
        assert torch.equal(found.local, torch.where(mine, target - START, -1))
        return
    counts = target != ignore_index
    order = torch.argsort(counts, descending=True, stable=True)
    assert found.count == counts.sum() and found.divisor == max(counts.sum(), 1)
    assert torch.equal(found.index, order)
    assert torch.equal(found.local, torch.where(mine & counts, target - START, -1)[order])
    again = kernels.select_rows(
        target, ignore_index=ignore_index, start=START, stop=STOP, vocab_size=VOCAB, check=False
    )
    assert again.divisor is None
    assert torch.equal(again.index, order) and torch.equal(again.local, found.local) and again.count == found.count


@pytest.mark.parametrize("ignore_index", [-100, None])
@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**40, -(2**40)])
@pytest.mark.parametrize("place", [0, 1100, 4199])
def test_a_target_that_is_no_id_is_noticed(wrong, place, ignore_index):
    """In the first, a later and the last block, seen by the program that reports; it counts and lives nowhere."""
    target = targets(4200, 0.0 if ignore_index is None else 0.5)
    target[place] = wrong
    found = kernels.select_rows(target, ignore_index=ignore_index, start=START, stop=STOP, vocab_size=VOCAB, check=True)
    assert found.divisor == 0
    at = place if found.index is None else (found.index == place).nonzero()[0]
    assert found.local[at] == -1
    with pytest.raises(RuntimeError, match=r"a target is outside \[0, 400\)"):
        tokens.Rows(target, settings(ignore_index), check=True)


def test_no_tokens():
    found = kernels.select_rows(
        torch.empty(0, dtype=torch.int64), ignore_index=-100, start=0, stop=9, vocab_size=9, check=True
    )
    assert found.count == 0 and found.divisor == 1
    assert found.index.shape == found.local.shape == (0,)
    assert kernels.take_rows(torch.ones(0, 5), found.index, found.count).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [1, 64, 1025])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_hidden_in_order(d, dtype, layout):
    """Bitwise, NaN of ignored tokens left behind, whatever hidden's strides."""
    target = targets(133, 0.4)
    hidden = torch.randn(133, d).to(dtype)
    hidden[target == -100] = torch.nan
    given = hidden if layout == "rows" else hidden.T.contiguous().T
    found = kernels.select_rows(target, ignore_index=-100, start=START, stop=STOP, vocab_size=VOCAB, check=False)
    taken = kernels.take_rows(given, found.index, found.count)
    kept = hidden[target != -100]
    assert taken.is_contiguous() and taken.dtype == dtype
    assert torch.equal(taken[: len(kept)], kept) and torch.all(taken[len(kept) :] == 0)


@pytest.mark.parametrize("ignore_index", [-100, None])
def test_nothing_is_copied_where_every_token_counts(ignore_index):
    hidden = torch.randn(130, 8)
    rows = tokens.Rows(targets(130, 0.0), settings(ignore_index))
    assert (rows.take(hidden) is hidden) == (ignore_index is None)


def parts(n: int, n_ranks: int, entropy=True, argmax=True, logit_sum=True) -> tuple[torch.Tensor, StatsLayout]:
    """Statistics of shards with random maxima, ties among them, and a shard without columns as the last of several."""
    g = torch.Generator().manual_seed(n_ranks)
    packed = []
    for rank in range(n_ranks):
        top = torch.randint(-20, 20, (n,), generator=g).float()
        total = 1 + 50 * torch.rand(n, generator=g)
        logit = torch.where(torch.arange(n) % n_ranks == rank, top - torch.rand(n, generator=g), 0.0)
        expected, best = total * (top - 1), torch.randint(0, 50, (n,), generator=g)
        if rank and rank == n_ranks - 1:
            top, total, logit = torch.full((n,), -torch.inf), torch.zeros(n), torch.zeros(n)
            expected, best = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
        stats = LocalStats.pack(
            top, total, logit, 50 * rank, expected=expected if entropy else None, argmax=best if argmax else None,
            logit_sum=torch.randn(n, generator=g) if logit_sum else None,
        )  # fmt: skip
        packed.append(stats.packed)
    return torch.stack(packed), stats.layout


def check_merged(ranks, layout, target, how, monkeypatch):
    found = tokens.Rows(target, how)
    order = found.index if found.index is not None else slice(None)
    n_kept = len(target) if found.count is None else int(found.count)
    compact = ranks[..., target.new_tensor(range(len(target)))[order]].contiguous()
    compact[..., n_kept:] = torch.nan  # nobody reads what stands behind
    ours = merge_ranks(compact, layout, how.vocab_size, found.index, found.count)
    plain_order = plain_rows(target, how, monkeypatch)
    plain = row_terms.merge_ranks(compact[..., :n_kept], layout, target, how, plain_order)
    for name, value, expected in zip(ours._fields, ours, plain, strict=True):
        assert (value is None) == (expected is None), name
        if name == "argmax" and value is not None:
            assert torch.equal(value, expected)
        elif value is not None:
            torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-6, equal_nan=True, msg=name)
    return ours


@pytest.mark.parametrize("ignore_index", [-100, None])
@pytest.mark.parametrize("n_ranks", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 130, 600])
def test_merge(n, n_ranks, ignore_index, monkeypatch):
    ranks, layout = parts(n, n_ranks)
    target = targets(n, 0.4 if ignore_index is not None else 0.0)
    ours = check_merged(ranks, layout, target, settings(ignore_index), monkeypatch)
    kept = target != -100
    assert torch.all(ours.lse[kept] >= ours.target_logit[kept])
    assert all(torch.all(part[~kept] == 0) for part in ours)


@pytest.mark.parametrize("ignored", [0.0, 1.0])
@pytest.mark.parametrize("wanted", ["", "entropy", "argmax", "logit_sum"])
def test_merge_of_what_was_asked_for(wanted, ignored, monkeypatch):
    ranks, layout = parts(130, 2, *(wanted == name for name in ("entropy", "argmax", "logit_sum")))
    check_merged(ranks, layout, targets(130, ignored), settings(-100), monkeypatch)


def test_merge_of_a_single_rank_needs_no_dimension_for_it():
    ranks, layout = parts(130, 1)
    for a, b in zip(merge_ranks(ranks, layout, 50, None, None), merge_ranks(ranks[0], layout, 50, None, None),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_merge_of_numbers_that_are_none(monkeypatch):
    """-inf everywhere, +inf and NaN come through as they do in PyTorch; the target's logit bounds lse from below."""
    ranks, layout = parts(7, 3)
    ranks[:, 0, 0], ranks[:, 1, 0], ranks[:, 2, 0] = -torch.inf, 0.0, 0.0  # no rank has a logit above -inf
    ranks[0, 0, 1] = torch.nan
    ranks[1, 1, 2] = torch.nan
    ranks[0, 2, 3] = torch.nan
    ranks[0, 0, 4], ranks[0, 1, 4] = torch.inf, torch.nan
    ranks[0, 2, 5] = 1000.0
    ours = check_merged(ranks, layout, targets(7, 0.0), settings(None), monkeypatch)
    assert ours.lse[0] == 0 and ours.lse[5] == ours.target_logit[5] >= 999
    assert all(math.isnan(ours.lse[i]) for i in (1, 2, 3, 4))


def test_ids_travel_as_bits():
    """The lowest id of equal maxima, also those whose bits are a denormal number."""
    ranks, layout = parts(4, 2, entropy=False, logit_sum=False)
    ranks[:, 0] = 3.0
    ranks[0, layout.argmax_row] = as_float_bits(torch.tensor([5, 90, 2**31 - 2, 0]), torch.float32)
    ranks[1, layout.argmax_row] = as_float_bits(torch.tensor([60, 1, 2**31 - 3, 8]), torch.float32)
    assert merge_ranks(ranks, layout, 2**31 - 1, None, None).argmax.tolist() == [5, 1, 2**31 - 3, 0]


@pytest.mark.parametrize("n", [1, 130, 600])
def test_merge_of_bounds(n):
    """Several ranks, and ranks that lie apart, as those do that a seed follows."""
    ranks = parts(n, 5)[0][:, :2].contiguous()
    close = dict(rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(merge_bounds(ranks), row_terms.merge_bounds(ranks), **close)
    apart = torch.full((5, 2 * n + 2), torch.nan)
    apart[:, :-2] = ranks.view(5, -1)
    assert torch.equal(merge_bounds(apart[:, :-2].view(5, 2, n)), merge_bounds(ranks))
    empty = torch.stack([torch.full((2, n), -torch.inf), torch.zeros(2, n)], 1)
    assert torch.all(merge_bounds(empty) == -torch.inf)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.7, torch.tensor(1.3)], ids=str)
@pytest.mark.parametrize("v", [1, 300, 3000])
def test_hot_set(v, scale, softcap, monkeypatch):
    """Fewer columns than the set holds, or all of them and more: the targets are among those that are summed."""
    monkeypatch.setattr("vpcce.kernels.hot_set.MAX_ROWS", 64)
    monkeypatch.setattr("vpcce.kernels.hot_set.MEAN_COLUMNS", 1100)
    n = 130
    hidden, weight, bias, _ = truth.problem(n, v, 16, torch.float32, bias=True)
    target = torch.randint(0, v, (n,)).where(torch.rand(n) < 0.5, -1)
    with torch.no_grad():
        (top, total, bound), _, mean_bound = hot_set(hidden, Head(weight, bias, scale, softcap), target)
        x = truth.logits_of(hidden.double(), weight.double(), bias.double(), scale, softcap)
    torch.testing.assert_close(bound, top + total.log(), rtol=1e-6, atol=1e-6)
    bound = bound.double()
    lse = x.logsumexp(1)
    if v <= 1024:
        torch.testing.assert_close(bound, lse, rtol=2e-6, atol=2e-6)
    own = x.gather(1, target.clamp(min=0)[:, None])[:, 0].where(target >= 0, -torch.inf)
    assert torch.all(bound <= lse + 1e-5) and torch.all(bound >= own - 1e-5)
    assert (mean_bound is None) == (softcap is not None)
    if mean_bound is not None:
        some = x[:, :1100]
        expected = some.mean(1) + math.log(some.shape[1])
        torch.testing.assert_close(mean_bound.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constant", [0.0, -200.0, -torch.inf, torch.nan])
def test_the_mean_of_rounded_weights(constant, dtype):
    """A mean far above the logits' differences keeps 16 bits of itself; one that is no number bounds nothing."""
    n, v, d, r = 40, 1700, 48, 8
    hidden, weight, _, _ = truth.problem(n, v, d, dtype)
    hidden, weight = hidden.detach(), (weight.detach().float() + 3).to(dtype)
    bias = torch.randn(v)
    bias[7] += constant
    low = LowRank(torch.randn(n, r).to(dtype), torch.randn(v, r).to(dtype))
    mean_bound = hot_set(hidden, Head(weight, bias, 0.7, low_rank=low), torch.zeros(n).long()).mean_bound
    x = 0.7 * (hidden.double() @ weight.double().T + low.hidden.double() @ low.weight.double().T + bias)
    if math.isfinite(constant):
        size = 0.7 * (hidden.double().abs() @ weight.double().mean(0).abs()).amax().item()
        expected = x.mean(1) + math.log(v)
        torch.testing.assert_close(mean_bound.double(), expected, rtol=0, atol=2.0**-17 * size + 1e-5)
        assert size > 50
    else:
        assert torch.all(mean_bound < -1e29)


@pytest.mark.parametrize("ignore_index", [-100, None])
@pytest.mark.parametrize("given", ["11", "1", "01", "0010", "1111", "1001", ""])
@pytest.mark.parametrize("n", [1, 130, 1030])
def test_row_gradients(n, given, ignore_index, monkeypatch):
    """Contiguous and expanded gradients; ignored tokens hold NaN and give 0."""
    target = targets(n, 0.4 if ignore_index is not None else 0.0)
    how = settings(ignore_index)
    lse, entropy = torch.randn(2, n)
    grads = [torch.randn(n) if flag == "1" else None for flag in given.ljust(4, "0")]
    if grads[0] is not None:
        grads[0] = torch.randn(()).expand(n)
    late = target == -100
    lse[late] = entropy[late] = torch.nan
    if grads[1] is not None:
        grads[1][late] = torch.nan
    found = tokens.Rows(target, how)
    own_lse, ours = kernels.row_gradients(tuple(grads), lse, entropy, found.index, found.count)
    plain_lse, plain = row_terms.row_gradients(grads, lse, entropy, target, plain_rows(target, how, monkeypatch))
    n_kept = len(plain_lse)
    pairs = {"lse": (own_lse, plain_lse)} | {name: (value, vars(plain)[name]) for name, value in vars(ours).items()}
    for name, (value, expected) in pairs.items():
        assert (value is None) == (expected is None), name
        if value is not None:
            assert value.is_contiguous() and value.data_ptr() % 16 == 0
            torch.testing.assert_close(value[:n_kept], expected, rtol=1e-6, atol=1e-6)
            assert torch.all(value[n_kept:] == 0)


OPTIONS = {
    "mean": dict(),
    "smoothing and z-loss": dict(label_smoothing=0.1, z_loss=1e-2),
    "softcap, so smoothing travels from the kernel": dict(label_smoothing=0.1, softcap=4.0, reduction="sum"),
    "every token ignored": dict(ignored=1.0),
    "no ignore_index": dict(ignored=0.0, ignore_index=None),
}


def losses(rank, world, options):
    """(loss, dE, dC of this rank's rows) of the first option set to the last; uneven shards, one of them empty."""
    results = []
    for kept in options:
        given = dict(kept)
        hidden, weight, bias, target = truth.problem(
            20, 90, 16, torch.float32, bias=True, ignored=given.pop("ignored", 0.3)
        )
        bounds = {1: (0, 90), 2: (0, 20, 90), 3: (0, 20, 20, 90)}[world]
        shard = vpcce.VocabShard(bounds[rank], bounds[rank + 1], 90) if world > 1 else None
        part = [t.detach()[slice(*bounds[rank : rank + 2])].requires_grad_() for t in (weight, bias)]
        loss = vpcce.linear_cross_entropy(hidden, part[0], target, bias=part[1], shard=shard, **given)
        results.append([t.detach().numpy() for t in (loss, *torch.autograd.grad(loss, (hidden, *part)))])
    return results


@pytest.mark.parametrize("world", [1, 3])
def test_losses(world):
    everyone = run_ranks(world, losses, world, list(OPTIONS.values()))
    for index, options in enumerate(OPTIONS.values()):
        given = dict(options)
        hidden, weight, bias, target = truth.problem(
            20, 90, 16, torch.float32, bias=True, ignored=given.pop("ignored", 0.3)
        )
        if given.get("ignore_index", 0) is None:
            given["ignore_index"] = -100
        leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
        plain = truth.cross_entropy(*leaves[:2], target, bias=leaves[2], **given)
        grads = torch.autograd.grad(plain, leaves)
        loss, d_hidden, *_ = everyone[0][index]
        d_weight, d_bias = (torch.cat([torch.from_numpy(r[index][i]) for r in everyone]) for i in (2, 3))
        torch.testing.assert_close(torch.from_numpy(loss).double(), plain.detach(), rtol=1e-5, atol=1e-6)
        for ours, expected in zip((torch.from_numpy(d_hidden), d_weight, d_bias), grads, strict=True):
            assert (ours.double() - expected).norm() <= 1e-4 * expected.norm()
