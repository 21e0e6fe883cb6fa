"""Rewards of OGBench's single tasks, computed from recorded simulator states.

Reward = (number of solved parts) - (number of parts), 0 when the task is solved; `masks` is 0 there. The
targets are read from OGBench's environment. A cube counts as placed within 4 cm, a drawer or window as moved
within 4 cm, a button by its state, an ant or ball within the environment's own tolerance.

Source:
    OGBench (arXiv 2410.20092), single-task variants; layout of `qpos` as its simulators have it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from policies.errors import DatasetError
from policies.extras import require

_TOLERANCE = 0.04  # metres
_ARM = 14  # entries of qpos before the first object
_CUBE = 7  # entries of qpos per cube: position and quaternion
_BALL = 15  # first entry of the ball's position in qpos
_NAME = re.compile(r"[a-z0-9-]+-singletask(-task\d+)?-v\d+")


def rewards_of_task(task: str, rows: Mapping[str, np.ndarray], source: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rewards and masks of a single task, both (M,) float32.

    Args:
        task: Its name, e.g. `cube-single-play-singletask-task2-v0`.
        rows: `qpos` (M, nq) and, for tasks with buttons, `button_states` (M, buttons).
        source: Name of the file in messages.
    """
    if not _NAME.fullmatch(task):
        example = "cube-single-play-singletask-task2-v0"
        raise DatasetError(f"{source}: reader.task must be a single task such as {example}; got '{task}'.")
    env = _load(task, source)
    try:
        solved = _solved_parts(task, env, rows, source)
    finally:
        env.close()
    rewards: np.ndarray = solved.sum(axis=1) - solved.shape[1]
    masks = np.asarray(~solved.all(axis=1))
    return rewards.astype(np.float32), masks.astype(np.float32)


def _load(task: str, source: str) -> Any:
    """Build OGBench's environment of a task and reset it, which sets the targets."""
    ogbench = require("ogbench", extra="ogbench")
    import gymnasium

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the viewer warns about a missing display on import
        try:
            env = ogbench.make_env_and_datasets(task, env_only=True)
        except (gymnasium.error.Error, ValueError, IndexError) as error:
            raise DatasetError(f"{source}: OGBench has no task '{task}' ({error}).") from error
        env.reset(seed=0)
    return env.unwrapped


def _solved_parts(task: str, env: Any, rows: Mapping[str, np.ndarray], source: str) -> np.ndarray:
    """Return which parts of a task are solved in every row, (M, parts) bool."""
    if "maze" in task or "soccer" in task:
        first = 0 if "maze" in task else _BALL
        place = _states(rows, "qpos", first + 2, source)[:, first : first + 2]
        near: np.ndarray = np.linalg.norm(place - env.cur_goal_xy, axis=1) <= env._goal_tol
        return near[:, None]
    parts = []
    cubes = 0 if "puzzle" in task else int(env._num_cubes)
    if cubes:
        qpos = _states(rows, "qpos", _ARM + _CUBE * cubes, source)
        centres = qpos[:, _ARM : _ARM + _CUBE * cubes].reshape(len(qpos), cubes, _CUBE)[:, :, :3]
        parts.append(np.linalg.norm(env._data.mocap_pos - centres, axis=2) <= _TOLERANCE)
    if "scene" in task or "puzzle" in task:
        wanted = np.asarray(env._target_button_states)
        parts.append(_states(rows, "button_states", len(wanted), source)[:, : len(wanted)] == wanted)
    if "scene" in task:
        first = _ARM + _CUBE * cubes + int(env._num_buttons)
        handles = _states(rows, "qpos", first + 2, source)[:, first : first + 2]
        targets = np.array([env._target_drawer_pos, env._target_window_pos])
        parts.append(np.abs(handles - targets) <= _TOLERANCE)
    if not parts:
        raise DatasetError(f"{source}: rewards of '{task}' are not known; leave reader.task out.")
    return np.concatenate(parts, axis=1)


def _states(rows: Mapping[str, np.ndarray], key: str, width: int, source: str) -> np.ndarray:
    got = np.shape(rows[key]) if key in rows else "nothing"
    if key not in rows or len(got) != 2 or int(got[1]) < width:
        raise DatasetError(f"{source}: key '{key}' must have shape (N, {width} or more); got {got}.")
    return rows[key]
