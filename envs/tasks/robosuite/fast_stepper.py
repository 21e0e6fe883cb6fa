"""robosuite's tasks with a fast control loop.

Model, reset and rules are robosuite's; the 25 physics steps per control step use MuJoCo and one compiled
function, `envs/tasks/robosuite/osc_controller.py:drive`. robosuite computes the state of every physics step
three times; here it is computed once, by splitting the step around the control law. The physics is equal up
to rounding of the torques. One scene per process is compiled and shared.

Legend: N environments, M of them addressed, A arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.spec import Array, StepResult
from envs.tasks.robosuite.observations import reader, success_rule
from envs.tasks.robosuite.osc_controller import FINGER_RATE, compiled
from envs.tasks.robosuite.reference_stepper import begin, hide_collisions, make_robosuite
from policies.errors import CheckpointError

COMMAND = 7  # entries of an arm's action: translation, rotation, gripper


@dataclass(frozen=True)
class Arm:
    """Indices of one arm in the model's arrays.

    Shapes:
        entries: (7, 7) indices of its inertia in `qM`.
        limits: (7, 2) torques.
        finger_range: (2, 2) positions that the finger motors accept.
    """

    qpos: slice
    dofs: slice
    motors: slice
    fingers: Array
    site: int
    root: int
    entries: Array
    limits: Array
    finger_range: Array


class ArmController:
    """One arm of one environment: its command, and views into the simulator's memory."""

    def __init__(self, arm: Arm, data: Any) -> None:
        self.rest = np.zeros(7)  # initial posture of the episode
        self.grip = np.zeros(2)  # target finger opening, -1 to 1 of the range
        self._fingers, self._ctrl = arm.fingers, data.ctrl
        self._middle, self._half = arm.finger_range.mean(axis=1), np.diff(arm.finger_range)[:, 0] / 2
        self._gripper = data.site_xpos[arm.site], data.site_xmat[arm.site].reshape(3, 3)
        self._goal = np.zeros(3), np.zeros((3, 3))
        self._set_goal, self._drive = compiled()
        self.joints = data.qpos[arm.qpos]
        self._motion = self.joints, data.qvel[arm.dofs], data.qfrc_bias[arm.dofs], data.cdof[arm.dofs]
        self._others = (
            *(data.subtree_com[arm.root], *self._gripper, arm.entries, arm.limits),
            *(self.rest, *self._goal, data.ctrl[arm.motors]),
        )

    def begin(self) -> None:
        self.rest[:], self.grip[:] = self.joints, 0.0

    def command(self, action: Array) -> None:
        """Accept a command (7,) for the state of MuJoCo's position stage."""
        self._set_goal(action[:6], *self._gripper, *self._goal)
        self.grip += np.array([-1.0, 1.0]) * FINGER_RATE * np.sign(action[6])
        np.clip(self.grip, -1.0, 1.0, out=self.grip)
        self._ctrl[self._fingers] = self._middle + self._half * self.grip

    def drive(self, inertia: Array) -> None:
        """Set the motors for the state of MuJoCo's velocity stage, with inertias like its `qM`."""
        self._drive(*self._motion, inertia, *self._others)


@dataclass(frozen=True)
class Scene:
    """A compiled robosuite task: its environment, for resets, and the indices of its arms."""

    env: Any
    model: Any
    arms: tuple[Arm, ...]
    num_substeps: int


@lru_cache(maxsize=8)
def load_scene(task: str, num_arms: int) -> Scene:
    """Compile a task once per process; takes about a second."""
    import mujoco

    env = make_robosuite(task, num_arms)
    begin(env, 0)
    model = env.sim.model._model
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR  # wrist forces, which are unused
    arms = tuple(_arm(env, model, robot) for robot in env.robots)
    return Scene(env, model, arms, int(env.control_timestep / env.model_timestep))


def _arm(env: Any, model: Any, robot: Any) -> Arm:
    qpos, dofs = list(robot._ref_arm_joint_pos_indexes), list(robot._ref_arm_joint_vel_indexes)
    motors = list(robot._ref_actuators_indexes_dict["right"])
    fingers = list(robot._ref_joint_gripper_actuator_indexes["right"])
    site = robot.eef_site_id["right"]
    return Arm(
        qpos=_as_slice(qpos),
        dofs=_as_slice(dofs),
        motors=_as_slice(motors),
        fingers=np.array(fingers),
        site=site,
        root=int(model.body_rootid[model.site_bodyid[site]]),
        entries=_inertia_entries(model, dofs),
        limits=model.actuator_ctrlrange[motors].copy(),
        finger_range=model.actuator_ctrlrange[fingers].copy(),
    )


def _as_slice(indices: Sequence[int]) -> slice:
    """Return consecutive indices as a slice, so that an array's part is a view."""
    return slice(indices[0], indices[0] + len(indices))


def _inertia_entries(model: Any, dofs: Sequence[int]) -> Array:
    """Return where `qM` holds M[i, j] of a chain of joints: a row lists a joint's ancestors, itself first."""
    entries = np.empty((len(dofs), len(dofs)), np.int64)
    for i, dof in enumerate(dofs):
        index, ancestor = int(model.dof_Madr[dof]), dof
        for j in range(i, -1, -1):
            assert ancestor == dofs[j]  # the joints of an arm follow each other
            entries[i, j] = entries[j, i] = index
            index, ancestor = index + 1, int(model.dof_parentid[ancestor])
    return entries


class FastStepper(MujocoStepper):
    """Steps N copies of one of robosuite's tasks; all share one model.

    `keys` are names of robosuite's observations, in order; a leading minus sign negates one.
    """

    def __init__(self, task: str, num_arms: int, keys: Sequence[str], num_envs: int) -> None:
        self.scene = load_scene(task, num_arms)
        import mujoco

        super().__init__(self.scene.model, num_envs)
        self._spare = mujoco.MjData(self.model)
        self._controllers = [[ArmController(arm, data) for arm in self.scene.arms] for data in self.datas]
        self._read, self._is_solved = reader(self.scene.env, keys), success_rule(self.scene.env)
        self._halves: tuple[Callable[..., None], ...] = (mujoco.mj_step1, mujoco.mj_step2)
        self._kinematics: Callable[..., None] = mujoco.mj_kinematics

    def reset(self, row: int, seed: int) -> Array:
        import mujoco

        begin(self.scene.env, seed)
        data = self.datas[row]
        mujoco.mj_copyData(data, self.model, self.scene.env.sim.data._data)
        for controller in self._controllers[row]:
            controller.begin()
        return self._observe(data)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step (25 physics steps)."""
        obs, success = [], np.zeros(len(rows), bool)
        for i, row in enumerate(rows.tolist()):
            data = self.datas[row]
            self._advance(data, self._controllers[row], np.asarray(actions[i], np.float64))
            success[i] = self._is_solved(data)  # by the poses before the last physics step, as in robosuite
            obs.append(self._observe(data))
        no = np.zeros(len(rows), bool)
        return StepResult(np.stack(obs), success.astype(np.float64), no, no, success)

    def named_env(self, row: int) -> Any:
        """Return robosuite's environment, for names; its own state is meaningless."""
        return self.scene.env

    def get_appearance(self, row: int) -> dict[str, Array]:
        return {}

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        """Hide the collision geoms of a rendering model, as robosuite does."""
        hide_collisions(model)

    def get_state(self) -> dict[str, Array]:
        """Return physics, postures (N, A, 7) and grips (N, A, 2)."""
        controllers = self._controllers
        return {
            **super().get_state(),
            "rest": np.array([[controller.rest for controller in arms] for arms in controllers]),
            "grip": np.array([[controller.grip for controller in arms] for arms in controllers]),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        import mujoco

        if not isinstance(state, Mapping) or not {"physics", "rest", "grip"} <= state.keys():
            raise CheckpointError("the state is not one of env.engine=fast; use the engine that was saved.")
        super().set_state(state)
        for row, data in enumerate(self.datas):
            mujoco.mj_forward(self.model, data)
            for arm, controller in enumerate(self._controllers[row]):
                controller.rest[:], controller.grip[:] = state["rest"][row][arm], state["grip"][row][arm]

    def close(self) -> None:
        self.datas, self._controllers = [], []

    def _advance(self, data: Any, controllers: Sequence[ArmController], action: Array) -> None:
        """Execute one action (Da,): a new goal after the first position stage, then torques at every step."""
        model, (first_half, second_half), inertia = self.model, self._halves, data.qM
        first_half(model, data)
        first_inertia = self._first_inertia(controllers) if data.time == 0.0 else inertia
        for arm, controller in enumerate(controllers):
            controller.command(action[arm * COMMAND : (arm + 1) * COMMAND])
            controller.drive(first_inertia)
        second_half(model, data)
        for _ in range(self.scene.num_substeps - 1):
            first_half(model, data)
            for controller in controllers:
                controller.drive(inertia)
            second_half(model, data)

    def _first_inertia(self, controllers: Sequence[ArmController]) -> Array:
        """Return the `qM` (nM,) of an episode's first physics step: the arms before the fingers open."""
        import mujoco

        self._spare.qpos[:] = self.model.qpos0
        for arm, controller in zip(self.scene.arms, controllers, strict=True):
            self._spare.qpos[arm.qpos] = controller.rest
        mujoco.mj_fwdPosition(self.model, self._spare)
        inertia: Array = self._spare.qM
        return inertia

    def _observe(self, data: Any) -> Array:
        # Poses only: cheaper than a full forward pass, and nothing that the next step starts from changes.
        self._kinematics(self.model, data)
        return self._read(data)
