"""Maximum and sum of exponentials of every token's logits over this shard, at the cost of the matrix product.

One program walks a part of the vocabulary (a split) for one row block of 128 tokens. Its tiles of logits live in
registers; the running maximum m and sum s of a token are updated per tile,

    m' = max(m, max x * log2 e)        s' = s * 2^(m - m') + sum 2^(x * log2 e - m')

in base-2 units, since exp2 is one instruction and its argument another. With marks, a tile's exponentials are taken
relative to a lower bound of the log-sum-exp (`marks`) and their sum is scaled to m'. Each program writes its statistics
once, [splits, N], and a second, small kernel merges the splits. Results are bitwise repeatable: statistics need no
atomics, and with marks a program starts from the sums of those splits that should be finished by then, and waits for
them (`finished_bound`).

- Programs of the same split and different row blocks have neighbouring numbers, run together, and so read the same
  tiles of the weight from L2. Row blocks come in groups whose hidden rows fit into L2 too (`tiles.grouped`).
- With a softcap m may be 0 in place of the maximum (`softcap`): it says what the sum is relative to, no more.
- m starts at -inf, and a difference with a maximum of -inf is taken with 0 instead: rows whose logits are all -inf
  (an empty shard, masked ids) end with s = 0 and no NaN.
- Row blocks behind the `n_rows` that count return at once; how many that is, only the device knows.
- The tile loop is flattened into the loop over D (`flatten`), so the loads of the next tile are under way while the
  exponentials of this one are computed; not with a low-rank product, see `add_low_rank`.

Optional results cost a pass over the tile's registers each: sum of exp(x - m) * x for the entropy, the first column
of the maximum, the weighted sum of logits, marks for the sampled backward, the maxima of groups of columns from which
`topk` goes on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .coin import COIN_BLOCKS, coin_thresholds
from .launch_table import launch_parameters, plan_splits
from .marks import (
    FAR,
    add_marks,
    finished_bound,
    mark_bound,
    mark_shift,
    mark_words,
    marks_shape,
    store_found,
)
from .problem import Head, LocalStats, Marks, Sampling, StatsLayout, as_float_bits
from .softcap import capped_update, in_registers
from .target_logit import write_target_logits
from .tiles import (
    ROW_BLOCK,
    TL_DTYPE,
    Source,
    Tile,
    add_low_rank,
    ceil_div,
    compute_dtype,
    count_rows,
    grouped,
    load_scale,
    load_tile,
    logits_of,
    low_rank_arguments,
    multiprocessors,
    rows_in_cache,
    scale_tensor,
    scaled_of,
)
from .topk import GroupMaxima, store_group_maxima, write_topk
from .units import LN2, LOG2E


@triton.jit
def forward_kernel(
    hidden,  # [N, D] descriptor or pointer
    weight,  # [V, D] descriptor or pointer
    low_hidden_ptr,  # [N, RANK] or None
    low_weight_ptr,  # [V, RANK] or None
    bias_ptr,  # [V] or None
    scale_ptr,  # [] fp32 or None
    column_weight_ptr,  # [V] or None
    n_rows_ptr,  # [1] int32 or None
    max_ptr,  # [splits, N] out, base 2
    sum_ptr,  # [splits, N] out
    expected_ptr,  # [splits, N] out or None
    argmax_ptr,  # [splits, N] int32 out or None
    logit_sum_ptr,  # [splits, N] out or None
    lower_bound_ptr,  # [N] natural-log, or None without marks
    mean_bound_ptr,  # [N] natural-log, another one, or None
    found_ptr,  # [splits, N], see `finished_bound`, or None
    hot_ptr,  # [splits, N], `HotSplits.mass`
    ticket_ptr,  # [1] int32, zero: programs wait for those that took a ticket before them
    threshold_ptr,  # [coin groups, V]
    bits_ptr,  # [row blocks, words]
    group_max_ptr,  # [N, groups] out, see `topk`, or None
    n,
    n_columns,
    stride_hidden_row,
    stride_hidden_col,
    stride_weight_row,
    stride_weight_col,
    softcap,
    n_blocks,
    splits,
    group,
    tiles_per_split,
    n_words,
    processors,
    D: tl.constexpr,
    RANK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    COIN_BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,  # the last tile of columns is a whole one
    CAPPED: tl.constexpr,  # there is a softcap, and no option needs the logits themselves
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_HIDDEN: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    if found_ptr is not None:
        item = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    row_block, split = grouped(item, n_blocks, splits, group)
    n_counting = count_rows(n, n_rows_ptr)
    if row_block * BLOCK_M >= n_counting:
        return
    scale = load_scale(scale_ptr)
    row = row_block * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    counts = rows < n_counting
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    s = tl.zeros((BLOCK_M,), tl.float32)
    expected = tl.zeros((BLOCK_M,), tl.float32)
    argmax = tl.zeros((BLOCK_M,), tl.int32)
    logit_sum = tl.zeros((BLOCK_M,), tl.float32)
    if lower_bound_ptr is not None:
        lower_bound = tl.load(lower_bound_ptr + rows, mask=counts, other=FAR) * LOG2E
    if found_ptr is not None:
        side_by_side = tl.minimum(tl.cdiv(n_counting, BLOCK_M) - row_block // group * group, group)
        finished = split - processors // side_by_side
        lower_bound = finished_bound(lower_bound, found_ptr, n, rows, counts, finished)
    if mean_bound_ptr is not None:
        lower_bound = tl.maximum(lower_bound, tl.load(mean_bound_ptr + rows, mask=counts, other=0.0) * LOG2E)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(n_columns, BLOCK_N))
    for tile in tl.range(first_tile, last_tile, flatten=RANK == 0):
        column = tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            h = load_tile(hidden, row, k, n, D, stride_hidden_row, stride_hidden_col, BLOCK_M, BLOCK_K, TMA_HIDDEN)
            w = load_tile(
                weight, column, k, n_columns, D, stride_weight_row, stride_weight_col, BLOCK_N, BLOCK_K, TMA_WEIGHT
            )
            acc = tl.dot(h.to(DTYPE), w.to(DTYPE).T, acc, input_precision=PRECISION)
        columns = column + tl.arange(0, BLOCK_N)
        inside = columns < n_columns
        if low_hidden_ptr is not None:
            acc = add_low_rank(
                acc, low_hidden_ptr, low_weight_ptr, rows, counts, columns, inside, RANK, DTYPE, PRECISION
            )
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if lower_bound_ptr is not None:
            coin_group = (row_block // COIN_BLOCKS).to(tl.int64)
            threshold = tl.load(threshold_ptr + coin_group * n_columns + columns, mask=inside, other=float("inf"))
        if CAPPED:
            m, s, words = capped_update(
                in_registers(scaled_of(acc, bias, scale)), softcap, inside, m, s,
                lower_bound if lower_bound_ptr is not None else None,
                threshold if lower_bound_ptr is not None else None, EVEN, lower_bound_ptr is not None, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            x = logits_of(acc, bias, scale, softcap, HAS_SOFTCAP)
            if LOGIT_SUM:
                share = inside.to(tl.float32)
                if column_weight_ptr is not None:
                    share = tl.load(column_weight_ptr + columns, mask=inside, other=0.0)
                logit_sum += tl.sum(x * share[None, :], 1)
            if not EVEN:
                x = tl.where(inside[None, :], x, -float("inf"))
            if group_max_ptr is not None:
                n_groups = tl.cdiv(n_columns, BLOCK_N) * 8
                store_group_maxima(group_max_ptr, n_groups, rows, counts, tile, x, BLOCK_M, BLOCK_N)
            peak = tl.max(x, 1)
            if argmax_ptr is not None:
                first = tl.min(tl.where(x == peak[:, None], columns[None, :], n_columns), 1)
                argmax = tl.where(peak * LOG2E > m, first, argmax)
            m_new = tl.maximum(m, peak * LOG2E)
            unit = tl.where(m_new == -float("inf"), 0.0, m_new)  # of the running sums
            shift = unit  # of this tile's exponentials
            if lower_bound_ptr is not None:
                shift = mark_shift(tl.maximum(mark_bound(lower_bound, m, s), unit), unit - 60.0, unit + 60.0)
            rescale = tl.exp2(m - unit)
            e = tl.exp2(x * LOG2E - shift[:, None])
            s_tile = tl.sum(e, 1)
            if expected_ptr is not None:
                expected_tile = tl.sum(tl.where(e > 0.0, e * x, 0.0), 1)
            if lower_bound_ptr is not None:
                words = mark_words(e, threshold, BLOCK_M, BLOCK_N)
                rescale_tile = tl.exp2(shift - unit)
                s_tile *= rescale_tile
                if expected_ptr is not None:
                    expected_tile *= rescale_tile
            s = s * rescale + s_tile
            if expected_ptr is not None:
                expected = expected * rescale + expected_tile
            m = m_new
        if lower_bound_ptr is not None:
            add_marks(bits_ptr, n_words, row_block, tile, words, BLOCK_M, BLOCK_N)
    out = split.to(tl.int64) * n + rows
    tl.store(max_ptr + out, m, mask=counts)
    tl.store(sum_ptr + out, s, mask=counts)
    if found_ptr is not None:
        store_found(found_ptr, hot_ptr, out, counts, m, s)
    if expected_ptr is not None:
        tl.store(expected_ptr + out, expected, mask=counts)
    if argmax_ptr is not None:
        tl.store(argmax_ptr + out, argmax, mask=counts)
    if LOGIT_SUM:
        tl.store(logit_sum_ptr + out, logit_sum, mask=counts)


@triton.jit
def merge_splits_kernel(
    max_ptr,  # [splits, N] base 2
    sum_ptr,
    expected_ptr,  # or None
    argmax_ptr,  # or None
    logit_sum_ptr,  # or None
    out_ptr,  # [rows of the layout, N], natural log; the target logits' rows are left to `target_logit`
    n_rows_ptr,  # [1] int32 or None
    n,
    splits,
    first_id,  # global id of column 0
    EXPECTED: tl.constexpr,  # rows of the layout
    ARGMAX: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merges the splits in order; rows that do not count get the statistics of an empty shard."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = rows < count_rows(n, n_rows_ptr)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    expected = tl.zeros((BLOCK,), tl.float32)
    argmax = tl.zeros((BLOCK,), tl.int32)
    logit_sum = tl.zeros((BLOCK,), tl.float32)
    at = rows.to(tl.int64)
    for _ in range(splits):
        m_part = tl.load(max_ptr + at, mask=counts, other=-float("inf"))
        m_new = tl.maximum(m, m_part)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        rescale, rescale_part = tl.exp2(m - shift), tl.exp2(m_part - shift)
        s = s * rescale + tl.load(sum_ptr + at, mask=counts, other=0.0) * rescale_part
        if expected_ptr is not None:
            part = tl.load(expected_ptr + at, mask=counts, other=0.0)
            expected = expected * rescale + part * rescale_part
        if argmax_ptr is not None:
            argmax = tl.where(m_part > m, tl.load(argmax_ptr + at, mask=counts, other=0), argmax)
        if logit_sum_ptr is not None:
            logit_sum += tl.load(logit_sum_ptr + at, mask=counts, other=0.0)
        m = m_new
        at += n
    stored = rows < n
    wide_n = tl.full((), n, tl.int64)  # n = 1 arrives as a constant
    out = out_ptr + rows.to(tl.int64)
    tl.store(out, m * LN2, mask=stored)
    tl.store(out + wide_n, s, mask=stored)
    if expected_ptr is not None:
        tl.store(out + EXPECTED * wide_n, expected, mask=stored)
    if argmax_ptr is not None:
        tl.store(out + ARGMAX * wide_n, (argmax + first_id).to(tl.float32, bitcast=True), mask=stored)
    if logit_sum_ptr is not None:
        tl.store(out + LOGIT_SUM * wide_n, logit_sum, mask=stored)


def forward_stats(
    hidden: Tensor,  # [N, D]
    head: Head,
    target: Tensor,  # [N] or [N, K] int64, local rows, -1 for elsewhere
    *,
    n_rows: Tensor | None,
    entropy: bool,
    argmax: bool,
    logit_sum: bool,
    sampling: Sampling | None,
    topk: int = 0,
    tile: Tile | None = None,
    splits: int | None = None,
    group: int | None = None,
) -> LocalStats:
    """`LocalStats` of this shard; `tile`, `splits` and `group` (row blocks) override the launch table."""
    n, d = hidden.shape
    n_columns = head.weight.shape[0]
    device = hidden.device
    layout = StatsLayout(target.shape[1] if target.dim() == 2 else None, entropy, argmax, topk, logit_sum)

    def per_row(dtype=torch.float32, wanted=True, rows: tuple[int, ...] = ()):
        return torch.empty(*rows, n, dtype=dtype, device=device) if wanted else None

    if n == 0 or n_columns == 0:
        marks = None
        if sampling is not None:
            bits = torch.zeros(marks_shape(n, n_columns), dtype=torch.int32, device=device)
            marks = Marks(bits, sampling.seed)
        packed = torch.zeros(layout.n_rows, n, device=device)
        packed[0] = -torch.inf
        packed[layout.topk_row : layout.topk_row + topk] = -torch.inf  # of id 0
        if argmax:
            packed[layout.argmax_row] = as_float_bits(torch.full((n,), head.start, device=device), torch.float32)
        return LocalStats(packed, layout, head.start, marks)

    dtype = compute_dtype(hidden, head)
    tile = (tile or launch_parameters("forward", device, dtype)).of_depth(hidden.shape[1])
    n_blocks = ceil_div(n, tile.block_m)
    processors = multiprocessors(device)
    splits, tiles_per_split = plan_splits(n, n_columns, tile, processors, splits)
    part_max, part_sum = per_row(rows=(splits,)), per_row(rows=(splits,))
    part_expected = per_row(wanted=entropy, rows=(splits,))
    part_argmax = per_row(torch.int32, argmax, (splits,))
    part_logit_sum = per_row(wanted=logit_sum, rows=(splits,))
    bits = thresholds = found = hot = ticket = None
    n_words = 0
    if sampling is not None:
        # Row blocks without tokens are not visited, and nothing in them is marked.
        bits = torch.zeros(marks_shape(n, n_columns), dtype=torch.int32, device=device)
        n_words = bits.shape[1]
        thresholds = coin_thresholds(sampling.seed, sampling.eps, n, head.start, n_columns)
        if sampling.hot_splits is not None and sampling.hot_splits.columns == tiles_per_split * tile.block_n:
            hot = sampling.hot_splits.mass
            found = torch.full((splits, n), torch.nan, device=device)
            ticket = torch.zeros(1, dtype=torch.int32, device=device)
    maxima = GroupMaxima.empty(n, n_columns, tile.block_n, device) if topk else None
    h = Source(hidden, tile.block_m, tile.block_k)
    w = Source(head.weight, tile.block_n, tile.block_k)
    low_hidden, low_weight, rank = low_rank_arguments(head)
    capped = head.softcap is not None and not (entropy or argmax or logit_sum or topk)
    forward_kernel[(n_blocks * splits,)](
        h.source, w.source, low_hidden, low_weight, head.bias, scale_tensor(head), head.column_weight, n_rows,
        part_max, part_sum, part_expected, part_argmax, part_logit_sum,
        None if sampling is None else sampling.lower_bound, None if sampling is None else sampling.mean_bound,
        found, hot, ticket, thresholds, bits,
        maxima.values if topk else None,
        n, n_columns, h.stride_row, h.stride_col, w.stride_row, w.stride_col, head.softcap or 1.0,
        n_blocks, splits, group or rows_in_cache(n, d, hidden.element_size()), tiles_per_split, n_words, processors,
        D=d, RANK=rank, HAS_SOFTCAP=head.softcap is not None, LOGIT_SUM=logit_sum, COIN_BLOCKS=COIN_BLOCKS,
        EVEN=n_columns % tile.block_n == 0, CAPPED=capped,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        TMA_HIDDEN=h.tma, TMA_WEIGHT=w.tma, DTYPE=TL_DTYPE[dtype], PRECISION="ieee",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    packed = torch.empty(layout.n_rows, n, dtype=torch.float32, device=device)
    merge_splits_kernel[(ceil_div(n, ROW_BLOCK),)](
        part_max, part_sum, part_expected, part_argmax, part_logit_sum, packed, n_rows, n, splits, head.start,
        EXPECTED=layout.expected_row, ARGMAX=layout.argmax_row, LOGIT_SUM=layout.logit_sum_row,
        BLOCK=ROW_BLOCK, num_warps=4,
    )  # fmt: skip
    write_target_logits(hidden, head, target, packed, 2, bits, n_rows)
    if topk:
        write_topk(hidden, head, maxima, n_rows, topk, packed[layout.topk_row :][: 2 * topk])
    return LocalStats(packed, layout, head.start, None if sampling is None else Marks(bits, sampling.seed))
