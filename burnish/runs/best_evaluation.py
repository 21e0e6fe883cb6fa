"""The last and the best evaluation during training.

The last evaluation is the result. The best one is selected on its own evaluation episodes and needs the
simulator during training, so it is biased upwards; the difference measures the stability of training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from algos.training.run_directory import EvalFile, RunDirectory
from envs.evaluation.evaluate import Evaluation
from policies.errors import BurnishError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointEvaluation:
    """A checkpoint and its evaluation during training."""

    step: int
    summary: dict[str, Any]
    quantity: str  # main quantity of the task

    @property
    def value(self) -> float:
        return float(self.summary[self.quantity]["value"])


@dataclass(frozen=True)
class BestEvaluation:
    """Last and best evaluation, and the number of evaluations."""

    last: CheckpointEvaluation
    best: CheckpointEvaluation
    count: int

    def __str__(self) -> str:
        unit, scale = (" %", 100.0) if self.last.quantity == "success" else ("", 1.0)
        last, best = (f"{scale * one.value:.4g}{unit} at step {one.step}" for one in (self.last, self.best))
        episodes = self.last.summary["episodes"]
        return f"last {last}; best of {self.count} on the way {best} ({episodes} episodes each)"


def best_evaluation(directory: RunDirectory) -> BestEvaluation | None:
    """Return both evaluations of a run, by success if defined, else by return; None without any.

    Counted are evaluations during training with the protocol of the last one.
    """
    alike = alike_evaluations(directory)
    return BestEvaluation(alike[-1], max(alike, key=lambda one: one.value), len(alike)) if alike else None


def alike_evaluations(directory: RunDirectory) -> list[CheckpointEvaluation]:
    """Return the evaluations during training with the protocol of the last one, by step."""
    found = [
        CheckpointEvaluation(file.step, content["summary"], one.quantity)
        for file, content, one in read_evaluations(directory)
        if file.is_of_training
    ]
    found.sort(key=lambda evaluation: evaluation.step)
    return [one for one in found if one.summary["protocol_hash"] == found[-1].summary["protocol_hash"]]


def read_evaluations(directory: RunDirectory) -> Iterator[tuple[EvalFile, dict[str, Any], Evaluation]]:
    """Yield file, content and evaluation of those of a run; damaged ones are left out with a warning."""
    for file in directory.evals():
        try:
            content = json.loads(file.path.read_text(encoding="utf-8"))
            if not {"protocol", "summary", "rows"} <= set(content):
                raise ValueError("it holds no evaluation")
            if file.is_of_training and not {"protocol_hash", "episodes"} <= set(content["summary"]):
                raise ValueError("its summary lacks protocol_hash or episodes")
            evaluation = Evaluation.from_json(content)
            float(content["summary"][evaluation.quantity]["value"])
        except (BurnishError, OSError, TypeError, ValueError, LookupError) as error:
            _log.warning("%s is damaged (%s) and is left out. Restore or remove it.", file.path, error)
            continue
        yield file, content, evaluation
