"""Numpy's global generator, from which some simulators and their oracles draw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np


@contextlib.contextmanager
def seeded_globally(seed: int | Sequence[int]) -> Iterator[None]:
    """Seed numpy's global generator, and put it back afterwards."""
    before = np.random.get_state()
    bits = np.random.MT19937(np.random.SeedSequence(seed))
    np.random.set_state(np.random.RandomState(bits).get_state())
    try:
        yield
    finally:
        np.random.set_state(before)
