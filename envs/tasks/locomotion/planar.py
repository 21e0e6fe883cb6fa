"""Planar locomotion: gymnasium's Hopper, Walker2d, HalfCheetah and Swimmer, bit for bit.

In v4 the step of a fall still earns the healthy reward, and Walker2d's feet have other friction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.datasets.episode import Episode
from envs.datasets.scores import reference
from envs.engine.pixels import HasCameras
from envs.engine.vector import ChunkVector
from envs.spec import EnvSpec
from envs.tasks.locomotion.expert import LocomotionExpert, demonstrate_locomotion
from envs.tasks.locomotion.stepper import Array, RobotStepper, States
from policies.bounds import bounded
from policies.registry import register

if TYPE_CHECKING:
    import mujoco

VERSIONS = ("v4", "v5")


class GymnasiumRobot(HasCameras):
    """Common base of gymnasium's robots."""

    camera = "track"
    fields: tuple[str, ...] = ()
    gymnasium_name: str

    def make_vector(self: Any, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        vector: ChunkVector = self.vector_of(RobotStepper(self, num_envs), obs_steps)
        return vector

    def noise(self: Any, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw uniform noise for positions, then for velocities."""
        scale = self.reset_noise_scale
        return rng.uniform(low=-scale, high=scale, size=nq), rng.uniform(low=-scale, high=scale, size=nv)

    def x(self, states: States, model: mujoco.MjModel) -> Array:
        """Return the first coordinate (M,) [m]."""
        return states.qpos[:, 0]

    def has_fallen(self, states: States) -> Array:
        """Return (M,) False: only the time limit ends an episode."""
        return np.zeros(len(states.qpos), bool)


def control_cost(weight: float, actions: Array) -> Array:
    """Return the weighted sum of squares (M,) of actions (M, Da)."""
    cost: Array = weight * np.sum(np.square(actions), axis=-1)
    return cost


def health(version: str, reward: float, has_fallen: Array) -> Array:
    """Return the healthy reward, (M,); v4 also pays it on the step of a fall."""
    return np.full(len(has_fallen), reward) if version == "v4" else ~has_fallen * reward


def describe(
    name: str,
    obs_names: tuple[str, ...],
    motors: tuple[str, ...],
    *,
    hz: float,
    limit: int,
    full_scale: float = 1.0,
    scored: bool = True,
) -> EnvSpec:
    """Return the specification of a robot.

    Args:
        name: Name of the task.
        obs_names: Observation names with units.
        motors: Actuated joints, in action order.
        hz: Control rate.
        limit: Time limit in control steps.
        full_scale: Largest action.
        scored: Whether D4RL has reference returns.
    """
    scores = reference(name) if scored else None
    unit = "of full scale" if full_scale == 1.0 else f"±{full_scale:g} is full scale"
    return EnvSpec(
        name=name,
        family="locomotion",
        obs_dim=len(obs_names),
        action_dim=len(motors),
        action_low=(-full_scale,) * len(motors),
        action_high=(full_scale,) * len(motors),
        max_episode_steps=limit,
        control_hz=hz,
        obs_names=obs_names,
        action_names=tuple(f"{motor} torque [{unit}]" for motor in motors),
        reference_scores=None if scores is None else (scores.min_return, scores.max_return),
    )


def angles_and_rates(positions: tuple[str, ...], velocities: tuple[str, ...]) -> tuple[str, ...]:
    """Append units to names of angles and rates; names with a unit are unchanged."""
    angles = (name if "[" in name else f"{name} angle [rad]" for name in positions)
    rates = (name if "[" in name else f"{name} rate [rad/s]" for name in velocities)
    return (*angles, *rates)


_LEG = ("thigh", "leg", "foot")
_ROOT = ("torso height [m]", "torso")
_SPEEDS = ("forward speed [m/s]", "vertical speed [m/s]", "torso")


def _planar(name: str, joints: tuple[str, ...], *, hz: float, limit: int) -> EnvSpec:
    names = angles_and_rates((*_ROOT, *joints), (*_SPEEDS, *joints))
    return describe(name, names, joints, hz=hz, limit=limit)


class Demonstrated(GymnasiumRobot):
    """Common base of robots with trained actors."""

    def demonstrate(self: Any, seed: int) -> Episode:
        """Record the configured actor on the episode of this seed."""
        return demonstrate_locomotion(RobotStepper(self, 1), seed, self.expert, spec=self.spec)


class _Upright(Demonstrated):
    """Common base of the two robots that may fall."""

    def observe(self, states: States) -> Array:
        """Return positions without x, and velocities clipped to ±10, (M, Do)."""
        return np.concatenate([states.qpos[:, 1:], np.clip(states.qvel, -10, 10)], axis=1)

    def reward(self: Any, states: States, x_velocity: Array, actions: Array, has_fallen: Array) -> Array:
        """Return speed plus health minus control cost, (M,), added up in gymnasium's order."""
        rewards = self.forward_reward_weight * x_velocity + health(
            self.version, self.healthy_reward, has_fallen
        )
        return rewards - control_cost(self.ctrl_cost_weight, actions)


@register("env", "hopper")
@dataclass(frozen=True)
class Hopper(_Upright):
    """One leg hops forward without falling (`Hopper-v5`)."""

    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps
    version: str = bounded("v5", choices=VERSIONS)  # v4 also pays healthy_reward on the step of a fall
    forward_reward_weight: float = 1.0  # per m/s
    healthy_reward: float = 1.0  # per step while upright
    ctrl_cost_weight: float = 1e-3  # times squared torques
    reset_noise_scale: float = 5e-3  # uniform half-width, rad, m, rad/s, m/s
    expert: LocomotionExpert = bounded(LocomotionExpert(), was="demonstrator")  # options of the expert

    gymnasium_name = "Hopper"
    xml_file = "hopper.xml"
    frame_skip = 4

    @property
    def spec(self) -> EnvSpec:
        return _planar("hopper", _LEG, hz=125.0, limit=self.max_episode_steps)

    def has_fallen(self, states: States) -> Array:
        """Return (M,) whether height, angle or any coordinate left the healthy range."""
        z, angle = states.qpos[:, 1], states.qpos[:, 2]
        rest = np.concatenate([states.qpos[:, 2:], states.qvel], axis=1)
        inside = ((rest > -100.0) & (rest < 100.0)).all(axis=1)
        has_fallen: Array = ~(inside & (z > 0.7) & (z < np.inf) & (angle > -0.2) & (angle < 0.2))
        return has_fallen


@register("env", "walker2d")
@dataclass(frozen=True)
class Walker2d(_Upright):
    """Two legs walk forward without falling (`Walker2d-v5`)."""

    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps
    version: str = bounded("v5", choices=VERSIONS)  # v4: less friction at one foot, and reward on a fall
    forward_reward_weight: float = 1.0  # per m/s
    healthy_reward: float = 1.0  # per step while upright
    ctrl_cost_weight: float = 1e-3  # times squared torques
    reset_noise_scale: float = 5e-3  # uniform half-width, rad, m, rad/s, m/s
    expert: LocomotionExpert = bounded(LocomotionExpert(), was="demonstrator")  # options of the expert

    gymnasium_name = "Walker2d"
    frame_skip = 4

    @property
    def xml_file(self) -> str:
        return "walker2d.xml" if self.version == "v4" else "walker2d_v5.xml"

    @property
    def spec(self) -> EnvSpec:
        joints = (*_LEG, *(f"left {joint}" for joint in _LEG))
        return _planar("walker2d", joints, hz=125.0, limit=self.max_episode_steps)

    def has_fallen(self, states: States) -> Array:
        """Return (M,) whether height or angle left the healthy range."""
        z, angle = states.qpos[:, 1], states.qpos[:, 2]
        has_fallen: Array = ~((z > 0.8) & (z < 2.0) & (angle > -1.0) & (angle < 1.0))
        return has_fallen


@register("env", "halfcheetah")
@dataclass(frozen=True)
class HalfCheetah(Demonstrated):
    """Two legs run forward; nothing ends an episode but the limit (`HalfCheetah-v5`)."""

    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps
    forward_reward_weight: float = 1.0  # per m/s
    ctrl_cost_weight: float = 0.1  # times squared torques
    reset_noise_scale: float = 0.1  # half-width of positions, std of velocities
    expert: LocomotionExpert = bounded(LocomotionExpert(), was="demonstrator")  # options of the expert

    gymnasium_name = "HalfCheetah"
    xml_file = "half_cheetah.xml"
    frame_skip = 5

    @property
    def spec(self) -> EnvSpec:
        joints = tuple(f"{end} {joint}" for end in ("back", "front") for joint in ("thigh", "shin", "foot"))
        return _planar("halfcheetah", joints, hz=20.0, limit=self.max_episode_steps)

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw uniform noise for positions, then normal noise for velocities."""
        scale = self.reset_noise_scale
        return rng.uniform(low=-scale, high=scale, size=nq), scale * rng.standard_normal(nv)

    def observe(self, states: States) -> Array:
        """Return positions without x and velocities, (M, 17)."""
        return np.concatenate([states.qpos[:, 1:], states.qvel], axis=1)

    def reward(self, states: States, x_velocity: Array, actions: Array, has_fallen: Array) -> Array:
        return self.forward_reward_weight * x_velocity - control_cost(self.ctrl_cost_weight, actions)


@register("env", "swimmer")
@dataclass(frozen=True)
class Swimmer(GymnasiumRobot):
    """Three links swim forward in a viscous plane (`Swimmer-v5`)."""

    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps
    forward_reward_weight: float = 1.0  # per m/s
    ctrl_cost_weight: float = 1e-4  # times squared torques
    reset_noise_scale: float = 0.1  # uniform half-width, rad, m, rad/s, m/s

    gymnasium_name = "Swimmer"
    xml_file = "swimmer.xml"
    frame_skip = 4

    @property
    def spec(self) -> EnvSpec:
        joints = ("first joint", "second joint")
        names = angles_and_rates(("head", *joints), ("x speed [m/s]", "y speed [m/s]", "head", *joints))
        return describe("swimmer", names, joints, hz=25.0, limit=self.max_episode_steps, scored=False)

    def observe(self, states: States) -> Array:
        """Return positions without x and y, and velocities, (M, 8)."""
        return np.concatenate([states.qpos[:, 2:], states.qvel], axis=1)

    def reward(self, states: States, x_velocity: Array, actions: Array, has_fallen: Array) -> Array:
        return self.forward_reward_weight * x_velocity - control_cost(self.ctrl_cost_weight, actions)
