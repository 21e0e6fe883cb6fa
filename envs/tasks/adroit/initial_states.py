"""Initial states of recorded demonstrations of the Adroit door.

A file in D4RL's layout holds the door position (`infos/door_body_pos`) and the initial simulator positions
and velocities (`infos/init_qpos`, `infos/init_qvel`) per episode, but the arm had moved before the first
recorded row. Its pose is therefore taken from the first observation, which holds every joint but the arm's
slide; the slide follows from the observed palm position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.spec import Array
from policies.errors import DatasetError

_OBS_DIM, _NUM_POSITIONS = 39, 30
_JOINTS = slice(0, 27)  # indices in an observation: all joints of arm and hand but the slide
_LATCH, _HINGE, _PALM = 27, 28, slice(29, 32)
_SHAPES = {"init_qpos": _NUM_POSITIONS, "init_qvel": _NUM_POSITIONS, "door_body_pos": 3}


@dataclass(frozen=True)
class DoorState:
    """Initial state of one demonstration.

    Shapes:
        qpos, qvel: (30,) positions and velocities, except the arm's slide.
        door: (3,) door position [m].
        palm: (3,) observed palm position [m].
    """

    qpos: Array
    qvel: Array
    door: Array
    palm: Array

    def apply(self, env: Any) -> Array:
        """Apply the state to gymnasium-robotics' environment; returns the observation (39,)."""
        state = {"qpos": self.qpos.copy(), "qvel": self.qvel, "door_body_pos": self.door}
        env.set_env_state(state)
        seen = env.data.site_xpos[env.grasp_site_id]
        state["qpos"][0] += env.data.xaxis[0] @ (self.palm - seen)  # the slide moves the palm along its axis
        env.set_env_state(state)
        obs: Array = env._get_obs()
        return obs


def read_initial_states(path: str) -> tuple[DoorState, ...]:
    """Read the initial states of a file's episodes, in order.

    Raises:
        DatasetError: If the file is not D4RL's, is of another task, or lacks initial states.
    """
    from envs.datasets.formats.d4rl import load_d4rl

    arrays = load_d4rl(path)
    if arrays["observations"].shape[1:] != (_OBS_DIM,):
        raise DatasetError(
            f"{path}: env.starts of adroit-door needs observations of {_OBS_DIM} entries; "
            f"got {arrays['observations'].shape[1:]}. Give the file that was recorded on the door task."
        )
    ends = np.flatnonzero(arrays["terminals"].astype(bool) | arrays.get("timeouts", False))
    first = np.concatenate([[0], ends[ends < len(arrays["rewards"]) - 1] + 1])
    parts = {key: _rows(path, arrays, key, (len(first), width)) for key, width in _SHAPES.items()}
    obs = arrays["observations"][first].astype(np.float64)
    qpos = parts["init_qpos"].copy()
    qpos[:, 1:28], qpos[:, 28], qpos[:, 29] = obs[:, _JOINTS], obs[:, _HINGE], obs[:, _LATCH]
    rows = zip(qpos, parts["init_qvel"], parts["door_body_pos"], obs[:, _PALM], strict=True)
    return tuple(DoorState(*row) for row in rows)


def _rows(path: str, arrays: dict[str, Any], key: str, shape: tuple[int, int]) -> Array:
    """Return `infos/<key>` with one row per episode."""
    value = arrays.get(f"infos/{key}")
    if value is None or np.shape(value) != shape:
        got = "nothing" if value is None else f"shape {np.shape(value)}"
        raise DatasetError(
            f"{path}: env.starts of adroit-door needs infos/{key} of shape {shape}, one row per episode; "
            f"got {got}."
        )
    return np.asarray(value, np.float64)
