"""How many threads torch uses inside an operation: the only place that changes it.

Networks of this size lose far more to threads that wait for each other than they gain, and some sums
depend on the number in their last bits. So code whose numbers must be reproducible sets the number of
threads here, independently of the program's own setting and of `OMP_NUM_THREADS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Use exactly this many threads inside an operation of torch, on the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
