"""Mazes: a point or an ant moves to a goal drawn per episode (gymnasium-robotics).

Physics, starts, goals and rewards are those of `PointMaze_*-v3` and `AntMaze_*-v4`, bit for bit. The
observation is flat: positions, velocities, and the goal (x, y) at its end; with `goal=separate` the goal is
provided beside the observation. A point is driven by forces at 100 Hz; with `control=waypoint` an action is a
target position for a PD controller, with `hold` it is kept for several simulator steps.
"""

from __future__ import annotations

import contextlib
import io
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.evaluation.scores import reference
from envs.spec import Array, EnvSpec, StepResult
from envs.tasks.mazes.expert import FORCE_CONTROL, MazeExpert, demonstrate_maze, pd_force, position_control
from envs.tasks.mazes.layouts import Cell, Layout, layout, load_model
from envs.tasks.mazes.stepper import ANT_NAMES, MazeRows, MazeTask, ant_torques
from envs.tasks.plane import Plane
from policies.bounds import bounded
from policies.extras import require
from policies.registry import variant

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

RADIUS_M = 0.45  # success radius of the goal
SPEED_LIMIT = 5.0  # of a point, per axis [m/s]
REWARDS = ("sparse", "dense")
CONTROLS = ("force", "waypoint")
GOALS = ("appended", "separate")
_POINT_NAMES = ("x [m]", "y [m]", "x speed [m/s]", "y speed [m/s]")


class MazeStepper(MazeRows):
    """Steps N agents, each in its own simulator state of one shared model; exact."""

    def __init__(self, task: _Maze, num_envs: int) -> None:
        super().__init__(load_model(task.agent_file(), task.layout), task.layout, num_envs)
        self.task = task

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode as gymnasium-robotics does for this seed; returns (Do,)."""
        import mujoco
        from gymnasium.utils import seeding

        rng, _ = seeding.np_random(seed)
        self._start[row], self._goal[row] = self.maze.draw(rng, *self.task.ends)
        data = self.datas[row]
        mujoco.mj_resetData(self.model, data)
        data.qpos[:2] = self._start[row]
        mujoco.mj_forward(self.model, data)
        return self._observe(row)

    def step(self, rows: Array, actions: Array) -> StepResult:
        for row, action in zip(rows.tolist(), actions, strict=True):
            self.task.drive(self.model, self.datas[row], action)
        obs = np.stack([self._observe(row) for row in rows.tolist()])
        reward, ended = self.task.outcome(obs, self._goal[rows])
        success = self.task.is_at(obs, self._goal[rows])
        return StepResult(obs, reward, ended, np.zeros_like(ended), success)

    def _observe(self, row: int) -> Array:
        data = self.datas[row]
        goal = () if self.task.goal == "separate" else self._goal[row]
        return np.concatenate([data.qpos, data.qvel, goal])


class WaypointStepper(MazeStepper):
    """Points that are sent to places, which can be drawn and moved by hand."""

    task: _PointMaze

    def plane(self, row: int) -> Plane:
        """Return the maze from above; the pace is that of the expert."""
        maze, half = self.maze, self.maze.cell_m / 2
        x, y = maze.half_size.tolist()
        return Plane(
            low=(-x, -y),
            high=(x, y),
            pillars=(),
            walls=tuple((*maze.center(cell).tolist(), half, half) for cell in maze.walls),
            finish=None,
            goal=(*self._goal[row].tolist(), RADIUS_M),
            radius=float(self.model.geom("particle_geom").size[0]),
            pace=0.01 * self.task.hold * self.task.expert.pace,
            reach=None,
        )

    def place(self, row: int, position: Array) -> Array:
        """Put a point at the free place (2,) [m] nearest to a position, at rest; returns (Do,)."""
        import mujoco

        room = self.maze.cell_m / 2 - float(self.model.geom("particle_geom").size[0])
        center, data = self.maze.center(self.maze.cell(position)), self.datas[row]
        inside = self.maze.is_free(position[None])[0]
        data.qpos[:2] = position if inside else np.clip(position, center - room, center + room)
        data.qvel[:] = 0.0
        mujoco.mj_forward(self.model, data)
        return self._observe(row)


def _distance(states: Array, goals: Array) -> Array:
    # Norm over an axis, as in gymnasium-robotics: a dot product may round differently on some processors.
    return np.linalg.norm(states[..., :2] - goals, axis=-1)


@dataclass(frozen=True)
class _Maze(MazeTask):
    """Common options; subclasses define agent and maze."""

    max_episode_steps: int = bounded(300, ge=1)  # time limit in control steps
    continuing: bool = False  # whether episodes continue after reaching the goal, as in D4RL's maze2d
    reward: str = bounded("sparse", choices=REWARDS)  # sparse: 1 within 0.45 m | dense: exp(-distance)
    goal: str = bounded("appended", choices=GOALS)  # appended: in the state | separate: beside it
    start_cell: tuple[int, ...] = ()  # row and column of the start, from the upper left; (): drawn
    goal_cell: tuple[int, ...] = ()  # row and column of the goal; (): drawn

    maze = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        grid = " ".join(self.layout.rows)
        for key in ("start_cell", "goal_cell"):
            cell = getattr(self, key)
            is_free = not cell or cell in self.layout.cells
            self.require(key, is_free, f"row and column of a free cell of '{self.maze}' ({grid}), or ()")

    @property
    def ends(self) -> tuple[Cell | None, Cell | None]:
        return self.start_cell or None, self.goal_cell or None  # type: ignore[return-value]

    def achieved_goal(self, states: Array) -> Array:
        return states[..., :2]

    def is_at(self, states: Array, goals: Array) -> Array:
        """Return whether states (..., Do) are within the success radius of goals (..., 2)."""
        return _distance(states, goals) <= RADIUS_M

    def outcome(self, states: Array, goals: Array) -> tuple[Array, Array]:
        """Return reward and termination (...) of states (..., Do) under goals (..., 2)."""
        success = self.is_at(states, goals)
        dense = self.reward == "dense"
        reward = np.exp(-_distance(states, goals)) if dense else success.astype(np.float64)
        return reward, success & (not self.continuing)

    @abstractmethod
    def agent_file(self) -> str:
        """Return the path of the agent's MJCF file."""

    @abstractmethod
    def drive(self, model: Any, data: Any, action: Array) -> None:
        """Advance one simulator by a control step."""

    def stepper(self, num_envs: int) -> MazeStepper:
        return MazeStepper(self, num_envs)


@dataclass(frozen=True)
class _PointMaze(_Maze):
    """A ball on two slide joints, driven by forces."""

    control: str = bounded("force", choices=CONTROLS)  # waypoint: target position [m] of a PD controller
    hold: int = bounded(1, ge=1)  # simulator steps (10 ms) per action
    expert: MazeExpert = bounded(MazeExpert(), was="demonstrator")  # options of the expert

    packages = ("gymnasium-robotics",)
    extra = "mazes"

    @property
    def layout(self) -> Layout:
        return layout(self.maze)

    def agent_file(self) -> str:
        from importlib.resources import files

        with contextlib.redirect_stderr(io.StringIO()):  # the import prints notices about other tasks
            require("gymnasium_robotics", extra="mazes")
        return str(files("gymnasium_robotics") / "envs" / "assets" / "point" / "point.xml")

    def drive(self, model: Any, data: Any, action: Array) -> None:
        """Advance one simulator by `hold` steps, each after limiting the speed, as gymnasium-robotics."""
        import mujoco

        qpos, qvel, ctrl = data.qpos, data.qvel, data.ctrl  # views, made once
        is_place = self.control == "waypoint"
        for _ in range(self.hold):
            if max(map(abs, qvel.tolist())) > SPEED_LIMIT:
                qvel[:] = np.clip(qvel, -SPEED_LIMIT, SPEED_LIMIT)
            mujoco.mj_forward(model, data)
            ctrl[:] = pd_force(qpos, qvel, action) if is_place else action
            mujoco.mj_step(model, data)

    @property
    def spec(self) -> EnvSpec:
        if self.control == "waypoint":
            limit, names = self.layout.half_size, ("wanted x [m]", "wanted y [m]")
        else:
            limit, names = np.ones(2), ("x force [100 N]", "y force [100 N]")
        return self.describe(_POINT_NAMES, names, limit, hz=100.0 / self.hold, radius_m=RADIUS_M)

    def stepper(self, num_envs: int) -> MazeStepper:
        kind = WaypointStepper if self.control == "waypoint" else MazeStepper
        return kind(self, num_envs)

    def demonstrate(self, seed: int) -> Episode:
        """Record one demonstration; with a separate goal every step stores it as extra key `goal`."""
        control = FORCE_CONTROL if self.control == "force" else position_control(self.layout)
        return demonstrate_maze(self, self.expert, control, seed, step_s=0.01 * self.hold)


# fmt: off
PointmazeUmaze = variant("env", "pointmaze-umaze", _PointMaze, "Point, one corridor (`PointMaze_UMaze-v3`).",
    maze="umaze")
PointmazeMedium = variant("env", "pointmaze-medium", _PointMaze, "Point, one loop (`PointMaze_Medium-v3`).",
    maze="medium", max_episode_steps=600)
PointmazeLarge = variant("env", "pointmaze-large", _PointMaze, "Point, several loops (`PointMaze_Large-v3`).",
    maze="large", max_episode_steps=800)
# fmt: on


@dataclass(frozen=True)
class _AntMaze(_Maze):
    """Gymnasium's ant, driven by eight joint torques; its D4RL score is the success rate in percent."""

    @property
    def layout(self) -> Layout:
        return layout(self.maze, cell_m=4.0, height_m=0.5)

    def agent_file(self) -> str:
        from importlib.resources import files

        return str(files("gymnasium") / "envs" / "mujoco" / "assets" / "ant.xml")

    def drive(self, model: Any, data: Any, action: Array) -> None:
        import mujoco

        data.ctrl[:] = action
        mujoco.mj_step(model, data, nstep=5)

    @property
    def spec(self) -> EnvSpec:
        is_success = self.reward == "sparse" and not self.continuing
        return self.describe(
            ANT_NAMES,
            ant_torques(150),
            np.ones(8),
            hz=20.0,
            radius_m=RADIUS_M,
            scores=reference(self.name).returns if is_success else None,
        )


# fmt: off
AntmazeUmaze = variant("env", "antmaze-umaze", _AntMaze, "Ant, one corridor (`AntMaze_UMaze-v4`).",
    maze="umaze", max_episode_steps=700)
AntmazeMedium = variant("env", "antmaze-medium", _AntMaze, "Ant, one loop (`AntMaze_Medium-v4`).",
    maze="medium", max_episode_steps=1000)
AntmazeLarge = variant("env", "antmaze-large", _AntMaze, "Ant, several loops (`AntMaze_Large-v4`).",
    maze="large", max_episode_steps=1000)
# fmt: on
