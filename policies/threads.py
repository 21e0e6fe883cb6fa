"""How many threads torch uses inside an operation: the only place that changes it.

Networks of this size lose far more to threads that wait for each other than they gain, and some sums
depend on the number in their last bits. So whatever computes numbers that must come out again says how many
threads it takes, and what the program or the environment (`OMP_NUM_THREADS`) chose for itself has no part
in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch use exactly this many threads inside an operation, on the thread that calls.

    Args:
        number: Threads, at least 1; restored to what it was at the end.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
