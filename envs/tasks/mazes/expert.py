"""Expert of the point mazes: plans a path through the cells and tracks it with a PD controller.

The path is drawn among those without repeated cells that are at most `detour` cells longer than the shortest.
With `visits` it leads through drawn cells first, which is play: an episode then shows many ways and no task.
The point tracks a target slightly ahead on the path. Noise bends the path inside the cells and perturbs the
target.

Source:
    D4RL's maze2d data, arXiv 2004.07219, come from a planner and a PD controller as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from envs.rollouts.recording import Recording, expert_rng
from envs.spec import Array
from policies.bounds import Checked, bounded

if TYPE_CHECKING:
    from envs.datasets.episode import Episode
    from envs.tasks.mazes.layouts import Cell, Layout
    from envs.tasks.mazes.stepper import MazeTask

KP, KD = 10.0, 1.0  # force of 1 per 10 cm of distance, and per m/s of speed
BEND = 0.08  # standard deviation of the path's corners around cell centres [cells], at noise = 1, cut at two
WOBBLE = 0.04  # standard deviation of the target's wobble [cells], at noise = 1
WOBBLE_S = 0.3  # its correlation time [s]
PACE_SPREAD = 0.15  # relative spread of the pace between episodes, at noise = 1


@dataclass(frozen=True)
class MazeExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    noise: float = bounded(1.0, ge=0)  # scale of bends, wobble and pace variation; 0: cell centres
    pace: float = bounded(3.0, gt=0, le=4)  # speed along the path [m/s]
    detour: int = bounded(0, ge=0)  # maximum excess length of a path over the shortest [cells]
    visits: int = bounded(0, ge=0)  # cells, drawn for every episode, to pass before the goal: play


def pd_force(position: Array, velocity: Array, target: Array) -> Array:
    """Return the force (..., 2), in [-1, 1], towards a target, all (..., 2)."""
    return np.clip(KP * (target - position) - KD * velocity, -1.0, 1.0)


def distances(maze: Layout, goal: Cell) -> dict[Cell, int]:
    """Return the distance of every cell to the goal [cells], by breadth-first search."""
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        cell = waiting.popleft()
        for other in maze.neighbours(cell):
            if other not in found:
                found[other] = found[cell] + 1
                waiting.append(other)
    return found


def simple_paths(maze: Layout, start: Cell, goal: Cell, *, detour: int = 0) -> list[tuple[Cell, ...]]:
    """Return all paths between two cells without repeated cells, shortest first.

    `detour` is the number of cells by which a path may exceed the shortest.
    """
    left = distances(maze, goal)
    longest = left[start] + detour
    found: list[tuple[Cell, ...]] = []
    open_paths: list[tuple[Cell, ...]] = [(start,)]
    while open_paths:
        path = open_paths.pop()
        if path[-1] == goal:
            found.append(path)
            continue
        # Prune cells whose shortest remaining path is too long.
        steps = (cell for cell in maze.neighbours(path[-1]) if cell not in path)
        open_paths += [(*path, cell) for cell in steps if len(path) + left[cell] <= longest]
    return sorted(found, key=lambda path: (len(path), path))


class Polyline:
    """Tracking state on a polyline with corners (n, 2) [m], at least two."""

    def __init__(self, corners: Array, cell_m: float = 1.0) -> None:
        self._from, self._side = corners[:-1], np.diff(corners, axis=0)
        self._length = np.maximum(np.linalg.norm(self._side, axis=1), 1e-9)
        self._end = np.cumsum(self._length)
        self._along = 0.0  # progress along the path
        self._back, self._forth = 0.5 * cell_m, 1.0 * cell_m  # search range of the next progress

    def ahead(self, position: Array, look: float) -> Array:
        """Return the point (2,) `look` metres ahead of the one nearest to a position (2,)."""
        share = ((position - self._from) * self._side).sum(axis=1) / self._length**2
        share = share.clip(0.0, 1.0)
        distance = np.linalg.norm(self._from + share[:, None] * self._side - position, axis=1)
        along = self._end - (1.0 - share) * self._length
        # The search is local, so that progress cannot jump to a later part of the path next to it.
        reachable = (along >= self._along - self._back) & (along <= self._along + self._forth)
        nearest = np.where(reachable, distance, np.inf).argmin()
        self._along = max(self._along, float(along[nearest]))
        return self.point_at(self._along + look)

    def point_at(self, along: float) -> Array:
        """Return the point (2,) at an arc length; past the end, the end."""
        i = min(int(np.searchsorted(self._end, along)), len(self._end) - 1)
        share = np.clip(1.0 - (self._end[i] - along) / self._length[i], 0.0, 1.0)
        point: Array = self._from[i] + share * self._side[i]
        return point


class PathFollower:
    """Target generator of one demonstration, from start to goal (2,) [m].

    `lag_s` is the lag of the point behind the target, `step_s` the time between two decisions [s].
    """

    def __init__(
        self,
        maze: Layout,
        start: Array,
        goal: Array,
        *,
        options: MazeExpert,
        lag_s: float,
        step_s: float,
        rng: np.random.Generator,
    ) -> None:
        self._rng, self._noise = rng, options.noise * maze.cell_m
        stops = [maze.cells[int(rng.integers(len(maze.cells)))] for _ in range(options.visits)]
        stops = [maze.cell(start), *stops, maze.cell(goal)]
        choices = (simple_paths(maze, *ends, detour=options.detour) for ends in pairwise(stops))
        legs = [choice[int(rng.integers(len(choice)))][1:] for choice in choices]
        cells = [cell for leg in legs for cell in leg][:-1]
        bends = BEND * self._noise * rng.standard_normal((len(cells), 2)).clip(-2, 2)
        corners = [maze.center(cell) + bend for cell, bend in zip(cells, bends, strict=True)]
        self._path = Polyline(np.stack([start, *corners, goal]), maze.cell_m)
        spread = PACE_SPREAD * options.noise * np.clip(rng.standard_normal(), -2, 2)
        self._look = look_ahead(options.pace * math.exp(spread), lag_s, step_s)
        self._keep = math.exp(-step_s / WOBBLE_S)
        self._wobble = np.zeros(2)

    def target(self, position: Array) -> Array:
        """Return the target (2,) for a position (2,) [m]."""
        fresh = math.sqrt(1 - self._keep**2) * self._rng.standard_normal(2)
        self._wobble = self._keep * self._wobble + fresh
        return self._path.ahead(position, self._look) + WOBBLE * self._noise * self._wobble


def look_ahead(pace: float, lag_s: float, step_s: float) -> float:
    """Return the look-ahead distance [m] for a pace [m/s], if the target moves every `step_s` [s].

    At constant speed the point lags by `lag_s` (damping over stiffness); a target held for a control step
    adds half a step on average.
    """
    return pace * (lag_s + step_s / 2)


@dataclass(frozen=True)
class PointControl:
    """Controller that moves a point to a target.

    Args:
        action: Maps an observation (Do,) and a target (2,) [m] to an action (2,).
        limit: (2,) largest action.
        lag_s: Lag distance over speed at constant speed [s].
    """

    action: Callable[[Array, Array], Array]
    limit: Array
    lag_s: float = KD / KP


FORCE_CONTROL = PointControl(lambda obs, target: pd_force(obs[:2], obs[2:4], target), np.ones(2))
"""For points that are pushed."""


def position_control(maze: Layout) -> PointControl:
    """Return the controller of points whose actions are target positions of a PD controller."""
    return PointControl(lambda _, target: target, maze.half_size)


def displacement_control(full_m: float, step_s: float, lag_s: float) -> PointControl:
    """Return the controller of points that move by up to `full_m` [m] per control step of `step_s` [s]."""
    gain = step_s / (lag_s * full_m)
    return PointControl(lambda obs, target: gain * (target - obs[:2]), np.ones(2), lag_s)


def demonstrate_maze(
    task: MazeTask, options: MazeExpert, control: PointControl, seed: int, *, step_s: float
) -> Episode:
    """Record the episode of a seed in a task of points.

    Extras are the physics state before each action (`states`: time, positions, velocities) and, with a
    separate goal, the goal (2,) of every step (`goal`).
    """
    stepper, max_steps = task.stepper(1), task.max_episode_steps
    rng, record = expert_rng(seed), Recording(stepper, seed)
    start, goal = stepper.start_and_goal(0)
    follower = PathFollower(
        task.layout, start, goal, options=options, lag_s=control.lag_s, step_s=step_s, rng=rng
    )
    extras = {"goal": goal} if task.goal == "separate" else {}
    while not record.ended and len(record) < max_steps:
        action = control.action(record.now, follower.target(record.now[:2]))
        record.step(np.clip(action, -control.limit, control.limit), states=stepper.physics_state(0), **extras)
    return record.episode(truncated=len(record) >= max_steps, success=record.was_solved)
