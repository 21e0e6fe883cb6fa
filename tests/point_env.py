"""A point on a plane: the smallest environment with all that matters to on-policy learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvSpec, StepResult

LIMIT = 1.6


class PointStepper:
    """Moves by 0.2 times the action; the reward falls with the distance to the goal at (0.5, 0)."""

    can_save = True

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.position = np.zeros((num_envs, 2))

    def reset(self, row: int, seed: int) -> Array:
        self.position[row] = np.random.default_rng(seed).uniform(-1, 1, 2)
        return self.position[row].copy()

    def step(self, rows: Array, actions: Array) -> StepResult:
        self.position[rows] += 0.2 * actions
        here = self.position[rows]
        distance = np.linalg.norm(here - [0.5, 0.0], axis=1)
        out = (np.abs(here) > LIMIT).any(axis=1)
        return StepResult(here.copy(), 1.0 - distance, out, np.zeros(len(rows), bool), distance < 0.1)

    def metrics(self) -> dict[str, Array]:
        return {}

    def get_state(self) -> Any:
        return self.position.copy()

    def set_state(self, state: Any) -> None:
        self.position = np.array(state)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class PointEnv:
    """Configuration; episodes are cut after `limit` steps."""

    limit: int = 11

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="point",
            family="toy",
            obs_dim=2,
            action_dim=2,
            action_low=(-1.0, -1.0),
            action_high=(1.0, 1.0),
            max_episode_steps=self.limit,
            control_hz=10.0,
            obs_names=("x [m]", "y [m]"),
            action_names=("vx", "vy"),
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        return ChunkVector(self.spec, PointStepper(num_envs), obs_steps=obs_steps)
