"""Pictures of a report: learning curves and film strips, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
CURVES = (
    ("eval/success", "success rate, evaluation"),
    ("rollout/success", "success rate, training episodes"),
    ("eval/return", "mean return, evaluation"),
    ("rollout/return", "mean return, training episodes"),
    ("validation/action_mse_best", "held-out error of the best sampled chunk"),
    ("policy/loss", "policy loss"),
)
"""What can be drawn, most telling first."""


@dataclass(frozen=True)
class Curve:
    """One run's numbers over its steps; both (n,)."""

    label: str
    steps: np.ndarray
    values: np.ndarray


def read_curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[Curve]:
    """Return the curve of a metric for every run that has it."""
    curves = []
    for label, rows in metrics.items():
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            curves.append(Curve(label, steps, values))
    return curves


def learning_curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]], unit: str) -> bytes | None:
    """Draw the most telling metrics that the runs have, a panel each; None where there is nothing to draw.

    A task with success has no panel of returns, a task without none of successes; the loss is drawn where
    it says something, in cloning.
    """
    drawn = {name: read_curves(metrics, name) for name, _ in CURVES}
    skip = "/return" if drawn["eval/success"] else "/success" if drawn["eval/return"] else "?"
    is_cloning = not drawn["rollout/return"]
    names = {name for name, _ in CURVES if not name.endswith(skip) and (is_cloning or name != "policy/loss")}
    panels = [(title, drawn[name]) for name, title in CURVES if name in names]
    panels = [(title, curves) for title, curves in panels if any(len(c.steps) > 1 for c in curves)][:3]
    if not panels:
        return None
    figure = _figure(4.6 * len(panels), 3.4)
    for index, (title, curves) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for curve in curves:
            mark = "o" if len(curve.steps) <= 40 else None
            axes.plot(curve.steps, curve.values, marker=mark, markersize=3, linewidth=1.3, label=curve.label)
        if len(curves) > 1:
            _draw_mean(axes, curves)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(unit.replace("_", " "))
        axes.grid(alpha=0.3)
        if title.startswith("success"):
            axes.set_ylim(-0.02, 1.02)
        if len(curves) > 1:
            axes.legend(fontsize=7)
    return to_png(figure)


def _draw_mean(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw the mean of the runs over the steps that all of them reached."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    grid = curves[0].steps[(curves[0].steps >= first) & (curves[0].steps <= last)]
    if len(grid) > 1:
        mean = np.mean([np.interp(grid, c.steps, c.values) for c in curves], axis=0)
        axes.plot(grid, mean, color="black", linewidth=2.2, label="mean")


def film_strip(frames: np.ndarray, *, title: str, columns: int = 6, rows: int = 2) -> bytes:
    """Draw frames (F, height, width, 3) evenly over the episode, in reading order."""
    count = min(columns * rows, len(frames))
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    rows = -(-count // columns)
    figure = _figure(2.1 * columns, 1.75 * rows + 0.3)
    for place, index in enumerate(chosen):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(frames[index])
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    return to_png(figure)


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _figure(width: float, height: float) -> Figure:
    """Return a figure (inches) that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
