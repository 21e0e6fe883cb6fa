"""Planner of the next subtask in OGBench's worlds.

OGBench's oracles move one cube, press one button, or move the drawer or the window. Tasks require several of
these, with dependencies: a cube lies on another or on a target, a drawer is locked, a press toggles
neighbouring buttons. The planners are called again after every subtask, which corrects failures.

Legend: n cubes or buttons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from envs.rollouts.recording import Recording
from envs.spec import Array
from envs.tasks.ogbench.stepper import OgbenchStepper

_CUBE_TOLERANCE = 0.035  # success tolerance of a cube [m]; OGBench: 0.04
_CUBE = 0.04  # edge of a cube [m]
_CLEARANCE = 0.06  # minimum distance of cube centres, for the gripper's fingers [m]
_SLIDE_TOLERANCE = 0.035  # success tolerance of drawer and window [m]; OGBench: 0.04
_SPARE = tuple(product((0.35, 0.425, 0.5), (-0.2, -0.1, 0.0, 0.1, 0.2)))  # spare cube positions (x, y) [m]
_DRAWER_Y = -0.3  # cube targets with smaller y are inside the drawer [m]


@dataclass(frozen=True)
class Subtask:
    """One subtask.

    Attributes:
        kind: Oracle: "cube", "button", "drawer" or "window".
        index: Index of the cube or button.
        target: Target position of the cube (3,), state of the button, or position of drawer or window [m].
    """

    kind: str
    index: int
    target: Any


def next_subtask(env: Any) -> Subtask | None:
    """Return the next subtask of OGBench's environment; None if all are done."""
    if hasattr(env, "_target_drawer_pos"):
        return _next_in_scene(env)
    if hasattr(env, "_cur_button_states"):
        presses = fewest_presses(env._cur_button_states != env._target_button_states, env._num_cols)
        tops = env._data.site_xpos[env._button_site_ids]
        return _press(env, _nearest(presses, tops, gripper_of(env))) if presses else None
    positions, targets = cubes_of(env)
    move = next_move(positions, targets)
    return None if move is None else Subtask("cube", *move)


def gripper_of(env: Any) -> Array:
    """Return the gripper position (3,)."""
    position: Array = env._data.site_xpos[env._pinch_site_id]
    return position


def cubes_of(env: Any) -> tuple[Array, Array]:
    """Return cube positions and targets, (n, 3) each."""
    joints = (env._data.joint(f"object_joint_{i}") for i in range(env._num_cubes))
    return np.stack([joint.qpos[:3] for joint in joints]), env._data.mocap_pos[env._cube_target_mocap_ids]


# -- cubes -------------------------------------------------------------------------------------------------


def next_move(positions: Array, targets: Array) -> tuple[int, Array] | None:
    """Return the next cube and its destination (3,) [m]; None if all are placed.

    A cube is movable if no cube lies on it. It can be placed if its target is vacant and, above the table,
    its support is placed. If no cube can reach its target, one is moved aside. Places and targets are (n, 3)
    [m].
    """
    wrong = [i for i in range(len(positions)) if np.linalg.norm(positions[i] - targets[i]) > _CUBE_TOLERANCE]
    if not wrong:
        return None
    loose = [i for i in range(len(positions)) if not _is_covered(i, positions)]
    for i in wrong:
        if i in loose and _is_vacant(i, positions, targets):
            return i, targets[i]
    waiting = next((i for i in loose if i in wrong), loose[0])
    taken = np.concatenate([positions, targets])[:, :2]
    spot = max(_SPARE, key=lambda spot: np.linalg.norm(taken - spot, axis=1).min())
    return waiting, np.array([*spot, _CUBE / 2])


def _is_covered(i: int, positions: Array) -> bool:
    distance_xy = np.linalg.norm(positions[:, :2] - positions[i, :2], axis=1)
    return bool(((distance_xy < _CUBE) & (positions[:, 2] > positions[i, 2] + _CUBE / 2)).any())


def _is_vacant(i: int, positions: Array, targets: Array) -> bool:
    others = np.delete(positions, i, axis=0)
    distance_xy = np.linalg.norm(others[:, :2] - targets[i, :2], axis=1)
    if ((distance_xy < _CLEARANCE) & (others[:, 2] > targets[i, 2] - _CUBE / 2)).any():
        return False
    below = np.linalg.norm(others - (targets[i] - [0, 0, _CUBE]), axis=1)
    return bool(targets[i, 2] < _CUBE or (below < _CUBE_TOLERANCE).any())


# -- buttons -----------------------------------------------------------------------------------------------


def fewest_presses(wrong: Array, columns: int) -> list[int]:
    """Return the shortest set of button presses that toggles exactly the `wrong` (n,) buttons.

    A press toggles a button and its neighbours in rows and columns, so presses add modulo 2. All solutions
    are one solution plus the null space of presses.

    Raises:
        ValueError: If there is no solution.
    """
    n = len(wrong)
    rows = np.concatenate([_toggle_matrix(n, columns), wrong[:, None]], axis=1).astype(np.uint8)
    pivots: list[int] = []
    for column in range(n):
        row = next((r for r in range(len(pivots), n) if rows[r, column]), None)
        if row is None:
            continue
        rows[[len(pivots), row]] = rows[[row, len(pivots)]]
        clear = rows[:, column].astype(bool)
        clear[len(pivots)] = False
        rows[clear] ^= rows[len(pivots)]
        pivots.append(column)
    if rows[len(pivots) :, n].any():
        raise ValueError("no presses turn exactly these buttons.")
    free = [column for column in range(n) if column not in pivots]
    best: list[int] | None = None
    for chosen in product((0, 1), repeat=len(free)):
        presses = np.zeros(n, np.uint8)
        presses[free] = chosen
        toggled = rows[: len(pivots), free] @ np.array(chosen, np.uint8) if free else 0
        presses[pivots] = (rows[: len(pivots), n] + toggled) % 2
        found = np.flatnonzero(presses).tolist()
        best = found if best is None or len(found) < len(best) else best
    assert best is not None
    return best


def _toggle_matrix(n: int, columns: int) -> Array:
    """Return (n, n) bool: pressing button j toggles button i."""
    row, column = np.divmod(np.arange(n), columns)
    distance = np.abs(row[:, None] - row) + np.abs(column[:, None] - column)
    return distance <= 1


def _nearest(presses: Sequence[int], tops: Array, gripper: Array) -> int:
    return min(presses, key=lambda i: float(np.linalg.norm(tops[i, :2] - gripper[:2])))


def _press(env: Any, button: int) -> Subtask:
    return Subtask("button", button, int((env._cur_button_states[button] + 1) % env._num_button_states))


# -- scene -------------------------------------------------------------------------------------------------


def _next_in_scene(env: Any) -> Subtask | None:
    """Plan the cube first, through the open drawer if its target is inside; then drawer, window, buttons."""
    data = env._data
    positions, targets = cubes_of(env)
    drawer, window = (float(data.joint(name).qpos[0]) for name in ("drawer_slide", "window_slide"))
    if targets[0, 1] < _DRAWER_Y:
        if not env._is_in_drawer(positions[0]):
            opened = _slide(env, "drawer", drawer, -0.16)
            return opened if opened is not None else Subtask("cube", 0, env._drawer_center.copy())
    elif np.linalg.norm(positions[0] - targets[0]) > _CUBE_TOLERANCE:
        return Subtask("cube", 0, targets[0])
    for kind, current, target in (
        ("drawer", drawer, env._target_drawer_pos),
        ("window", window, env._target_window_pos),
    ):
        moved = _slide(env, kind, current, float(target))
        if moved is not None:
            return moved
    wrong = np.flatnonzero(env._cur_button_states != env._target_button_states).tolist()
    tops = data.site_xpos[env._button_site_ids]
    return _press(env, _nearest(wrong, tops, gripper_of(env))) if wrong else None


def _slide(env: Any, kind: str, current: float, target: float) -> Subtask | None:
    """Return the subtask that moves drawer or window, or unlocks it first; None if at its target."""
    if abs(current - target) <= _SLIDE_TOLERANCE:
        return None
    lock = ("drawer", "window").index(kind)
    return _press(env, lock) if env._cur_button_states[lock] == 0 else Subtask(kind, 0, target)


def record_step(stepper: OgbenchStepper, record: Recording, action: Array) -> None:
    """Execute an action inside the box; records physics and buttons before it."""
    buttons = stepper.button_states(0)
    extras = {} if buttons is None else {"button_states": buttons}
    record.step(action, states=stepper.physics_state(0), **extras)
