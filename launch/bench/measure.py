"""Time, peak memory and error of one training step of a head.

A *step* is `loss = loss_of()` and `loss.backward()` on leaves `hidden` and `weight` whose gradients are None
before.

- Time: warm-up calls first, so that compilation and the allocator's growth stay out; then single calls timed
  with device events, and their median. The number of repeats follows from a time budget and the first warm
  call; the inputs are much larger than any cache.
- Memory: the allocator's peak during one warm step minus what was allocated before it: gradients included,
  inputs not.
- Error: |x - truth| / |truth| in the Frobenius norm. The truth is the fp32 product and softmax of the same
  (bf16) inputs, a slice of tokens at a time; TF32 is off.

Without a GPU the clock is the host's and memory is None, so that the tests can run the harness.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIB = 2**20
MIN_REPEATS, MAX_REPEATS = 3, 50


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def call_ms(fs: Sequence[Callable[[], object]], rounds: int = 1) -> list[list[float]]:
    """Milliseconds of each function in each round, in turn, enqueued without waiting in between.

    A training step works like that: the host runs ahead, and its own work shows only where it is the slower of the
    two. Taking turns puts all functions into the same state of the chip, whose clock falls by a tenth under load.
    """
    times: list[list[float]] = [[] for _ in fs]
    if not torch.cuda.is_available():
        for _ in range(rounds):
            for f, found in zip(fs, times, strict=True):
                start = time.perf_counter()
                f()
                found.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(fs) + 1)]
    events[0].record()
    for index in range(rounds * len(fs)):
        fs[index % len(fs)]()
        events[index + 1].record()
    events[-1].synchronize()
    for index in range(rounds * len(fs)):
        times[index % len(fs)].append(events[index].elapsed_time(events[index + 1]))
    return times


def median_ms(fs: Sequence[Callable[[], object]], budget_s: float) -> list[float]:
    """Median time of a call of each function; all have run before."""
    first = sum(found[0] for found in call_ms(fs))
    rounds = int(budget_s * 1e3 / max(first, 1e-3))
    rounds = min(max(rounds, MIN_REPEATS), MAX_REPEATS)
    return [statistics.median(found[1:]) for found in call_ms(fs, rounds + 1)]


def peak_mb(f: Callable[[], object]) -> float | None:
    """Peak of the allocator during a call beyond what is allocated before it, in MiB."""
    if not torch.cuda.is_available():
        f()
        return None
    synchronize()
    free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def kernel_times(f: Callable[[], object], calls: int = 5) -> dict[str, float]:
    """Milliseconds per call of every kernel that takes at least 10 us, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(calls):
            f()
        synchronize()
    times = {event.key: event.device_time_total / 1e3 / calls for event in record.key_averages()}
    kept = {name[:80]: round(ms, 4) for name, ms in times.items() if ms >= 0.01}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def gemm(hidden: Tensor, weight: Tensor, slice_bytes: int = 24 * 2**30) -> Callable[[], None]:
    """The bare matrix product hidden @ weight.T, in slices of tokens where the result would not fit.

    2 N V D operations; N V results.
    """
    tokens = max(1, slice_bytes // (weight.shape[0] * hidden.element_size()))
    hidden, weight = hidden.detach(), weight.detach()

    def product() -> None:
        for part in hidden.split(tokens):
            part @ weight.T

    return product


@dataclass
class Truth:
    """Gradients of the mean loss, fp32."""

    loss: float
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]


@torch.no_grad()
def truth_of(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, tokens: int = 512) -> Truth:
    n, d = hidden.shape
    wide = weight.float()
    d_hidden = torch.zeros(n, d, device=hidden.device)
    d_weight = torch.zeros_like(wide)
    loss = torch.zeros((), device=hidden.device)
    kept = (target != ignore_index).nonzero()[:, 0]
    for rows in kept.split(tokens):
        x = hidden[rows].float()
        g = x @ wide.T
        own = g.gather(1, target[rows, None])
        loss += (g.logsumexp(1, keepdim=True) - own).sum()
        g = g.softmax(1)
        g[torch.arange(len(rows), device=g.device), target[rows]] -= 1
        d_hidden[rows] = g @ wide
        d_weight.addmm_(g.T, x)
    count = max(len(kept), 1)
    return Truth(loss.item() / count, d_hidden.div_(count), d_weight.div_(count))


@torch.no_grad()
def relative_error(x: Tensor, truth: Tensor, rows: int = 16384) -> float:
    """|x - truth| / |truth| without a full-size difference."""
    squares = torch.zeros(2, device=truth.device, dtype=torch.float64)
    for a, b in zip(x.split(rows), truth.split(rows), strict=True):
        squares[0] += (a.float() - b).square().sum()
        squares[1] += b.square().sum()
    return (squares[0] / squares[1]).sqrt().item()


def measure(
    loss_of: Callable[[], Tensor],
    hidden: Tensor,
    weight: Tensor,
    *,
    budget_s: float,
    truth: Truth | None = None,
    main_grad: Tensor | None = None,
    kernels: bool = False,
) -> dict[str, object]:
    """gemm_ms, forward_ms, total_ms, peak_mb, error_loss, error_dE, error_dC; `main_grad` replaces weight.grad.

    The gradients of a call are dropped before the next one, so that each call allocates them anew.
    """

    def step():
        hidden.grad = weight.grad = None
        loss = loss_of()
        loss.backward()
        return loss

    step()
    if main_grad is not None:
        main_grad.zero_()
    loss = step()
    result: dict[str, object] = {}
    if truth is not None:
        d_weight = weight.grad if main_grad is None else main_grad
        result["error_loss"] = abs(loss.item() / truth.loss - 1)
        result["error_dE"] = relative_error(hidden.grad, truth.hidden)
        result["error_dC"] = relative_error(d_weight, truth.weight)
    hidden.grad = weight.grad = d_weight = loss = None
    result["peak_mb"] = peak_mb(step)
    hidden.grad = weight.grad = None
    product = gemm(hidden, weight)
    product()
    times = median_ms((product, loss_of, step), 2 * budget_s)
    result["gemm_ms"], result["forward_ms"], result["total_ms"] = times
    if kernels and torch.cuda.is_available():
        result["kernels_ms"] = kernel_times(step)
    hidden.grad = weight.grad = None
    return result
