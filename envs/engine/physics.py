"""Shared base of MuJoCo steppers: N simulator states of one model, saved bit-exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.spec import Array, StepResult
from policies.errors import CheckpointError, ConfigError


class MujocoStepper(ABC):
    """N simulator states of one compiled `mujoco.MjModel`."""

    can_save = True

    def __init__(self, model: Any, num_envs: int) -> None:
        import mujoco

        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        self.model, self.num_envs = model, num_envs
        self.datas = [mujoco.MjData(model) for _ in range(num_envs)]

    @abstractmethod
    def reset(self, row: int, seed: int) -> Array:
        """Start a seeded episode in one row; returns the observation (Do,)."""

    @abstractmethod
    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step."""

    def metrics(self) -> dict[str, Array]:
        return {}

    def physics_state(self, row: int) -> Array:
        """Return the recorded state of a row; see `recorded_physics`."""
        return recorded_physics(self.datas[row])

    def get_state(self) -> dict[str, Any]:
        return {"physics": get_physics(self.model, self.datas)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        set_physics(self.model, self.datas, state["physics"])

    def close(self) -> None:
        self.datas = []


def get_physics(model: Any, datas: Sequence[Any]) -> Array:
    """Return the integration states (N, nstate) of N `MjData` of one model, including warm starts."""
    import mujoco

    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    states = np.empty((len(datas), mujoco.mj_stateSize(model, signature)))
    for data, state in zip(datas, states, strict=True):
        mujoco.mj_getState(model, data, state, signature)
    return states


def set_physics(model: Any, datas: Sequence[Any], states: Any) -> None:
    """Restore the output of `get_physics`; derived quantities are not recomputed.

    Raises:
        CheckpointError: If the states belong to other simulators or another number of them.
    """
    import mujoco

    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    states = np.asarray(states, np.float64)
    expected = (len(datas), mujoco.mj_stateSize(model, signature))
    if states.shape != expected:
        raise CheckpointError(
            f"saved states of physics are {states.shape}, these simulators need {expected}; "
            "they are of another environment, or of another number of them."
        )
    for data, state in zip(datas, states, strict=True):
        mujoco.mj_setState(model, data, state, signature)


def recorded_physics(data: Any) -> Array:
    """Return time, positions and velocities (1 + nq + nv,), as in robomimic's files."""
    return np.concatenate([[data.time], data.qpos, data.qvel])
