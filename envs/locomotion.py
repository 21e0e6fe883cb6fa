"""Planar locomotion: gymnasium's Hopper, Walker2d and HalfCheetah v5, many in one process.

One compiled model is shared by one `MjData` per environment; `mj_step` advances them, and observations,
rewards and terminations are computed for all of them at once in gymnasium's own arithmetic, so every
number equals `gymnasium.make("Hopper-v5")` bit for bit. Actions are clipped to the box first, as the
wrapped environments of D4RL do, so the control cost never charges for what the motors cannot do.

Legend: N environments, M of them addressed, Ta executed steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from envs.datasets.scores import reference
from envs.spec import EnvSpec
from envs.vector import ChunkVector, StepResult
from policies.errors import ConfigError
from policies.registry import register

if TYPE_CHECKING:
    import mujoco

Array = np.ndarray


class Task(Protocol):
    """What distinguishes the three robots; configurations below implement it.

    `qpos` (M, nq), `qvel` (M, nv), `actions` (M, Da), `x_velocity` (M,) [m/s].
    """

    @property
    def xml_file(self) -> str: ...  # noqa: D102

    @property
    def frame_skip(self) -> int: ...  # noqa: D102

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw what a reset adds to the initial qpos (nq,) and qvel (nv,)."""
        ...

    def observe(self, qpos: Array, qvel: Array) -> Array:
        """Return observations (M, Do)."""
        ...

    def fell(self, qpos: Array, qvel: Array) -> Array:
        """Return (M,) whether the robot left its healthy range."""
        ...

    def reward(self, x_velocity: Array, actions: Array, fell: Array) -> Array:
        """Return rewards (M,)."""
        ...


class MujocoStepper:
    """Steps N copies of one MuJoCo robot; exact, and as fast as `mj_step` allows.

    Args:
        task: Robot, reward and termination.
        num_envs: N.
    """

    can_save = True

    def __init__(self, task: Task, num_envs: int) -> None:
        import mujoco

        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        self.task = task
        self.num_envs = num_envs
        self.model = load_model(task.xml_file)
        self.datas = [mujoco.MjData(self.model) for _ in range(num_envs)]
        self._mj_step: Callable[..., None] = mujoco.mj_step
        self._dt = self.model.opt.timestep * task.frame_skip
        # Views into the simulators' memory, made once: each attribute access would build a new one.
        self._qpos = [data.qpos for data in self.datas]
        self._qvel = [data.qvel for data in self.datas]
        self._ctrl = [data.ctrl for data in self.datas]
        self._start = (self._qpos[0].copy(), self._qvel[0].copy())
        self._x = np.zeros(num_envs)
        self._signature = mujoco.mjtState.mjSTATE_INTEGRATION

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode as gymnasium does for this seed; returns (Do,)."""
        import mujoco
        from gymnasium.utils import seeding

        rng, _ = seeding.np_random(seed)
        data = self.datas[row]
        mujoco.mj_resetData(self.model, data)
        qpos_noise, qvel_noise = self.task.noise(rng, self.model.nq, self.model.nv)
        data.qpos[:] = self._start[0] + qpos_noise
        data.qvel[:] = self._start[1] + qvel_noise
        mujoco.mj_forward(self.model, data)
        self._x[row] = data.qpos[0]
        observation: Array = self.task.observe(data.qpos[None], data.qvel[None])[0]
        return observation

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step (`frame_skip` physics steps)."""
        return self.step_through(rows, actions[:, None]).at(0)

    def step_through(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by whole chunks (M, Ta, Da), one robot after the other, also when it falls.

        A robot's memory stays in the cache, and everything but the physics happens once per chunk.
        """
        m, steps = actions.shape[:2]
        qpos, qvel = (np.empty((m, steps, size)) for size in (self.model.nq, self.model.nv))
        mj_step, model, skip = self._mj_step, self.model, self.task.frame_skip
        for i, chunk, positions, velocities in zip(rows.tolist(), actions, qpos, qvel, strict=True):
            data, ctrl, position, velocity = self.datas[i], self._ctrl[i], self._qpos[i], self._qvel[i]
            for j in range(steps):
                ctrl[:] = chunk[j]
                mj_step(model, data, nstep=skip)
                positions[j], velocities[j] = position, velocity
        x = np.concatenate([self._x[rows, None], qpos[:, :, 0]], axis=1)
        self._x[rows] = x[:, -1]
        return self._judge(qpos, qvel, (x[:, 1:] - x[:, :-1]) / self._dt, actions)

    def _judge(self, qpos: Array, qvel: Array, x_velocity: Array, actions: Array) -> StepResult:
        """Return what (M, Ta, ...) states and actions are worth."""
        shape = qpos.shape[:2]
        flat = [part.reshape(-1, part.shape[-1]) for part in (qpos, qvel, actions)]
        fell = self.task.fell(flat[0], flat[1])
        reward = self.task.reward(x_velocity.reshape(-1), flat[2], fell)
        no = np.zeros(shape, bool)
        obs = self.task.observe(flat[0], flat[1]).reshape(*shape, -1)
        return StepResult(obs, reward.reshape(shape), fell.reshape(shape), no, no)

    def metrics(self) -> dict[str, Array]:
        """Return nothing: the return says it all."""
        return {}

    def get_state(self) -> Array:
        """Return the integration states (N, nstate), from which physics continues bit-exactly."""
        import mujoco

        states = np.empty((self.num_envs, mujoco.mj_stateSize(self.model, self._signature)))
        for row, data in enumerate(self.datas):
            mujoco.mj_getState(self.model, data, states[row], self._signature)
        return states

    def set_state(self, state: Any) -> None:
        """Continue from `get_state`."""
        import mujoco

        for row, data in enumerate(self.datas):
            mujoco.mj_setState(self.model, data, np.asarray(state[row], np.float64), self._signature)
            self._x[row] = data.qpos[0]

    def close(self) -> None:
        """Drop the simulators."""
        self.datas, self._qpos, self._qvel, self._ctrl = [], [], [], []


def load_model(xml_file: str) -> mujoco.MjModel:
    """Compile one of the robots that gymnasium ships."""
    from importlib.resources import as_file, files

    import mujoco

    with as_file(files("gymnasium") / "envs" / "mujoco" / "assets" / xml_file) as path:
        return mujoco.MjModel.from_xml_path(str(path))


def _clipped_observation(qpos: Array, qvel: Array) -> Array:
    """Positions without x, velocities clipped to ±10."""
    return np.concatenate([qpos[:, 1:], np.clip(qvel, -10, 10)], axis=1)


def _uniform_noise(rng: np.random.Generator, nq: int, nv: int, scale: float) -> tuple[Array, Array]:
    """Draw uniform noise of ±scale, positions first."""
    return rng.uniform(low=-scale, high=scale, size=nq), rng.uniform(low=-scale, high=scale, size=nv)


def _control_cost(weight: float, actions: Array) -> Array:
    cost: Array = weight * np.sum(np.square(actions), axis=-1)
    return cost


_LEG = ("thigh", "leg", "foot")
_MOTOR = "{} torque [of full scale]"


def _names(positions: tuple[str, ...], velocities: tuple[str, ...]) -> tuple[str, ...]:
    """Name angles and rates; entries that carry a unit already stay as they are."""
    angles = (name if "[" in name else f"{name} angle [rad]" for name in positions)
    rates = (name if "[" in name else f"{name} rate [rad/s]" for name in velocities)
    return (*angles, *rates)


def _spec(
    name: str,
    joints: tuple[str, ...],
    root: tuple[str, ...],
    speeds: tuple[str, ...],
    hz: float,
    limit: int,
) -> EnvSpec:
    if limit < 1:
        raise ConfigError(f"env.max_episode_steps must be at least 1; got {limit}.")
    scores = reference(name)
    names = _names((*root, *joints), (*speeds, *joints))
    return EnvSpec(
        name=name,
        family="locomotion",
        obs_dim=len(names),
        action_dim=len(joints),
        action_low=(-1.0,) * len(joints),
        action_high=(1.0,) * len(joints),
        max_episode_steps=limit,
        control_hz=hz,
        obs_names=names,
        action_names=tuple(_MOTOR.format(joint) for joint in joints),
        reference_scores=(scores.min_return, scores.max_return),
    )


_ROOT = ("torso height [m]", "torso")
_SPEEDS = ("forward speed [m/s]", "vertical speed [m/s]", "torso")


class _Robot:
    """What the three configurations do alike."""

    def make_vector(self: Any, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build the exact engine for N environments."""
        return ChunkVector(self.spec, MujocoStepper(self, num_envs), obs_steps=obs_steps)

    def render_frames(self: Any, seed: int, actions: Array, **options: Any) -> Array:
        """Photograph an episode (F, height, width, 3); options as in `envs.rendering.replay_frames`."""
        from envs.rendering import replay_frames

        return replay_frames(self.make_vector(1), seed, actions, camera="track", **options)


@register("env", "hopper")
@dataclass(frozen=True)
class Hopper(_Robot):
    """One leg hops forward without falling (`Hopper-v5`)."""

    max_episode_steps: int = 1000  # control steps, then truncated
    forward_reward_weight: float = 1.0  # per m/s
    healthy_reward: float = 1.0  # per step while upright
    ctrl_cost_weight: float = 1e-3  # times squared torques
    reset_noise_scale: float = 5e-3  # uniform half-width, rad, m, rad/s, m/s

    xml_file = "hopper.xml"
    frame_skip = 4

    @property
    def spec(self) -> EnvSpec:
        """Describe the task."""
        return _spec("hopper", _LEG, _ROOT, _SPEEDS, 125.0, self.max_episode_steps)

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw uniform noise, positions first."""
        return _uniform_noise(rng, nq, nv, self.reset_noise_scale)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        """Return positions without x and clipped velocities, (M, 11)."""
        return _clipped_observation(qpos, qvel)

    def fell(self, qpos: Array, qvel: Array) -> Array:
        """Return (M,) whether height, angle or any coordinate left the healthy range."""
        z, angle = qpos[:, 1], qpos[:, 2]
        state = np.concatenate([qpos[:, 2:], qvel], axis=1)
        inside = ((state > -100.0) & (state < 100.0)).all(axis=1)
        fell: Array = ~(inside & (z > 0.7) & (z < np.inf) & (angle > -0.2) & (angle < 0.2))
        return fell

    def reward(self, x_velocity: Array, actions: Array, fell: Array) -> Array:
        """Return speed plus health minus control cost, (M,)."""
        return _upright_reward(self, x_velocity, actions, fell)


@register("env", "walker2d")
@dataclass(frozen=True)
class Walker2d(_Robot):
    """Two legs walk forward without falling (`Walker2d-v5`)."""

    max_episode_steps: int = 1000  # control steps, then truncated
    forward_reward_weight: float = 1.0  # per m/s
    healthy_reward: float = 1.0  # per step while upright
    ctrl_cost_weight: float = 1e-3  # times squared torques
    reset_noise_scale: float = 5e-3  # uniform half-width, rad, m, rad/s, m/s

    xml_file = "walker2d_v5.xml"
    frame_skip = 4

    @property
    def spec(self) -> EnvSpec:
        """Describe the task."""
        joints = (*_LEG, *(f"left {joint}" for joint in _LEG))
        return _spec("walker2d", joints, _ROOT, _SPEEDS, 125.0, self.max_episode_steps)

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw uniform noise, positions first."""
        return _uniform_noise(rng, nq, nv, self.reset_noise_scale)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        """Return positions without x and clipped velocities, (M, 17)."""
        return _clipped_observation(qpos, qvel)

    def fell(self, qpos: Array, qvel: Array) -> Array:
        """Return (M,) whether height or angle left the healthy range."""
        z, angle = qpos[:, 1], qpos[:, 2]
        fell: Array = ~((z > 0.8) & (z < 2.0) & (angle > -1.0) & (angle < 1.0))
        return fell

    def reward(self, x_velocity: Array, actions: Array, fell: Array) -> Array:
        """Return speed plus health minus control cost, (M,)."""
        return _upright_reward(self, x_velocity, actions, fell)


@register("env", "halfcheetah")
@dataclass(frozen=True)
class HalfCheetah(_Robot):
    """Two legs run forward; nothing ends an episode but the limit (`HalfCheetah-v5`)."""

    max_episode_steps: int = 1000  # control steps, then truncated
    forward_reward_weight: float = 1.0  # per m/s
    ctrl_cost_weight: float = 0.1  # times squared torques
    reset_noise_scale: float = 0.1  # half-width of positions, std of velocities

    xml_file = "half_cheetah.xml"
    frame_skip = 5

    @property
    def spec(self) -> EnvSpec:
        """Describe the task."""
        joints = tuple(f"{end} {joint}" for end in ("back", "front") for joint in ("thigh", "shin", "foot"))
        return _spec("halfcheetah", joints, _ROOT, _SPEEDS, 20.0, self.max_episode_steps)

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]:
        """Draw uniform noise for positions, then normal noise for velocities."""
        scale = self.reset_noise_scale
        return rng.uniform(low=-scale, high=scale, size=nq), scale * rng.standard_normal(nv)

    def observe(self, qpos: Array, qvel: Array) -> Array:
        """Return positions without x and velocities, (M, 17)."""
        return np.concatenate([qpos[:, 1:], qvel], axis=1)

    def fell(self, qpos: Array, qvel: Array) -> Array:
        """Return (M,) false."""
        return np.zeros(len(qpos), bool)

    def reward(self, x_velocity: Array, actions: Array, fell: Array) -> Array:
        """Return speed minus control cost, (M,)."""
        return self.forward_reward_weight * x_velocity - _control_cost(self.ctrl_cost_weight, actions)


def _upright_reward(task: Hopper | Walker2d, x_velocity: Array, actions: Array, fell: Array) -> Array:
    """Add up speed, health and control cost in gymnasium's order."""
    rewards = task.forward_reward_weight * x_velocity + ~fell * task.healthy_reward
    return rewards - _control_cost(task.ctrl_cost_weight, actions)
