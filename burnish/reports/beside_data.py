"""A cloned policy beside its data: the last evaluation, and whether evaluations still rose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from algos.training.run_directory import RunDirectory
from burnish.runs.best_evaluation import CheckpointEvaluation, alike_evaluations
from burnish.runs.locate import locate
from envs.evaluation.comparison import format_interval

STILL_RISING = "still rising: more algo.steps may help"


def beside_data(directory: RunDirectory) -> str | None:
    """Return a line that compares the last evaluation of a run with the episodes that it was cloned from.

    None without evaluation, or where the data hold nothing in the unit of the task.
    """
    alike = [] if directory.latest() is None else alike_evaluations(directory)
    if not alike:
        return None
    last, data = alike[-1], locate(directory.path, "run").provenance().get("data", {})
    if last.quantity not in data:
        return None
    recorded, _ = format_interval(last.quantity, {"value": data[last.quantity]})
    own, around = format_interval(last.quantity, last.summary[last.quantity])
    halfway = _halfway(alike)
    rises = halfway is not None and is_above(last, halfway)
    return (
        f"{last.quantity} of the data {recorded} (mean of {data['episodes']} episodes), of the policy {own} "
        f"({around}; {last.summary['episodes']} episodes){f'; {STILL_RISING}' if rises else ''}"
    )


def _halfway(alike: Sequence[CheckpointEvaluation]) -> CheckpointEvaluation | None:
    """Return the evaluation nearest to half of the steps of the last; None without one."""
    end = alike[-1].step
    between = [one for one in alike if 0.25 * end <= one.step <= 0.75 * end]
    return min(between, key=lambda one: abs(one.step - end / 2), default=None)


def is_above(one: CheckpointEvaluation, other: CheckpointEvaluation) -> bool:
    """Whether an evaluation exceeds another by more than the half-widths of both intervals, added in squares.

    False where one of them has no interval.
    """
    found = [each.summary[one.quantity] for each in (one, other)]
    if not all("low" in each for each in found):
        return False
    noise = math.hypot(*((each["high"] - each["low"]) / 2 for each in found))
    return bool(found[0]["value"] - found[1]["value"] > noise)
