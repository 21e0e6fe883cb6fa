"""Planar locomotion: gymnasium's Hopper, Walker2d, HalfCheetah and Swimmer, bit for bit.

In v4 the step of a fall still earns the healthy reward, and Walker2d's feet have other friction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from envs.engine.engines import HasEngines, exactly
from envs.engine.pixels import HasCameras
from envs.evaluation.scores import reference
from envs.spec import Array, EnvSpec, symmetric_spec
from envs.tasks.locomotion.expert import LocomotionExpert, demonstrate_locomotion
from envs.tasks.locomotion.stepper import RobotStepper, States
from policies.bounds import bounded
from policies.registry import register

if TYPE_CHECKING:
    import mujoco

    from envs.datasets.episode import Episode

VERSIONS = ("v4", "v5")


@dataclass(frozen=True)
class GymnasiumRobot(HasCameras):
    """Common options of gymnasium's robots, and the parts that most of them share."""

    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps
    forward_reward_weight: float = 1.0  # per m/s

    camera = "track"
    fields: ClassVar[tuple[str, ...]] = ()
    has_normal_velocity_noise = False  # whether reset noise of velocities is normal instead of uniform
    gymnasium_name = ""
    frame_skip = 5

    def stepper(self: Any, num_envs: int) -> RobotStepper:
        return RobotStepper(self, num_envs)

    def noise(self: Any, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw uniform noise for positions, then for velocities."""
        scale = self.reset_noise_scale
        qpos = rng.uniform(low=-scale, high=scale, size=nq)
        if self.has_normal_velocity_noise:
            return qpos, scale * rng.standard_normal(nv)
        return qpos, rng.uniform(low=-scale, high=scale, size=nv)

    def x(self, states: States, model: mujoco.MjModel) -> Array:
        return states.qpos[:, 0]

    def has_fallen(self, states: States) -> Array:
        """Return (M,) False: only the time limit ends an episode."""
        return np.zeros(len(states.qpos), bool)

    def reward(self, states: States, x_velocity: Array, actions: Array, has_fallen: Array) -> Array:
        """Return speed minus costs, (M,)."""
        return self.forward_reward_weight * x_velocity - self.cost(states, actions)

    def cost(self: Any, states: States, actions: Array) -> Array:
        """Return the control cost (M,) of actions (M, Da)."""
        cost: Array = self.ctrl_cost_weight * np.sum(np.square(actions), axis=-1)
        return cost


class UprightRobot(GymnasiumRobot):
    """Common base of the robots that may fall; in v4 the step of a fall still earns the healthy reward."""

    def reward(self: Any, states: States, x_velocity: Array, actions: Array, has_fallen: Array) -> Array:
        """Return speed plus health minus costs, (M,), added up in gymnasium's order."""
        healthy = np.ones(len(has_fallen)) if self.version == "v4" else ~has_fallen
        rewards: Array = self.forward_reward_weight * x_velocity + healthy * self.healthy_reward
        return rewards - self.cost(states, actions)


def describe(
    name: str,
    obs_names: tuple[str, ...],
    motors: tuple[str, ...],
    *,
    hz: float,
    max_steps: int,
    full_scale: float = 1.0,
    has_scores: bool = True,
) -> EnvSpec:
    """Return the specification of a robot; actions are torques of the motors, D4RL may have scores."""
    unit = "of full scale" if full_scale == 1.0 else f"±{full_scale:g} is full scale"
    return symmetric_spec(
        obs_names,
        tuple(f"{motor} torque [{unit}]" for motor in motors),
        limit=full_scale,
        name=name,
        family="locomotion",
        max_episode_steps=max_steps,
        control_hz=hz,
        reference_scores=reference(name).returns if has_scores else None,
    )


def angles_and_rates(positions: tuple[str, ...], velocities: tuple[str, ...]) -> tuple[str, ...]:
    """Append units to names of angles and rates; names with a unit are unchanged."""
    angles = (name if "[" in name else f"{name} angle [rad]" for name in positions)
    rates = (name if "[" in name else f"{name} rate [rad/s]" for name in velocities)
    return (*angles, *rates)


_LEG = ("thigh", "leg", "foot")
_ROOT = ("torso height [m]", "torso")
_SPEEDS = ("forward speed [m/s]", "vertical speed [m/s]", "torso")


@dataclass(frozen=True)
class _Planar(HasEngines, GymnasiumRobot):
    """Common base of the planar robots with trained actors."""

    expert: LocomotionExpert = bounded(LocomotionExpert(), was="demonstrator")  # options of the expert

    name = ""
    joints: ClassVar[tuple[str, ...]] = ()
    control_hz = 125.0

    @property
    def spec(self) -> EnvSpec:
        names = angles_and_rates((*_ROOT, *self.joints), (*_SPEEDS, *self.joints))
        return describe(self.name, names, self.joints, hz=self.control_hz, max_steps=self.max_episode_steps)

    def stepper(self: Any, num_envs: int) -> Any:
        if self.engine == "exact":
            return super().stepper(num_envs)
        from envs.tasks.locomotion.warp_stepper import WarpRobotStepper

        return WarpRobotStepper(self, num_envs)

    def demonstrate(self: Any, seed: int) -> Episode:
        return demonstrate_locomotion(exactly(self).stepper(1), seed, self.expert, spec=self.spec)


@dataclass(frozen=True)
class _PlanarUpright(UprightRobot, _Planar):
    """Common options of the two planar robots that may fall."""

    version: str = bounded("v5", choices=VERSIONS)  # v4 also pays healthy_reward on the step of a fall
    healthy_reward: float = 1.0  # per step while upright
    ctrl_cost_weight: float = 1e-3  # times squared torques
    reset_noise_scale: float = 5e-3  # uniform half-width, rad, m, rad/s, m/s

    frame_skip = 4

    def observe(self, states: States) -> Array:
        """Return positions without x, and velocities clipped to ±10, (M, Do)."""
        return np.concatenate([states.qpos[:, 1:], np.clip(states.qvel, -10, 10)], axis=1)


@register("env", "hopper")
@dataclass(frozen=True)
class Hopper(_PlanarUpright):
    """One leg hops forward without falling (`Hopper-v5`)."""

    name = "hopper"
    gymnasium_name = "Hopper"
    xml_file = "hopper.xml"
    joints = _LEG

    def has_fallen(self, states: States) -> Array:
        """Return (M,) whether height, angle or any coordinate left the healthy range."""
        z, angle = states.qpos[:, 1], states.qpos[:, 2]
        rest = np.concatenate([states.qpos[:, 2:], states.qvel], axis=1)
        inside = ((rest > -100.0) & (rest < 100.0)).all(axis=1)
        has_fallen: Array = ~(inside & (z > 0.7) & (z < np.inf) & (angle > -0.2) & (angle < 0.2))
        return has_fallen


@register("env", "walker2d")
@dataclass(frozen=True)
class Walker2d(_PlanarUpright):
    """Two legs walk forward without falling (`Walker2d-v5`)."""

    version: str = bounded("v5", choices=VERSIONS)  # v4: less friction at one foot, and reward on a fall

    name = "walker2d"
    gymnasium_name = "Walker2d"
    joints = (*_LEG, *(f"left {joint}" for joint in _LEG))

    @property
    def xml_file(self) -> str:
        return "walker2d.xml" if self.version == "v4" else "walker2d_v5.xml"

    def has_fallen(self, states: States) -> Array:
        """Return (M,) whether height or angle left the healthy range."""
        z, angle = states.qpos[:, 1], states.qpos[:, 2]
        has_fallen: Array = ~((z > 0.8) & (z < 2.0) & (angle > -1.0) & (angle < 1.0))
        return has_fallen


@register("env", "halfcheetah")
@dataclass(frozen=True)
class HalfCheetah(_Planar):
    """Two legs run forward; nothing ends an episode but the limit (`HalfCheetah-v5`)."""

    ctrl_cost_weight: float = 0.1  # times squared torques
    reset_noise_scale: float = 0.1  # half-width of positions, std of velocities

    name = "halfcheetah"
    gymnasium_name = "HalfCheetah"
    xml_file = "half_cheetah.xml"
    has_normal_velocity_noise = True
    joints = tuple(f"{end} {joint}" for end in ("back", "front") for joint in ("thigh", "shin", "foot"))
    control_hz = 20.0

    def observe(self, states: States) -> Array:
        """Return positions without x and velocities, (M, 17)."""
        return np.concatenate([states.qpos[:, 1:], states.qvel], axis=1)


@register("env", "swimmer")
@dataclass(frozen=True)
class Swimmer(GymnasiumRobot):
    """Three links swim forward in a viscous plane (`Swimmer-v5`)."""

    ctrl_cost_weight: float = 1e-4  # times squared torques
    reset_noise_scale: float = 0.1  # uniform half-width, rad, m, rad/s, m/s

    gymnasium_name = "Swimmer"
    xml_file = "swimmer.xml"
    frame_skip = 4

    @property
    def spec(self) -> EnvSpec:
        joints = ("first joint", "second joint")
        names = angles_and_rates(("head", *joints), ("x speed [m/s]", "y speed [m/s]", "head", *joints))
        return describe("swimmer", names, joints, hz=25.0, max_steps=self.max_episode_steps, has_scores=False)

    def observe(self, states: States) -> Array:
        """Return positions without x and y, and velocities, (M, 8)."""
        return np.concatenate([states.qpos[:, 2:], states.qvel], axis=1)
