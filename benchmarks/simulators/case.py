"""One comparison of simulators: a case and its two sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Array = np.ndarray


class Side(Protocol):
    """One simulator of a task, or its physics alone."""

    def begin(self, seed: int, actions: Array) -> None:
        """Start the episode in which actions (T, Da) will be executed; this is not timed."""
        ...

    def run(self, actions: Array) -> int:
        """Execute actions (T, Da); returns how many were."""
        ...

    def state(self) -> Array:
        """Return what sides are compared by."""
        ...

    def clock(self) -> float:
        """Return the processor time spent so far [s]."""
        return time.process_time()


@dataclass(frozen=True)
class Case:
    """A row of the table: how to build its sides, and how far they may differ."""

    env: str
    backend: str
    peer: str
    build: Callable[[], Mapping[str, Side]]  # of `ours`, `peer` and, where it makes sense, `physics`
    action_dim: int
    tolerance: float | None  # largest difference after an episode; None: the two cannot begin alike
    steps: int = 50  # of an episode, over all environments
    num_envs: int = 1  # of ours
