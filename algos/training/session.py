"""State of one run while it is trained: resume, record, save, evaluate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from algos.base import Algorithm
from algos.training.loggers import MetricLogger
from algos.training.metrics import Scalars, broken, read_jsonl, read_out
from algos.training.ranks import current
from algos.training.run_directory import RunDirectory
from algos.training.run_time import RunTime
from algos.training.schedule import EvaluationSchedule, is_due
from algos.training.serialization import capture_global_rng, restore_global_rng
from algos.training.settings import TrainerSettings
from algos.training.signals import StopSignals
from policies.errors import BurnishError, CheckpointError, TrainingError
from policies.policy import Policy

_log = logging.getLogger(__name__)

Evaluator = Callable[[Policy, int], Mapping[str, float]]
"""(policy, step) -> metrics; names without a component are logged as `eval/<name>`."""


@dataclass
class Member:
    """One of several runs that are trained together; attributes as in `train`."""

    algorithm: Algorithm
    run: RunDirectory
    evaluator: Evaluator | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    amendment: tuple[Mapping[str, Any], Sequence[str]] | None = None


class Session:
    """State of one run: last logged, saved and evaluated steps. Nothing is written before `rewind`.

    Args:
        member: The run.
        settings: Intervals.
        step: Checkpoint to resume from; None: start.
        names: Names of the runs trained together; None: a single run.
        clock: Time [s].
    """

    def __init__(
        self,
        member: Member,
        settings: TrainerSettings,
        step: int | None,
        names: list[str] | None,
        clock: Callable[[], float],
    ) -> None:
        self.member, self.settings, self._clock = member, settings, clock
        self.algorithm, self.run = member.algorithm, member.run
        self.loggers: list[MetricLogger] = []
        self.fresh: dict[str, float] = {}  # metrics not displayed yet
        self.evaluations, self._time = EvaluationSchedule(self.algorithm, settings), RunTime(clock)
        self._processes = [(0, current().world)]  # number of processes from each step on
        self.saved, self._metrics_bytes, self._names = 0, 0, names
        if step is not None:
            self._load(step)

    @property
    def is_finished(self) -> bool:
        return self.algorithm.progress >= self.algorithm.total

    def _load(self, step: int) -> None:
        state = self.run.load_training_state(step)
        try:
            self.algorithm.load_state_dict(state["algorithm"])
            restore_global_rng(state["global_rng"])
            trainer = state["trainer"]
            self.evaluations.load_state_dict(trainer)
            self._time.load_state_dict(trainer)
            self._metrics_bytes = trainer["metrics_bytes"]
            self._count_processes(step, trainer.get("processes", [(0, 1)]))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, BurnishError):
                raise
            reason = str(error).rstrip(".")
            raise CheckpointError(
                f"checkpoint {step} of {self.run.path} does not fit this configuration: {reason}. "
                f"Resume with the configuration and data that the run was started with."
            ) from error
        self.saved = step

    def _count_processes(self, step: int, before: Sequence[tuple[int, int]]) -> None:
        """Record a change of the number of processes, after which numbers differ in their last bits."""
        self._processes, (_, world) = list(before), before[-1]
        if world != (now := current().world):
            self._processes.append((step, now))
            _log.warning(
                "the run used %d processes, now %d: from here on, numbers differ in their last bits from a "
                "run that was not stopped.", world, now,
            )  # fmt: skip

    def rewind(self) -> None:
        """Remove results of an earlier attempt after the resume checkpoint."""
        if not self.saved:
            self.run.rewind(None)
        elif not (self.is_finished and (self.member.evaluator is None or self._adopt_evaluation())):
            self.run.rewind(self.saved, metrics_bytes=self._metrics_bytes)
            self._adopt_evaluation()

    def _adopt_evaluation(self) -> bool:
        """Return whether the last row evaluates the current step, which then counts as evaluated."""
        rows = read_jsonl(self.run.metrics_path)
        last = rows[-1] if rows else {}
        if last.get("step") != self.saved or not any(name.startswith("eval/") for name in last):
            return False
        self.evaluations.evaluated = self.saved
        self._time.adopt(last)
        return True

    def amend(self) -> None:
        """Record a changed configuration, unless the run is longer than it requests."""
        if self.member.amendment is not None and self.algorithm.progress <= self.algorithm.total:
            self.run.amend(*self.member.amendment)

    def log_if_finished(self) -> None:
        """Log how to continue a finished run."""
        algorithm = self.algorithm
        if 0 < algorithm.total <= algorithm.progress == self.saved:
            budget, unit = getattr(algorithm, "budget", None), algorithm.unit.replace("_", " ")
            advice = f"raise {budget}" if budget else f"start a new run from its policy: init={self.run.path}"
            done = algorithm.progress
            _log.info("%s is already finished: %d %s. To go on, %s.", self.run.path, done, unit, advice)

    def report(self, before: int, values: Scalars) -> None:
        """Record an iteration that began at `before` units.

        Raises:
            TrainingError: If a metric is not finite.
        """
        bad, is_rare = broken(values), any(name.startswith(("validation/", "refit/")) for name in values)
        if bad or is_rare or is_due(self.algorithm, before, self.settings.log_every or 1):
            self._record(values)
        if bad:
            got = ", ".join(str(values[name]) for name in bad)
            raise self._diverged(f"{', '.join(bad)} must be finite; got {got}")

    def checkpoint_if_due(self) -> bool:
        """Save at multiples of `checkpoint_every` and at the end; return whether saved."""
        if is_now := is_due(self.algorithm, self.saved, self.settings.checkpoint_every):
            self.checkpoint()
        return is_now

    @property
    def is_evaluation_due(self) -> bool:
        return self.member.evaluator is not None and self.evaluations.is_due

    def evaluate(self, stop: StopSignals) -> None:
        """Evaluate the current step; a signal aborts the evaluation."""
        evaluator, algorithm, began = self.member.evaluator, self.algorithm, self._clock()
        assert evaluator is not None
        with stop.immediate():
            result = evaluator(algorithm.snapshot(), algorithm.progress)
        self.evaluations.add(self._clock() - began)
        named = {name if "/" in name else f"eval/{name}": value for name, value in result.items()}
        self._record(read_out(named))

    def checkpoint(self) -> None:
        """Save the current state, unless it is saved already or nothing was done."""
        algorithm, step = self.algorithm, self.algorithm.progress
        if step == self.saved:
            return
        policy = algorithm.snapshot()
        if not all_finite(policy):
            raise self._diverged("the weights must be finite; they are not")
        own = algorithm.state_dict()
        current().require_equal(own, f"weights and random states after {step} {algorithm.unit}")
        is_alone = self._processes == [(0, 1)]
        state = {
            "algorithm": own,
            "global_rng": capture_global_rng(),
            "trainer": {
                **self.evaluations.state_dict(),
                **self._time.state_dict(),
                "metrics_bytes": self.run.metrics_bytes,
                "together": self._names,
                **({} if is_alone else {"processes": self._processes}),
            },
        }
        facts = {"unit": algorithm.unit, **self.member.provenance}
        facts |= {} if is_alone else {"processes": self._processes}
        self.run.save_checkpoint(step, policy, state, provenance=facts)
        self.saved = step

    def _record(self, values: Scalars) -> None:
        row, step = values | self._time.metrics, self.algorithm.progress
        self.run.log(row, step)
        for logger in list(self.loggers):
            if not survived(logger, partial(logger.write, row, step)):
                self.loggers.remove(logger)
        self.fresh |= row

    @property
    def elapsed_s(self) -> float:
        """Time so far [s], over all attempts, with evaluations."""
        return self._time.state_dict()["elapsed_s"]

    def _diverged(self, what: str) -> TrainingError:
        saved = f"{self.run.path} has no earlier checkpoint."
        if self.saved:
            saved = f"The last good checkpoint is {self.run.checkpoint_path(self.saved)}."
        return TrainingError(
            f"{what} after {self.algorithm.progress} {self.algorithm.unit}. {saved} Lower the learning rate "
            f"or clip gradients."
        )


def survived(logger: MetricLogger, call: Callable[[], None]) -> bool:
    """Call a tracker; return whether it worked, and warn if not: a run does not end with its trackers."""
    try:
        call()
    except Exception as error:
        _log.warning(
            "%s failed (%s: %s) and records no more; metrics.jsonl has every row.",
            type(logger).__name__, type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def all_finite(policy: Policy) -> bool:
    """Return whether every weight and statistic of a policy is finite."""
    tensors: Sequence[torch.Tensor] = [v for v in policy.state_dict().values() if v.is_floating_point()]
    return bool(torch.stack([v.isfinite().all() for v in tensors]).all()) if tensors else True
