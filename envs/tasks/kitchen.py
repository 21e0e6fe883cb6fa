"""Franka kitchen: a nine-joint arm completes four of seven household tasks (gymnasium-robotics).

Physics, noise, control and goals are those of `FrankaKitchen-v1`, bit for bit. The observation has the layout
of D4RL's kitchen data: 9 robot positions, 21 object positions, and the 30 target positions (constant).

Differences from D4RL's `kitchen-*-v0`, all inherited from gymnasium-robotics: sensor noise is 1 % of the
robot's and 0.05 % of the objects' amplitudes (D4RL: 10 %), and a sub-task counts by the true, not by the
noisy position. As in D4RL the controller starts from the noisy position it observed last.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.engine.pixels import HasCameras
from envs.evaluation.scores import reference
from envs.spec import Array, EnvSpec, StepResult, symmetric_spec
from policies.bounds import bounded
from policies.extras import require
from policies.registry import variant

NUM_ROBOT = 9
NUM_POSITIONS = 30
_BURNERS = ("bottom right", "bottom left", "top right", "top left")
_POSITION_NAMES = (
    *(f"arm joint {i} angle [rad]" for i in range(1, 8)),
    "right finger position [m]",
    "left finger position [m]",
    *(f"{burner} {part}" for burner in _BURNERS for part in ("knob angle [rad]", "burner position [m]")),
    "light switch angle [rad]",
    "light joint position [m]",
    "slide cabinet position [m]",
    "left hinge cabinet angle [rad]",
    "right hinge cabinet angle [rad]",
    "microwave door angle [rad]",
    *(f"kettle {axis} [m]" for axis in "xyz"),
    *(f"kettle quaternion {part} [1]" for part in "wxyz"),
)
_ACTION_NAMES = (
    *(f"arm joint {i} speed [2 rad/s]" for i in range(1, 8)),
    "right finger speed [2 m/s]",
    "left finger speed [2 m/s]",
)


class KitchenStepper(MujocoStepper):
    """Step N kitchens with sub-tasks in gymnasium-robotics' spelling; noises scale its amplitudes."""

    def __init__(
        self, tasks: tuple[str, ...], num_envs: int, robot_noise: float, object_noise: float
    ) -> None:
        kitchen = load_kitchen()
        from gymnasium_robotics.envs.franka_kitchen import kitchen_env

        super().__init__(kitchen.model, num_envs)
        robot = kitchen.robot_env
        self._start = robot.init_qpos.copy()
        self._skip, self._dt = robot.frame_skip, robot.dt
        self._speed = robot.act_rng
        self._speed_limits = robot.robot_vel_bound[:NUM_ROBOT].T
        self._position_limits = robot.robot_pos_bound[:NUM_ROBOT].T
        # The objects' amplitudes begin one entry early, as in gymnasium-robotics.
        self._robot_noise = robot_noise * robot.robot_pos_noise_amp[:NUM_ROBOT]
        self._object_noise = object_noise * robot.robot_pos_noise_amp[NUM_ROBOT - 1 :]
        self._tolerance = kitchen_env.BONUS_THRESH
        self._goals = [
            (kitchen_env.OBS_ELEMENT_INDICES[task], kitchen_env.OBS_ELEMENT_GOALS[task]) for task in tasks
        ]
        self._target_positions = np.zeros(NUM_POSITIONS)
        for index, goal in self._goals:
            self._target_positions[index] = goal
        self._rngs = [np.random.default_rng(0) for _ in range(num_envs)]  # reseeded by each reset
        self._observed = np.zeros((num_envs, NUM_ROBOT))  # robot positions, with noise
        self._completed = np.zeros((num_envs, len(tasks)), bool)

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode as gymnasium-robotics does for this seed; returns (60,)."""
        import mujoco
        from gymnasium.utils import seeding

        self._rngs[row], _ = seeding.np_random(seed)
        data = self.datas[row]
        mujoco.mj_resetData(self.model, data)
        data.qpos[:] = self._start
        mujoco.mj_forward(self.model, data)
        self._completed[row] = False
        return self._observe(row)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, 9) for one control step (40 physics steps)."""
        import mujoco

        obs = np.empty((len(rows), 2 * NUM_POSITIONS))
        reward = np.empty(len(rows))
        for i, row in enumerate(rows.tolist()):
            data = self.datas[row]
            data.ctrl[:] = self._control(row, actions[i])
            mujoco.mj_step(self.model, data, nstep=self._skip)
            obs[i] = self._observe(row)
            reward[i] = self._count_completed(row)
        success = self._completed[rows].all(axis=1)
        return StepResult(obs, reward, success, np.zeros(len(rows), bool), success)

    def metrics(self) -> dict[str, Array]:
        return {"subtasks": self._completed.sum(axis=1).astype(np.float64)}

    def get_state(self) -> dict[str, Any]:
        return {
            **super().get_state(),
            "observed": self._observed.copy(),
            "completed": self._completed.copy(),
            "noise": [rng.bit_generator.state for rng in self._rngs],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._observed = np.array(state["observed"], np.float64)
        self._completed = np.array(state["completed"], bool)
        super().set_state(state)
        for row in range(self.num_envs):
            self._rngs[row].bit_generator.state = state["noise"][row]

    def _control(self, row: int, action: Array) -> Array:
        """Convert joint speeds (9,) to joint targets, relative to the observed positions."""
        speed = np.clip(action * self._speed, *self._speed_limits)
        target: Array = np.clip(self._observed[row] + speed * self._dt, *self._position_limits)
        return target

    def _observe(self, row: int) -> Array:
        qpos, rng = self.datas[row].qpos, self._rngs[row]
        robot = qpos[:NUM_ROBOT] + self._robot_noise * rng.uniform(-1.0, 1.0, NUM_ROBOT)
        rng.uniform(size=NUM_ROBOT)  # noise of the velocities, which this layout omits
        objects = qpos[NUM_ROBOT:] + self._object_noise * rng.uniform(-1.0, 1.0, NUM_POSITIONS - NUM_ROBOT)
        rng.uniform(size=self.model.nv - NUM_ROBOT)
        self._observed[row] = robot
        return np.concatenate([robot, objects, self._target_positions])

    def _count_completed(self, row: int) -> float:
        """Mark completed sub-tasks and return the number of new ones."""
        qpos = self.datas[row].qpos
        done = np.array([np.linalg.norm(qpos[index] - goal) < self._tolerance for index, goal in self._goals])
        new = done & ~self._completed[row]
        self._completed[row] |= done
        return float(new.sum())


@lru_cache(maxsize=1)
def load_kitchen() -> Any:
    """Build gymnasium-robotics' environment once per process, for its model and constants."""
    with contextlib.redirect_stderr(io.StringIO()):  # the import prints notices about other tasks
        module = require("gymnasium_robotics.envs.franka_kitchen", extra="kitchen")
    kitchen = module.KitchenEnv()
    view, model = kitchen.robot_env.mujoco_renderer.default_cam_config, kitchen.model
    model.stat.center, model.stat.extent = view["lookat"], view["distance"] / 1.5  # as MuJoCo's free camera
    model.vis.global_.azimuth, model.vis.global_.elevation = view["azimuth"], view["elevation"]
    return kitchen


@dataclass(frozen=True)
class _Kitchen(HasCameras):
    """Common options of the three tasks."""

    max_episode_steps: int = bounded(280, ge=1)  # time limit in control steps
    robot_noise_ratio: float = bounded(0.01, ge=0)  # fraction of the robot's noise amplitudes
    object_noise_ratio: float = bounded(0.0005, ge=0)  # fraction of the objects' noise amplitudes

    name = ""
    tasks = ("microwave", "kettle", "light switch", "slide cabinet")

    @property
    def spec(self) -> EnvSpec:
        return symmetric_spec(
            (*_POSITION_NAMES, *(f"wanted {name}" for name in _POSITION_NAMES)),
            _ACTION_NAMES,
            name=self.name,
            family="kitchen",
            max_episode_steps=self.max_episode_steps,
            control_hz=12.5,
            success_rule=f"all four sub-tasks were completed: {', '.join(self.tasks)}",
            reference_scores=reference(f"{self.name}-v0").returns,
            episode_metrics=("subtasks",),
            packages=("gymnasium-robotics",),
            extra="kitchen",
        )

    def stepper(self, num_envs: int) -> KitchenStepper:
        return KitchenStepper(self.tasks, num_envs, self.robot_noise_ratio, self.object_noise_ratio)


# fmt: off
KitchenComplete = variant("env", "kitchen-complete", _Kitchen,
    "Four sub-tasks, which its data do in order (D4RL `kitchen-complete-v0`).")
KitchenPartial = variant("env", "kitchen-partial", _Kitchen,
    "Four sub-tasks, which some of its data do (D4RL `kitchen-partial-v0`).")
KitchenMixed = variant("env", "kitchen-mixed", _Kitchen,
    "Four sub-tasks, which no demonstration does together (D4RL `kitchen-mixed-v0`).",
    tasks=("microwave", "kettle", "bottom burner", "light switch"))
# fmt: on
