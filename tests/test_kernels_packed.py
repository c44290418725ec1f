"""The packed backward's kernels in Triton's interpreter, against the same decisions in PyTorch.

Both toss the same coins, so the gradient is compared draw by draw, not on average. Tiles are as large as the shapes
allow: the interpreter takes about 2 ms a loop step whatever a step's size.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton

from vpcce import sampling
from vpcce.kernels import backward_packed, column_kinds, marks, pack, packed_layout
from vpcce.kernels.problem import Head, Marks, RowGradients
from vpcce.policy import sampled

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]
SEED = torch.tensor(2**40 + 77)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """One k-step per product, groups and slabs small enough that small vocabularies have several; lists always pay."""
    blocks = {
        "gradient": dict(BLOCK_N=128, BLOCK_K=128),
        "hidden": dict(BLOCK_K=128, BLOCK_D=128),
        "weight": dict(BLOCK_N=128, BLOCK_K=128, BLOCK_D=128),
        "stream": dict(BLOCK_N=128, BLOCK_K=128, BLOCK_D=64),
        "direct": dict(BLOCK_N=128, BLOCK_K=64, BLOCK_D=64, PARTS=3),
    }
    monkeypatch.setattr(backward_packed, "packed_launch", lambda kernel, device, dtype: (2, dict(blocks[kernel])))
    monkeypatch.setattr(packed_layout, "MAX_DENSITY_SHORT_ROWS", 1.0)
    monkeypatch.setattr(packed_layout, "SHORT_STEP", 0)
    monkeypatch.setattr(packed_layout, "DENSE_GROUP", 1024)
    monkeypatch.setattr(packed_layout, "SLAB_COLUMNS", 512)
    monkeypatch.setattr(column_kinds, "LISTS", triton.language.constexpr(8))
    monkeypatch.setattr(backward_packed, "LIST_BLOCK", 32)
    monkeypatch.setattr(packed_layout, "LIST_BLOCK", 32)


class Problem:
    """One head, its exact fp64 gradient per logit, and what the sampled policy makes of it."""

    def __init__(self, n, v, d, dtype, *, n_rows=None, bias=False, softcap=None, scale=1.0, entropy=False,
                 constant=False, start=7000, eps=2.0**-5):  # fmt: skip
        g = torch.Generator().manual_seed(n + v)
        self.eps, self.n_rows_int = eps, n if n_rows is None else n_rows
        self.hidden = torch.randn(n, d, generator=g).to(dtype)
        self.weight = (3 * torch.randn(v, d, generator=g) / d**0.5).to(dtype)
        offset = torch.randn(v, generator=g).to(dtype) if bias else None
        share = torch.rand(v, generator=g) if constant else None
        self.head = Head(self.weight, offset, scale, softcap, start, share)
        self.target = torch.randint(0, v, (n,), generator=g)
        self.target[::7] = -1
        self.n_rows = None if n_rows is None else torch.tensor([n_rows], dtype=torch.int32)
        z = self.hidden.double() @ self.weight.double().T
        z = (z if offset is None else z + offset.double()) * scale
        x = z if softcap is None else softcap * torch.tanh(z / softcap)
        self.lse = x.logsumexp(1)
        p = (x - self.lse[:, None]).exp()
        onehot = torch.zeros_like(p)
        local = (self.target >= 0).nonzero()[:, 0]
        onehot[local, self.target[local]] = 1
        self.error = p - onehot
        self.error[self.n_rows_int :] = 0

        def per_row(sign, wanted=True):
            return sign * torch.rand(n, generator=g) / n if wanted else None

        self.rows = RowGradients(per_row(1), per_row(-1), per_row(1, entropy), per_row(0.01, constant))
        per_row_softmax = self.rows.softmax[:, None].double()
        if entropy:
            per_row_softmax = per_row_softmax + self.rows.softmax_logit[:, None] * x
        self.grad = (p * per_row_softmax + onehot * self.rows.target[:, None]) * scale
        if softcap is not None:
            self.grad *= 1 - (x / softcap) ** 2
        columns = torch.arange(start, start + v)
        size = torch.where(onehot > 0, 1.0, p)
        size[self.n_rows_int :] = 0
        m = sampling._block_max(size)
        blocks = torch.arange(m.shape[0])
        self.scale = sampling.keep_scale(m, eps, SEED, blocks, columns)
        self.grad = sampling.scale_columns(self.grad, self.scale)
        if constant:
            self.grad += (self.rows.constant * scale)[:, None] * share
        self.grad[self.n_rows_int :] = 0
        # The forward's marks: an upper bound of m decides, here 2% above.
        bits = marks.pack_marks(1.02 * m * (sampling.LEVELS / eps) > sampling.coin(SEED, blocks, columns))
        self.marks = Marks(bits, SEED)

    def run(self, *, deterministic=False, main_grad=None, bias_grad=False, expect_dense=False, hidden_grad=True,
            weight_grad=True):  # fmt: skip
        flags, ready = [], []
        record = mock.patch.object(backward_packed, "dense_stream", lambda *_, dense, **__: flags.append(dense.item()))
        with record:
            results = self._backward(ready, deterministic, main_grad, bias_grad, hidden_grad, weight_grad)
        assert flags == [int(expect_dense)]
        assert len(ready) == hidden_grad
        return results

    def _backward(self, ready, deterministic, main_grad, bias_grad, hidden_grad, weight_grad):
        return backward_packed.packed_backward(
            self.hidden, self.head, self.target, self.lse.float(), self.rows, n_rows=self.n_rows, row_index=None,
            policy=sampled(self.eps, deterministic=deterministic), marks=self.marks, hidden_grad=hidden_grad,
            weight_grad=weight_grad, bias_grad=bias_grad, main_grad=main_grad, hidden_grad_dtype=torch.float32,
            hidden_grad_ready=ready.append,
        )  # fmt: skip

    def check(self, d_hidden, d_weight, tolerance):
        for ours, truth in (
            (d_hidden, self.grad @ self.weight.double()),
            (d_weight, self.grad.T @ self.hidden.double()),
        ):
            assert ((ours.double() - truth).norm() / truth.norm()).item() < tolerance
        assert torch.all(d_hidden[self.n_rows_int :] == 0)


OPTIONS = {
    "plain": dict(),
    "bias, softcap, scale, entropy, ignored rows": dict(n_rows=400, bias=True, softcap=10.0, scale=1.3, entropy=True),
    "label smoothing": dict(constant=True, bias=True, n_rows=500),
    "one row block, vocabulary of one partial word tile": dict(n=100, v=200),
    "one token": dict(n=1, v=1500),
    "D that no tile divides": dict(d=123),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fp32(options):
    """fp32 dC: rounds, additions in place; every sum is fp32."""
    problem = Problem(**{**dict(n=640, v=2300, d=64, dtype=torch.float32), **options})
    d_hidden, d_weight, d_bias = problem.run(bias_grad=True)
    problem.check(d_hidden, d_weight, 2e-6)
    check_bias_grad(problem, d_bias, 2e-6)


def have_rows_beside(monkeypatch, rows: int) -> None:
    """As many rows of G, in half precision, fit behind dC's storage."""
    for name in ("EXTRA_BYTES", "BESIDE_BYTES"):
        monkeypatch.setattr(packed_layout, name, rows * 256)
    monkeypatch.setattr(packed_layout, "RING_TOKEN_BYTES", 0)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["label smoothing"]], ids=["plain", "label smoothing"])
def test_half_precision_in_place(options, monkeypatch):
    """dC in fp16 from the ring, while most of G lies in dC's own storage (extra rows for a third of the pairs)."""
    problem = Problem(**{**dict(n=600, v=4000, d=256, dtype=torch.float16, eps=2.0**-3), **options})
    n_pairs = int(marks.unpack_marks(problem.marks.bits, 4000).sum())
    have_rows_beside(monkeypatch, n_pairs // 3)
    d_hidden, d_weight, _ = problem.run()
    problem.check(d_hidden, d_weight, 6e-4)


DIRECT = {
    "G begins in the middle of dC": dict(),
    "G begins in the second group, a pair is as long as two columns": dict(d=64, eps=0.5),
    "all of G beside dC, five super-blocks": dict(n=2200, eps=0.5, extra_share=1),
    "one super-block, none is hot": dict(n=500),
    "two, both have to keep a hot column": dict(n=1000),
    "five, columns of two are summed": dict(n=2200, d=256, eps=0.5),
    "more hot columns than the table holds": dict(hot_most=256, extra_share=0.8),
    "label smoothing, bias, a row block cut short; four super-blocks of five count": dict(
        n=2200, n_rows=2000, d=256, eps=0.5, constant=True, bias=True
    ),
    "two runs of parts of D, which no tile divides; vocabulary of partial word tiles": dict(d=251, v=3900),
}


@pytest.mark.parametrize("options", DIRECT.values(), ids=DIRECT)
def test_columns_that_need_no_sums_go_to_dc_directly(options, monkeypatch):
    """Three super-blocks, if not said otherwise. Every kept column is listed once for what stores it: as single, as hot
    or in the unions; behind G's first pair in the unions only. dC is right for each kind of column by itself.

    The last column before the limit and the next one are single ones, so a limit that is off by one shows.
    """
    options = {**dict(n=1100, v=4000, d=128, dtype=torch.float16, eps=0.25, extra_share=1 / 3), **options}
    extra_share, hot_most = options.pop("extra_share"), options.pop("hot_most", 4096)
    monkeypatch.setattr(column_kinds, "HOT_MOST", hot_most)
    problem = Problem(**options)
    v, d = problem.weight.shape
    n_pairs = int(marks.unpack_marks(problem.marks.bits, v).sum())
    extra_rows = int(n_pairs * extra_share)
    if extra_share < 1:
        expected = super_blocks(problem.scale > 0).any(1).sum(0) == 1
        while not expected[(at := (v * d // 128 - (n_pairs - extra_rows)) * 128 // d) - 1] & expected[at]:
            extra_rows += 1
    have_rows_beside(monkeypatch, extra_rows)
    seen = []
    direct_columns = backward_packed._Work.direct_columns
    monkeypatch.setattr(
        backward_packed._Work, "direct_columns", lambda work: seen.append((work, direct_columns(work))) or seen[0][1]
    )
    d_hidden, d_weight, d_bias = problem.run(bias_grad=True)
    problem.check(d_hidden, d_weight, 6e-4)
    check_bias_grad(problem, d_bias, 6e-4)

    work, columns = seen[0]
    kept = super_blocks(marks.unpack_marks(work.kept_bits, v))
    in_any = kept.any(1)
    keepers, n_super = in_any.sum(0), -(-problem.n_rows_int // 512)
    before_g, plan = torch.arange(v) < v, work.layout.plan[0]
    if plan[pack.PLAN_SPILL.value] > 0:
        before_g = (torch.arange(v) + 1) * d <= plan[pack.PLAN_STORAGE_SHIFT.value] * 128
        limit = int(before_g.sum())
        assert keepers[limit - 1] == keepers[limit] == 1
    assert before_g.all() == (extra_share == 1)
    single = (keepers == 1) & before_g
    often = keepers >= max(2, n_super / 2)
    hot = torch.zeros_like(single)
    hot[columns.hot[: int(columns.n_hot)].long()] = True
    assert not (hot & ~(often & before_g)).any() and hot.sum() == min(columns.n_hot.item(), hot_most)
    assert columns.n_hot == (often & before_g).sum() and (columns.n_hot > hot_most) == (hot_most == 256)
    summed = in_any.any(0) & ~single & ~hot
    for name, chosen in {"single": single, "hot": hot, "summed": summed}.items():
        assert chosen.sum() > 30 or (n_super == 1, name) == (True, "hot"), (name, chosen.sum())
        ours, truth = d_weight[chosen].double(), problem.grad.T[chosen] @ problem.hidden.double()
        assert ours.numel() == 0 or (ours - truth).norm() < 6e-4 * truth.norm(), name
    check_lists(work, columns, kept, single, hot, summed)


def super_blocks(kept):  # [row blocks, V]
    return torch.nn.functional.pad(kept, (0, 0, 0, -len(kept) % 4)).view(-1, 4, kept.shape[1])


def check_lists(work, columns, kept, single, hot, summed):
    in_any, v = kept.any(1), kept.shape[2]
    for words, chosen in (columns.is_summed, summed), (columns.is_direct, single | hot):
        assert torch.equal(marks.unpack_marks(words[None], v)[0], chosen)
    pairs = columns.hot_pairs[:, : hot.sum()]
    listed = columns.hot[: hot.sum()].long()
    assert torch.equal(pairs >= 0, kept.flatten(0, 1)[: len(pairs), listed])
    counts = columns.single_counts.tolist()
    alone = kept & (kept.sum(1, keepdim=True) == 1)
    lists = torch.cat([alone, (kept.sum(1, keepdim=True) > 1)], 1).flatten(0, 1) & single
    assert counts == lists.sum(1).tolist()
    for ours, chosen in zip(columns.single.split([*counts, v - sum(counts)]), lists, strict=False):
        assert torch.equal(ours.sort().values.long(), chosen.nonzero()[:, 0])
    left = torch.zeros_like(in_any)
    for s, (starts, sizes) in enumerate(zip(work.union_start, work.union_count, strict=True)):
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            left[s, work.union[start : start + size].long()] = True
    assert torch.equal(left, in_any & summed) and work.union_count.sum() == left.sum()


def test_main_grad_is_added_to_in_rounds(monkeypatch):
    """The arena holds two of the three super-blocks, so there are two rounds."""
    problem = Problem(1300, 1500, 64, torch.float32, n_rows=1200)
    per_super_block = marks.unpack_marks(problem.marks.bits, 1500).sum(1).view(-1)
    most = max(int(per_super_block[i : i + 4].sum()) for i in (0, 4, 8))
    monkeypatch.setattr(packed_layout, "ARENA_BYTES", int(2.2 * most) * 512)
    before = torch.randn(1500, 64)
    main_grad = before.clone()
    d_hidden, nothing, _ = problem.run(main_grad=main_grad)
    assert nothing is None
    problem.check(d_hidden, main_grad.double() - before.double(), 1e-4)  # rounding of the fp32 sum with `before`


def test_hidden_grad_is_ready_before_the_last_weight_grad(monkeypatch):
    """Its collective runs under that product, whose round is one of the two that have work, not an empty one."""
    problem = Problem(1300, 1500, 64, torch.float32, n_rows=1200)
    per_super_block = marks.unpack_marks(problem.marks.bits, 1500).sum(1).view(-1)
    most = max(int(per_super_block[i : i + 4].sum()) for i in (0, 4, 8))
    monkeypatch.setattr(packed_layout, "ARENA_BYTES", int(2.2 * most) * 512)
    order, weight_grad = [], backward_packed._Work.weight_grad

    def recorded(work, r, out):
        order.append(int(work.layout.plan[r, pack.PLAN_LAST.value] - work.layout.plan[r, pack.PLAN_FIRST.value]))
        weight_grad(work, r, out)

    monkeypatch.setattr(backward_packed._Work, "weight_grad", recorded)
    ready = SimpleNamespace(append=lambda grad: order.append("dE"))
    problem._backward(ready, False, torch.zeros(1500, 64), False, True, True)
    assert order[-2:] == ["dE", 7] and sum(order[:-2]) == 4  # row blocks of eleven

    order.clear()
    stream = backward_packed._Work.weight_grad_stream
    monkeypatch.setattr(
        backward_packed._Work, "weight_grad_stream", lambda *args: order.append("stream") or stream(*args)
    )
    Problem(600, 1500, 64, torch.float16)._backward(ready, False, None, False, True, True)
    assert order == ["dE", "stream"]


LAYOUTS = {  # (n, v, d, into dC's own storage), G's memory beside it in MiB, rounds
    "fresh": ((8192, 256000, 2304, True), 20, 1),
    "fresh, less than lists may need": ((8192, 131072, 512, True), 93, 1),
    "fresh, usual lists fit": ((8192, 151936, 1024, True), 20, 1),
    "fresh, a little less": ((8192, 49152, 2048, True), 93, 1),
    "fresh, enough for lists, not for wide slices": ((8192, 32064, 3072, True), 64, 1),
    "fresh, many tokens": ((32768, 32768, 1024, True), 256, 1),
    "fresh, few tokens of short rows": ((2048, 50304, 128, True), 38, 1),
    "fresh, fewer pairs": ((11, 256000, 128, True), 16, 1),
    "fresh, fewer pairs than that": ((11, 65536, 128, True), 4, 1),
    "main_grad": ((8192, 256000, 2304, False), 36, 12),
    "main_grad, many tokens": ((98304, 65536, 2048, False), 432, 12),
    "main_grad, a short step": ((8192, 50304, 768, False), 128, 4),
    "main_grad, one that needs one round": ((8192, 16384, 2048, False), 90, 1),
    "main_grad, few pairs": ((512, 1000, 64, False), 1, 1),
}


@pytest.mark.parametrize("shape, arena_mb, rounds", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_grows_with_the_tokens_that_need_it(shape, arena_mb, rounds, monkeypatch):
    monkeypatch.undo()
    n, v, d, in_place = shape
    kernels = {name: mock.MagicMock() for name in ("count_kernel", "plan_in_place_kernel", "plan_rounds_kernel")}
    with torch.device("meta"), mock.patch.multiple(pack, **kernels):
        bits = torch.empty(marks.marks_shape(n, v), dtype=torch.int32)
        storage = torch.empty(v, d, dtype=torch.bfloat16) if in_place else None
        layout = packed_layout.plan_layout(bits, None, n, v, d, torch.bfloat16, storage)
    assert round(layout.extra.nbytes / 2**20) == arena_mb and len(layout.plan) == rounds
    assert layout.list_pairs * 256 >= layout.extra.nbytes


@pytest.mark.parametrize("n_super, capacity", [(1, 40), (5, 40), (5, 39), (12, 100), (300, 1500), (300, 800)])
def test_rounds_are_filled_from_the_last(n_super, capacity):
    n_rounds, n_blocks, n_groups = 6, 4 * n_super - 2, 3
    pairs = torch.randint(0, 7, (n_super, 4, n_groups), generator=torch.Generator().manual_seed(n_super))
    pairs[n_super // 2] = 0
    pairs[0] = torch.tensor([10, 0, 0, 30])[:, None] * (torch.arange(3) == 1)  # as many as one of the arenas holds
    counts = pairs.sum((1, 2))
    expected, last, used = [], n_blocks, 0
    for s in reversed(range(n_super)):
        n = int(counts[s])
        if used + n > capacity:
            expected.insert(0, (4 * (s + 1), last))
            last, used = 4 * (s + 1), 0
        used += n
    expected.insert(0, (0, last))
    fits = counts.max() <= capacity and len(expected) <= n_rounds
    start, block_start, scratch = torch.full((n_super, 4, n_groups), -1), torch.full((n_super, 4), -1), counts * 0 - 1

    def planned(list_pairs):
        plan, dense = torch.full((n_rounds, pack.PLAN_FIELDS), -1), torch.full((1,), -1, dtype=torch.int32)
        pack.plan_rounds_kernel[(1,)](
            pairs, None, start, block_start, scratch, plan, dense, 128 * n_blocks, 1000, n_groups, n_super, n_blocks,
            capacity, list_pairs, 1.0, n_rounds, PLAN_FIELDS=pack.PLAN_FIELDS, GROUPS=4, SUPERS=4,
        )  # fmt: skip
        return plan, dense

    total = int(counts.sum())
    plan, dense = planned(total - 1)
    assert dense.item() == 1 and not plan.any()
    plan, dense = planned(total)
    assert torch.equal(start.transpose(1, 2), before(pairs.transpose(1, 2)))
    assert torch.equal(block_start, before(pairs.sum(2)))
    assert dense.item() == (not fits)
    if not fits:
        assert not plan.any()
        return
    first, stop, base = plan[n_rounds - len(expected) :, :3].unbind(1)
    assert list(zip(first.tolist(), stop.tolist(), strict=True)) == expected and not plan[: -len(expected)].any()
    assert base.tolist() == [int(counts[: start // 4].sum()) for start, _ in expected]


def before(counts: torch.Tensor) -> torch.Tensor:
    """How many come before each, in the order of memory."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view(counts.shape)


@pytest.mark.parametrize("n_blocks", [1, 64, 150])
def test_pairs_in_place_are_ordered_by_group(n_blocks):
    """And lie at the end of storage and extra: of T pairs the last 100 in extra, T - 100 at the end of storage."""
    n_groups = 5
    pairs = torch.randint(0, 50, (n_blocks, n_groups), generator=torch.Generator().manual_seed(n_blocks))
    start, block_start = torch.full((n_blocks, n_groups), -1), torch.full((n_blocks,), -1)
    total = int(pairs.sum())
    for capacity in (total, total - 1):
        plan, dense = torch.full((1, pack.PLAN_FIELDS), -1), torch.full((1,), -1, dtype=torch.int32)
        pack.plan_in_place_kernel[(1,)](
            pairs, None, start, block_start, plan, dense, 128 * n_blocks, 1000, n_groups, n_blocks, capacity, 1.0,
            10**6, 100, 256, 64, GROUP=256, GROUPS=8, BLOCKS=64,
        )  # fmt: skip
        spill = max(total - 100, 0)
        assert dense.item() == (capacity < total)
        assert plan[0].tolist() == [0, n_blocks if capacity == total else 0, 0, spill, 10**6 - spill, -spill]
        assert torch.equal(start.T, before(pairs.T)) and torch.equal(block_start, before(pairs.sum(1)))


def test_deterministic():
    problem = Problem(1100, 2300, 64, torch.float16, eps=2.0**-3)
    first, second = (problem.run(deterministic=True, bias_grad=True) for _ in range(2))
    problem.check(*first[:2], 6e-4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    check_bias_grad(problem, first[2], 6e-4)


@pytest.mark.parametrize("per_round", [None, 1, 2])
def test_dbias_of_several_super_blocks(per_round, monkeypatch):
    """Three of them in one round with dC, or one or two a round with main_grad, so that later rounds begin and end
    between the row blocks that are summed at a time; the last row block that counts is cut. fp16 has a unit."""
    problem = Problem(1300, 1500, 64, torch.float16, n_rows=1200, bias=True, constant=True)
    total = None
    if per_round:
        total = torch.zeros(1500, 64)
        per_block = marks.unpack_marks(problem.marks.bits, 1500).sum(1).view(-1)
        most = max(int(per_block[i : i + 4].sum()) for i in (0, 4, 8))
        monkeypatch.setattr(packed_layout, "ARENA_BYTES", int((per_round + 0.2) * most) * 256)
    check_bias_grad(problem, problem.run(bias_grad=True, main_grad=total)[2], 1e-4)


def check_bias_grad(problem, d_bias, tolerance):
    truth = problem.grad.sum(0)
    assert ((d_bias.double() - truth).norm() / truth.norm()).item() < tolerance


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_one_gradient(wanted):
    problem = Problem(256, 1500, 64, torch.float32)
    d_hidden, d_weight, _ = problem.run(hidden_grad=wanted == "hidden", weight_grad=wanted == "weight")
    assert (d_hidden is None) == (wanted == "weight") and (d_weight is None) == (wanted == "hidden")


@pytest.mark.parametrize("main_grad", [False, True])
def test_too_many_pairs_go_to_the_dense_backward(main_grad, monkeypatch):
    """Nothing is written through a list that overflows; the caller is told by the flag alone, on the device."""
    monkeypatch.setattr(packed_layout, "ARENA_BYTES", 256 * 512)
    have_rows_beside(monkeypatch, 1)
    monkeypatch.setattr(packed_layout, "MIN_LIST", 1)
    problem = Problem(600, 2000, 64, torch.float32 if main_grad else torch.float16, eps=1e-6)
    total = torch.ones(2000, 64) if main_grad else None
    problem.run(main_grad=total, expect_dense=True)
    assert total is None or torch.all(total == 1)


@pytest.mark.parametrize("main_grad", [False, True])
def test_lists_that_would_not_pay_go_to_the_dense_backward(main_grad, monkeypatch):
    """The density is that of tokens that count: four row blocks of eight; `_most_pairs` allows 2048 pairs more."""
    v = 4000
    problem = Problem(1000, v, 64, torch.float16, n_rows=500, eps=2.0**-5)
    density = int(marks.unpack_marks(problem.marks.bits, v).sum()) / (4 * v) - 2048 / (4 * v)
    assert 0.1 < density < 0.8
    for part, dense in ((0.999, True), (1.001, False)):
        monkeypatch.setattr(packed_layout, "MAX_DENSITY_SHORT_ROWS", part * density)
        problem.run(main_grad=torch.zeros(v, 64) if main_grad else None, expect_dense=dense)


def test_gradients_that_dc_would_overwrite_go_to_the_dense_backward(monkeypatch):
    """The lists fit, but finished groups of dC would reach G of later ones: too little lies behind dC's storage."""
    monkeypatch.setattr(packed_layout, "SLAB_COLUMNS", 1024)
    problem = Problem(600, 4000, 384, torch.float16, eps=2.0**-3)
    n_pairs = int(marks.unpack_marks(problem.marks.bits, 4000).sum())
    have_rows_beside(monkeypatch, n_pairs // 50)
    problem.run(expect_dense=True)
