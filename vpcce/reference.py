"""One rank's statistics and gradients in plain PyTorch: the CPU backend, and the truth of the tests.

The same functions as `vpcce.kernels.local`, see `vpcce.kernels.problem` for what they are asked. Logits exist for
one slice of the vocabulary at a time, [N, width] with N * width bounded, so memory stays near the inputs and the
gradients; such a block also stays in the caches of a CPU, which makes the recomputation in the
backward about as fast as reading stored logits back.

bf16 and fp16 operands are widened to fp32 slice by slice, so products and sums are fp32 and each result is rounded
once; fp64 stays fp64.
"""

import torch
from torch import Tensor

from vpcce import sampling
from vpcce.kernels.problem import (
    Head,
    HiddenGradReady,
    HotSet,
    LocalStats,
    Marks,
    Policy,
    RowGradients,
    Sampling,
    weight_factors,
)

# Numbers in one [N, width] block of logits: 8 MiB in fp32.
BLOCK_NUMEL = 2**21
# Slices narrower than this leave matrix products inefficient; N above BLOCK_NUMEL / MIN_WIDTH makes larger blocks.
MIN_WIDTH = 256


def local_stats(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] or [N, K] int64, local rows, -1 for elsewhere
    *,
    n_rows: Tensor | None = None,
    entropy: bool = False,
    argmax: bool = False,
    logit_sum: bool = False,
    sampling: Sampling | None = None,
    topk: int = 0,
) -> LocalStats:
    """max, sum of exp, target logit and what else is asked for, over this shard."""
    dtype = operand_dtype(hidden, head)
    n = hidden.shape[0]
    rows = hidden.to(dtype)
    top = rows.new_full((n,), -torch.inf)
    total = torch.zeros_like(top)
    ids = _per_token(target)
    target_logit = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)
    expected = torch.zeros_like(top) if entropy else None
    weighted = torch.zeros_like(top) if logit_sum else None
    best = torch.zeros(n, dtype=torch.int64, device=hidden.device) if argmax else None
    likely = rows.new_full((n, topk), -torch.inf)
    likely_ids = torch.zeros(n, topk, dtype=torch.int64, device=hidden.device)
    for start, stop in _slices(n, head.weight.shape[0]):
        x = _logits(rows, head, slice(start, stop))
        peak, where = x.max(1)
        if best is not None:
            best = torch.where(peak > top, where + start, best)
        if topk:
            part, place = x.topk(min(topk, stop - start), 1)
            likely, order = torch.cat([likely, part], 1).topk(topk, 1)
            likely_ids = torch.cat([likely_ids, place + start], 1).gather(1, order)
        new_top = torch.maximum(top, peak)
        shift = torch.where(new_top.isinf(), 0.0, new_top)
        rescale = torch.exp(top - shift)
        column = ids - start
        inside = (column >= 0) & (column < stop - start)
        picked = x.gather(1, torch.where(inside, column, 0))
        target_logit += torch.where(inside, picked, 0.0)
        if weighted is not None:
            weighted += x.sum(1) if head.column_weight is None else x @ head.column_weight[start:stop].to(dtype)
        if expected is None:
            e = x.sub_(shift[:, None]).exp_()
        else:
            e = torch.exp(x - shift[:, None])
            expected = expected * rescale + torch.where(e > 0, e * x, 0.0).sum(1)
        total = total * rescale + e.sum(1)
        top = new_top
    return LocalStats.pack(
        top, total, target_logit.view(target.shape), head.start, expected=expected, argmax=best, logit_sum=weighted,
        marks=_no_marks(sampling), topk=(likely, likely_ids) if topk else None,
    )  # fmt: skip


def hot_set(hidden: Tensor, head: Head, target: Tensor) -> HotSet:
    """A bound of the log-sum-exp speeds up kernels; the slices here need none, and -inf is a lower bound."""
    stats = hidden.new_zeros(3, hidden.shape[0], dtype=torch.float32)
    stats[::2] = -torch.inf
    return HotSet(stats, None)


def marks_shape(n: int, n_columns: int) -> tuple[int, ...]:
    """The backward decides about a column when it has its logits, so the forward leaves no marks but the seed."""
    return (1,)


def local_backward(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] or [N, K] int64, local rows, -1 for elsewhere
    lse: Tensor,  # [N], over the whole vocabulary
    rows: RowGradients,
    *,
    n_rows: Tensor | None = None,
    row_index: Tensor | None = None,
    hidden_policy: Policy | None = None,
    weight_policy: Policy | None = None,
    bias_grad: bool = False,
    marks: Marks | None = None,
    main_grad: Tensor | None = None,
    hidden_grad_dtype: torch.dtype,
    hidden_grad_ready: HiddenGradReady,
    hidden_grad: bool = True,
    low_rank_grad: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dE (handed to `hidden_grad_ready` too), dC or None when main_grad took it, dbias. None policy: not wanted.

    The gradient of `head.low_rank.hidden` is added to `low_rank_grad`; without `hidden_grad` it is all that is computed
    under hidden_policy.
    """
    wide = hidden.to(operand_dtype(hidden, head))
    total = torch.zeros_like(wide) if hidden_policy is not None and hidden_grad else None
    factor, trained = weight_factors(wide, head)
    weight_grad = main_grad
    if weight_policy is not None and main_grad is None:
        weight_grad = torch.zeros_like(trained, memory_format=torch.contiguous_format)
    column_grad = wide.new_zeros(head.weight.shape[0]) if bias_grad else None
    column_policy = weight_policy or hidden_policy
    for columns, wanted in _passes(hidden, head, hidden_policy, weight_policy):
        part = _Columns(wide, head, target, lse, rows, columns, marks)
        if total is not None and "hidden" in wanted:
            total.addmm_(part.gradient(hidden_policy), head.weight[columns].to(wide.dtype))
        if low_rank_grad is not None and "hidden" in wanted:
            low_rank_grad.addmm_(part.gradient(hidden_policy), head.low_rank.weight[columns])
        if "weight" in wanted:
            if column_grad is not None:
                column_grad[columns] = part.gradient(column_policy).sum(0)
            if weight_policy is not None:
                weight_grad[columns] += part.gradient(weight_policy).T @ factor
    if total is not None:
        hidden_grad_ready(total := total.to(hidden_grad_dtype))
    return total, None if weight_policy is None or main_grad is not None else weight_grad, column_grad


class _Columns:
    """Gradients of some columns' logits: d loss / d (hidden @ weight.T + bias), [N, columns], under any policy."""

    def __init__(self, wide, head: Head, target, lse, rows: RowGradients, columns: slice | Tensor, marks: Marks | None):
        x = _logits(wide, head, columns)
        p = torch.exp(x - lse[:, None])
        n_columns = x.shape[1]
        # Where in this block each token's target stands, n_columns for elsewhere.
        place = torch.full((head.weight.shape[0] + 1,), n_columns, device=x.device)
        place[:-1][columns] = torch.arange(n_columns, device=x.device)
        column = place[_per_token(target)]  # target -1 reads the last entry
        row, k = (column < n_columns).nonzero(as_tuple=True)
        at = (row, column[row, k])
        per_row = rows.softmax[:, None]
        if rows.softmax_logit is not None:
            per_row = per_row + rows.softmax_logit[:, None] * torch.where(p > 0, x, 0.0)
        slope = head.scale if head.softcap is None else head.scale * (1 - (x / head.softcap) ** 2)
        sparse = p * per_row
        sparse.index_put_(at, _per_token(rows.target)[row, k], accumulate=True)  # an id may be chosen twice
        self._sparse = sparse.mul_(slope)
        self._capped_constant = rows.constant is not None and head.softcap is not None  # exact, as in the kernels
        self._constant = None
        if rows.constant is not None:
            share = 1.0 if head.column_weight is None else head.column_weight[columns].to(x.dtype)
            self._constant = rows.constant[:, None] * share * slope
        self._p, self._at = p, at
        self._first_column = head.start + columns.start if isinstance(columns, slice) else None
        self._marks = marks
        self._made: dict[Policy, Tensor] = {}

    def gradient(self, policy: Policy) -> Tensor:
        """What `policy` leaves of the columns. Label smoothing's share is the same for all columns and never sparse."""
        if policy not in self._made:
            grad = self._sparse
            if policy.kind == "sampled" and not self._capped_constant:
                size = self._p.index_put(self._at, self._p.new_ones(()))
                scale = sampling.sampled_scale(size, policy.eps, self._marks.seed, self._first_column)
                grad = sampling.scale_columns(grad, scale)
            elif policy.kind == "filtered":
                error = self._p.index_put(self._at, self._p[self._at] - 1)
                grad = sampling.scale_columns(grad, sampling.filtered_scale(error, policy.eps))
            self._made[policy] = grad if self._constant is None else grad + self._constant
        return self._made[policy]


def _per_token(values: Tensor) -> Tensor:
    """[N] or [N, K] as [N, K]."""
    return values if values.dim() == 2 else values[:, None]


def _passes(hidden, head: Head, hidden_policy, weight_policy) -> list[tuple[slice | Tensor, str]]:
    """(columns, wanted gradients) block by block; in one order, or one order for each gradient where they differ."""
    n, n_columns = hidden.shape[0], head.weight.shape[0]
    spans = [slice(start, stop) for start, stop in _slices(n, n_columns)]
    sorts = {"hidden": hidden_policy is not None and hidden_policy.sort}
    sorts["weight"] = sorts["hidden"] if weight_policy is None else weight_policy.sort
    if hidden_policy is None:
        sorts["hidden"] = sorts["weight"]
    order = sampling.column_order(hidden, head) if any(sorts.values()) and n else None
    passes: list[tuple[slice | Tensor, str]] = []
    for sort in sorted(set(sorts.values())):
        wanted = " ".join(name for name in sorts if sorts[name] == sort)
        passes += [(order[span] if sort and order is not None else span, wanted) for span in spans]
    return passes


def _logits(wide: Tensor, head: Head, columns: slice | Tensor) -> Tensor:
    x = wide @ head.weight[columns].to(wide.dtype).T
    if head.low_rank is not None:
        x.addmm_(head.low_rank.hidden, head.low_rank.weight[columns].T)
    if head.bias is not None:
        x += head.bias[columns].to(wide.dtype)
    if isinstance(head.scale, Tensor) or head.scale != 1.0:
        x *= head.scale
    if head.softcap is not None:
        x = torch.tanh_(x.div_(head.softcap)).mul_(head.softcap)
    return x


def _slices(n: int, n_columns: int) -> list[tuple[int, int]]:
    """Columns per block of logits, a multiple of 128 so that tiles of the filter never straddle two slices."""
    width = max(MIN_WIDTH, BLOCK_NUMEL // max(n, 1) // 128 * 128)
    return [(start, min(start + width, n_columns)) for start in range(0, n_columns, width)]


def operand_dtype(hidden: Tensor, head: Head) -> torch.dtype:
    """Of products and of their sums."""
    return torch.float64 if torch.float64 in (hidden.dtype, head.weight.dtype) else torch.float32


def _no_marks(sampling: Sampling | None) -> Marks | None:
    if sampling is None:
        return None
    return Marks(torch.zeros(1, dtype=torch.int32, device=sampling.seed.device), sampling.seed)
