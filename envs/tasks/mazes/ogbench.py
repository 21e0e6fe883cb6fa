"""OGBench's mazes: a point, an ant or a humanoid moves to a goal in mazes of four sizes.

Each is `<agent>maze-<maze>-v0` in OGBench's names, with its five pairs of start and goal. `goal=fixed` is
OGBench's `<agent>maze-<maze>-singletask-task<k>-v0`, whose goal is fixed and not observed; its datasets fit
it. With `appended` and `separate` the goal varies per episode and is observed, as a position (OGBench's
`use_oracle_rep`). Names without `og-` are gymnasium-robotics' mazes (`envs.tasks.mazes.d4rl`), whose agents
have other bodies, rates and starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from envs.spec import EnvSpec
from envs.tasks.mazes.expert import MazeExpert, demonstrate_maze, displacement_control
from envs.tasks.mazes.layouts import Layout
from envs.tasks.mazes.ogbench_layouts import ogbench_layout
from envs.tasks.mazes.ogbench_stepper import NUM_TASKS, OgbenchMazeStepper
from envs.tasks.mazes.stepper import ANT_NAMES, MazeTask, ant_torques
from policies.bounds import bounded
from policies.registry import variant

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

GOALS = ("fixed", "appended", "separate")
_MOVE_M = 0.2  # displacement of a point by an action of 1
_POINT_HZ = 10.0
_LAG_S = 0.3  # lag of a demonstrated point behind its target
_LEG = ("hip x", "hip z", "hip y", "knee", "ankle y", "ankle x")
_ARM = ("shoulder 1", "shoulder 2", "elbow")
_HUMANOID_JOINTS = (
    *(f"abdomen {axis}" for axis in "zyx"),
    *(f"{side} {joint}" for side in ("right", "left") for joint in _LEG),
    *(f"{side} {joint}" for side in ("right", "left") for joint in _ARM),
)
_HUMANOID_MOTORS = (
    *(f"abdomen {axis}" for axis in "yzx"),
    *(f"{side} {joint}" for side in ("right", "left") for joint in (*_LEG[:4], *_LEG[:3:-1])),
    *(f"{side} {joint}" for side in ("right", "left") for joint in _ARM),
)
_FULL_NM = {"abdomen": 40, "hip x": 40, "hip z": 40, "hip y": 120, "knee": 80, "ankle": 20}
_FULL_NM |= {"shoulder": 20, "elbow": 40}
_HUMANOID_NAMES = (
    *(f"torso {axis} [m]" for axis in "xy"),
    *(f"{joint} angle [rad]" for joint in _HUMANOID_JOINTS),
    "head height [m]",
    *(
        f"{limb} {axis} seen from the torso [m]"
        for limb in ("left hand", "left foot", "right hand", "right foot")
        for axis in "xyz"
    ),
    *(f"torso {axis} axis upwards [1]" for axis in "xyz"),
    *(f"centre of mass {axis} speed [m/s]" for axis in "xyz"),
    *(f"torso {axis} speed [m/s]" for axis in "xyz"),
    *(f"torso {axis} rate [rad/s]" for axis in "xyz"),
    *(f"{joint} rate [rad/s]" for joint in _HUMANOID_JOINTS),
)


def _torque_name(motor: str) -> str:
    full = next(torque for part, torque in _FULL_NM.items() if part in motor)
    return f"{motor} torque [{full} Nm]"


@dataclass(frozen=True)
class _OgbenchMaze(MazeTask):
    """Common options; subclasses define agent and maze."""

    task: int = bounded(1, ge=0, le=NUM_TASKS)  # start and goal, in OGBench's numbering; 0: drawn
    goal: str = bounded("fixed", choices=GOALS)  # fixed: by the task | appended, separate: observed
    max_episode_steps: int = bounded(1000, ge=1)  # time limit in control steps

    agent = ""
    maze = ""
    radius_m = 0.5  # success radius of the goal
    packages = ("ogbench",)
    extra = "ogbench"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = self.task > 0 or self.goal != "fixed"
        self.require("task", is_known, f"1 to {NUM_TASKS} with env.goal=fixed, which hides a drawn task")

    @property
    def conditions(self) -> tuple[str, ...]:
        """The task's number selects starts and goals; where the goal is observed it is a condition."""
        return () if self.goal == "fixed" else ("task",)

    @property
    def layout(self) -> Layout:
        return ogbench_layout(self.maze)

    def stepper(self, num_envs: int) -> OgbenchMazeStepper:
        return OgbenchMazeStepper(
            f"{self.agent}maze-{self.maze}",
            self.layout,
            num_envs,
            task=self.task,
            single=self.goal == "fixed",
            observe_goal=self.goal == "appended",
        )


@dataclass(frozen=True)
class _Point(_OgbenchMaze):
    """A ball of 0.7 m radius; an action moves it by up to 20 cm per axis."""

    agent = "point"
    radius_m = 1.0

    @property
    def spec(self) -> EnvSpec:
        moved = ("x change [20 cm]", "y change [20 cm]")
        return self.describe(("x [m]", "y [m]"), moved, np.ones(2), hz=_POINT_HZ, radius_m=self.radius_m)


@dataclass(frozen=True)
class _GuidedPoint(_Point):
    """A point with an expert."""

    expert: MazeExpert = bounded(MazeExpert(pace=1.6), was="demonstrator")  # options of the expert

    def demonstrate(self, seed: int) -> Episode:
        """Record one demonstration; with a separate goal every step stores it as extra key `goal`."""
        control = displacement_control(_MOVE_M, 1 / _POINT_HZ, _LAG_S)
        return demonstrate_maze(self, self.expert, control, seed, step_s=1 / _POINT_HZ)


# fmt: off
OgPointmazeMedium = variant("env", "og-pointmaze-medium", _GuidedPoint, "OGBench's `pointmaze-medium`.",
    maze="medium")
OgPointmazeLarge = variant("env", "og-pointmaze-large", _GuidedPoint, "OGBench's `pointmaze-large`.",
    maze="large")
OgPointmazeGiant = variant("env", "og-pointmaze-giant", _GuidedPoint, "OGBench's `pointmaze-giant`.",
    maze="giant")
OgPointmazeTeleport = variant("env", "og-pointmaze-teleport", _Point, "OGBench's `pointmaze-teleport`.",
    maze="teleport")
# fmt: on


@dataclass(frozen=True)
class _Ant(_OgbenchMaze):
    """OGBench's ant, driven by the torques of eight joints."""

    agent = "ant"

    @property
    def spec(self) -> EnvSpec:
        return self.describe(ANT_NAMES, ant_torques(30), np.ones(8), hz=10.0, radius_m=self.radius_m)


# fmt: off
OgAntmazeMedium = variant("env", "og-antmaze-medium", _Ant, "OGBench's `antmaze-medium`.", maze="medium")
OgAntmazeLarge = variant("env", "og-antmaze-large", _Ant, "OGBench's `antmaze-large`.", maze="large")
OgAntmazeGiant = variant("env", "og-antmaze-giant", _Ant, "OGBench's `antmaze-giant`.", maze="giant")
OgAntmazeTeleport = variant("env", "og-antmaze-teleport", _Ant, "OGBench's `antmaze-teleport`.",
    maze="teleport")
# fmt: on


@dataclass(frozen=True)
class _Humanoid(_OgbenchMaze):
    """DeepMind's humanoid, driven by the torques of 21 joints."""

    max_episode_steps: int = bounded(2000, ge=1)  # time limit in control steps

    agent = "humanoid"

    @property
    def spec(self) -> EnvSpec:
        motors = tuple(_torque_name(motor) for motor in _HUMANOID_MOTORS)
        return self.describe(_HUMANOID_NAMES, motors, np.ones(21), hz=40.0, radius_m=self.radius_m)


# fmt: off
OgHumanoidmazeMedium = variant("env", "og-humanoidmaze-medium", _Humanoid, "OGBench's `humanoidmaze-medium`.",
    maze="medium")
OgHumanoidmazeLarge = variant("env", "og-humanoidmaze-large", _Humanoid, "OGBench's `humanoidmaze-large`.",
    maze="large")
OgHumanoidmazeGiant = variant("env", "og-humanoidmaze-giant", _Humanoid, "OGBench's `humanoidmaze-giant`.",
    maze="giant", max_episode_steps=4000)
# fmt: on
