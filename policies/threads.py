"""Intra-op thread count of torch; set only here.

Networks of this size lose more to thread synchronisation than they gain, and the last bits of some sums
depend on the count. Code with reproducible numbers sets the count here, independently of the program's
own setting and of `OMP_NUM_THREADS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Set the intra-op thread count of torch on the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
