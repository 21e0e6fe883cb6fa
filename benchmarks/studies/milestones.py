"""How soon learning gets somewhere: steps and wall minutes until a training curve first reaches a level.

A curve is smoothed first: a point counts as the mean of itself and the four iterations before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

WINDOW = 5


def reached(
    curve: Sequence[Mapping[str, float]], quantity: str, level: float
) -> tuple[int, float | None] | None:
    """Return environment steps and seconds at which the smoothed curve first reaches a level.

    None where it never does; the seconds are None where the curve does not hold them.
    """
    values = np.array([point[quantity] for point in curve])
    if len(values) < WINDOW:
        return None
    smooth = np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")
    above = np.flatnonzero(smooth >= level)
    if not len(above):
        return None
    point = curve[int(above[0]) + WINDOW - 1]
    return int(point["step"]), point.get("wall_s")


def value_at(curve: Sequence[Mapping[str, float]], quantity: str, step: int) -> float:
    """Return the smoothed curve at its last point up to a step."""
    values = [point[quantity] for point in curve if point["step"] <= step]
    return float(np.mean(values[-WINDOW:]))


def milestones(
    levels: Sequence[float], quantity: str, found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[str]:
    """Yield the lines of a table: an algorithm per row, its seeds in order in every cell."""
    shown = [_shown(level, quantity) for level in levels]
    ends = [int(run["curve"][-1]["step"]) for runs in found.values() for run in runs]
    common = min(end for end in ends if 2 * end >= max(ends))
    heads = [f"{what} to {level}" for level in shown for what in ("steps", "minutes")]
    yield (
        f"Until the training {quantity}, with exploration noise and over {WINDOW} iterations, first "
        "reaches a level; one number per seed, – where it never does; minutes after ≈ are the share of the "
        "steps in the whole time, where none were recorded on the way. "
        f"Steps per second: executed control steps over collecting and updating. At {common:,} steps: the "
        f"same smoothed {quantity}, after as many steps as every run took that was not made for far fewer, "
        "of which it is the end."
    )
    yield ""
    yield f"| algorithm | steps/s | at {common:,} steps | {' | '.join(heads)} |"
    yield "|---" * (3 + len(heads)) + "|"
    for algo, runs in found.items():
        rates = (run["curve"][-1]["step"] / run["wall"]["tune_s"] for run in runs)
        values = (value_at(run["curve"], quantity, common) for run in runs)
        cells = [_joined(f"{rate:,.0f}" for rate in rates), _joined(_shown(v, quantity) for v in values)]
        for level in levels:
            marks = [reached(run["curve"], quantity, level) for run in runs]
            cells += [_joined("–" if mark is None else f"{mark[0]:,}" for mark in marks)]
            cells.append(_joined(_minutes(run, mark) for run, mark in zip(runs, marks, strict=True)))
        yield f"| {algo} | {' | '.join(cells)} |"


def _minutes(run: Mapping[str, Any], mark: tuple[int, float | None] | None) -> str:
    """Return the minutes to a milestone; iterations take equally long, where nobody took the time."""
    if mark is None:
        return "–"
    step, seconds = mark
    if seconds is not None:
        return f"{seconds / 60:.1f}"
    return f"≈{run['wall']['tune_s'] * step / run['curve'][-1]['step'] / 60:.1f}"


def _shown(value: float, quantity: str) -> str:
    return f"{100 * value:.0f} %" if quantity == "success" else f"{value:.0f}"


def _joined(cells: Iterator[str]) -> str:
    return " / ".join(cells)
