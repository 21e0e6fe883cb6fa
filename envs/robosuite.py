"""robomimic's state tasks in robosuite 1.5.1: lift, can, square and transport.

Franka arms move by changes of the hand's pose (operational-space control at 20 Hz, stiffness 150). The
reward is 1 on every step on which the task is solved; nothing but the limit ends an episode.

The observation is robomimic's: hand position, hand quaternion and finger positions of each arm, then the
`object` vector. Since robosuite 1.5 that vector has another order (and, in lift, another sign):
`object_layout` must name the kind of file a policy was cloned from.

Differences from robomimic's rollouts on robosuite 1.4.1, which DPPO (arXiv 2409.00588) used:

- Deltas are in the world frame and `lite_physics` is off, both as in robosuite 1.4.1; the defaults of
  1.5.1 turn the commands of transport's arms by 90 degrees.
- Observations describe the state after the step. robosuite reports them from before the last physics
  step, and can's and square's relative poses from older positions still (zeros after a reset).
- Models are compiled once (`hard_reset=False`), so what robosuite draws at compilation, the sizes of
  lift's cube and of the head of transport's hammer, is the same in all environments and episodes.
- A reset depends on its seed alone and leaves numpy's global generator as it was.

Legend: N environments, M of them addressed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from envs.spec import EnvSpec
from envs.vector import ChunkVector, StepResult
from policies.errors import CapabilityError, ConfigError
from policies.registry import register

Array = np.ndarray

LAYOUTS = ("v15", "v141")
_MODEL_SEED = 0  # of what robosuite draws while it compiles a model
_ARM = ("eef_pos", "eef_quat", "gripper_qpos")
_TURN = tuple(f"rotation about {axis} [0.5 rad]" for axis in "xyz")
_COMMAND = (*(f"hand {axis} change [5 cm]" for axis in "xyz"), *_TURN, "gripper closing [1]")


class RobosuiteStepper:
    """Steps N environments of robosuite, each with its own compiled model.

    Args:
        task: Name of robosuite's environment.
        num_arms: 1 or 2.
        keys: Names of robosuite's observations in the order wanted; a minus sign in front negates one.
        num_envs: N.

    Raises:
        MissingExtraError: If robosuite is not installed.
    """

    can_save = False  # controllers and grippers keep a state of their own

    def __init__(self, task: str, num_arms: int, keys: Sequence[str], num_envs: int) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        self.num_envs = num_envs
        self._keys = [(key.removeprefix("-"), -1.0 if key.startswith("-") else 1.0) for key in keys]
        self.envs = [make_robosuite(task, num_arms) for _ in range(num_envs)]

    @property
    def model(self) -> Any:
        """The first environment's compiled model."""
        return self.envs[0].sim.model._model

    @property
    def datas(self) -> list[Any]:
        """The simulators' states, one `MjData` each."""
        return [env.sim.data._data for env in self.envs]

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode in one row; returns the observation (Do,)."""
        env = self.envs[row]
        env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        with _global_seed(seed), _quiet():
            env.reset()
        return self._observe(env)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step (25 physics steps)."""
        obs, reward = [], np.empty(len(rows))
        for i, row in enumerate(rows.tolist()):
            env = self.envs[row]
            _, reward[i], _, _ = env.step(np.asarray(actions[i], np.float64))
            obs.append(self._observe(env))
        no = np.zeros(len(rows), bool)
        return StepResult(np.stack(obs), reward, no, no, reward > 0)

    def metrics(self) -> dict[str, Array]:
        """Return nothing: success says it all."""
        return {}

    def get_state(self) -> Any:
        """Refuse; see `can_save`."""
        raise CapabilityError("robosuite cannot save its state; begin new episodes instead.")

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Refuse; see `can_save`."""
        raise CapabilityError("robosuite cannot restore a state; begin new episodes instead.")

    def close(self) -> None:
        """Release the simulators."""
        for env in self.envs:
            env.close()
        self.envs = []

    def _observe(self, env: Any) -> Array:
        """Return the observation (Do,) of the present state, as robomimic reads it out of recorded states."""
        import mujoco

        # Poses only: cheaper than a full forward pass, and nothing that the next step starts from changes.
        mujoco.mj_kinematics(env.sim.model._model, env.sim.data._data)
        for _ in range(2):  # relative poses are computed from the object poses of the previous pass
            now = env._get_observations(force_update=True)
        return np.concatenate([sign * np.atleast_1d(now[key]) for key, sign in self._keys]).astype(np.float64)


def make_robosuite(task: str, num_arms: int) -> Any:
    """Build one environment as robomimic does, without cameras.

    Raises:
        MissingExtraError: If robosuite is not installed.
    """
    from envs.make import require

    with _quiet(), _global_seed(_MODEL_SEED):
        robosuite = require("robosuite", extra="robosuite")
        from robosuite.controllers import load_composite_controller_config

        controller = load_composite_controller_config(robot="Panda")
        controller["body_parts"]["right"]["input_ref_frame"] = "world"
        return robosuite.make(
            task,
            robots=["Panda"] * num_arms,
            controller_configs=[deepcopy(controller) for _ in range(num_arms)],
            **({"env_configuration": "opposed"} if num_arms == 2 else {}),
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            use_object_obs=True,
            reward_shaping=False,
            control_freq=20,
            ignore_done=True,
            hard_reset=False,
            lite_physics=False,
        )


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the global numpy generator, from which robosuite draws, and put it back afterwards."""
    before = np.random.get_state()
    bits = np.random.MT19937(np.random.SeedSequence(seed))
    np.random.set_state(np.random.RandomState(bits).get_state())
    try:
        yield
    finally:
        np.random.set_state(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence robosuite's log, which reports optional packages and every file it reads."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def entry_names(key: str) -> tuple[str, ...]:
    """Name the entries of one of robosuite's observations, with units.

    Example:
        >>> entry_names("cube_pos")
        ('cube x [m]', 'cube y [m]', 'cube z [m]')
    """
    label = key.removesuffix("_pos").removesuffix("_quat").removesuffix("_qpos").replace("_", " ")
    label = label.replace("SquareNut", "nut").replace("Can", "can")
    if key.endswith("_quat"):
        return tuple(f"{label} quaternion {part} [1]" for part in "xyzw")
    if key.endswith("_qpos"):
        return tuple(f"{label} finger {side} [m]" for side in ("right", "left"))
    if "_in_" in key:
        return (f"{label} [0 or 1]",)
    return tuple(f"{label} {axis} [m]" for axis in "xyz")


@dataclass(frozen=True)
class _Robosuite:
    """What the four configurations share."""

    max_episode_steps: int = 300  # control steps, then truncated
    object_layout: str = "v15"  # order of `object`: "v15" or "v141", as in robomimic's low_dim_v15.hdf5

    name = ""
    task = ""
    num_arms = 1
    success_rule = ""
    object_v15: ClassVar[tuple[str, ...]] = ()
    object_v141: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if self.max_episode_steps < 1:
            raise ConfigError(f"env.max_episode_steps must be at least 1; got {self.max_episode_steps}.")
        if self.object_layout not in LAYOUTS:
            choices = ", ".join(LAYOUTS)
            raise ConfigError(f"env.object_layout must be one of {choices}; got '{self.object_layout}'.")

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of robosuite's observations that make up ours, in order."""
        arms = (f"robot{arm}_{key}" for arm in range(self.num_arms) for key in _ARM)
        return (*arms, *(self.object_v15 if self.object_layout == "v15" else self.object_v141))

    @property
    def spec(self) -> EnvSpec:
        """Describe the task."""
        obs_names = tuple(name for key in self.keys for name in entry_names(key))
        action_names = _COMMAND
        if self.num_arms == 2:
            action_names = tuple(f"robot{arm} {name}" for arm in range(2) for name in _COMMAND)
        return EnvSpec(
            name=self.name,
            family="robosuite",
            obs_dim=len(obs_names),
            action_dim=len(action_names),
            action_low=(-1.0,) * len(action_names),
            action_high=(1.0,) * len(action_names),
            max_episode_steps=self.max_episode_steps,
            control_hz=20.0,
            obs_names=obs_names,
            action_names=action_names,
            success_rule=self.success_rule,
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build N environments; about a second each.

        Raises:
            MissingExtraError: If robosuite is not installed.
        """
        stepper = RobosuiteStepper(self.task, self.num_arms, self.keys, num_envs)
        return ChunkVector(self.spec, stepper, obs_steps=obs_steps)

    def render_frames(self, seed: int, actions: Array, **options: Any) -> Array:
        """Photograph an episode (F, height, width, 3); options as in `envs.rendering.replay_frames`."""
        from envs.rendering import replay_frames

        vector = self.make_vector(1)
        model = vector.stepper.model  # type: ignore[attr-defined]
        model.geom_rgba[model.geom_group == 0, 3] = 0.0  # shapes for collisions, drawn over the visible ones
        return replay_frames(vector, seed, actions, camera="frontview", **options)


@register("env", "lift")
@dataclass(frozen=True)
class Lift(_Robosuite):
    """Lift a cube (robosuite `Lift`)."""

    name = "lift"
    task = "Lift"
    success_rule = "the centre of the cube is more than 4 cm above the table"
    object_v15 = ("cube_pos", "cube_quat", "gripper_to_cube_pos")
    object_v141 = ("cube_pos", "cube_quat", "-gripper_to_cube_pos")


@register("env", "can")
@dataclass(frozen=True)
class Can(_Robosuite):
    """Put a can into its bin (robosuite `PickPlaceCan`)."""

    name = "can"
    task = "PickPlaceCan"
    success_rule = "the can lies in its bin and the gripper has left it"
    object_v15 = ("Can_to_robot0_eef_pos", "Can_to_robot0_eef_quat", "Can_pos", "Can_quat")
    object_v141 = ("Can_pos", "Can_quat", "Can_to_robot0_eef_pos", "Can_to_robot0_eef_quat")


@register("env", "square")
@dataclass(frozen=True)
class Square(_Robosuite):
    """Put a square nut on its peg (robosuite `NutAssemblySquare`)."""

    max_episode_steps: int = 400  # control steps, then truncated

    name = "square"
    task = "NutAssemblySquare"
    success_rule = "the nut is around the square peg and the gripper has left it"
    object_v15 = (
        "SquareNut_to_robot0_eef_pos",
        "SquareNut_to_robot0_eef_quat",
        "SquareNut_pos",
        "SquareNut_quat",
    )
    object_v141 = (
        "SquareNut_pos",
        "SquareNut_quat",
        "SquareNut_to_robot0_eef_pos",
        "SquareNut_to_robot0_eef_quat",
    )


_TRANSPORT_BODIES = (
    *("payload_pos", "payload_quat", "trash_pos", "trash_quat", "lid_handle_pos", "lid_handle_quat"),
    *("target_bin_pos", "trash_bin_pos"),
)
_TRANSPORT_FLAGS = ("payload_in_target_bin", "trash_in_trash_bin")
_TRANSPORT_OFFSETS = (
    *("gripper0_to_payload", "gripper0_to_lid_handle"),
    *("gripper1_to_payload", "gripper1_to_trash"),
)


@register("env", "transport")
@dataclass(frozen=True)
class Transport(_Robosuite):
    """Two arms hand a payload from bin to bin and remove trash (robosuite `TwoArmTransport`)."""

    max_episode_steps: int = 800  # control steps, then truncated

    name = "transport"
    task = "TwoArmTransport"
    num_arms = 2
    success_rule = "the payload is in the target bin and the trash in the trash bin"
    object_v15 = (*_TRANSPORT_BODIES, *_TRANSPORT_FLAGS, *_TRANSPORT_OFFSETS)
    object_v141 = (*_TRANSPORT_BODIES, *_TRANSPORT_OFFSETS, *_TRANSPORT_FLAGS)
