"""What is steered where: ways, sketches of them, and how to tell that one was taken.

A *way* is a number; its sketch is drawn carefully (`beside` 0) or moved away by `beside` metres.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from burnish.commands.collect import CollectConfig
from burnish.config.schema import compose_config
from envs.rollouts.episodes import EpisodeRow
from envs.tasks.avoid.expert import plan as draw_path
from envs.tasks.avoid.figures import INK, draw_avoid
from envs.tasks.avoid.scene import load_scene
from envs.tasks.avoid.task import CONTROL_HZ, MAX_SPEED, Avoid
from envs.tasks.mazes.expert import simple_paths
from envs.tasks.mazes.figures import draw_maze
from envs.tasks.mazes.layouts import Cell
from policies.wrappers.sketches import PositionSketch, WaypointSketch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from envs.spec import EnvConfig

Sketched = PositionSketch | WaypointSketch


class AvoidTask:
    """`avoid`: a sketch leads through one gap of every row; actions are velocities.

    Attributes:
        about: What its section of the page begins with.
        experiment: Trains the policy.
        overrides: Of the experiment.
        demonstrations: How many are recorded.
        episodes: Of every way, on the same seeds for all strategies.
        rough_m: How far a rough sketch lies beside a careful one.
        per_metre: Scale of distances as they are shown, in `unit`.
        drawn: The way that the picture shows.
        panel: Width and height of a panel of it [inch].
        base: The task as the experiment has it.
        recorded: How demonstrations are recorded.
    """

    about = """A sketch leads through one gap of every row. Rough ones lie 25 mm beside it, where a disc
that keeps to the line hits the pillars. Actions are velocities, so a sketch becomes the velocities that
lead onto it and along it. *Free*: no contact, which would end the episode."""
    experiment = "avoid_steering_bc"
    overrides: tuple[str, ...] = ("algo=bc",)
    demonstrations = 200
    episodes = 9
    rough_m = 0.025  # the disc has 0.019 m of room
    per_metre, unit = 1000.0, "mm"
    drawn = 3
    panel: tuple[float, float] = (2.2, 3.9)
    pace_m: ClassVar = 0.75 * MAX_SPEED / CONTROL_HZ  # what the expert covers in a control step

    base = Avoid()
    recorded = CollectConfig(env=base)

    @property
    def num_ways(self) -> int:
        """The direct ways."""
        return load_scene().num_direct

    def env(self, way: int) -> Avoid:
        """Return the task, which is the same for all ways."""
        return self.base

    def sketch(self, way: int, beside: float) -> PositionSketch:
        """Draw a way through the pillars, moved to the left or right."""
        scene = load_scene()
        path = draw_path(scene, scene.modes[way], np.zeros(2), noise=0.0, rng=np.random.default_rng(0))
        side = 1 if way % 2 else -1
        ys = np.linspace(0.0, scene.finish_y + 0.1, 40)
        points = tuple((round(float(path(y)) + side * beside, 4), round(float(y), 4)) for y in ys)
        return PositionSketch(points, pace=self.pace_m, reach=MAX_SPEED / CONTROL_HZ)

    def took(self, row: EpisodeRow, way: int) -> bool:
        """Tell whether an episode crossed the rows through the gaps of a way."""
        return bool(row.success and row.metrics["mode"] == way)

    def is_free(self, row: EpisodeRow) -> bool:
        """Tell whether an episode did not end by a contact."""
        return bool(row.success or not row.terminated)

    def draw(self, axes: Axes, rows: Sequence[EpisodeRow], beside: float) -> None:
        """Draw pillars, episodes and the sketch."""
        draw_avoid(axes, [_path(row) for row in rows], [row.success for row in rows])
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
        _draw_line(axes, np.array(self.sketch(self.drawn, beside).positions))


class MazeTask:
    """`pointmaze-large`: a sketch leads through cells; actions are places to go to."""

    about = """From one end of the maze to the other and back, start and goal anywhere in their cells, along
each of the six ways through it. The policy sees the goal. Actions are waypoints at 10 Hz, so a sketch is,
as in the paper, a plan in space. Rough sketches are moved by 0.5 m to the side and up or down: the ball has
0.4 m of room, so they run along walls and cut across their corners. *Free*: the ball was never seen in
touch with a wall (at 10 Hz); touching one costs time, but does not end an episode."""
    experiment = "pointmaze_steering_bc"
    overrides: tuple[str, ...] = ("algo=bc",)
    demonstrations = 1000
    episodes = 8
    rough_m = 0.5
    per_metre, unit = 100.0, "cm"
    drawn = 4
    panel: tuple[float, float] = (3.0, 2.6)
    pace_m: ClassVar = 0.25  # about what the expert covers in a control step
    touch_m: ClassVar = 0.102  # distance of the ball's centre from a wall that it touches
    ends: ClassVar = ((1, 1), (5, 9))

    @cached_property
    def base(self) -> Any:
        """The maze as the experiment has it."""
        return compose_config("train", [f"experiment={self.experiment}", *self.overrides]).env

    @property
    def recorded(self) -> CollectConfig:
        """The maze as it is."""
        return CollectConfig(env=self.base)

    @cached_property
    def _ways(self) -> list[tuple[Cell, ...]]:
        """The ways there, and the same back."""
        there = simple_paths(self.base.layout, *self.ends, detour=self.base.expert.detour)
        return [*there, *(way[::-1] for way in there)]

    @property
    def num_ways(self) -> int:
        """There and back."""
        return len(self._ways)

    def env(self, way: int) -> EnvConfig:
        """Return the maze with start and goal at the ends of the way."""
        cells = self._ways[way]
        return replace(self.base, start_cell=cells[0], goal_cell=cells[-1])

    def sketch(self, way: int, beside: float) -> WaypointSketch:
        """Draw the way through the centres of cells, moved along a diagonal."""
        centers = np.stack([self.base.layout.center(cell) for cell in self._ways[way]])
        shift = beside * np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])[way % 4]
        points = tuple((round(float(x), 4), round(float(y), 4)) for x, y in centers + shift)
        return WaypointSketch(points, pace=self.pace_m)

    def took(self, row: EpisodeRow, way: int) -> bool:
        """Tell whether an episode ended well and passed the cells of a way, turns back aside."""
        cells = self._ways[way]
        # The goal is reached half a metre before its middle, which may be a cell early.
        return bool(row.success) and self.base.layout.cells_along(_path(row)[:, :2]) in (cells, cells[:-1])

    def is_free(self, row: EpisodeRow) -> bool:
        """Tell whether the ball kept away from the walls."""
        maze = self.base.layout
        walls = np.stack([maze.center(cell) for cell in maze.walls])
        beside = np.maximum(np.abs(_path(row)[:, None, :2] - walls) - maze.cell_m / 2, 0.0)
        return bool((np.linalg.norm(beside, axis=2) > self.touch_m).all())

    def draw(self, axes: Axes, rows: Sequence[EpisodeRow], beside: float) -> None:
        """Draw walls, episodes and the sketch."""
        draw_maze(axes, [_path(row) for row in rows], [row.success for row in rows], maze=self.base.layout)
        _draw_line(axes, np.array(self.sketch(self.drawn, beside).waypoints))


class PlannedMazeTask(MazeTask):
    """`pointmaze-medium`: the planner's states follow the sketch."""

    about = """To the other side of a block of the maze and back, along each of the two ways around it,
which are equally long. A planner (`algo=decision_diffuser`) has learned from play: it plans 48 states up to
the goal and executes all of them. A sketch guides the places among these states; inverse dynamics turn them
into waypoints."""
    experiment = "pointmaze_decision_diffuser"
    overrides: tuple[str, ...] = ("algo.steps=2500",)
    demonstrations = 200
    episodes = 25
    drawn = 1
    panel = (2.2, 2.6)
    ends = ((6, 1), (3, 4))
    pace_m = 0.13  # six metres in a plan

    @property
    def recorded(self) -> CollectConfig:
        """Play: from place to place without an end."""
        expert = replace(self.base.expert, visits=20)
        env = replace(self.base, expert=expert, continuing=True, max_episode_steps=300)
        return CollectConfig(env=env, keep_failures=True)


Task = AvoidTask | MazeTask
TASKS: dict[str, Task] = {
    "avoid": AvoidTask(),
    "pointmaze-large": MazeTask(),
    "pointmaze-medium": PlannedMazeTask(),
}


def off_sketch(row: EpisodeRow, sketch: Sketched) -> float:
    """Return the mean distance of an episode's positions from a sketch [m]: motion alignment."""
    return float(sketch.distance(torch.as_tensor(_path(row)[:, :2])).mean())


def _path(row: EpisodeRow) -> np.ndarray:
    """Return the observations that were kept (L + 1, Do)."""
    assert row.observations is not None
    return row.observations


def _draw_line(axes: Axes, points: np.ndarray) -> None:
    axes.plot(*points.T, color=INK, linewidth=1.6, linestyle=(0, (4, 3)), zorder=6)
