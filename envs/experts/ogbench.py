"""OGBench's Markov oracle as a demonstrator: approach, grasp, lift, carry, lower.

It looks only at the present state, so a disturbed movement is corrected rather than continued; noise on
the executed actions therefore widens the states a clone sees, at little cost in success.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from envs.datasets.episodes import Episode
from envs.vector import StepResult
from policies.errors import ConfigError

_NOISE_STREAM = 1  # keeps the demonstrator's draws apart from those of the task


@dataclass(frozen=True)
class CubeDemonstrator:
    """Options of the demonstrator."""

    noise: float = 0.0  # standard deviation of Gaussian noise on every executed action entry, box is [-1, 1]
    min_norm: float = 0.4  # smallest distance the oracle reacts to as if farther away [m], sets its pace

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if not (0 <= self.noise < math.inf and 0 <= self.min_norm < math.inf):
            raise ConfigError(
                "env.demonstrator needs noise >= 0 and min_norm >= 0; "
                f"got noise={self.noise}, min_norm={self.min_norm}. Defaults are 0.0 and 0.4."
            )


class OracleStepper(Protocol):
    """A simulator that also tells what OGBench's oracles look at."""

    def reset(self, row: int, seed: int) -> np.ndarray: ...  # noqa: D102

    def step(self, rows: np.ndarray, actions: np.ndarray) -> StepResult: ...  # noqa: D102

    def oracle_info(self, row: int) -> dict[str, Any]: ...  # noqa: D102

    def physics_state(self, row: int) -> np.ndarray: ...  # noqa: D102


def demonstrate_cube(
    stepper: OracleStepper, seed: int, options: CubeDemonstrator, *, max_steps: int
) -> Episode:
    """Do one episode in row 0 of a stepper.

    Recorded are the actions that were executed, noise included, and the physics state before each
    (`states`: time, positions, velocities).

    Args:
        stepper: Simulator of the task.
        seed: Seed of the episode; decides the noise as well.
        options: How to demonstrate.
        max_steps: Time limit in control steps.
    """
    from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle

    rng = np.random.default_rng((seed, _NOISE_STREAM))
    rows = np.zeros(1, np.int64)
    observations = [stepper.reset(0, seed)]
    actions: list[np.ndarray] = []
    rewards: list[float] = []
    states: list[np.ndarray] = []
    oracle = CubeMarkovOracle(env=None, min_norm=options.min_norm)
    # The oracle's own reset draws where to withdraw to from global state; the episode ends before that.
    oracle._final_pos, oracle._final_yaw = np.array([0.425, 0.0, 0.3]), 0.0
    oracle._step, oracle._max_step = 0, max_steps
    ended = False
    while not ended and len(actions) < max_steps:
        wanted = oracle.select_action(observations[-1], stepper.oracle_info(0))
        action = np.clip(wanted + options.noise * rng.standard_normal(len(wanted)), -1, 1).astype(np.float32)
        states.append(stepper.physics_state(0))
        step = stepper.step(rows, action[None])
        observations.append(step.obs[0])
        actions.append(action)
        rewards.append(step.reward[0])
        ended = bool(step.terminated[0])
    return Episode(
        observations=np.stack(observations),
        actions=np.stack(actions),
        rewards=np.array(rewards),
        terminated=ended,
        truncated=len(actions) >= max_steps,
        success=ended,
        seed=seed,
        extras={"states": np.stack(states)},
    )
