"""What MuJoCo steppers keep of their simulators: states that go on bit-exactly, and those of recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.errors import CheckpointError

Array = np.ndarray


def get_physics(model: Any, datas: Sequence[Any]) -> Array:
    """Return everything the next physics step depends on, warm starts included.

    Args:
        model: `mujoco.MjModel` of all simulators.
        datas: N `mujoco.MjData`.

    Returns:
        Integration states (N, nstate).
    """
    import mujoco

    signature = mujoco.mjtState.mjSTATE_INTEGRATION
    states = np.empty((len(datas), mujoco.mj_stateSize(model, signature)))
    for data, state in zip(datas, states, strict=True):
        mujoco.mj_getState(model, data, state, signature)
    return states


def set_physics(model: Any, datas: Sequence[Any], states: Any) -> None:
    """Go on from `get_physics`; what is derived from states is not computed anew.

    Args:
        model: `mujoco.MjModel` of all simulators.
        datas: N `mujoco.MjData`.
        states: (N, nstate).

    Raises:
        CheckpointError: If the states are those of other simulators, or of another number of them.
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
    """Return time, positions and velocities (1 + nq + nv,), as robomimic's files keep them."""
    return np.concatenate([[data.time], data.qpos, data.qvel])
