"""Intra-op thread count of torch; set only here.

Networks of this size lose more to thread synchronisation than they gain, and the last bits of some sums
depend on the count. So code with reproducible numbers sets it, whatever `OMP_NUM_THREADS` is.
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
