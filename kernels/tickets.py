"""How programs of one launch share out items, and wait for each other: items in the order of a ticket counter.

An item may wait only for items with smaller tickets. Running programs have taken those, so waits end however many
programs run side by side; no launch has to be cooperative. A program may draw its next ticket before it works on the
item that it holds: of the unfinished items, the one with the smallest ticket is being worked on (were it a next one,
its program would work on an unfinished item with a smaller ticket), and all that it waits for is finished.
"""

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(256)  # no fewer than a program's threads, or the atomic's result is shared at once


@triton.jit
def draw_ticket(counter_ptr):
    """The next ticket in lane 0 of a tensor, for `ticket_number`; nobody waits for it before that.

    The result of a scalar atomic goes to all threads where it stands, through a barrier.
    """
    lane = tl.arange(0, LANES)
    return tl.atomic_add(counter_ptr + lane, 1, mask=lane == 0, sem="relaxed")


@triton.jit
def ticket_number(ticket):
    return tl.sum(tl.where(tl.arange(0, LANES) == 0, ticket, 0), 0)


@triton.jit
def wait_for(counter_ptr, count):
    """Until `count` items have signalled; what they wrote is visible then."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def signal(counter_ptr):
    """This program's item is done."""
    tl.debug_barrier()  # all threads of the program have written
    tl.atomic_add(counter_ptr, 1, sem="acq_rel")
