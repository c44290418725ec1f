"""The sampled backward: only the columns that the forward marked, packed into lists, without waiting for the device.

    lists       count the marks, plan rounds, list the marked columns of each row block           (`pack`)
    per round   recompute their logits, toss the coin, write the kept gradient G                  (`packed_gradient`)
                lists of what was kept; dE of the round's row blocks, final; dC, dbias added      (`packed_products`)

Where G lives, 256 bytes per pair in half precision, decides between two orders of work:

- dC fresh in half precision: one round. dC's own storage is free until dC is written, so G lies at its end and in
  memory behind it (`bytes_beside`), and is consumed from the front while finished slabs of dC overwrite it. The
  fp32 sums are a ring of parts of dC (`packed_stream`); columns before G that one super-block keeps, or most of them,
  need none and are computed beside dE (`column_kinds`, `packed_direct`).
- fp32 dC or main_grad (or dE alone, or a low-rank dC): G has an arena of ARENA_BYTES for ARENA_ROWS tokens; rounds take
  as many super-blocks as fit. Each finishes dE of its rows; dC is added to in fp32. The last round is a full one, so
  that dE's collective runs under its dC. Deterministic and half precision: into an fp32 copy of dC.

How many pairs there are is known on the device only. If they do not fit, or are so many that the dense product is
cheaper, the plan's rounds are empty and the flag `dense` starts `dense_stream` in their place.
"""

import torch
import triton
from torch import Tensor

from . import launch_table, pack
from .beside import Beside
from .coin import ROW_BLOCK
from .column_kinds import HOT_TILE, DirectColumns, column_kinds_kernel, hot_pairs_kernel, hot_width, single_list_kernel
from .dense_stream import dense_stream
from .packed_direct import packed_direct_kernel
from .packed_gradient import packed_gradient_kernel
from .packed_layout import LIST_BLOCK, plan_layout
from .packed_products import (
    packed_bias_grad_kernel,
    packed_hidden_grad_kernel,
    packed_weight_grad_kernel,
)
from .packed_stream import packed_stream_kernel
from .packed_table import LAG, RING, ROUND_ROWS, ROUND_STEP, SLOTS, packed_launch
from .problem import Head, HiddenGradReady, Marks, Policy, RowGradients, weight_factors
from .row_sum import row_sum
from .tiles import Source, compute_dtype, gradient_unit, low_rank_arguments, narrowed
from .unions import SETS, union_kernel


def packed_backward(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N]
    lse: Tensor,  # [N]
    rows: RowGradients,
    *,
    n_rows: Tensor | None,
    row_index: Tensor | None,
    policy: Policy,
    marks: Marks,
    hidden_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    main_grad: Tensor | None,
    hidden_grad_dtype: torch.dtype,
    hidden_grad_ready: HiddenGradReady,
    low_rank_grad: Tensor | None = None,  # [N, R] fp32 zeros, out
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dE, dC or None when main_grad took it, dbias) of the sampled policy; see the module and `problem`."""
    n, d = hidden.shape
    n_columns = head.weight.shape[0]
    device = hidden.device
    dtype = compute_dtype(hidden, head)
    d_hidden = torch.zeros(n, d, dtype=hidden_grad_dtype, device=device) if hidden_grad else None
    d_bias = torch.zeros(n_columns, dtype=torch.float32, device=device) if bias_grad else None
    d_weight = None
    if weight_grad and main_grad is None:
        like = weight_factors(hidden, head)[1]
        d_weight = torch.empty(like.shape, dtype=like.dtype if head.low_rank is None else torch.float32, device=device)
    total = main_grad if main_grad is not None else d_weight
    if n == 0 or n_columns == 0:
        if d_hidden is not None:
            hidden_grad_ready(d_hidden)
        if d_weight is not None:
            d_weight.zero_()
        return d_hidden, d_weight, d_bias

    in_place = (
        d_weight is not None
        and head.low_rank is None
        and d_weight.dtype == dtype != torch.float32
        and not policy.deterministic
        and n <= 40 * d  # beyond, G fits into dC below a density of 2.5% only
    )
    sums = None  # what dC is added into, fp32
    if weight_grad and not in_place:
        sums = total
        if total.dtype != torch.float32:
            sums = torch.zeros(total.shape, dtype=torch.float32, device=device)
        elif main_grad is None:
            sums.zero_()
    layout = plan_layout(marks.bits, n_rows, n, n_columns, d, dtype, d_weight if in_place else None)
    work = _Work(hidden, head, target, lse, rows, n_rows, row_index, policy, marks, layout, dtype, bias_grad)
    columns = work.direct_columns() if in_place else None
    n_rounds = layout.plan.shape[0]
    for r in range(n_rounds):
        work.gradient(r)
        if d_bias is not None:
            work.bias_grad(r, d_bias)
        with Beside(device) as beside:
            if in_place:
                with beside.stream():
                    work.direct_weight_grad(columns, d_weight)
            if low_rank_grad is not None:  # few programs, which leave most multiprocessors to dE's
                with beside.stream():
                    work.low_rank_grad(r, low_rank_grad)
            if d_hidden is not None:
                work.hidden_grad(r, d_hidden)
        if r == n_rounds - 1:  # dE ends before the last of dC, which its collective runs under
            work.free_lists()
            dense_stream(
                hidden, head, target, lse, rows, dense=layout.dense, n_rows=n_rows, row_index=row_index,
                hidden_grad=d_hidden, weight_grad=d_weight if in_place else sums, accumulate=not in_place,
                bias_grad=d_bias, low_rank_grad=low_rank_grad, arena=layout.extra,
            )  # fmt: skip
            if d_hidden is not None:
                hidden_grad_ready(d_hidden)
        if in_place:
            work.weight_grad_stream(columns, d_weight)
        elif weight_grad:
            work.unions(r)
            work.weight_grad(r, sums)
    if sums is not None:
        work.add_constant(sums)
    if sums is not None and sums is not total:
        total.copy_(sums) if main_grad is None else total.add_(sums)
    if d_bias is not None:
        work.add_constant_bias(d_bias)
    return d_hidden, d_weight, d_bias


class _Work:
    """The lists of one backward and the kernels that run on them, a round at a time."""

    def __init__(self, hidden, head, target, lse, rows, n_rows, row_index, policy, marks, layout, dtype, bias_grad):
        self.hidden, self.head, self.target, self.lse, self.rows = hidden, head, target, lse, rows
        self.row_index = row_index
        self.n_rows, self.policy, self.marks, self.layout = n_rows, policy, marks, layout
        self.n, self.d = hidden.shape
        self.n_columns = head.weight.shape[0]
        self.n_words = marks.bits.shape[1]
        device = hidden.device
        self.device, self.dtype = device, dtype
        self.precision = "ieee" if dtype == torch.float32 else "tf32"  # ignored for half operands
        scale = head.scale
        self.scale = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=torch.float32, device=device)
        self.unit = gradient_unit(rows, head, dtype)
        self._prepare_constant()

        def ints(*shape):
            return torch.empty(*shape, dtype=torch.int32, device=device)

        self.word_start = ints(layout.n_blocks, self.n_words)
        self.kept_bits = ints(layout.n_blocks, self.n_words)
        self.list = ints(layout.list_pairs)
        self.keep = torch.empty(layout.round_pairs, dtype=torch.int8, device=device)
        self.pair_sum = torch.empty(layout.round_pairs, dtype=torch.float32, device=device) if bias_grad else None
        self.kept_counts = ints(layout.n_blocks, layout.n_groups)
        self.kept_pair = ints(layout.round_pairs)
        self.kept_column = ints(layout.round_pairs)
        self.union = ints(layout.round_pairs)
        self.union_start = ints(layout.n_super, layout.n_slabs)
        self.union_count = ints(layout.n_super, layout.n_slabs)
        pack.list_kernel[(layout.n_groups, layout.n_blocks)](
            marks.bits, n_rows, layout.start, layout.dense, self.word_start, self.list, self.n_words, self.n_columns,
            GROUP_WORDS=layout.group_words, BLOCK=LIST_BLOCK, num_warps=4,
        )  # fmt: skip

    def free_lists(self) -> None:
        """dC needs the marks and the unions only."""
        del self.list, self.keep, self.pair_sum, self.kept_pair, self.kept_column

    def gradient(self, r: int) -> None:
        """G of the round's pairs, and the lists of those that stay."""
        at, rows, head = self.layout, self.rows, self.head
        plan = at.plan[r]
        programs, blocks = packed_launch("gradient", self.device, self.dtype)
        hidden = Source(self.hidden, ROW_BLOCK, blocks["BLOCK_K"])
        low_hidden, low_weight, rank = low_rank_arguments(head)
        packed_gradient_kernel[(programs,)](
            hidden.source, head.weight, low_hidden, low_weight, head.bias, self.target, self.lse, rows.softmax,
            rows.target, rows.softmax_logit, self.n_rows, self.marks.seed, self.scale, self.unit, at.start, at.counts,
            plan, self.list, self.keep, self.pair_sum, at.storage, at.extra, self.n, hidden.stride_row,
            head.weight.stride(0), head.start, at.n_groups, self.policy.eps, head.softcap or 1.0, D=self.d, RANK=rank,
            HAS_SOFTCAP=head.softcap is not None, TMA_HIDDEN=hidden.tma, PROGRAMS=programs, PRECISION=self.precision,
            SUMS_BY_PRODUCT=launch_table.sums_by_product(self.device, self.dtype), **blocks,
        )  # fmt: skip
        pack.keep_kernel[(at.processors * 4,)](
            self.marks.bits, self.word_start, self.keep, plan, self.kept_bits, self.kept_counts, self.n_words,
            self.n_columns, at.n_groups, GROUP_WORDS=at.group_words, BLOCK=LIST_BLOCK, PROGRAMS=at.processors * 4,
            num_warps=4,
        )  # fmt: skip
        pack.kept_list_kernel[(at.processors * 4,)](
            self.marks.bits, self.kept_bits, self.word_start, at.block_start, self.kept_counts, plan, self.kept_pair,
            self.kept_column, self.n_words, self.n_columns, at.n_groups, GROUP_WORDS=at.group_words,
            GROUPS=at.groups_pow2, BLOCK=LIST_BLOCK, PROGRAMS=at.processors * 4, num_warps=4,
        )  # fmt: skip

    def unions(self, r: int, summed: Tensor | None = None, single=None, single_counts=None) -> None:
        """Lists what each super-block kept: every column, or those of `summed`; then it counts those of `single`."""
        at = self.layout
        union_kernel[(at.processors * 4,)](
            self.kept_bits, at.start, at.plan[r], summed, single, single_counts, self.union, self.union_start,
            self.union_count, self.n_words, at.n_groups, at.n_slabs, GROUP_WORDS=at.group_words,
            SLAB_WORDS=at.slab_columns // 32, PROGRAMS=at.processors * 4, num_warps=8,
        )  # fmt: skip

    def hidden_grad(self, r: int, out: Tensor) -> None:
        self._hidden_product(r, self.head.weight, self.constant_weight, self.row_index, out)

    def low_rank_grad(self, r: int, out: Tensor) -> None:
        self._hidden_product(r, self.head.low_rank.weight, self.constant_low_weight, None, out)

    def _hidden_product(self, r: int, weight: Tensor, constant_weight, row_index, out: Tensor) -> None:
        at = self.layout
        programs, blocks = packed_launch("hidden", self.device, self.dtype)
        packed_hidden_grad_kernel[(programs,)](
            weight, at.storage, at.extra, self.unit, at.plan[r], at.block_start, self.kept_counts,
            self.kept_pair, self.kept_column, self.n_rows, row_index, self.constant, constant_weight, out,
            self.n, weight.stride(0), at.n_groups, D=weight.shape[1], GROUPS=at.groups_pow2, PROGRAMS=programs,
            PRECISION=self.precision, **self._narrowed(blocks, weight.shape[1]),
        )  # fmt: skip

    def _narrowed(self, blocks: dict, width: int) -> dict:
        """Launch parameters of a product whose result has `width` columns: D, or a smaller rank."""
        return blocks if width >= self.d else blocks | {"BLOCK_D": narrowed(blocks["BLOCK_D"], width)}

    def weight_grad(self, r: int, out: Tensor) -> None:
        at = self.layout
        programs, blocks = packed_launch("weight", self.device, self.dtype)
        factor, _ = weight_factors(self.hidden, self.head)
        blocks = self._narrowed(blocks, factor.shape[1])
        hidden = Source(factor, blocks["BLOCK_K"], blocks["BLOCK_D"])
        packed_weight_grad_kernel[(programs,)](
            hidden.source, at.storage, at.extra, self.unit, at.plan[r], self.marks.bits, self.kept_bits,
            self.word_start, self.union, self.union_start, self.union_count, self.n_rows, out, self.n,
            hidden.stride_row, out.stride(0), self.n_words, at.n_slabs, D=factor.shape[1], PROGRAMS=programs,
            TMA_HIDDEN=hidden.tma, ATOMIC=not self.policy.deterministic, PRECISION=self.precision, **blocks,
        )  # fmt: skip

    def weight_grad_stream(self, columns: DirectColumns, out: Tensor) -> None:
        """dC of the columns that need sums, slab by slab, into the storage that G leaves."""
        at = self.layout
        programs, blocks = packed_launch("stream", self.device, self.dtype)
        n_parts = at.n_slabs * triton.cdiv(self.d, blocks["BLOCK_D"])
        counters = torch.zeros(1 + 2 * n_parts + at.n_groups, dtype=torch.int32, device=self.device)
        ticket, added, rounded, groups = counters.split([1, n_parts, n_parts, at.n_groups])
        hidden = Source(self.hidden, blocks["BLOCK_K"], blocks["BLOCK_D"])
        ring = torch.zeros(RING, at.slab_columns, blocks["BLOCK_D"], dtype=torch.float32, device=self.device)
        packed_stream_kernel[(programs,)](
            hidden.source, at.storage, at.extra, self.unit, at.dense, at.plan[0], self.marks.bits, self.kept_bits,
            self.word_start, self.union, self.union_start, self.union_count, columns.is_summed, columns.is_direct,
            self.n_rows, self.constant_hidden, self.head.column_weight, ring, ticket, added, rounded, groups, out,
            self.n, hidden.stride_row, self.n_words, at.n_slabs, self.n_columns, at.n_super, D=self.d,
            SLAB=at.slab_columns, GROUP_SLABS=at.group_columns // at.slab_columns, RING=RING, LAG=LAG, SLOTS=SLOTS,
            ROUND_ROWS=min(ROUND_ROWS, at.slab_columns), ROUND_STEP=ROUND_STEP,
            TMA_HIDDEN=hidden.tma, **blocks,
        )  # fmt: skip

    def direct_columns(self) -> DirectColumns:
        """The memory of `direct_weight_grad`."""
        at = self.layout
        n_lists, width = SETS.value * at.n_super, hot_width(self.n_columns)
        programs, blocks = packed_launch("direct", self.device, self.dtype)

        def ints(*shape):
            return torch.empty(*shape, dtype=torch.int32, device=self.device)

        counters = torch.zeros(2 * n_lists + 2, dtype=torch.int32, device=self.device)
        counts, cursors, n_hot, ticket = counters.split([n_lists, n_lists, 1, 1])
        is_single, is_direct, is_summed = ints(3, self.n_words)
        return DirectColumns(
            is_single, is_direct, is_summed, n_hot, ints(width), ints(at.n_blocks, width), counts, cursors,
            ints(self.n_columns), ticket, ints(programs, 5, blocks["BLOCK_N"]),
        )  # fmt: skip

    def direct_weight_grad(self, columns: DirectColumns, out: Tensor) -> None:
        """dC of the columns that need no sums; the unions list the others."""
        at = self.layout
        plan, programs, width = at.plan[0], at.processors * 4, len(columns.hot)
        column_kinds_kernel[(triton.cdiv(self.n_words, LIST_BLOCK),)](
            self.kept_bits, self.n_rows, plan, columns.is_single, columns.is_direct, columns.is_summed, columns.n_hot,
            columns.hot, self.n, self.n_words, self.n_columns, D=self.d, HOT_MOST=width, BLOCK=LIST_BLOCK, num_warps=4,
        )  # fmt: skip
        hot_pairs_kernel[(width // HOT_TILE, at.n_blocks)](
            self.marks.bits, self.kept_bits, self.word_start, plan, columns.n_hot, columns.hot, columns.hot_pairs,
            self.n_words, HOT_MOST=width, BLOCK=HOT_TILE, num_warps=4,
        )  # fmt: skip
        self.unions(0, columns.is_summed, columns.is_single, columns.single_counts)
        single_list_kernel[(programs,)](
            self.kept_bits, plan, columns.is_single, columns.single_counts, columns.single_cursors, columns.single,
            self.n_words, at.n_slabs, SLAB_WORDS=at.slab_columns // 32, PROGRAMS=programs, num_warps=8,
        )  # fmt: skip
        programs, blocks = packed_launch("direct", self.device, self.dtype)
        hidden = Source(self.hidden, blocks["BLOCK_K"], blocks["BLOCK_D"])
        packed_direct_kernel[(programs,)](
            hidden.source, at.storage, at.extra, self.unit, at.dense, at.plan[0], self.marks.bits, self.kept_bits,
            self.word_start, columns.n_hot, columns.hot, columns.hot_pairs, columns.single_counts, columns.single,
            columns.tiles, self.n_rows, self.constant_hidden, self.head.column_weight, columns.ticket, out, self.n,
            hidden.stride_row, self.n_words, len(columns.single_counts), D=self.d, HOT_MOST=len(columns.hot),
            TMA_HIDDEN=hidden.tma, **blocks,
        )  # fmt: skip

    def bias_grad(self, r: int, out: Tensor) -> None:
        packed_bias_grad_kernel[(triton.cdiv(self.n_columns, 256),)](
            self.pair_sum, self.unit, self.layout.plan[r], self.marks.bits, self.kept_bits, self.word_start, out,
            self.n_words, self.n_columns, BLOCK_M=8, BLOCK_N=256, num_warps=8,
        )  # fmt: skip

    def _prepare_constant(self) -> None:
        """Row gradients that are the same for every column: dE += constant (x) sum of weights, and dC likewise."""
        self.constant = self.constant_weight = self.constant_low_weight = self.constant_hidden = None
        if self.rows.constant is None:
            return
        self.constant = self.rows.constant * self.scale
        share, self.constant_weight = self.head.column_weight, self.head.weight_sum
        if self.constant_weight is None:
            self.constant_weight = row_sum(self.head.weight, share)
        if self.head.low_rank is not None:
            self.constant_low_weight = row_sum(self.head.low_rank.weight, share)
        # 0 when the dense backward, which has its own constant term, takes over
        self.is_packed = (self.layout.dense == 0).float()
        factor, _ = weight_factors(self.hidden, self.head)
        self.constant_hidden = row_sum(factor, self.constant, n_rows=self.n_rows, factor=self.is_packed)

    def add_constant(self, out: Tensor) -> None:
        if self.constant_hidden is None:
            return
        share = self.head.column_weight
        out.add_(self.constant_hidden) if share is None else out.addr_(share, self.constant_hidden)

    def add_constant_bias(self, out: Tensor) -> None:
        if self.constant is None:
            return
        share = self.head.column_weight
        total = row_sum(self.constant[:, None], n_rows=self.n_rows, factor=self.is_packed)
        out.add_(total) if share is None else out.addcmul_(share, total)
