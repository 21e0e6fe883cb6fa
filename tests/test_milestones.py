"""When a training curve first reaches a level, and what is said where it does not."""

from __future__ import annotations

from typing import Any

from benchmarks.studies.milestones import milestones, reached


def curve(values: list[float], *, timed: bool = True) -> list[dict[str, float]]:
    points = [{"step": 10.0 * (k + 1), "success": value} for k, value in enumerate(values)]
    return [point | {"wall_s": 60.0 * (k + 1)} for k, point in enumerate(points)] if timed else points


def test_a_level_is_reached_where_the_mean_of_five_points_first_is() -> None:
    rising = curve([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    assert reached(rising, "success", 0.4) == (50, 300.0)
    assert reached(rising, "success", 0.8) == (70, 420.0)
    assert reached(rising, "success", 0.9) is None
    assert reached(rising[:4], "success", 0.0) is None  # too short to be smoothed


def test_minutes_that_nobody_recorded_are_shares_of_the_whole_time() -> None:
    def run(values: list[float], timed: bool) -> dict[str, Any]:
        return {"curve": curve(values, timed=timed), "wall": {"tune_s": 90.0}}

    found = {"timed": [run([1.0] * 5, True), run([0.0] * 5, True)], "untimed": [run([1.0] * 5, False)]}
    *_, timed, untimed = milestones((0.8, 0.9), "success", found)
    assert timed == "| timed | 1 / 1 | 100 % / 0 % | 50 / – | 5.0 / – | 50 / – | 5.0 / – |"
    assert untimed == "| untimed | 1 | 100 % | 50 | ≈1.5 | 50 | ≈1.5 |"
    longer = {"a": [run([0.0] * 5 + [1.0] * 5, True)], "b": [run([0.5] * 6, True)]}
    _, _, head, _, first, second = milestones((0.8, 0.9), "success", longer)
    assert "at 60 steps" in head and "| 20 % |" in first and "| 50 % |" in second
    *_, short = milestones((0.8, 0.9), "success", longer | {"short": [run([0.0] + [1.0] * 3, True)]})
    assert "| 75 % |" in short  # the end of a run of far fewer steps
