"""NumPy's global generator, used by some simulators and their oracles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np


@contextlib.contextmanager
def seeded_globally(seed: int | Sequence[int]) -> Iterator[None]:
    """Seed NumPy's global generator and restore it on exit."""
    before = np.random.get_state()
    bits = np.random.MT19937(np.random.SeedSequence(seed))
    np.random.set_state(np.random.RandomState(bits).get_state())
    try:
        yield
    finally:
        np.random.set_state(before)
