"""Observations and servo control of robosuite's arms, for scripted experts.

The gripper points down; its heading is the direction of its x axis in the plane [rad], along which the
fingers close.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.engine.physics import recorded_physics
from envs.spec import Array

OPEN, CLOSED = -1.0, 1.0
GAIN = 25.0  # command per metre of distance
TURN_GAIN = 1.5  # command per radian
PEG_TOP_M = 0.1  # of the peg above its body's origin
SEATED_M = 0.045  # height of a nut's centre above the table when it is around the peg
HELD_M = 0.035  # maximum distance of a held object from the gripper


@dataclass(frozen=True)
class Target:
    """Target pose of the gripper: position (3,) [m] and heading [rad]."""

    position: Array
    heading: float


def heading(frame: Array) -> float:
    """Return the direction of the x axis of a frame (3, 3) in the plane [rad]."""
    return math.atan2(frame[1, 0], frame[0, 0])


def wrap(angle: float) -> float:
    """Return an angle in [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def pointing_down(angle: float) -> Array:
    """Return the frame (3, 3) of a downward gripper with a heading."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])


class ArmObservation:
    """Current poses of one arm and its object; robosuite's environment gives the names."""

    def __init__(self, env: Any, data: Any, *, pace: float) -> None:
        self._env, self._data, self._pace = env, data, pace
        self._site = env.robots[0].eef_site_id["right"]
        self._body = env.cube_body_id if hasattr(env, "cube_body_id") else env.obj_body_id[env.obj_to_use]

    @property
    def hand(self) -> Array:
        """(3,) position between the fingertips."""
        return np.array(self._data.site_xpos[self._site])

    @property
    def heading(self) -> float:
        """Heading of the gripper [rad]."""
        return heading(self._frame)

    @property
    def object(self) -> Array:
        """(3,) centre of the object."""
        return np.array(self._data.xpos[self._body])

    @property
    def frame_of_object(self) -> Array:
        """(3, 3) orientation of the object."""
        return np.array(self._data.xmat[self._body]).reshape(3, 3)

    @property
    def handle(self) -> Array:
        """(3,) grasp position of a nut."""
        return np.array(self._data.site_xpos[self._env.object_site_ids[self._env.nut_id]])

    @property
    def bin(self) -> Array:
        """(3,) centre of the bin's floor."""
        return np.array(self._env.target_bin_placements[self._env.object_id])

    @property
    def peg(self) -> Array:
        """(3,) top of the nut's peg."""
        body = (self._env.peg1_body_id, self._env.peg2_body_id)[self._env.nut_id]
        return np.array(self._data.xpos[body]) + np.array([0.0, 0.0, PEG_TOP_M])

    def is_on_peg(self) -> bool:
        """Whether the nut has sunk down the peg."""
        return bool(self.object[2] < self._env.table_offset[2] + SEATED_M)

    def is_held(self) -> bool:
        """Whether the object (a nut's handle) is between the fingers, above its initial height."""
        held = self.handle if hasattr(self._env, "nut_id") else self.object
        return bool(np.linalg.norm(held - self.hand) < HELD_M)

    def natural_heading(self, point: Array) -> float:
        """Return the gripper heading above a point (3,) reached by turning only the arm's first joint."""
        base = self._env.robots[0].base_pos
        turned = (math.atan2(y - base[1], x - base[0]) for x, y, _ in (point, self.hand))
        return self.heading + next(turned) - next(turned)

    def nearest_heading(self, angle: float, *, turn: float) -> float:
        """Return the heading nearest to the gripper's among angle + k turn."""
        return angle + round((self.heading - angle) / turn) * turn

    def carrying(self, place: Array) -> Target:
        """Return the gripper target that puts the held nut at a position (3,), parallel to the axes.

        The handle is never on the far side, which is out of reach.
        """
        nut = heading(self.frame_of_object)
        turns = (wrap(side - nut) for side in (math.pi / 2, math.pi, -math.pi / 2))
        return Target(self.hand + place - self.object, self.heading + min(turns, key=abs))

    def distance(self, target: Target) -> tuple[float, float]:
        """Return the distance of the gripper to a target, [m] and [rad] in the plane."""
        apart = float(np.linalg.norm(target.position - self.hand))
        return apart, abs(wrap(target.heading - self.heading))

    def toward(self, target: Target, grip: float) -> Array:
        """Return the action (7,) that moves the gripper towards a target."""
        from scipy.spatial.transform import Rotation

        move = np.clip(GAIN * (target.position - self.hand), -self._pace, self._pace)
        error = Rotation.from_matrix(pointing_down(target.heading) @ self._frame.T).as_rotvec()
        return np.concatenate([move, np.clip(TURN_GAIN * error, -1, 1), [grip]])

    def physics_state(self) -> Array:
        return recorded_physics(self._data)

    @property
    def _frame(self) -> Array:
        """(3, 3) orientation of the gripper."""
        return np.array(self._data.site_xmat[self._site]).reshape(3, 3)
