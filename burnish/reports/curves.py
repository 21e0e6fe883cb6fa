"""Learning curves of a report: which metrics are drawn, means over runs, and the geometry of their SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from envs.evaluation.intervals import Interval

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

_MARKS, _FEWEST, _MOST = 12_000, 20, 240  # points of all curves of a page, about; of a curve
_MOST_MULTIPLES = 24
_SEVERAL = 10  # runs with colours of the palette
_PALETTE = (
    *("#3b82c4", "#e07b39", "#2a9d74", "#9468c9", "#d4505a"),
    *("#2aa3b8", "#a0785a", "#d565a7", "#8f9a2b", "#7d8794"),
)
MEAN_COLOURS = ("var(--ink)", "var(--accent)", "var(--lost)", "var(--won)")

Rows = Sequence[Mapping[str, Any]]
Intervals = Mapping[str, Mapping[int, Interval]]
"""Intervals of a metric by step."""


class Curve(NamedTuple):
    """A metric of one run, or the mean of several, over its steps: (n,) each; intervals where known."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    intervals: Mapping[int, Interval] = {}
    is_mean: bool = False


class Mark(NamedTuple):
    """A point of a curve, with the text that is shown on it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    """A drawn curve; paths are SVG's, `band` is empty without intervals."""

    label: str
    colour: str
    path: str
    band: str
    marks: tuple[Mark, ...]
    is_mean: bool


class Tick(NamedTuple):
    """A labelled place on an axis."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart in a view box of width x height; `level` is the height of the policy before training."""

    width, height = 420, 248
    left, right, top, bottom = 46, 400, 12, 208  # plot area

    title: str
    unit: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    level: Tick | None
    multiples: tuple[Chart, ...] = ()  # one per run, on the same axes

    @property
    def has_means(self) -> bool:
        return any(line.is_mean for line in self.lines)

    @property
    def has_bands(self) -> bool:
        return any(line.band for line in self.lines)

    def hover(self) -> list[dict[str, Any]]:
        """Return what is shown under the pointer, in JSON types."""
        return [{"label": one.label, "marks": one.marks} for one in self.lines]


def read_curves(
    metrics: Mapping[str, Rows], name: str, intervals: Mapping[str, Intervals] | None = None
) -> list[Curve]:
    """Return the curve of a metric for every run with it, of what `read_jsonl` returns."""
    curves = []
    for label, rows in metrics.items():
        points = [(row.get("step"), row.get(name)) for row in rows]
        points = [point for point in points if None not in point]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            known = (intervals or {}).get(label, {}).get(name, {})
            curves.append(Curve(label, steps, values, known))
    return curves


def run_colours(labels: Sequence[str]) -> dict[str, str]:
    """Assign every run a CSS colour for all charts of a report."""
    if len(labels) <= _SEVERAL:
        return dict(zip(labels, _PALETTE, strict=False))
    turn = 360.0 / len(labels)
    return {label: f"hsl({turn * index:.1f} 60% 52%)" for index, label in enumerate(labels)}


def learning_charts(
    metrics: Mapping[str, Rows],
    unit: str,
    *,
    colours: Mapping[str, str] | None = None,
    means: Mapping[str, Sequence[str]] | None = None,
    intervals: Mapping[str, Intervals] | None = None,
    levels: Mapping[str, float] | None = None,
) -> list[Chart]:
    """Draw the main metrics of the runs, at most three; none without metrics that were logged twice.

    Tasks with success have no chart of returns, tasks without it none of success; losses are drawn for
    cloning and offline learning. The first chart is repeated per run where there are several.

    Args:
        metrics: Logged rows of every run, by label; all of one task.
        unit: Unit of their steps.
        colours: Colours by label.
        means: Labels of averaged runs, by the name of their mean; None: all runs.
        intervals: Intervals by label (also of a mean) and metric.
        levels: Values of the policy before training, by quantity: `success` or `return`.
    """
    drawn = {name: read_curves(metrics, name, intervals) for name, _ in CURVES}
    skip = "/return" if drawn["eval/success"] else "/success" if drawn["eval/return"] else "?"
    explores, shown = bool(drawn["rollout/return"]), ("eval/", "rollout/", "validation/")
    found = [
        (name, title, drawn[name])
        for name, title in CURVES
        if not name.endswith(skip) and (not explores or name.startswith(shown))
    ]
    found = [one for one in found if any(len(curve.steps) > 1 for curve in one[2])][:3]
    colours = run_colours(list(metrics)) if colours is None else colours
    means = {"": list(metrics)} if means is None else means
    most = min(max(_MARKS // max(sum(len(one[2]) for one in found), 1), _FEWEST), _MOST)
    charts: list[Chart] = []
    for name, title, curves in found:
        component, _, quantity = name.rpartition("/")
        level = (levels or {}).get(quantity) if component in ("eval", "rollout") else None
        averages = [
            _mean(together, f"mean, {group}" if group and len(means) > 1 else "mean", name, intervals or {})
            for group, labels in means.items()
            if len(together := [curve for curve in curves if curve.label in labels]) > 1
        ]
        means_drawn = [mean for mean in averages if mean is not None]
        alone = [curve._replace(intervals={}) for curve in curves] if means_drawn else curves
        whole = [_thinned(curve, most) for curve in (*alone, *means_drawn)]
        repeated = [_thinned(curve, most) for curve in curves[:_MOST_MULTIPLES]]
        axes = _Axes.around(whole, level, is_share=quantity == "success")
        charts.append(_chart(title, unit, whole, colours, level, axes, () if charts else repeated))
    return charts


def _mean(curves: Sequence[Curve], label: str, name: str, intervals: Mapping[str, Intervals]) -> Curve | None:
    """Return the mean of runs: point by point at alike steps, else over the steps that all reached."""
    known = intervals.get(label, {}).get(name, {})
    if (steps := alike_steps([curve.steps for curve in curves])) is not None:
        return Curve(label, steps, np.mean([c.values for c in curves], axis=0), known, is_mean=True)
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    grid = curves[0].steps[(curves[0].steps >= first) & (curves[0].steps <= last)]
    if len(grid) < 2:
        return None
    mean = np.mean([np.interp(grid, c.steps, c.values) for c in curves], axis=0)
    return Curve(label, grid, mean, known, is_mean=True)


def _thinned(curve: Curve, most: int) -> Curve:
    """Return a curve with `most` of its points, evenly spaced, at most."""
    chosen = np.unique(np.linspace(0, len(curve.steps) - 1, most).round().astype(int))
    return curve._replace(steps=curve.steps[chosen], values=curve.values[chosen])


def alike_steps(steps: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the mean steps of runs; None unless points of one rank are closer than those of two."""
    if len({len(one) for one in steps}) > 1 or not len(steps[0]):
        return None
    together = np.stack(steps).astype(np.float64)
    mean: np.ndarray = together.mean(axis=0).round()
    spacing = np.diff(mean).min() if len(mean) > 1 else np.inf
    return mean if np.ptp(together, axis=0).max() < spacing or len(together) == 1 else None


def _chart(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    colours: Mapping[str, str],
    level: float | None,
    axes: _Axes,
    repeats: Sequence[Curve],
) -> Chart:
    """Draw curves and, in charts of their own on the same axes, `repeats`."""
    of_means = dict(zip((one.label for one in curves if one.is_mean), cycle(MEAN_COLOURS), strict=False))

    def chart(heading: str, shown: Sequence[Curve], multiples: tuple[Chart, ...] = ()) -> Chart:
        lines = tuple(axes.line(one, (of_means if one.is_mean else colours)[one.label]) for one in shown)
        at = None if level is None else Tick(axes.y(level), axes.value(level))
        return Chart(heading, unit.replace("_", " "), lines, axes.x_ticks(), axes.y_ticks(), at, multiples)

    each = tuple(chart(one.label, [one]) for one in repeats) if len(repeats) > 1 else ()
    return chart(title, curves, each)


@dataclass(frozen=True)
class _Axes:
    """Ranges of a chart, and what lies where in its view box."""

    left: float
    right: float
    low: float
    high: float
    is_share: bool

    @classmethod
    def around(cls, curves: Sequence[Curve], level: float | None, *, is_share: bool) -> _Axes:
        left, right = min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves)
        if is_share:
            return cls(left, max(right, left + 1), 0.0, 1.0, True)
        values = [value for c in curves for value in c.values] + ([] if level is None else [level])
        values += [end for c in curves for one in c.intervals.values() for end in (one.low, one.high)]
        low, high = float(min(values)), float(max(values))
        pad = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        return cls(left, max(right, left + 1), low - pad, high + pad, False)

    def x(self, step: float) -> float:
        return round(
            Chart.left + (Chart.right - Chart.left) * (step - self.left) / (self.right - self.left), 1
        )

    def y(self, value: float) -> float:
        return round(
            Chart.bottom - (Chart.bottom - Chart.top) * (value - self.low) / (self.high - self.low), 1
        )

    def value(self, value: float) -> str:
        if self.is_share:
            return f"{100 * value:.0f} %"
        largest, step = max(abs(self.low), abs(self.high)), (self.high - self.low) / 5
        digits = 1 + math.floor(math.log10(largest)) - math.floor(math.log10(step))  # that tell ticks apart
        return short_value(value) if digits <= 3 else f"{value:,.{digits}g}"

    def x_ticks(self) -> tuple[Tick, ...]:
        return tuple(
            Tick(self.x(step), short_count(step)) for step in _round_numbers(self.left, self.right, 5)
        )

    def y_ticks(self) -> tuple[Tick, ...]:
        return tuple(Tick(self.y(one), self.value(one)) for one in _round_numbers(self.low, self.high, 5))

    def line(self, curve: Curve, colour: str) -> Line:
        points = list(zip(curve.steps, curve.values, strict=True))
        marks = tuple(Mark(self.x(s), self.y(v), self._text(curve, s, v)) for s, v in points)
        known = [(step, curve.intervals[int(step)]) for step, _ in points if int(step) in curve.intervals]
        ends = [(step, one.high) for step, one in known] + [(step, one.low) for step, one in reversed(known)]
        band = _path((self.x(step), self.y(end)) for step, end in ends) + "Z" if len(known) > 1 else ""
        return Line(curve.label, colour, _path((m.x, m.y) for m in marks), band, marks, curve.is_mean)

    def _text(self, curve: Curve, step: float, value: float) -> str:
        around = curve.intervals.get(int(step))
        ends = "" if around is None else f" ({self.value(around.low)} to {self.value(around.high)})"
        return f"{step:,.0f}: {self.value(value)}{ends}"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def short_value(value: float) -> str:
    """Write a value in three digits, or as a whole number where it is large.

    Example:
        >>> [short_value(value) for value in (0.01234, 3.14159, 1234.5, -25000.0, 3e7)]
        ['0.0123', '3.14', '1,234', '-25,000', '3e+07']
    """
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"


def short_count(number: float) -> str:
    """Write a count in a few characters.

    Example:
        >>> [short_count(number) for number in (0, 950, 1500, 250_000, 2_000_000)]
        ['0', '950', '1.5k', '250k', '2M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round numbers in a range, evenly spaced."""
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(unit * k for k in (1, 2, 5, 10) if (high - low) / (unit * k) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
