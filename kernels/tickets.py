"""How programs of one launch wait for each other: counters of finished items, which all take by ascending ticket.

An item may wait only for items with smaller tickets. A program draws its next ticket when it starts on an item, so that
the draw takes no time; the smallest ticket whose item is not finished is never such a next one, so a program is at work
on it and has nothing to wait for. Waits end however many programs run side by side; no launch has to be cooperative.
"""

import triton
import triton.language as tl


@triton.jit
def draw(ticket_ptr, THREADS: tl.constexpr):
    """The next ticket, for `number_of`: nobody waits for it here, since each of the program's THREADS has an element.

    Only the first one draws. The others' addresses differ, lest the compiler hands one thread's number to all at once.
    """
    lane = tl.arange(0, THREADS)
    return tl.atomic_add(ticket_ptr + lane, 1, mask=lane == 0, sem="relaxed")


@triton.jit
def number_of(drawn, THREADS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, THREADS) == 0, drawn, 0), 0)


@triton.jit
def wait_for(counter_ptr, count):
    """Until `count` items have signalled; what they wrote is visible then."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def wait_for_all(counters_ptr, first, last, count, BLOCK: tl.constexpr):
    """`wait_for` each of the counters first <= i < last, at most BLOCK of them."""
    at = first + tl.arange(0, BLOCK)
    found = tl.zeros((), tl.int32)
    while found < count:
        each = tl.atomic_add(counters_ptr + at, 0, mask=at < last, sem="acquire")
        found = tl.min(tl.where(at < last, each, count), 0)


@triton.jit
def signal(counter_ptr):
    """This program's item is done."""
    tl.debug_barrier()  # all threads of the program have written
    tl.atomic_add(counter_ptr, 1, sem="acq_rel")
