"""Shared base of all mazes: agents as rows of one model, goals, specifications and rendering."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.engine.pixels import HasCameras
from envs.engine.rendering import replay_frames
from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvSpec, symmetric_spec
from envs.tasks.mazes.layouts import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envs.datasets.episodes import EpisodeDataset

_log = logging.getLogger(__name__)

GOAL_NAMES = ("goal x [m]", "goal y [m]")
_NUM_SAMPLES = 10_000  # approximate number of sampled dataset positions
_MAX_IN_WALLS = 0.05  # fraction above which positions in walls are no rounding errors
_LEGS = ("front left", "front right", "back left", "back right")
_JOINTS = tuple(f"{leg} {joint}" for leg in _LEGS for joint in ("hip", "ankle"))
ANT_NAMES = (
    *(f"torso {axis} [m]" for axis in "xyz"),
    *(f"torso quaternion {part} [1]" for part in "wxyz"),
    *(f"{joint} angle [rad]" for joint in _JOINTS),
    *(f"torso {axis} speed [m/s]" for axis in "xyz"),
    *(f"torso {axis} rate [rad/s]" for axis in "xyz"),
    *(f"{joint} rate [rad/s]" for joint in _JOINTS),
)


def ant_torques(full_nm: int) -> tuple[str, ...]:
    """Return the names of an ant's actions, in the order of its motors; an action of 1 is `full_nm` [Nm]."""
    legs = (_LEGS[3], *_LEGS[:3])
    return tuple(f"{leg} {joint} torque [{full_nm} Nm]" for leg in legs for joint in ("hip", "ankle"))


class MazeRows(MujocoStepper):
    """Steps N agents in one compiled maze, which has an element named `target`; exact."""

    target_kind: Literal["site", "geom"] = "site"  # model element named `target` that marks the goal

    def __init__(self, model: Any, maze: Layout, num_envs: int) -> None:
        super().__init__(model, num_envs)
        self.maze = maze
        self._start = np.zeros((num_envs, 2))
        self._goal = np.zeros((num_envs, 2))

    def get_appearance(self, row: int) -> dict[str, Array]:
        return {"goal": self._goal[row].copy()}

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        """Mark the goal in a rendering model, and aim its free camera down at the whole maze."""
        from envs.tasks.mazes.figures import see_from_above

        getattr(model, self.target_kind)("target").pos[:2] = appearance["goal"]
        see_from_above(model, self.maze)

    def goals(self) -> Array:
        return self._goal

    def start_and_goal(self, row: int) -> tuple[Array, Array]:
        """Return start and goal of an episode, (2,) each [m]."""
        return self._start[row].copy(), self._goal[row].copy()

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "start": self._start.copy(), "goal": self._goal.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._start, self._goal = (np.array(state[key], np.float64) for key in ("start", "goal"))


class MazeTask(HasCameras, ABC):
    """Common base of maze configurations; they declare the fields named here."""

    name = ""
    max_episode_steps: int
    goal: str  # whether and how the goal is observed
    packages: ClassVar[tuple[str, ...]] = ()  # see `EnvSpec`
    extra = ""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The maze."""

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """Describe the task."""

    @abstractmethod
    def stepper(self, num_envs: int) -> MazeRows:
        """Build the simulators of N environments."""

    def describe(
        self,
        obs: tuple[str, ...],
        actions: tuple[str, ...],
        limit: Array,
        *,
        hz: float,
        radius_m: float,
        scores: tuple[float, float] | None = None,
    ) -> EnvSpec:
        """Return the specification of the task.

        `limit` (Da,) are the largest actions, `radius_m` is the success distance to the goal, `scores` are
        D4RL's (random, expert) returns.
        """
        obs = (*obs, *GOAL_NAMES) if self.goal == "appended" else obs
        return symmetric_spec(
            obs,
            actions,
            limit=limit,
            name=self.name,
            family="maze",
            max_episode_steps=self.max_episode_steps,
            control_hz=hz,
            success_rule=f"within {radius_m:g} m of the goal",
            reference_scores=scores,
            goal_dim=len(GOAL_NAMES) if self.goal == "separate" else 0,
            state_goal_dim=len(GOAL_NAMES) if self.goal == "appended" else 0,
            packages=self.packages,
            extra=self.extra,
        )

    def check_recording(self, dataset: EpisodeDataset) -> None:
        """Warn about data with positions in walls: they belong to another maze or coordinate frame."""
        step = max(dataset.num_frames // _NUM_SAMPLES, 1)
        inside = self.layout.is_free(dataset.observations[::step, :2].numpy())
        if inside.mean() < 1 - _MAX_IN_WALLS:
            _log.warning(
                "%s: %.0f %% of the recorded positions lie in walls of env=%s, so what is learned from them "
                "cannot be judged in it. They are of another maze, or count from another corner, as those of "
                "D4RL's own AntMaze and maze2d files do.",
                dataset.source, 100 * (1 - inside.mean()), self.name,
            )  # fmt: skip

    def figure(self, panels: Mapping[str, tuple[Sequence[Array], Sequence[bool]]]) -> Figure:
        """Draw one panel of trajectories per title; see `envs.tasks.mazes.figures`."""
        from envs.tasks.mazes.figures import maze_figure

        return maze_figure(self.layout, panels, has_goals=self.goal == "appended")

    def render_frames(self, seed: int, actions: Array, **options: Any) -> Array:
        """Render an episode from above (F, height, width, 3); options as in `replay_frames`."""
        stepper = self.stepper(1)
        stepper.reset(0, seed)
        stepper.model = copy.copy(stepper.model)
        stepper.set_appearance(stepper.model, stepper.get_appearance(0))
        return replay_frames(ChunkVector(self.spec, stepper), seed, actions, **options)
