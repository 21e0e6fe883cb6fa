"""Top-down figures and renderings of mazes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.tasks.avoid.figures import FAILURE, INK, PILLAR, SUCCESS, Panels, side_by_side
from envs.tasks.mazes.layouts import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 4.2  # panel width [inches]
_MARGIN = 1.05  # visible extent of a rendering over the maze's size
_FREE_CAMERA_EXTENTS = 1.5  # distance of MuJoCo's free camera in model extents


def maze_figure(maze: Layout, panels: Panels, *, has_goals: bool = True) -> Figure:
    """Return a figure with one panel of episodes per title; values are trajectories and outcomes."""
    height = WIDTH_IN * maze.half_size[1] / maze.half_size[0] + 0.6
    draw = partial(draw_maze, maze=maze, has_goals=has_goals)
    return side_by_side(panels, draw, width=WIDTH_IN, height=height)


def draw_maze(
    ax: Axes,
    trajectories: Sequence[np.ndarray],
    outcomes: Sequence[bool],
    *,
    maze: Layout,
    title: str = "",
    has_goals: bool = True,
) -> None:
    """Draw episodes from above: walls, a dot at each start, a ring around its goal, one line per episode.

    Successes are green; failures are orange and end in a cross. Trajectories are (L+1, 4 or more) arrays, x
    and y [m] first; the goal is last if `has_goals`, else no ring is drawn.
    """
    _draw_walls(ax, maze)
    alpha = float(np.clip(18.0 / max(len(trajectories), 1), 0.3, 0.9))
    for i in sorted(range(len(trajectories)), key=lambda i: bool(outcomes[i])):
        path = np.asarray(trajectories[i])
        color = SUCCESS if outcomes[i] else FAILURE
        ax.plot(path[:, 0], path[:, 1], color=color, alpha=alpha, linewidth=1.1, zorder=3)
        ax.plot(*path[0, :2], "o", color=INK, markersize=2.5, zorder=4)
        if has_goals:
            ax.plot(*path[0, -2:], "o", color=color, markersize=6, markerfacecolor="none", zorder=4)
        if not outcomes[i]:
            ax.plot(*path[-1, :2], "X", color=color, markersize=5.5, markeredgecolor="white", zorder=5)
    good, total = int(np.sum(outcomes)), len(outcomes)
    score = f"{good / total:.0%} reach the goal ({good} of {total})" if total else "no episodes"
    ax.set_title(f"{title}\n{score}" if title else score, fontsize=9.5, color=INK, loc="left")


def _draw_walls(ax: Axes, maze: Layout) -> None:
    from matplotlib.patches import Rectangle

    for cell in maze.walls:
        corner = maze.center(cell) - maze.cell_m / 2
        wall = Rectangle(
            tuple(corner), maze.cell_m, maze.cell_m, facecolor=PILLAR, edgecolor=PILLAR, zorder=2
        )
        ax.add_patch(wall)
    (left, bottom), (right, top) = maze.middle - maze.half_size, maze.middle + maze.half_size
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.set_axis_off()


def see_from_above(model: Any, maze: Layout) -> None:
    """Aim the free camera of a rendering model down at the whole maze, for images wider than high."""
    model.stat.center = [*maze.middle, 0.0]
    model.vis.global_.azimuth, model.vis.global_.elevation = 90.0, -89.0
    seen = _FREE_CAMERA_EXTENTS * np.tan(np.deg2rad(model.vis.global_.fovy) / 2)  # half the image height
    model.stat.extent = _MARGIN * float(maze.half_size.max()) / seen
