"""Pictures of a report: learning curves and film strips, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
CURVES = (
    ("eval/success", "success rate, evaluation"),
    ("rollout/success", "success rate, training episodes"),
    ("eval/return", "mean return, evaluation"),
    ("rollout/return", "mean return, training episodes"),
    ("validation/action_mse_best", "held-out error of the best sampled chunk"),
    ("policy/loss", "policy loss"),
    ("critic/overestimation", "overestimation by the critics"),
    ("critic/loss", "critic loss"),
    ("actor/loss", "actor loss"),
    ("score/loss", "score loss"),
    ("dynamics/loss", "loss of the inverse dynamics"),
)
"""Plottable metrics, most informative first."""


class Curve(NamedTuple):
    """A metric of one run over its steps; both (n,)."""

    label: str
    steps: np.ndarray
    values: np.ndarray


def read_curves(metrics: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[Curve]:
    """Return the curve of a metric for every run with it."""
    curves = []
    for label, rows in metrics.items():
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            curves.append(Curve(label, steps, values))
    return curves


def run_colours(labels: Sequence[str]) -> dict[str, Any]:
    """Assign every run a colour for all pictures of a report."""
    if len(labels) <= 10:
        return {label: f"C{index}" for index, label in enumerate(labels)}
    from matplotlib import colormaps

    return dict(zip(labels, colormaps["turbo"](np.linspace(0.05, 0.95, len(labels))), strict=True))


def learning_curves(
    metrics: Mapping[str, Sequence[Mapping[str, Any]]],
    unit: str,
    *,
    colours: Mapping[str, Any] | None = None,
    means: Mapping[str, Sequence[str]] | None = None,
) -> bytes | None:
    """Plot the main metrics of the runs, one panel each; None without metrics.

    Tasks with success have no panel of returns, tasks without it none of success; losses are plotted for
    cloning and offline learning.

    Args:
        metrics: Logged rows of every run, by label; all of one task.
        unit: Unit of their steps.
        colours: Colours by label; more colours than runs add a legend.
        means: Labels of averaged runs, by the name of their mean; None: all runs.
    """
    drawn = {name: read_curves(metrics, name) for name, _ in CURVES}
    skip = "/return" if drawn["eval/success"] else "/success" if drawn["eval/return"] else "?"
    explores, shown = bool(drawn["rollout/return"]), ("eval/", "rollout/", "validation/")
    names = {
        name for name, _ in CURVES if not name.endswith(skip) and (not explores or name.startswith(shown))
    }
    panels = [(title, drawn[name]) for name, title in CURVES if name in names]
    panels = [(title, curves) for title, curves in panels if any(len(c.steps) > 1 for c in curves)][:3]
    if not panels:
        return None
    colours = run_colours(list(metrics)) if colours is None else colours
    means = {"": list(metrics)} if means is None else means
    figure = new_figure(4.6 * len(panels), 3.4)
    for index, (title, curves) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        _draw_panel(axes, curves, colours, means)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(unit.replace("_", " "))
        if title.startswith("success"):
            axes.set_ylim(-0.02, 1.02)
    return to_png(figure)


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], colours: Mapping[str, Any], means: Mapping[str, Sequence[str]]
) -> None:
    for curve in curves:
        mark = "o" if len(curve.steps) <= 40 else None
        style: dict[str, Any] = {"marker": mark, "markersize": 3, "linewidth": 1.3, "label": curve.label}
        axes.plot(curve.steps, curve.values, color=colours[curve.label], **style)
    for (title, labels), line in zip(means.items(), cycle(("-", "--", ":", "-."))):
        together = [curve for curve in curves if curve.label in labels]
        if len(together) > 1:
            _draw_mean(axes, together, "mean" if len(means) == 1 else f"mean, {title}", line)
    axes.grid(alpha=0.3)
    if len(colours) > 1:
        axes.legend(fontsize=7)


def _draw_mean(axes: Axes, curves: Sequence[Curve], label: str, line: str) -> None:
    """Plot the mean of runs over the steps that all of them reached."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    grid = curves[0].steps[(curves[0].steps >= first) & (curves[0].steps <= last)]
    if len(grid) > 1:
        mean = np.mean([np.interp(grid, c.steps, c.values) for c in curves], axis=0)
        axes.plot(grid, mean, color="black", linewidth=2.2, linestyle=line, label=label)


def film_strip(frames: np.ndarray, *, title: str, columns: int = 6, rows: int = 2) -> bytes:
    """Draw evenly spaced frames of (F, height, width, 3), in reading order."""
    count = min(columns * rows, len(frames))
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    rows = -(-count // columns)
    figure = new_figure(2.1 * columns, 1.75 * rows + 0.3)
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


def new_figure(width: float, height: float) -> Figure:
    """Return a figure (inches) that does not require a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
