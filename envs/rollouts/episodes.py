"""Running and finished episodes, and their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.spec import Array, ChunkStep


@dataclass(frozen=True)
class EpisodeRow:
    """One finished episode.

    `episode` counts the episodes of an evaluation, or of one environment in training; `length` is in control
    steps. `observations` (length + 1, Do), `actions` (length, Da) and `rewards` (length,) are optional.
    """

    seed: int
    episode: int
    return_: float
    length: int
    success: bool
    terminated: bool
    truncated: bool
    metrics: dict[str, float] = field(default_factory=dict)
    observations: Array | None = field(default=None, repr=False, compare=False)
    actions: Array | None = field(default=None, repr=False, compare=False)
    rewards: Array | None = field(default=None, repr=False, compare=False)


class EpisodeTracker:
    """Running totals of n episodes."""

    def __init__(self, n: int) -> None:
        self.seed = np.zeros(n, np.int64)
        self.episode = np.zeros(n, np.int64)
        self.return_ = np.zeros(n)
        self.length = np.zeros(n, np.int64)
        self.success = np.zeros(n, bool)

    def begin(self, rows: Array, seeds: Sequence[int], episodes: Array | Sequence[int]) -> None:
        self.seed[rows] = seeds
        self.episode[rows] = episodes

    def add(self, step: ChunkStep) -> None:
        self.return_ += step.rewards.sum(axis=1)
        self.length += step.length
        self.success |= step.success

    def reset(self, rows: Array) -> None:
        self.return_[rows] = 0.0
        self.length[rows] = 0
        self.success[rows] = False

    def rows(self, ended: Array, step: ChunkStep) -> list[EpisodeRow]:
        """Return the rows of episodes that ended in this chunk."""
        return [
            EpisodeRow(
                seed=int(self.seed[i]),
                episode=int(self.episode[i]),
                return_=float(self.return_[i]),
                length=int(self.length[i]),
                success=bool(self.success[i]),
                terminated=bool(step.terminated[i]),
                truncated=bool(step.truncated[i]),
                metrics={name: float(values[i]) for name, values in step.metrics.items()},
            )
            for i in ended.tolist()
        ]

    def state_dict(self) -> dict[str, Array]:
        return {name: values.copy() for name, values in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, values in vars(self).items():
            values[:] = np.asarray(state[name])
