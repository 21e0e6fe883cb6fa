"""OGBench's manipulation tasks: a UR5e arm with a gripper moves cubes, presses buttons, opens and closes.

Each is a world of `envs.tasks.ogbench.stepper` with five tasks (initial and target positions),
`<world>-play-singletask-task<k>-v0` in OGBench's names. The target is not observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envs.engine.pixels import HasCameras
from envs.spec import EnvSpec, symmetric_spec
from envs.tasks.ogbench.expert import OracleExpert, demonstrate
from envs.tasks.ogbench.stepper import NUM_TASKS, OgbenchStepper
from policies.bounds import bounded
from policies.registry import variant

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

_JOINTS = ("shoulder pan", "shoulder lift", "elbow", "wrist 1", "wrist 2", "wrist 3")
_ARM_NAMES = (
    *(f"{joint} angle [rad]" for joint in _JOINTS),
    *(f"{joint} rate [rad/s]" for joint in _JOINTS),
    "gripper x - 0.425 m [dm]",
    "gripper y [dm]",
    "gripper z [dm]",
    "gripper yaw cosine [1]",
    "gripper yaw sine [1]",
    "gripper closing [1/3 of full]",
    "gripper contact force [50 N]",
)
_ACTION_NAMES = (
    "gripper x change [5 cm]",
    "gripper y change [5 cm]",
    "gripper z change [5 cm]",
    "gripper yaw change [0.3 rad]",
    "gripper closing change [of full]",
)
_SLIDE_NAMES = (
    *("drawer position [1/18 m]", "drawer speed [m/s]"),
    *("window position [1/15 m]", "window speed [m/s]"),
)


def _cube_names(cube: str) -> tuple[str, ...]:
    return (
        f"{cube} x - 0.425 m [dm]",
        f"{cube} y [dm]",
        f"{cube} z [dm]",
        *(f"{cube} quaternion {part} [1]" for part in "wxyz"),
        f"{cube} yaw cosine [1]",
        f"{cube} yaw sine [1]",
    )


def _button_names(button: int) -> tuple[str, ...]:
    states = (f"button {button} is in state {state} [0 or 1]" for state in range(2))
    return (*states, f"button {button} position [1/120 m]", f"button {button} speed [m/s]")


@dataclass(frozen=True)
class _World(HasCameras):
    """Common options."""

    task: int = bounded(1, ge=1, le=NUM_TASKS)  # initial state and target, in OGBench's numbering
    max_episode_steps: int = bounded(500, ge=1)  # time limit in control steps
    expert: OracleExpert = bounded(OracleExpert(), was="demonstrator")  # options of the expert

    camera = "front"
    name = ""
    num_cubes = 0
    num_buttons = 0
    has_slides = False  # whether there are a drawer and a window
    success_rule = ""

    def unused(self) -> dict[str, str]:
        return super().unused() | {f"expert.{name}": why for name, why in self.expert.unused().items()}

    @property
    def conditions(self) -> tuple[str, ...]:
        """The task's number does not select the data of experts that play."""
        return () if self.expert.mode == "task" else ("task",)

    @property
    def spec(self) -> EnvSpec:
        cubes = ["cube"] if self.num_cubes == 1 else [f"cube {i}" for i in range(self.num_cubes)]
        obs_names = (
            *_ARM_NAMES,
            *(name for cube in cubes for name in _cube_names(cube)),
            *(name for button in range(self.num_buttons) for name in _button_names(button)),
            *(_SLIDE_NAMES if self.has_slides else ()),
        )
        return symmetric_spec(
            obs_names,
            _ACTION_NAMES,
            name=self.name,
            family="manipulation",
            max_episode_steps=self.max_episode_steps,
            control_hz=20.0,
            success_rule=self.success_rule,
            packages=("ogbench", "dm-control"),
            extra="ogbench",
        )

    def stepper(self, num_envs: int) -> OgbenchStepper:
        return OgbenchStepper(self.name, self.task, num_envs)

    def demonstrate(self, seed: int) -> Episode:
        limit = self.max_episode_steps
        return demonstrate(self.name, self.task, seed, self.expert, max_steps=limit)


# fmt: off
CubeSingle = variant("env", "cube-single", _World, "Move a cube to its target (OGBench).",
    num_cubes=1, success_rule="the centre of the cube is within 4 cm of its target", max_episode_steps=200)
CubeDouble = variant("env", "cube-double", _World, "Move one or two cubes, swap or stack them (OGBench).",
    num_cubes=2, success_rule="the centre of every cube is within 4 cm of its target")
CubeTriple = variant("env", "cube-triple", _World, "Move, unstack, rotate or stack three cubes (OGBench).",
    num_cubes=3, success_rule="the centre of every cube is within 4 cm of its target", max_episode_steps=1000)
Scene = variant("env", "scene", _World, "Arrange a cube, a drawer and a window with locks (OGBench).",
    num_cubes=1, num_buttons=2, has_slides=True, max_episode_steps=750,
    success_rule="cube, drawer and window are within 4 cm of their targets and both locks as wanted")
Puzzle3x3 = variant("env", "puzzle-3x3", _World, "Turn 9 lights by buttons that turn neighbours too.",
    num_buttons=9, success_rule="all nine lights are as wanted")
Puzzle4x4 = variant("env", "puzzle-4x4", _World, "Turn 16 lights by buttons that turn neighbours too.",
    num_buttons=16, success_rule="all sixteen lights are as wanted")
# fmt: on
