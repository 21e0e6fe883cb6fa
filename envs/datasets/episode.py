"""Data records: one episode, columns of many episodes, transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.datasets.array_storage import MEMORY, ArrayStorage
from envs.datasets.images import Images


@dataclass(frozen=True)
class Episode:
    """One recorded episode of T steps.

    Shapes:
        observations: (T+1, Do), the last row being the observation after the last action.
        actions: (T, Da).
        rewards: (T,).
        extras: every value (T, ...), e.g. simulator states.
        images: by camera, (T, H, W, 3) uint8, before each action.
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool
    truncated: bool
    success: bool = False
    seed: int = 0
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, eq=False)
class Transitions:
    """Single steps for offline reinforcement learning.

    Shapes:
        observations, next_observations: (M, Do).
        actions: (M, Da).
        rewards, terminated: (M,); values bootstrap from `next_observations` unless `terminated`.
        frames: (M,) int64, dataset frame of each transition.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminated: Tensor
    frames: Tensor


@dataclass(frozen=True, eq=False)
class EpisodeColumns:
    """The columns of a dataset; see `EpisodeDataset` for their shapes."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    episode_start: Tensor
    next_observations: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    episode_extras: dict[str, Tensor] = field(default_factory=dict)
    images: dict[str, Images] = field(default_factory=dict)
    storage: ArrayStorage = field(default=MEMORY, repr=False)

    @property
    def source(self) -> str:
        return str(self.meta.get("source", "dataset"))

    @property
    def num_frames(self) -> int:
        return self.observations.shape[0]

    @property
    def num_episodes(self) -> int:
        return self.episode_start.shape[0] - 1

    @property
    def is_last(self) -> Tensor:
        """Last frames of the episodes, (N,) bool."""
        return last_frames(self.episode_start)


def last_frames(start: Tensor) -> Tensor:
    """Return which of N frames are the last of their episodes (N,) bool; see `episode_start` (E+1,)."""
    last = torch.zeros(int(start[-1]), dtype=torch.bool, device=start.device)
    last[start[1:] - 1] = True
    return last
