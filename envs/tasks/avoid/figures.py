"""Figures of `avoid` episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from envs.tasks.avoid.scene import START_SPREAD_M, AvoidScene, load_scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panels = Mapping[str, tuple[Sequence[np.ndarray], Sequence[bool]]]
"""Trajectories and outcomes of episodes, by title."""

INK = "#2f3640"
PILLAR = "#5b6673"
SUCCESS = "#1f8a70"
FAILURE = "#e4572e"


def avoid_figure(panels: Panels) -> Figure:
    """Return a figure with one panel of episodes per title; values are trajectories and outcomes."""
    return side_by_side(panels, draw_avoid, width=3.5, height=6.0)


def side_by_side(panels: Panels, draw: Callable[..., None], *, width: float, height: float) -> Figure:
    """Return a figure, without display, with one panel [inches] per title drawn by `draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(panels), height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, (trajectories, outcomes)) in zip(axes, panels.items(), strict=True):
        draw(ax, trajectories, outcomes, title=title)
    return figure


def draw_avoid(
    ax: Axes, trajectories: Sequence[np.ndarray], outcomes: Sequence[bool], *, title: str = ""
) -> None:
    """Draw episodes of `avoid` from above: pillars, start, finish line, one line per episode.

    Successes are green; failures are orange and end in a crossed disc at the contact or final position.
    Trajectories are (L+1, 2 or more) arrays, x and y [m] first, e.g. observations.
    """
    scene = load_scene()
    _draw_scene(ax, scene)
    alpha = float(np.clip(18.0 / max(len(trajectories), 1), 0.25, 0.9))
    order = sorted(range(len(trajectories)), key=lambda i: bool(outcomes[i]))
    for i in order:
        x, y = np.asarray(trajectories[i])[:, 0], np.asarray(trajectories[i])[:, 1]
        color = SUCCESS if outcomes[i] else FAILURE
        ax.plot(x, y, color=color, alpha=alpha, linewidth=1.1, solid_capstyle="round", zorder=3)
        if not outcomes[i]:
            _mark_end(ax, scene, float(x[-1]), float(y[-1]))
    _label(ax, outcomes, title)


def _mark_end(ax: Axes, scene: AvoidScene, x: float, y: float) -> None:
    from matplotlib.patches import Circle

    ax.add_patch(Circle((x, y), scene.disc_radius, facecolor=FAILURE, alpha=0.18, edgecolor="none", zorder=5))
    ax.plot(x, y, "X", color=FAILURE, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6, zorder=6)


def _draw_scene(ax: Axes, scene: AvoidScene) -> None:
    from matplotlib.patches import Circle, Rectangle

    wide, low, high = scene.half_width, scene.back_y, scene.finish_y + 0.05
    floor = Rectangle((-wide, low), 2 * wide, high - low, facecolor="#f7f8fa", edgecolor="none", zorder=0)
    ax.add_patch(floor)
    for x, y in scene.obstacles:
        pillar = Circle(
            (x, y), scene.pillar_radius, facecolor=PILLAR, edgecolor="white", linewidth=0.8, zorder=4
        )
        ax.add_patch(pillar)
        pillar.set_clip_path(floor)
    for side in (-wide, wide):
        ax.plot([side, side], [low, high], color=INK, linewidth=2.5, zorder=7, solid_capstyle="butt")
    ax.plot([-wide, wide], [low, low], color=INK, linewidth=2.5, zorder=6)
    _draw_finish(ax, scene)
    half = np.array(START_SPREAD_M)
    ax.add_patch(Rectangle(tuple(-half), *(2 * half), facecolor="#c9d6ea", edgecolor="none", zorder=1))
    ax.annotate("start", (0, -half[1] - 0.012), ha="center", va="top", fontsize=8, color=INK)
    ax.add_patch(
        Circle(
            (-wide + 0.045, low + 0.035), scene.disc_radius, facecolor="#8fa9d1", edgecolor="none", zorder=2
        )
    )
    ax.annotate("disc", (-wide + 0.068, low + 0.035), va="center", fontsize=7.5, color=INK)
    ax.set(xlim=(-wide - 0.006, wide + 0.006), ylim=(low - 0.006, high + 0.002), aspect="equal")
    ax.set_axis_off()


def _draw_finish(ax: Axes, scene: AvoidScene) -> None:
    from matplotlib.patches import Rectangle

    size = scene.half_width / 18
    for i in range(36):
        for j in range(2):
            shade = INK if (i + j) % 2 else "white"
            corner = (-scene.half_width + i * size, scene.finish_y + j * size)
            ax.add_patch(Rectangle(corner, size, size, facecolor=shade, edgecolor="none", zorder=2))
    ax.annotate("finish", (0, scene.finish_y + 2.5 * size), ha="center", va="bottom", fontsize=8, color=INK)


def _label(ax: Axes, outcomes: Sequence[bool], title: str) -> None:
    from matplotlib.lines import Line2D

    good, total = int(np.sum(outcomes)), len(outcomes)
    share = f"{good / total:.0%} succeed ({good} of {total})" if total else "no episodes"
    ax.set_title(share, fontsize=9.5, color=INK, loc="left", pad=5)
    if title:
        ax.text(0, 1.05, title, transform=ax.transAxes, fontsize=13, fontweight="bold", color=INK)
    handles = [
        Line2D([], [], color=SUCCESS, linewidth=2, label="reached the finish"),
        Line2D([], [], color=FAILURE, linewidth=2, marker="X", markeredgecolor="white", label="failed"),
    ]
    ax.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, frameon=False, fontsize=8
    )
