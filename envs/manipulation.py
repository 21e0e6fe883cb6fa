"""OGBench manipulation: a UR5e arm with a gripper moves one cube to a target (`cube-single`, single task).

The simulator, controller, observation and reward are OGBench's own; this module steps them without what
nobody looks at between steps (colours, repeated bookkeeping) and shares one compiled model and one
controller among all environments of a process. Every number equals OGBench stepped one by one.

Rewards and the end of an episode are judged on the state *before* an action, as in OGBench: -1 per step
until the cube lies at the target, and the step after that has reward 0, is a success and terminates.

A reset depends on its seed alone. OGBench lets the goal scene settle under two actions drawn from fresh
entropy; here they are drawn from the seed.

Legend: N environments, M of them addressed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.experts.ogbench import CubeDemonstrator, demonstrate_cube
from envs.spec import EnvSpec
from envs.vector import ChunkVector, StepResult
from policies.errors import ConfigError
from policies.registry import register

if TYPE_CHECKING:
    from envs.datasets.episodes import Episode

Array = np.ndarray

NUM_TASKS = 5
_JOINTS = ("shoulder pan", "shoulder lift", "elbow", "wrist 1", "wrist 2", "wrist 3")
_OBS_NAMES = (
    *(f"{joint} angle [rad]" for joint in _JOINTS),
    *(f"{joint} rate [rad/s]" for joint in _JOINTS),
    "gripper x - 0.425 m [dm]",
    "gripper y [dm]",
    "gripper z [dm]",
    "gripper yaw cosine [1]",
    "gripper yaw sine [1]",
    "gripper closing [1/3 of full]",
    "gripper contact force [50 N]",
    "cube x - 0.425 m [dm]",
    "cube y [dm]",
    "cube z [dm]",
    *(f"cube quaternion {part} [1]" for part in "wxyz"),
    "cube yaw cosine [1]",
    "cube yaw sine [1]",
)
_ACTION_NAMES = (
    "gripper x change [5 cm]",
    "gripper y change [5 cm]",
    "gripper z change [5 cm]",
    "gripper yaw change [0.3 rad]",
    "gripper closing change [of full]",
)


class CubeStepper:
    """Steps N copies of OGBench's single-cube task.

    Args:
        task: 1 to 5, start and target of the cube.
        num_envs: N.

    Raises:
        MissingExtraError: If OGBench is not installed.
    """

    can_save = True

    def __init__(self, task: int, num_envs: int) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        self._env = load_cube()
        self._task = task
        import mujoco

        self.num_envs = num_envs
        self.model = self._env.model
        self.datas = [mujoco.MjData(self.model) for _ in range(num_envs)]
        self._solved = np.zeros(num_envs, bool)  # the cube lies at the target now
        self._signature = mujoco.mjtState.mjSTATE_INTEGRATION
        self._pinch = self._env._pinch_site_id

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode in one row; returns the observation (28,)."""
        obs: Array = self._bind(row).reset(seed=seed)[0]
        self._solved[row] = False
        return obs

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, 5) for one control step (25 physics steps)."""
        obs = np.empty((len(rows), len(_OBS_NAMES)))
        ended = self._solved[rows]
        for i, row in enumerate(rows.tolist()):
            env = self._bind(row)
            env.advance(actions[i])
            obs[i] = env.compute_observation()
            self._solved[row] = env.is_solved()
        return StepResult(obs, ended - 1.0, ended, np.zeros(len(rows), bool), ended)

    def oracle_info(self, row: int) -> dict[str, Any]:
        """Return what OGBench's oracles look at: the state in named parts, and the target."""
        info: dict[str, Any] = self._bind(row).oracle_info()
        return info

    def physics_state(self, row: int) -> Array:
        """Return time, positions and velocities of one row, (1 + nq + nv,)."""
        data = self.datas[row]
        return np.concatenate([[data.time], data.qpos, data.qvel])

    def metrics(self) -> dict[str, Array]:
        """Return nothing: success says it all."""
        return {}

    def get_state(self) -> dict[str, Array]:
        """Return everything the next steps depend on.

        Besides the integration state that is the gripper pose, which the controller reads from the
        kinematics of the last physics step.
        """
        import mujoco

        states = np.empty((self.num_envs, mujoco.mj_stateSize(self.model, self._signature)))
        for row, data in enumerate(self.datas):
            mujoco.mj_getState(self.model, data, states[row], self._signature)
        return {
            "physics": states,
            "gripper_pos": np.stack([data.site_xpos[self._pinch] for data in self.datas]),
            "gripper_mat": np.stack([data.site_xmat[self._pinch] for data in self.datas]),
            "solved": self._solved.copy(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `get_state`."""
        import mujoco

        self._solved = np.array(state["solved"], bool)
        for row, data in enumerate(self.datas):
            physics = np.asarray(state["physics"][row], np.float64)
            mujoco.mj_setState(self.model, data, physics, self._signature)
            data.site_xpos[self._pinch] = state["gripper_pos"][row]
            data.site_xmat[self._pinch] = state["gripper_mat"][row]

    def close(self) -> None:
        """Drop the simulators."""
        self.datas = []

    def _bind(self, row: int) -> Any:
        """Let the shared environment work on the simulator of a row."""
        self._env._data, self._env._reward_task_id = self.datas[row], self._task
        return self._env


@lru_cache(maxsize=1)
def load_cube() -> Any:
    """Build OGBench's environment once per process; compiling its model takes over a second.

    The tasks differ in where a reset puts cube and target, nothing else.

    Raises:
        MissingExtraError: If OGBench is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the viewer complains about a missing display
        cube = _cube_class()
        import gymnasium

        env = cube(**gymnasium.spec("cube-single-singletask-task1-v0").kwargs)  # as OGBench registers it
    env.reset(seed=0)
    return env


@lru_cache(maxsize=1)
def _cube_class() -> Any:
    """Derive our environment from OGBench's, which is imported now and not before."""
    from envs.make import require

    require("ogbench", extra="ogbench")
    import mujoco
    from gymnasium.spaces import Box
    from ogbench.manipspace import lie
    from ogbench.manipspace.envs.cube_env import CubeEnv

    class Cube(CubeEnv):
        """OGBench's environment, seeded to the last draw and without work between steps that nobody sees."""

        def __init__(self, **options: Any) -> None:
            self._box = Box(np.float32(-1), np.float32(1), (5,), np.float32)
            super().__init__(**options)

        @property
        def action_space(self) -> Box:
            """Return one box instead of a fresh, unseeded one per call."""
            return self._box

        def reset(self, *, seed: int) -> tuple[Array, dict[str, Any]]:
            """Start an episode; everything in it follows from the seed."""
            self._box.seed(seed)
            result: tuple[Array, dict[str, Any]] = super().reset(seed=seed)
            return result

        def pre_step(self) -> None:
            """Keep no copy of the previous state: only the names must exist."""
            self._prev_qpos, self._prev_qvel = self._data.qpos, self._data.qvel

        def advance(self, action: Array) -> None:
            """Advance the physics by one control step."""
            self.set_control(action)
            mujoco.mj_step(self._model, self._data, nstep=self._n_steps)
            mujoco.mj_rnePostConstraint(self._model, self._data)  # contact forces for the observation
            self.pre_step()

        def is_solved(self) -> bool:
            """Tell whether the cube lies at the target."""
            return all(self._compute_successes())

        def oracle_info(self) -> dict[str, Any]:
            """Return the named state with the target, which OGBench adds only while it collects data."""
            mocap = self._cube_target_mocap_ids[0]
            yaw = lie.SO3(wxyz=self._data.mocap_quat[mocap]).compute_yaw_radians()
            return {
                **self.compute_ob_info(),
                "privileged/target_task": "cube",
                "privileged/target_block": 0,
                "privileged/target_block_pos": self._data.mocap_pos[mocap].copy(),
                "privileged/target_block_yaw": np.array([yaw]),
            }

    return Cube


@register("env", "cube-single")
@dataclass(frozen=True)
class CubeSingle:
    """Move a cube to its target (OGBench `cube-single-play-singletask-task<k>-v0`); sparse reward."""

    task: int = 1  # 1 to 5: start and target of the cube, in OGBench's numbering
    max_episode_steps: int = 200  # control steps, then truncated
    demonstrator: CubeDemonstrator = field(default_factory=CubeDemonstrator)

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if not 1 <= self.task <= NUM_TASKS:
            raise ConfigError(f"env.task of cube-single must be 1 to {NUM_TASKS}; got {self.task}.")
        if self.max_episode_steps < 1:
            raise ConfigError(f"env.max_episode_steps must be at least 1; got {self.max_episode_steps}.")

    @property
    def spec(self) -> EnvSpec:
        """Describe the task."""
        return EnvSpec(
            name="cube-single",
            family="manipulation",
            obs_dim=len(_OBS_NAMES),
            action_dim=len(_ACTION_NAMES),
            action_low=(-1.0,) * len(_ACTION_NAMES),
            action_high=(1.0,) * len(_ACTION_NAMES),
            max_episode_steps=self.max_episode_steps,
            control_hz=20.0,
            obs_names=_OBS_NAMES,
            action_names=_ACTION_NAMES,
            success_rule="the centre of the cube is within 4 cm of its target",
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build the exact engine for N environments.

        Raises:
            MissingExtraError: If OGBench is not installed.
        """
        return ChunkVector(self.spec, CubeStepper(self.task, num_envs), obs_steps=obs_steps)

    def demonstrate(self, seed: int) -> Episode:
        """Let the oracle do the episode of this seed."""
        stepper = CubeStepper(self.task, 1)
        return demonstrate_cube(stepper, seed, self.demonstrator, max_steps=self.max_episode_steps)

    def render_frames(self, seed: int, actions: Array, **options: Any) -> Array:
        """Photograph an episode (F, height, width, 3); options as in `envs.rendering.replay_frames`."""
        from envs.rendering import replay_frames

        return replay_frames(self.make_vector(1), seed, actions, camera="front", **options)
