"""Locomotion in space: gymnasium's Ant and Humanoid, bit for bit (`envs.tasks.locomotion.stepper`).

Ant-v5 also observes the contact forces on its bodies (105 numbers; v4 has 27); Humanoid-v5 omits what is
always zero (348; v4 has 376). v5 charges for contact forces, v4 pays for being upright also on the step of a
fall. As in gymnasium, body positions, inertias and forces are those of the last physics step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from envs.spec import Array, EnvSpec
from envs.tasks.locomotion.planar import (
    VERSIONS,
    UprightRobot,
    angles_and_rates,
    describe,
)
from envs.tasks.locomotion.stepper import States
from policies.bounds import bounded
from policies.registry import register

if TYPE_CHECKING:
    import mujoco

_FREE_POSE = ("torso height [m]", *(f"torso quaternion {axis} [1]" for axis in "wxyz"))
_FREE_SPEED = (*(f"{axis} speed [m/s]" for axis in "xyz"), *(f"torso {axis}" for axis in "xyz"))
_TORSO = 1  # index of the body
_FORCE = tuple(f"{kind} {axis}" for kind in ("torque", "force") for axis in "xyz")


def _of_bodies(bodies: tuple[str, ...], quantities: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{body} {quantity}" for body in bodies for quantity in quantities)


def _contact_names(bodies: tuple[str, ...], unit: str) -> tuple[str, ...]:
    return _of_bodies(bodies, tuple(f"contact {name} [{unit}]" for name in _FORCE))


_ANT_LEGS = ("front left", "front right", "back left", "back right")
_ANT_JOINTS = tuple(f"{leg} {joint}" for leg in _ANT_LEGS for joint in ("hip", "ankle"))
_ANT_BODIES = ("torso", *(f"{leg} {part}" for leg in _ANT_LEGS for part in ("leg", "upper leg", "foot")))


@register("env", "ant")
@dataclass(frozen=True)
class Ant(UprightRobot):
    """Four legs walk forward without falling (`Ant-v5`)."""

    version: str = bounded("v5", choices=VERSIONS)  # v4: 27 observations, no contact cost | v5: 105
    healthy_reward: float = 1.0  # per step while upright
    ctrl_cost_weight: float = 0.5  # times squared torques
    contact_cost_weight: float = 5e-4  # times squared contact forces, clipped to ±1; v5 only
    reset_noise_scale: float = 0.1  # half-width of positions, std of velocities

    gymnasium_name = "Ant"
    xml_file = "ant.xml"
    has_normal_velocity_noise = True

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("xpos",) if self.version == "v4" else ("xpos", "cfrc_ext")

    @property
    def spec(self) -> EnvSpec:
        names = angles_and_rates((*_FREE_POSE, *_ANT_JOINTS), (*_FREE_SPEED, *_ANT_JOINTS))
        if self.version != "v4":
            names = (*names, *_contact_names(_ANT_BODIES, "clipped to ±1"))
        motors = (*_ANT_JOINTS[-2:], *_ANT_JOINTS[:-2])
        return describe("ant", names, motors, hz=20.0, max_steps=self.max_episode_steps)

    def observe(self, states: States) -> Array:
        """Return pose without x and y, velocities and, in v5, contact forces."""
        own = [states.qpos[:, 2:], states.qvel]
        if self.version != "v4":
            own.append(_flat(_clipped_forces(states)[:, 1:]))
        return np.concatenate(own, axis=1)

    def x(self, states: States, model: mujoco.MjModel) -> Array:
        return states.more["xpos"][:, _TORSO, 0]

    def has_fallen(self, states: States) -> Array:
        """Return (M,) whether the torso is too low, too high, or not finite."""
        z = states.qpos[:, 2]
        finite = np.isfinite(states.qpos).all(axis=1) & np.isfinite(states.qvel).all(axis=1)
        has_fallen: Array = ~(finite & (z >= 0.2) & (z <= 1.0))
        return has_fallen

    def cost(self, states: States, actions: Array) -> Array:
        cost = super().cost(states, actions)
        if self.version != "v4":
            squares = np.square(_flat(_clipped_forces(states)))
            cost = cost + self.contact_cost_weight * squares.sum(axis=1)
        return cost


def _clipped_forces(states: States) -> Array:
    return np.clip(states.more["cfrc_ext"], -1.0, 1.0)


def _flat(parts: Array) -> Array:
    return parts.reshape(len(parts), math.prod(parts.shape[1:]))


_SPINE = ("abdomen z", "abdomen y", "abdomen x")
_HUMAN_LEG, _HUMAN_ARM = ("hip x", "hip z", "hip y", "knee"), ("shoulder 1", "shoulder 2", "elbow")
_LIMBS = (
    *(f"{side} {joint}" for side in ("right", "left") for joint in _HUMAN_LEG),
    *(f"{side} {joint}" for side in ("right", "left") for joint in _HUMAN_ARM),
)
_HUMAN_BODIES = (
    *("torso", "lower waist", "pelvis"),
    *(f"{side} {part}" for side in ("right", "left") for part in ("thigh", "shin", "foot")),
    *(f"{side} {part}" for side in ("right", "left") for part in ("upper arm", "lower arm")),
)
_INERTIA = tuple(f"inertia {i} [kg m2, kg m, kg]" for i in range(10))
_VELOCITY = (*(f"turning {axis} [rad/s]" for axis in "xyz"), *(f"moving {axis} [m/s]" for axis in "xyz"))


@register("env", "humanoid")
@dataclass(frozen=True)
class Humanoid(UprightRobot):
    """A human figure walks forward without falling (`Humanoid-v5`)."""

    version: str = bounded("v5", choices=VERSIONS)  # v4: 376 observations, no contact cost | v5: 348
    forward_reward_weight: float = 1.25  # per m/s
    healthy_reward: float = 5.0  # per step while upright
    ctrl_cost_weight: float = 0.1  # times squared torques
    contact_cost_weight: float = 5e-7  # times squared contact forces, at most 10 in all; v5 only
    reset_noise_scale: float = 1e-2  # uniform half-width, rad, m, rad/s, m/s

    gymnasium_name = "Humanoid"
    xml_file = "humanoid.xml"
    fields = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")

    @property
    def spec(self) -> EnvSpec:
        joints = (*_SPINE, *_LIMBS)
        motors = (_SPINE[1], _SPINE[0], _SPINE[2], *_LIMBS)
        bodies = _HUMAN_BODIES if self.version != "v4" else ("world", *_HUMAN_BODIES)
        driven = joints if self.version != "v4" else (*(f"root {i}" for i in range(6)), *joints)
        names = (
            *angles_and_rates((*_FREE_POSE, *joints), (*_FREE_SPEED, *joints)),
            *_of_bodies(bodies, _INERTIA),
            *_of_bodies(bodies, _VELOCITY),
            *(f"{joint} motor torque [N m]" for joint in driven),
            *_contact_names(bodies, "N m, N"),
        )
        return describe(
            *("humanoid", names, motors),
            hz=200 / 3,
            max_steps=self.max_episode_steps,
            full_scale=0.4,
            has_scores=False,
        )

    def observe(self, states: States) -> Array:
        """Return pose without x and y, velocities, inertias, motor and contact forces."""
        first_body, first_joint = (0, 0) if self.version == "v4" else (1, 6)
        more = states.more
        bodies = [_flat(more[name][:, first_body:]) for name in ("cinert", "cvel")]
        forces = [more["qfrc_actuator"][:, first_joint:], _flat(more["cfrc_ext"][:, first_body:])]
        return np.concatenate([states.qpos[:, 2:], states.qvel, *bodies, *forces], axis=1)

    def x(self, states: States, model: mujoco.MjModel) -> Array:
        """Return the centre of mass, (M,) [m]; computed per robot, as the summation order affects bits."""
        mass = model.body_mass
        sums = [np.einsum("b,bj->j", mass, places)[0] for places in states.more["xipos"]]
        x: Array = np.array(sums) / mass.sum()
        return x

    def has_fallen(self, states: States) -> Array:
        """Return (M,) whether the torso is too low or too high."""
        z = states.qpos[:, 2]
        has_fallen: Array = ~((z > 1.0) & (z < 2.0))
        return has_fallen

    def cost(self, states: States, actions: Array) -> Array:
        cost = super().cost(states, actions.astype(np.float64))
        if self.version != "v4":
            squares = np.square(_flat(states.more["cfrc_ext"]))
            cost = cost + np.clip(self.contact_cost_weight * squares.sum(axis=1), -np.inf, 10.0)
        return cost
