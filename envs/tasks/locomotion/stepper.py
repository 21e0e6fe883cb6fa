"""The engine of gymnasium's robots: many in one process, bit for bit what gymnasium computes.

`mj_step` advances one `MjData` per environment; observations, rewards and terminations are computed for all
of them at once in gymnasium's own arithmetic. Actions are clipped to the box first, as in D4RL's wrapped
environments.

Legend: N environments, M of them addressed, Ta executed steps, nq and nv widths of positions and velocities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.spec import Array, StepResult

if TYPE_CHECKING:
    import mujoco


@dataclass(frozen=True)
class States:
    """Simulator state of M robots.

    Shapes:
        qpos: (M, nq). qvel: (M, nv). more: other fields of `MjData` by name, (M, ...).
    """

    qpos: Array
    qvel: Array
    more: Mapping[str, Array]


class Robot(Protocol):
    """Interface of a robot; the configurations in `envs.tasks.locomotion.planar` implement it.

    `fields` are those of `MjData` used besides positions and velocities, and the difference of `x` [m] is the
    speed. `noise` draws the reset noise of qpos (nq,) and qvel (nv,).

    Shapes:
        actions: (M, Da). x, x_velocity, has_fallen, reward: (M,). observe: (M, Do).
    """

    @property
    def xml_file(self) -> str: ...

    @property
    def frame_skip(self) -> int: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    def noise(self, rng: np.random.Generator, nq: int, nv: int) -> tuple[Array, Array]: ...

    def observe(self, states: States) -> Array: ...

    def x(self, states: States, model: mujoco.MjModel) -> Array: ...

    def has_fallen(self, states: States) -> Array: ...

    def reward(self, states: States, x_velocity: Array, actions: Array, has_fallen: Array) -> Array: ...


class Judge:
    """What a robot's rules make of states, whichever engine computed them; keeps `x` (N,) of each."""

    def __init__(self, robot: Robot, model: mujoco.MjModel, num_envs: int) -> None:
        self.robot, self.model, self.x = robot, model, np.zeros(num_envs)
        self.names = ("qpos", "qvel", *robot.fields)
        self._dt = model.opt.timestep * robot.frame_skip

    def begin(self, row: int, parts: list[Array]) -> Array:
        """Return the observation (Do,) of a first state, whose parts are (1, ...)."""
        states = self._states(parts)
        self.x[row] = self.robot.x(states, self.model)[0]
        observation: Array = self.robot.observe(states)[0]
        return observation

    def results(self, rows: Array, seen: list[Array], actions: Array) -> StepResult:
        """Return the results of chunks (M, Ta, Da) with the states after each step, (M, Ta, ...) by part."""
        shape = actions.shape[:2]
        states = self._states([part.reshape(-1, *part.shape[2:]) for part in seen])
        x = np.concatenate([self.x[rows, None], self.robot.x(states, self.model).reshape(shape)], axis=1)
        self.x[rows] = x[:, -1]
        x_velocity = ((x[:, 1:] - x[:, :-1]) / self._dt).reshape(-1)
        has_fallen, flat = self.robot.has_fallen(states), actions.reshape(-1, actions.shape[-1])
        reward = self.robot.reward(states, x_velocity, flat, has_fallen)
        obs = self.robot.observe(states)
        obs, no = obs.reshape(*shape, obs.shape[1]), np.zeros(shape, bool)
        return StepResult(obs, reward.reshape(shape), has_fallen.reshape(shape), no, no)

    def _states(self, parts: list[Array]) -> States:
        return States(parts[0], parts[1], dict(zip(self.names[2:], parts[2:], strict=True)))


class RobotStepper(MujocoStepper):
    """Steps N copies of one robot; exact, and as fast as `mj_step` allows."""

    def __init__(self, robot: Robot, num_envs: int) -> None:
        import mujoco

        super().__init__(load_model(robot.xml_file), num_envs)
        self.robot, self._judge = robot, Judge(robot, self.model, num_envs)
        self._mj_step: Callable[..., None] = mujoco.mj_step
        # Contact forces are computed only on request of a sensor.
        self._forces = mujoco.mj_rnePostConstraint if "cfrc_ext" in robot.fields else None
        # Cached views into the simulators' memory; each attribute access would create a new one.
        self._views = [[getattr(data, name) for name in self._judge.names] for data in self.datas]
        self._ctrl = [data.ctrl for data in self.datas]

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode as gymnasium does for this seed; returns (Do,)."""
        import mujoco

        data = self.datas[row]
        mujoco.mj_resetData(self.model, data)
        data.qpos[:], data.qvel[:] = draw_start(self.robot, self.model, seed)
        mujoco.mj_forward(self.model, data)
        return self._judge.begin(row, [view[None] for view in self._views[row]])

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step (`frame_skip` physics steps)."""
        return self.step_through(rows, actions[:, None]).at(0)

    def step_through(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by whole chunks (M, Ta, Da), one robot after the other, past falls.

        This keeps a robot's memory in the cache; all but the physics is computed once per chunk.
        """
        m, steps = actions.shape[:2]
        seen = [np.empty((m, steps, *view.shape)) for view in self._views[0]]
        mj_step, forces, model, skip = self._mj_step, self._forces, self.model, self.robot.frame_skip
        for i, (row, chunk) in enumerate(zip(rows.tolist(), actions, strict=True)):
            data, ctrl, views = self.datas[row], self._ctrl[row], self._views[row]
            pairs = [(out[i], view) for out, view in zip(seen, views, strict=True)]
            for j in range(steps):
                ctrl[:] = chunk[j]
                mj_step(model, data, nstep=skip)
                if forces is not None:
                    forces(model, data)
                for out, view in pairs:
                    out[j] = view
        return self._judge.results(rows, seen, actions)

    def get_state(self) -> dict[str, Array]:
        return {**super().get_state(), "x": self._judge.x.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._judge.x = np.array(state["x"], np.float64)

    def close(self) -> None:
        self.datas, self._views, self._ctrl = [], [], []


def draw_start(robot: Robot, model: mujoco.MjModel, seed: int) -> tuple[Array, Array]:
    """Return the first qpos (nq,) and qvel (nv,) of an episode, those of gymnasium for this seed."""
    from gymnasium.utils import seeding

    rng, _ = seeding.np_random(seed)
    qpos_noise, qvel_noise = robot.noise(rng, model.nq, model.nv)
    return model.qpos0 + qpos_noise, np.zeros(model.nv) + qvel_noise


def load_model(xml_file: str) -> mujoco.MjModel:
    """Compile a robot model shipped with gymnasium."""
    from importlib.resources import as_file, files

    import mujoco

    with as_file(files("gymnasium") / "envs" / "mujoco" / "assets" / xml_file) as path:
        return mujoco.MjModel.from_xml_path(str(path))
