"""When a run is logged, saved and evaluated: at multiples of an interval, evaluations also by their time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from algos.base import Algorithm
from algos.training.settings import TrainerSettings

_log = logging.getLogger(__name__)

EVALUATION_SHARE = 0.2  # of the time of a run, at most, for evaluations that `eval_every` does not fix
_UNKNOWN_S = 2.0  # duration [s] assumed for an evaluation before the first


class EvaluationSchedule:
    """Evaluations of one run.

    Args:
        algorithm: Its progress and length decide.
        settings: `eval_every` and `eval_first`.

    Attributes:
        evaluated: Step of the last evaluation, or of one left out; -1: one is due before the first step.
        spent_s: Time of all evaluations [s].
        last_s: Time of the last one [s].
    """

    def __init__(self, algorithm: Algorithm, settings: TrainerSettings) -> None:
        self._algorithm, self._every = algorithm, settings.eval_every
        self.evaluated = -1 if settings.eval_first else 0
        self.spent_s, self.last_s = 0.0, _UNKNOWN_S
        self._has_skipped = False

    @property
    def is_due(self) -> bool:
        return is_due(self._algorithm, self.evaluated, self._every)

    @property
    def is_fixed(self) -> bool:
        """Whether an evaluation that is due takes place however long it takes."""
        is_last = self._algorithm.progress >= self._algorithm.total
        return self._every is not None or is_last or self.evaluated < 0

    def skip(self) -> None:
        """Leave out an evaluation that is due; the first one left out is logged."""
        self.evaluated = self._algorithm.progress
        if not self._has_skipped:
            _log.info(
                "evaluations before the end take at most %.0f %% of the time, so this one is left out; "
                "trainer.eval_every=<n> fixes their steps.", 100 * EVALUATION_SHARE,
            )  # fmt: skip
        self._has_skipped = True

    def add(self, seconds: float) -> None:
        """Count an evaluation of the present step."""
        self.last_s = seconds
        self.spent_s += seconds
        self.evaluated = self._algorithm.progress

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {
            "evaluated": self.evaluated,
            "evaluation_s": self.spent_s,
            "last_evaluation_s": self.last_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, of this or an earlier version."""
        self.evaluated = state["evaluated"]
        self.spent_s = state.get("evaluation_s", 0.0)
        self.last_s = state.get("last_evaluation_s", _UNKNOWN_S)


def are_affordable(due: Sequence[EvaluationSchedule], elapsed_s: float, spent_s: float) -> bool:
    """Return whether evaluations take place: fixed and last ones do, others within their share of time.

    Args:
        due: Schedules of the runs to evaluate.
        elapsed_s: Time so far [s], evaluations included.
        spent_s: Time of the evaluations of all runs so far [s]; they take turns.
    """
    total_s = spent_s + sum(one.last_s for one in due)
    return any(one.is_fixed for one in due) or total_s <= EVALUATION_SHARE * (elapsed_s - spent_s + total_s)


def is_due(algorithm: Algorithm, before: int, every: int | None) -> bool:
    """Return whether a multiple of `every` or the end lies after `before`, up to the present step.

    Args:
        algorithm: Its progress is the present step.
        before: Step of the last time; below 0: always due.
        every: Units; None: a tenth of the run; 0: at the end only.
    """
    now, total = algorithm.progress, algorithm.total
    every = max(total // 10, 1) if every is None else every
    if now <= before:
        return False
    return before < 0 or now >= total or (every > 0 and now // every > before // every)
