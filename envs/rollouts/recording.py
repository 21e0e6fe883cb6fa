"""Stepwise recording of an expert's episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from envs.spec import Array, Stepper

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

_FIRST = np.zeros(1, np.int64)
_EXPERT_STREAM = 1  # separates the random numbers of an expert from those of the task


def expert_rng(seed: int) -> np.random.Generator:
    """Return the random numbers of an expert in the episode of a seed."""
    return np.random.default_rng((seed, _EXPERT_STREAM))


class Recording:
    """One episode in row 0 of a stepper.

    Attributes:
        observations: (Do,) each, the first one before any action.
        actions: (Da,) each, as executed, float32.
        rewards: One per action.
        ended: Whether the last step terminated the episode.
        is_solved: Whether the last step was a success.
        was_solved: Whether any step was.
    """

    def __init__(self, stepper: Stepper, seed: int, *, terminate_on_success: bool = False) -> None:
        self._stepper, self._seed, self._ends_solved = stepper, seed, terminate_on_success
        self.observations: list[Array] = [stepper.reset(0, seed)]
        self.actions: list[Array] = []
        self.rewards: list[float] = []
        self.ended = self.is_solved = self.was_solved = False
        self._extras: dict[str, list[Array]] = {}

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def now(self) -> Array:
        return self.observations[-1]

    def step(self, action: Array, **extras: Array) -> None:
        """Execute an action (Da,) inside the box; `extras` are values before it, stored with the step."""
        action = np.asarray(action, np.float32)
        for name, value in extras.items():
            self._extras.setdefault(name, []).append(value)
        step = self._stepper.step(_FIRST, action[None])
        self.observations.append(step.obs[0])
        self.actions.append(action)
        self.rewards.append(float(step.reward[0]))
        self.is_solved = bool(step.success[0])
        self.ended = bool(step.terminated[0]) or (self._ends_solved and self.is_solved)
        self.was_solved = self.was_solved or self.is_solved

    def episode(self, *, truncated: bool, success: bool, **extras: Array) -> Episode:
        """Return the episode, with per-episode `extras` (T, …) beside the per-step ones."""
        from envs.datasets.episode import Episode

        kept: dict[str, Any] = {name: np.stack(values) for name, values in self._extras.items()}
        return Episode(
            observations=np.stack(self.observations),
            actions=np.stack(self.actions),
            rewards=np.array(self.rewards),
            terminated=self.ended,
            truncated=truncated,
            success=success,
            seed=self._seed,
            extras=kept | extras,
        )
