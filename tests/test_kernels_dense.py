"""The exact backward in Triton's interpreter against fp64, through the public functions and through local_backward.

fp32 results are held to a few fp32 roundings. Half-precision ones may be no further from the truth than 1.1 times
PyTorch's own in that dtype, rows of dC that were targets and rows that never were apart.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import truth
from interpreter import never_a_larger_workspace, prepare_kernels
from spawn import run_ranks
from tolerance import assert_as_good_as, assert_weight_grad_as_good_as, relative_error

import vpcce
from vpcce.kernels import backward_dense
from vpcce.kernels.local import local_backward
from vpcce.kernels.problem import Head, RowGradients

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXACT, DROPS = vpcce.exact(), vpcce.filtered(0.97)
ROUNDINGS = 5e-6  # relative error of fp32 sums over some hundred terms, lse and exp2 included


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    prepare_kernels(monkeypatch)


@pytest.fixture
def small_workspace(monkeypatch):
    """Slices of one tile each, whether G lies in a workspace or in dC's storage."""
    monkeypatch.setattr(backward_dense, "WORKSPACE_BYTES", 1)
    never_a_larger_workspace(monkeypatch)


def grads_of(loss, *leaves):
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


def wide_of(*leaves):
    return [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]


def same_dtype_loss(hidden, weight, target, bias=None, logit_scale=1.0, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """PyTorch as people write it: logits in the operands' dtype, the loss in fp32."""
    x = F.linear(hidden, weight, bias).float() * logit_scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    loss = F.cross_entropy(x, target, label_smoothing=label_smoothing)
    return loss + z_loss * x.logsumexp(-1)[target >= 0].square().mean()


def compare(hidden, weight, bias, target, **options):
    """Loss and gradients of one call against fp64, and against PyTorch in the same dtype."""
    ours = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, backward=EXACT, **options)
    grads = grads_of(ours, hidden, weight, bias)
    wide = wide_of(hidden, weight, bias)
    exact = truth.cross_entropy(*wide[:2], target, bias=wide[2], **options)
    right = grads_of(exact, *wide)
    assert relative_error(ours.detach(), exact.detach()) < ROUNDINGS
    assert [g.dtype for g in grads] == [t.dtype for t in (hidden, weight, bias) if t is not None]
    if hidden.dtype == weight.dtype == FP32:
        plain, k, floor = right, 1.0, ROUNDINGS
    else:
        common = torch.promote_types(hidden.dtype, weight.dtype)
        loss = same_dtype_loss(hidden.to(common), weight.to(common), target, bias, **options)
        plain, k, floor = grads_of(loss, hidden, weight, bias), 1.1, ROUNDINGS
    assert_as_good_as(grads[0], plain[0], right[0], k, floor)
    for got, same, real in zip(grads[1:], plain[1:], right[1:], strict=True):
        assert_weight_grad_as_good_as(got, same, real, target, k, floor)


SHAPES = [
    (1, 505, 8),  # one token
    (127, 1, 8),  # a vocabulary of one: dE and dC are 0
    (129, 125, 123),  # less than a tile, one row in a second block, plain loads
    (5, 127, 8),
    (130, 129, 8),  # one column in a second tile
    (260, 505, 123),  # several of everything
]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("n, v, d", SHAPES)
def test_shapes_and_dtypes(n, v, d, dtype):
    hidden, weight, _, target = truth.problem(n, v, d, dtype)
    if v > 1:
        return compare(hidden, weight, None, target)
    grads = grads_of(vpcce.linear_cross_entropy(hidden, weight, target, backward=EXACT), hidden, weight)
    assert all(g.abs().max() < 1e-6 for g in grads)  # p - 1 of a p that is 1 but for a rounding


OPTIONS = {
    "bias": dict(),
    "softcap": dict(softcap=5.0),
    "scale, z-loss": dict(logit_scale=-0.4, z_loss=1e-2),
    "label smoothing": dict(label_smoothing=0.2),
    "label smoothing with a softcap": dict(label_smoothing=0.2, softcap=5.0, logit_scale=1.5),
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, dtype):
    compare(*truth.problem(140, 300, 72, dtype, bias=True, ignored=0.3), **options)


@pytest.mark.parametrize("n, v", [(0, 40), (20, 40)])
def test_no_token_counts(n, v):
    hidden, weight, bias, target = truth.problem(n, v, 8, FP32, bias=True, ignored=1.0)
    loss = vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, backward=EXACT, label_smoothing=0.1)
    assert loss == 0 and all((g == 0).all() for g in grads_of(loss, hidden, weight, bias))


@pytest.mark.parametrize("offset, softcap", [(-200.0, None), (5000.0, None), (-200.0, 30.0)])
def test_extreme_logits(offset, softcap):
    """125 columns leave 3 lanes of the tile empty: they must get no probability, whatever the logits are."""
    hidden, weight, _, target = truth.problem(40, 125, 8, FP32)
    bias = torch.full((125,), offset)
    grads = grads_of(
        vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, softcap=softcap, backward=EXACT), hidden, weight
    )
    wide = wide_of(hidden, weight)
    right = grads_of(truth.cross_entropy(*wide, target, bias=bias, softcap=softcap), *wide)
    step = 2**-23 * abs(offset)  # one rounding of a logit moves p by this much, relatively
    for got, real in zip(grads, right, strict=True):
        # near -30 of 30 the slope 1 - (x/30)^2 has lost all but a few digits: only its smallness is known
        assert relative_error(got, real) < max(8 * step, ROUNDINGS) or (softcap and got.abs().max() < 1e-5)


def test_masked_ids_give_no_nan():
    """p = 0 times a logit of -inf, in the entropy's gradient."""
    hidden, weight, _, target = truth.problem(20, 300, 8, FP32)
    bias = torch.zeros(300)
    bias[:200] = -torch.inf
    stats = vpcce.linear_stats(hidden, weight, target % 100 + 200, bias=bias, entropy=True, backward=EXACT)
    grads = grads_of(stats.lse.sum() + stats.entropy.sum(), hidden, weight)
    wide = wide_of(hidden, weight[200:])
    x = truth.logits_of(*wide)
    entropy = torch.distributions.Categorical(logits=x).entropy()
    right = grads_of(x.logsumexp(-1).sum() + entropy.sum(), *wide)
    assert relative_error(grads[0], right[0]) < ROUNDINGS
    assert relative_error(grads[1][200:], right[1]) < ROUNDINGS and (grads[1][:200] == 0).all()


def test_gradient_of_a_sure_target_keeps_its_digits():
    """p = .999 in bf16: p rounded before 1 is subtracted would be wrong by 100%."""
    weight = torch.zeros(2000, 8, dtype=BF16)
    weight[7, 0] = 14.5
    weight.requires_grad_()
    hidden = torch.zeros(1, 8, dtype=BF16)
    hidden[0, 0] = 1.0
    loss = vpcce.linear_cross_entropy(hidden, weight, torch.tensor([7]), backward=EXACT)
    p = torch.softmax(hidden.double() @ weight.detach().double().T, -1)[0, 7]
    assert 0.998 < p < 0.9995
    torch.testing.assert_close(grads_of(loss, weight)[0][7, 0].double(), p - 1, rtol=2**-8, atol=0.0)


def test_fp16_gradients_below_its_range():
    """The mean over a large batch: G is 1e-8, where fp16 ends at 6e-8; G is stored in units of the largest."""
    hidden, weight, _, target = truth.problem(40, 200, 64, FP16)
    stats = vpcce.linear_stats(hidden, weight, target, backward=EXACT)
    got = grads_of((stats.lse - stats.target_logit).sum() * 1e-5, hidden, weight)
    wide = wide_of(hidden, weight)
    right = grads_of(truth.cross_entropy(*wide, target, reduction="sum") * 1e-5, *wide)
    for ours, real in zip(got, right, strict=True):
        # dE and dC themselves are fp16: their last digit is 6e-8
        assert (ours.double() - real).abs().max() <= 2**-25 + 2**-9 * real.abs().max()
        assert relative_error(ours, real) < 0.05


@pytest.mark.parametrize("of_hidden, of_weight", [(FP32, BF16), (BF16, FP32)], ids=str)
def test_mixed_dtypes(of_hidden, of_weight):
    hidden, weight, _, target = truth.problem(40, 200, 72, FP32)
    leaves = [t.detach().to(dtype).requires_grad_() for t, dtype in ((hidden, of_hidden), (weight, of_weight))]
    compare(*leaves, None, target)


def test_strides():
    """Transposed storage on both sides; bitwise, since the same numbers take the same way."""
    hidden, weight, _, target = truth.problem(60, 200, 72, FP32)
    expected = grads_of(vpcce.linear_cross_entropy(hidden, weight, target, backward=EXACT), hidden, weight)
    moved = [t.detach().T.contiguous().T.requires_grad_() for t in (hidden, weight)]
    got = grads_of(vpcce.linear_cross_entropy(*moved, target, backward=EXACT), *moved)
    wide = torch.full((200, 80), torch.nan)
    wide[:, :72] = weight.detach()
    apart = wide[:, :72].requires_grad_()
    (of_apart,) = grads_of(vpcce.linear_cross_entropy(hidden, apart, target, backward=EXACT), apart)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and torch.equal(of_apart, expected[1])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("into_main", [False, True])
def test_several_slices(dtype, into_main, small_workspace, monkeypatch):
    """Bitwise dC: a slice's sums do not know the others. dE adds slice by slice: approximate, still rounded once."""
    plans = []
    plan = backward_dense.plan_slices
    monkeypatch.setattr(backward_dense, "plan_slices", lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1])

    def run():
        hidden, weight, bias, target = truth.problem(140, 505, 72, dtype, bias=True, ignored=0.1)
        total = torch.zeros(505, 72) if into_main else None
        vpcce.linear_cross_entropy(hidden, weight, target, bias=bias, backward=EXACT, main_grad=total).backward()
        return hidden.grad, total if into_main else weight.grad, bias.grad

    some = run()
    monkeypatch.setattr(backward_dense, "WORKSPACE_BYTES", 1 << 30)
    one = run()
    assert len(plans[0]) > 1 and len(plans[1]) == 1
    assert torch.equal(some[1], one[1]) and torch.equal(some[2], one[2])
    assert relative_error(some[0], one[0]) < (2**-9 if dtype == BF16 else ROUNDINGS)
    assert all(torch.equal(a, b) for a, b in zip(run(), one, strict=True))  # bitwise: a repetition


@pytest.mark.parametrize("dtype, major", [(FP32, 9), (BF16, 9), (FP16, 9), (FP16, 10)], ids=str)
def test_dbias_of_several_row_blocks(dtype, major, small_workspace, monkeypatch):
    """Nine row blocks, of which seven count, the last of them in part; slices of two widths. fp16 has a unit.

    From capability 10 on, sums of tiles take no products."""
    monkeypatch.setattr("vpcce.kernels.launch_table.capability", lambda device: major)
    hidden, weight, bias, target = truth.problem(1100, 330, 8, dtype, bias=True, ignored=0.2)
    assert 768 < (target >= 0).sum() < 896
    compare(hidden, weight, bias, target)


@pytest.mark.parametrize("programs", [1, 3, 5, 7, 11])
def test_any_number_of_programs(programs, monkeypatch):
    """Tiles of dE leave some programs idle, which start on dC: every tile is made once. Row blocks come in groups."""
    # A tile of dE takes as long as 8.5 of dC in the first slice, whose products share a launch.
    monkeypatch.setattr(backward_dense, "plan_slices", lambda *_, **__: ((0, 1280, False), (1280, 2000, False)))
    hidden, weight, _, target = truth.problem(150, 2000, 300, FP32)

    def gradients():  # dC is added to a buffer, so that a tile made twice shows
        total = torch.ones(2000, 300)
        hidden.grad = None
        vpcce.linear_cross_entropy(hidden, weight, target, backward=EXACT, main_grad=total).backward()
        return hidden.grad, total

    expected = gradients()
    monkeypatch.setattr(backward_dense, "multiprocessors", lambda device: programs)
    monkeypatch.setattr("vpcce.kernels.tiles.HIDDEN_CACHE_BYTES", 128 * 300 * 4)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


@pytest.fixture
def products(monkeypatch) -> list:
    """One entry per product: "dE" or "dC"."""
    calls = []
    kernel = backward_dense.products_kernel

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                calls.extend(name for name, out in (("dE", args[3]), ("dC", args[8])) if out is not None)
                return kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(backward_dense, "products_kernel", Recorder())
    return calls


def test_frozen_sides_cost_no_product(products):
    """Bitwise the same gradient of the other side."""
    hidden, weight, _, target = truth.problem(40, 200, 16, FP32)
    both = grads_of(vpcce.linear_cross_entropy(hidden, weight, target, backward=EXACT), hidden, weight)
    assert sorted(products) == ["dC", "dE"]
    products.clear()
    (e,) = grads_of(vpcce.linear_cross_entropy(hidden, weight.detach(), target, backward=EXACT), hidden)
    assert products == ["dE"] and torch.equal(e, both[0])
    products.clear()
    (c,) = grads_of(vpcce.linear_cross_entropy(hidden.detach(), weight, target, backward=EXACT), weight)
    assert products == ["dC"] and torch.equal(c, both[1])


@pytest.mark.parametrize("pair", [(EXACT, DROPS), (DROPS, EXACT)], ids=["FullE", "FullC"])
def test_pairs_of_policies(pair, products):
    """The exact side is exact()'s, the other one its own policy's; each is computed once."""
    hidden, weight, _, target = truth.problem(140, 300, 16, FP32)
    target %= 100  # the other two tiles of columns have no target, and so nothing near 1

    def grads(policy):
        return grads_of(vpcce.linear_cross_entropy(hidden, weight, target, backward=policy), hidden, weight)

    exact, dropped = grads(EXACT), grads(DROPS)
    products.clear()
    mixed = grads(pair)
    assert sorted(products) == ["dC", "dE"]
    for got, policy, one, other in zip(mixed, pair, exact, dropped, strict=True):
        wanted = one if policy is EXACT else other
        assert (got - wanted).norm() <= 1e-5 * wanted.norm() < 1e-3 * (one - other).norm()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_main_grad_is_added_to(dtype):
    hidden, weight, _, target = truth.problem(140, 300, 16, BF16)
    wide = wide_of(hidden, weight)
    right = grads_of(truth.cross_entropy(*wide, target), *wide)[1]
    before = (1e-3 * torch.randn(300, 16)).to(dtype)
    total = before.clone()
    vpcce.linear_cross_entropy(hidden, weight, target, backward=EXACT, main_grad=total).backward()
    assert weight.grad is None
    # The product is added in fp32: an fp32 buffer shows G's rounding to bf16 alone, a bf16 one its own rounding too.
    allowed = 2**-9 * (right + (before.double() if dtype == BF16 else 0)).norm()
    assert (total.double() - before.double() - right).norm() < 1.2 * allowed
    assert (total.double() - before.double()).norm() > 0.9 * right.norm()


@pytest.mark.parametrize("n_rows", [0, 1, 128, 200])
def test_late_rows_and_where_rows_belong(n_rows, small_workspace):
    """What the device does with ignored tokens: late rows add nothing, and row i of dE goes to row_index[i]."""
    n, v, d, softcap, scale = 300, 260, 24, 6.0, 1.4
    g = torch.Generator().manual_seed(n_rows)
    hidden, weight = torch.randn(n, d, generator=g), torch.randn(v, d, generator=g)
    hidden[n_rows:] = 1e10
    bias, share = torch.randn(v, generator=g), torch.rand(v, generator=g)
    target = torch.randint(0, v, (n,), generator=g)
    target[::7] = -1
    target[n_rows:] = -1
    rows = RowGradients(*(torch.randn(n, generator=g) / n for _ in range(4)))
    order = torch.randperm(n, generator=g)

    x = truth.logits_of(hidden.double(), weight.double(), bias.double(), scale, softcap)
    lse = x.logsumexp(1)
    onehot = F.one_hot(target.clamp(min=0), v) * (target >= 0)[:, None]
    per_row = [part.double()[:, None] for part in vars(rows).values()]
    grad = (x - lse[:, None]).exp() * (per_row[0] + per_row[2] * x) + onehot * per_row[1] + per_row[3] * share
    grad = (grad * (1 - (x / softcap) ** 2) * scale)[:n_rows]

    ready = []
    d_hidden, d_weight, d_bias = local_backward(
        hidden, Head(weight, bias, scale, softcap, column_weight=share), target, lse.float(), rows,
        n_rows=torch.tensor([n_rows], dtype=torch.int32), row_index=order, hidden_policy=EXACT, weight_policy=EXACT,
        bias_grad=True, hidden_grad_dtype=FP32, hidden_grad_ready=ready.append,
    )  # fmt: skip
    assert len(ready) == 1 and ready[0] is d_hidden
    assert relative_error(d_hidden[order[:n_rows]], grad @ weight.double()) < ROUNDINGS
    assert (d_hidden[order[n_rows:]] == 0).all()
    assert relative_error(d_weight, grad.T @ hidden[:n_rows].double()) < ROUNDINGS
    assert relative_error(d_bias, grad.sum(0)) < ROUNDINGS


def _on_ranks(rank, world, v):
    prepare_kernels(pytest.MonkeyPatch())
    hidden, weight, bias, target = truth.problem(140, v, 16, FP32, bias=True, ignored=0.2)
    shard = vpcce.VocabShard.split(v, dist.group.WORLD)
    part = slice(shard.start, shard.stop)
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight[part], bias[part])]
    loss = vpcce.linear_cross_entropy(
        leaves[0], leaves[1], target, bias=leaves[2], shard=shard, softcap=8.0, label_smoothing=0.1, backward=EXACT
    )
    return [part.start, part.stop, *(t.detach().numpy() for t in (loss, *grads_of(loss, *leaves)))]


@pytest.mark.parametrize("v", [129, 1])
def test_two_ranks_equal_one(v):
    """65 + 64 ids, and a rank without any; targets of the other rank must match no lane of this one's tiles."""
    hidden, weight, bias, target = truth.problem(140, v, 16, FP32, bias=True, ignored=0.2)
    wide = wide_of(hidden, weight, bias)
    loss = truth.cross_entropy(*wide[:2], target, bias=wide[2], softcap=8.0, label_smoothing=0.1)
    right = [g if v > 1 else torch.zeros_like(g) for g in grads_of(loss, *wide)]
    for start, stop, *got in run_ranks(2, _on_ranks, 2, v):
        expected = (loss.detach(), right[0], *(g[start:stop] for g in right[1:]))
        for ours, real in zip(map(torch.from_numpy, got), expected, strict=True):
            if v == 1:  # nothing but rounding
                torch.testing.assert_close(ours.double(), real, rtol=0, atol=1e-6)
            else:
                assert relative_error(ours, real) < ROUNDINGS


@pytest.mark.parametrize("backward", [EXACT, vpcce.sampled()], ids=["exact", "sampled"])
def test_fake_shapes_are_the_real_ones(backward):
    """torch.compile plans memory by them; argmax, top-k and entropy asked for, so that no output is empty.

    No token is ignored: on the CPU those are left out at once, and the marks with them.
    """
    hidden, weight, _, target = truth.problem(140, 505, 16, BF16)
    scale = torch.tensor(1.3, requires_grad=True)

    def step(hidden, weight, scale):
        stats = vpcce.linear_stats(hidden, weight, target, logit_scale=scale, entropy=True, argmax=True,
                                    topk=3, backward=backward)  # fmt: skip
        loss = vpcce.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, backward=backward)
        return stats, grads_of(loss + stats.lse.sum() - stats.target_logit.sum(), hidden, weight, scale)

    with torch._subclasses.CrossRefFakeMode(check_aliasing=False):
        step(hidden, weight, scale)


@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("ids", [None, 3])
def test_outputs_are_contiguous(ids, ignore_index):
    """Their fakes are, and compiled code reads results with the strides of those."""
    hidden, weight, _, target = truth.problem(140, 505, 16, BF16)
    target = target if ids is None else target[:, None].expand(-1, ids)
    stats = vpcce.linear_stats(hidden, weight, target, ignore_index=ignore_index, entropy=True, argmax=True, topk=3)
    assert all(part.is_contiguous() for part in (*stats[:4], *stats.topk))
