"""How programs of one launch wait for each other: counters of finished items, which all take by ascending ticket.

An item may wait only for items with smaller tickets. Running programs have taken those, so waits end however many
programs run side by side; no launch has to be cooperative.
"""

import triton
import triton.language as tl


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
