"""Every kernel that a training step launches compiles for four architectures and fits on the chip.

The launches are recorded from the library's own host code (`aot.py`), so the table of launch parameters is tested as it
is. Compiling proves nothing about fitting: shared memory is compared with what the chip has, and spilled registers with
a bound a little above what Triton 3.6.0 and 3.9.0 gave when this was written, so that a change that spills is noticed;
so is one after which sm_90's products wait for each other, which takes half their speed.

    marks and lists    the forward with marks, every packed kernel, and their fallback
    bias               the sums that its gradient takes from the kernels that make G
    every option       bias, scale, softcap, entropy, argmax, weighted sum of logits, ignored tokens, class weights
    top-k              group maxima and what is made of them, for few and most ids
    low rank           a second pair of factors, of a rank that is no power of two and of one beyond a block
"""

from dataclasses import dataclass, replace

import pytest
import torch
from aot import SHARED_LIMIT, TARGETS, compile_launches, recorded_launches

import vpcce
from vpcce.kernels import launch_table
from vpcce.kernels.local import hot_set, local_backward, local_stats
from vpcce.kernels.merge import merge_bounds, merge_ranks
from vpcce.kernels.problem import Head, LowRank, Policy, RowGradients, Sampling, StatsLayout
from vpcce.kernels.row_sum import row_sum
from vpcce.kernels.rows import row_gradients, select_rows, take_rows

N, V = 256, 1000
# Bytes, of the common cases and of the others.
SPILL_LIMIT = {"sm80": (1536, 4608), "sm90": (128, 4608), "sm100": (2048, 7680)}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    policy: Policy
    options: bool = False
    bias: bool = False  # a trainable one, without the other options
    main_grad: bool = False
    d: int = 256  # 123: rows that no descriptor can take
    rank: int = 0
    common: bool = True  # nothing that takes more registers: options, the filter, fp32, an fp32 tile to add to


CASES = {
    "marks and lists": Case(torch.bfloat16, vpcce.sampled()),
    "marks and lists into main_grad": Case(torch.bfloat16, vpcce.sampled(), main_grad=True, common=False),
    "marks and lists, every option": Case(torch.bfloat16, vpcce.sampled(), options=True, common=False),
    "exact": Case(torch.bfloat16, vpcce.exact()),
    "bias": Case(torch.bfloat16, vpcce.exact(), bias=True),
    # Triton 3.9 spills 144 bytes, 3.6 none.
    "bias, marks and lists": Case(torch.bfloat16, vpcce.sampled(), bias=True, common=False),
    # Tiles of one step keep more of other memory.
    "one step of D, bias": Case(torch.bfloat16, vpcce.exact(), bias=True, d=64, common=False),
    "one step of D, bias and low rank": Case(torch.bfloat16, vpcce.exact(), bias=True, d=64, rank=12, common=False),
    "one step of D, marks and lists": Case(torch.bfloat16, vpcce.sampled(), options=True, d=64, common=False),
    "odd D": Case(torch.bfloat16, vpcce.exact(), d=123, common=False),
    "odd D, fp32": Case(torch.float32, vpcce.exact(), d=123, common=False),
    "every option": Case(torch.bfloat16, vpcce.exact(), options=True, common=False),
    "low rank": Case(torch.bfloat16, vpcce.exact(), rank=64, common=False),
    "low rank, marks and lists": Case(torch.bfloat16, vpcce.sampled(), rank=12, common=False),
    "low rank, fp32": Case(torch.float32, vpcce.sampled(), rank=64, common=False),
    "filter, fp16": Case(torch.float16, vpcce.filtered(), common=False),
    "fp32": Case(torch.float32, vpcce.exact(), common=False),
    "fp32, marks and lists": Case(torch.float32, vpcce.sampled(), common=False),
}


def training_step(case: Case) -> None:
    """One forward and backward; all contents are meaningless, since no kernel runs."""
    hidden, weight = torch.zeros(N, case.d, dtype=case.dtype), torch.zeros(V, case.d, dtype=case.dtype)
    target, per_row = torch.zeros(N, dtype=torch.int64), torch.zeros(N)
    head, count, rows = Head(weight, weight[:, 0].clone() if case.bias else None), None, RowGradients(per_row, per_row)
    if case.options:
        softcap = 30.0 if case.policy.kind == "exact" else None  # with one, the constant below is computed exactly
        head = Head(weight, weight[:, 0].clone(), 1.5, softcap, 0, torch.zeros(V))
        count = torch.tensor([N], dtype=torch.int32)
        rows = RowGradients(per_row, per_row, per_row, per_row)
    if case.rank:
        head = replace(head, low_rank=LowRank(hidden[:, : case.rank].contiguous(), weight[:, : case.rank].contiguous()))
    sampling = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_table, "choose_splits", lambda *_: 4)
        if case.policy.kind == "sampled":
            hot = hot_set(hidden, head, target)
            assert hot.splits is not None
            sampling = Sampling(torch.tensor(1), case.policy.eps, per_row, hot.splits, hot.mean_bound)
        options = dict(entropy=case.options, argmax=case.options, logit_sum=case.options)
        stats = local_stats(hidden, head, target, n_rows=count, sampling=sampling, **options)
    local_backward(
        hidden, head, target, per_row, rows, n_rows=count, row_index=target if case.options else None,
        hidden_policy=case.policy, weight_policy=case.policy, bias_grad=case.options or case.bias, marks=stats.marks,
        main_grad=torch.zeros(V, case.d) if case.main_grad else None, hidden_grad_dtype=case.dtype,
        low_rank_grad=torch.zeros(N, case.rank) if case.rank else None,
        hidden_grad_ready=lambda grad: None,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiles_and_fits(case, target):
    with recorded_launches(target) as launches:
        training_step(case)
    for kernel, _, arguments in launches:
        # Grid axes 1 and 2 end at 65535 programs. Row blocks (8 million tokens) may stand there, columns may not.
        assert all(size <= -(-N // 512) * 4 for size in arguments["grid"][1:]), kernel.__name__
    usages = compile_launches(launches, target)
    names = {usage.name for usage in usages}
    if case.options or case is CASES["bias"]:
        assert names >= {"part_sums_kernel", "add_parts_kernel"}
    assert names >= {"forward_kernel", "merge_splits_kernel", "target_logit_kernel"}
    backward = {"packed_gradient_kernel", "dense_stream_kernel"}
    assert names >= (backward if case.policy.kind == "sampled" else {"gradient_kernel", "products_kernel"})
    for usage in usages:
        assert usage.shared <= SHARED_LIMIT[target] and not usage.serialized, usage
        if usage.spills is not None:  # gfx942's compiler does not say
            assert usage.registers <= 255, usage
            common = case.common and usage.name != "dense_stream_kernel"  # a fallback
            assert usage.spills <= SPILL_LIMIT[target][0 if common else 1], usage
    assert ("packed_bias_grad_kernel" in names) == (case.policy.kind == "sampled" and (case.options or case.bias))
    if case is CASES["marks and lists"]:
        in_place = {"packed_direct_kernel", "packed_stream_kernel"}
        assert names >= in_place | {"column_kinds_kernel", "hot_pairs_kernel", "single_list_kernel"}
        assert target != "sm90" or all(usage.spills == 0 for usage in usages if usage.name in in_place)
    if target == "sm90" and case is CASES["bias"]:
        assert all(usage.spills == 0 for usage in usages if usage.name == "gradient_kernel")
    if target == "sm90" and case is CASES["exact"]:
        assert all(usage.spills == 0 for usage in usages), "the kernels that the speed on an H200 stands on"


TOPK = {
    "8 ids": (torch.bfloat16, (N, 256000, 256), 8, 0),
    "64 ids, options, odd D": (torch.bfloat16, (N, 256000, 123), 64, 12),
    "fp32": (torch.float32, (N, 256000, 256), 8, 0),
    "one token, one column, one id, each a constant to the compiler": (torch.float16, (1, 1, 64), 1, 1),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, shape, k, rank", TOPK.values(), ids=TOPK)
def test_topk_compiles_and_fits(dtype, shape, k, rank, target):
    """For the vocabulary of the README's tables, since the number of tiles that a program holds is a constant."""
    n, v, d = shape
    hidden, weight = torch.zeros(n, d, dtype=dtype), torch.zeros(v, d, dtype=dtype)
    head, count = Head(weight), None
    if rank:
        low = LowRank(torch.zeros(n, rank, dtype=dtype), torch.zeros(v, rank, dtype=dtype))
        head, count = Head(weight, weight[:, 0].clone(), 1.5, 30.0, low_rank=low), torch.tensor([n], dtype=torch.int32)
    with recorded_launches(target) as launches:
        for sampling in (None, Sampling(torch.tensor(1), 2**-12, torch.zeros(n))):
            options = dict(n_rows=count, argmax=rank > 0, sampling=sampling)
            local_stats(hidden, head, torch.zeros(n, dtype=torch.int64), topk=k, **options)
    usages = compile_launches(launches, target)
    names = {usage.name for usage in usages}
    assert names >= {"forward_kernel", "pick_groups_kernel", "list_groups_kernel", "candidates_kernel"}
    for usage in usages:
        assert usage.shared <= SHARED_LIMIT[target], usage
        if usage.spills is not None:  # gfx942's compiler does not say
            assert usage.spills <= SPILL_LIMIT[target][0 if dtype != torch.float32 and not rank else 1], usage
    if target == "sm90" and k == 8 and dtype == torch.bfloat16:
        assert all(usage.spills == 0 for usage in usages)


def small_kernels(n: int, dtype: torch.dtype, ignore_index: int | None, options: bool, ranks: int) -> None:
    """The kernels per token, forward and backward, as `vpcce.autograd` calls them."""
    target, per_row = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    for check in (True, False):
        found = select_rows(target, ignore_index=ignore_index, start=0, stop=V, vocab_size=V, check=check)
        if found.index is not None:
            take_rows(torch.zeros(n, 256, dtype=dtype), found.index, found.count)
    layout = StatsLayout(None, options, options, 0, options)
    merge_ranks(torch.zeros(ranks, layout.n_rows, n), layout, V, found.index, found.count)
    merge_bounds(torch.zeros(ranks, 2 * n + 2)[:, :-2].view(ranks, 2, n))
    grads = (per_row[:1].expand(n), per_row, *((per_row, per_row) if options else (None, None)))
    row_gradients(grads, per_row, per_row, found.index, found.count)


@pytest.mark.parametrize("target", TARGETS)
def test_sums_of_rows_compile_and_fit(target):
    """Of every dtype, weighted and not, of one column, of columns that lie apart."""
    share, factor, count = torch.zeros(N), torch.zeros(()), torch.zeros(1, dtype=torch.int32)
    with recorded_launches(target) as launches:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            row_sum(torch.zeros(N, 2304, dtype=dtype))
            row_sum(torch.zeros(N, 123, dtype=dtype), share, n_rows=count, factor=factor, out=share[:123])
        row_sum(torch.zeros(123, N).T, share)
        row_sum(share[:, None], n_rows=count, factor=factor)
    usages = compile_launches(launches, target)
    assert len(usages) >= 10
    for usage in usages:
        assert usage.shared <= SHARED_LIMIT[target] and not usage.spills, usage
        assert usage.registers is None or usage.registers <= 128, usage  # several programs side by side


@pytest.mark.parametrize("target", TARGETS)
def test_small_kernels_compile_and_fit(target):
    """Also for one token, whose count is a constant to the compiler."""
    with recorded_launches(target) as launches:
        small_kernels(N, torch.bfloat16, -100, options=False, ranks=1)
        small_kernels(N + 1, torch.float16, -100, options=True, ranks=8)
        small_kernels(N, torch.float32, None, options=True, ranks=8)
        small_kernels(1, torch.bfloat16, -100, options=True, ranks=2)
    assert all(size == 1 for _, _, arguments in launches for size in arguments["grid"][1:])
    usages = compile_launches(launches, target)
    assert len(usages) >= 12
    for usage in usages:
        assert usage.shared <= SHARED_LIMIT[target] and (usage.spills or 0) <= 32, usage
