"""Training loop of every algorithm: advance, log, checkpoint, evaluate, stop cleanly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from algos.base import Algorithm, Metrics
from algos.training.loggers import MetricLogger, open_logger
from algos.training.metrics import Scalars, broken, read_jsonl, read_out
from algos.training.processor_time import cpu_s
from algos.training.progress import LONG_ITERATION_S, LONG_S, Bar, Lines, announced, open_display, planned
from algos.training.ranks import current
from algos.training.run_directory import RunDirectory
from algos.training.serialization import capture_global_rng, restore_global_rng
from algos.training.settings import TrainerSettings
from algos.training.signals import Interrupted, StopSignals
from policies.errors import BurnishError, CheckpointError, TrainingError, WorkerError
from policies.policy import Policy

_log = logging.getLogger(__name__)

Evaluator = Callable[[Policy, int], Mapping[str, float]]
"""(policy, step) -> metrics; names without a component are logged as `eval/<name>`."""

EVALUATION_SHARE = 0.2  # of the time of a run, at most, for evaluations that `eval_every` does not fix
_UNKNOWN_S = 2.0  # duration [s] assumed for an evaluation before the first
_TIMED_ITERATION = 2  # its speed predicts the length of the run: the first iteration includes warm-up


def train(
    algorithm: Algorithm,
    run: RunDirectory,
    settings: TrainerSettings | None = None,
    *,
    evaluator: Evaluator | None = None,
    progress: bool | None = None,
    provenance: Mapping[str, Any] | None = None,
    amendment: tuple[Mapping[str, Any], Sequence[str]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train to the end, from the newest checkpoint of the run if present.

    A resumed run takes the same steps as an uninterrupted one, bitwise on the CPU and in as many processes.
    The first SIGINT or SIGTERM stops the run after the iteration, with a checkpoint and `Interrupted`; the
    second stops immediately. The caller closes the algorithm. Of several processes (see
    `algos.training.ranks`), all call this; those that do not write have a `FollowedRun` and no evaluator.

    Args:
        algorithm: Built from the configuration of the run.
        run: Run directory for all output.
        settings: Intervals.
        evaluator: Called with the exported policy, after the checkpoint of its step.
        progress: True: bar; False: log lines; None: bar on a terminal.
        provenance: Facts for the model card of every checkpoint.
        amendment: Changed configuration and overrides of a resumed run; recorded after its checkpoint has
            been accepted, unless the run is longer than they request.
        clock: Returns the time [s], which decides when evaluations without `eval_every` are affordable.

    Raises:
        TrainingError: If a loss, a norm or a weight is not finite; earlier checkpoints are unchanged.
        CheckpointError: If another process holds the run, or its checkpoint does not fit.
        Interrupted: After a signal.
    """
    member = Member(algorithm, run, evaluator, provenance or {}, amendment)
    title = run.path.name
    train_together(
        [member], lambda: [algorithm.advance()], settings, title=title, progress=progress, clock=clock
    )


@dataclass
class Member:
    """One of several runs that are trained together; attributes as in `train`."""

    algorithm: Algorithm
    run: RunDirectory
    evaluator: Evaluator | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    amendment: tuple[Mapping[str, Any], Sequence[str]] | None = None


def train_together(
    members: Sequence[Member],
    advance: Callable[[], Sequence[Metrics]],
    settings: TrainerSettings | None = None,
    *,
    title: str,
    progress: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train several runs of equal length with one `advance` call for all; otherwise as `train`.

    After a kill between two of their checkpoints, they resume from the latest common one. A non-finite loss
    or weight in one run stops all. Displayed metrics are means over the runs.

    Args:
        members: The runs.
        advance: Advances the runs with the fewest steps by one iteration; returns metrics per run, empty for
            the others.
        settings: Intervals.
        title: Title of the bar.
        progress: See `train`.
        clock: See `train`.
    """
    settings, ranks = settings or TrainerSettings(), current()
    if ranks.rank:
        settings = replace(settings, tensorboard=False, loggers=())
    with ExitStack() as held:
        for member in members:
            held.enter_context(member.run.claim())
        names = sorted(member.run.path.name for member in members) if len(members) > 1 else None
        steps = ranks.share(_resume_steps(members, names) if ranks.rank == 0 else [])
        sessions = [
            _Session(member, settings, step, names, clock)
            for member, step in zip(members, steps, strict=True)
        ]
        for session in sessions:
            session.rewind()
        for session in sessions:
            session.amend()
        loop = _Loop(sessions, advance, clock)
        with loop.opened(title, progress), StopSignals() as stop:
            loop.train(stop)


def _resume_steps(members: Sequence[Member], names: list[str] | None) -> list[int | None]:
    """Return the checkpoint from which each run resumes; None: from the start.

    The checkpoint is the newest, unless a run trained with it has only the previous one, or none: then the
    process was killed while writing checkpoints.
    """
    newest = [member.run.latest() for member in members]
    slowest = None if None in newest else min(step for step in newest if step is not None)
    steps = []
    for run, step in zip((member.run for member in members), newest, strict=True):
        before = next(iter(run.checkpoints()[-2:-1]), None)
        is_ahead = step != slowest == before
        if is_ahead and run.load_training_state(step)["trainer"].get("together") == names:
            _log.info("%s resumes from %s instead of %s, as all runs have it.", run.path, slowest or 0, step)
            step = slowest
        steps.append(step)
    return steps


class _Loop:
    """Training loop of runs that advance together."""

    def __init__(
        self,
        sessions: Sequence[_Session],
        advance: Callable[[], Sequence[Metrics]],
        clock: Callable[[], float],
    ) -> None:
        self.sessions, self._advance, self._clock = sessions, advance, clock
        self._display: Bar | Lines | None = None
        self._iterations, self._iteration_s = 0, 0.0
        self._is_estimated = False  # whether the length of the run was found to be long, or not

    @property
    def _slowest(self) -> Algorithm:
        return min((session.algorithm for session in self.sessions), key=lambda one: one.progress)

    def train(self, stop: StopSignals) -> None:
        """Train to the end, or to a signal."""
        for session in self.sessions:
            session.log_if_finished()
        while True:
            if stop.number is None:
                if any([session.checkpoint_if_due() for session in self.sessions]):
                    self._remove_old_checkpoints()
                with suppress(Interrupted):
                    self._evaluate(stop)
            if (number := current().first(stop.number)) is not None:  # a signal that reached any process
                self._save_and_stop(number)
            self._show()
            if all(session.is_finished for session in self.sessions):
                return
            self._iterate(stop)
            self._show()

    def _evaluate(self, stop: StopSignals) -> None:
        """Evaluate the runs that are due; the display does not count this time as training."""
        due = [session for session in self.sessions if session.is_evaluation_due]
        if due and not self._is_affordable(due):
            for session in due:
                session.skip_evaluation()
            return
        if not due:
            return
        began = self._clock()
        with announced("the evaluation") if self._display is not None else nullcontext():
            for session in due:
                session.evaluate(stop)
        if self._display is not None:
            self._display.skip(self._clock() - began)

    def _is_affordable(self, due: Sequence[_Session]) -> bool:
        """Return whether evaluations take place: fixed and last ones do, others within their share of time.

        The time of all runs counts, since they take turns.
        """
        if any(session.is_evaluation_fixed for session in due):
            return True
        spent = sum(session.evaluation_s for session in self.sessions)
        expected = sum(session.last_evaluation_s for session in due)
        return is_affordable(due[0].elapsed() - spent, spent, expected)

    def _save_and_stop(self, number: int) -> None:
        for session in self.sessions:
            session.checkpoint()
        self._remove_old_checkpoints()
        raise Interrupted(number)

    def _remove_old_checkpoints(self) -> None:
        """Remove old checkpoints once all runs have the newest, so that a common one always exists."""
        for session in self.sessions:
            if (count := session.settings.keep_checkpoints) is not None:
                session.run.keep_newest(count)

    def _iterate(self, stop: StopSignals) -> None:
        before, began = [session.algorithm.progress for session in self.sessions], self._clock()
        is_first, is_long = self._iterations == 0, self._iteration_s > LONG_ITERATION_S
        what = f"iteration {self._iterations + 1}" + (
            "" if is_first else f" (the last took {self._iteration_s:.0f} s)"
        )
        is_told = (is_first or is_long) and self._display is not None
        try:
            with announced(what, stage=lambda: self._stage(before, began)) if is_told else nullcontext():
                found = self._advance()
        except WorkerError as error:
            if stop.number is None:
                raise
            # Workers received the signal too: the iteration cannot be finished.
            raise Interrupted(stop.number) from error
        self._iterations += 1
        self._iteration_s = self._clock() - began
        if self._iterations == _TIMED_ITERATION or self._iteration_s > LONG_ITERATION_S:
            self._log_if_long(before, began)
            self._is_estimated = True
        errors = []
        for session, done, values in zip(self.sessions, before, found, strict=True):
            if session.algorithm.progress > done:
                try:
                    session.report(done, current().average(read_out(values)))
                except TrainingError as error:  # raised after all runs are recorded
                    errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else TrainingError(" ".join(map(str, errors)))

    def _stage(self, before: Sequence[int], began: float) -> str:
        """Return where the present iteration is; the first steps already tell whether the run is long."""
        algorithm = self._slowest
        self._log_if_long(before, began)
        done = f"{algorithm.progress:,} of {algorithm.total:,} {algorithm.unit.replace('_', ' ')}"
        return getattr(algorithm, "stage", "") or done

    def _log_if_long(self, before: Sequence[int], began: float) -> None:
        """Log once how long the run takes, if that is long, from the units done since `began`."""
        algorithm, seconds = self._slowest, self._clock() - began
        units, left = algorithm.progress - min(before), algorithm.total - algorithm.progress
        if not self._is_estimated and units > 0 and seconds * left > LONG_S * units:
            self._is_estimated = True
            rate, budget = units / max(seconds, 1e-9), getattr(algorithm, "budget", None) or ""
            _log.info("%s", planned(algorithm.total, algorithm.unit, rate, budget))

    def _show(self) -> None:
        """Display the metrics recorded since the last call, as means over the runs."""
        rows = [session.fresh for session in self.sessions if session.fresh]
        if not rows or self._display is None:
            return
        names = [name for name in rows[0] if all(name in row for row in rows)]
        values = {name: sum(row[name] for row in rows) / len(rows) for name in names}
        self._display.show(self._slowest.progress, self._slowest.total, values)
        for session in self.sessions:
            session.fresh = {}

    @contextmanager
    def opened(self, title: str, progress: bool | None) -> Iterator[None]:
        """Hold the display and the trackers open."""
        first, done = self.sessions[0].algorithm, self._slowest.progress
        with ExitStack() as held:
            for session in self.sessions:
                for name in session.settings.trackers:
                    logger = open_logger(name, session.run, first_step=session.algorithm.progress)
                    session.loggers.append(logger)
                    held.callback(logger.close)
            self._display = open_display(title, first.unit, first.total, done, bar=progress)
            held.callback(self._display.close)
            yield


class _Session:
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
        self.elapsed_s, self.started = 0.0, clock()
        self.cpu_s, self._cpu_started = 0.0, cpu_s()
        self.evaluation_s, self.last_evaluation_s = 0.0, _UNKNOWN_S
        self._has_skipped = False
        self._processes = [(0, current().world)]  # number of processes from each step on
        self.evaluated = -1 if settings.eval_first else 0
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
            self.evaluated, self.elapsed_s = trainer["evaluated"], trainer["elapsed_s"]
            self.cpu_s, self._metrics_bytes = trainer.get("cpu_s", 0.0), trainer["metrics_bytes"]
            self.evaluation_s = trainer.get("evaluation_s", 0.0)
            self.last_evaluation_s = trainer.get("last_evaluation_s", _UNKNOWN_S)
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
        self.evaluated = self.saved
        self.elapsed_s = max(self.elapsed_s, last.get("time/elapsed_s") or 0.0)
        self.cpu_s = max(self.cpu_s, last.get("time/cpu_s") or 0.0)
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
        now, bad = self.algorithm.progress, broken(values)
        if bad or _due(before, now, self.settings.log_every or 1, self.algorithm.total):
            self._record(values)
        if bad:
            got = ", ".join(str(values[name]) for name in bad)
            raise self._diverged(f"{', '.join(bad)} must be finite; got {got}")

    def checkpoint_if_due(self) -> bool:
        """Save at multiples of `checkpoint_every` and at the end; return whether saved."""
        is_due = self._is_due(self.saved, self.settings.checkpoint_every)
        if is_due:
            self.checkpoint()
        return is_due

    @property
    def is_evaluation_due(self) -> bool:
        due = self._is_due(self.evaluated, self.settings.eval_every)
        return self.member.evaluator is not None and due

    @property
    def is_evaluation_fixed(self) -> bool:
        """Whether an evaluation that is due takes place however long it takes."""
        return self.settings.eval_every is not None or self.is_finished or self.evaluated < 0

    def skip_evaluation(self) -> None:
        """Leave out an evaluation that is due; the first one left out is logged."""
        self.evaluated = self.algorithm.progress
        if not self._has_skipped:
            _log.info(
                "evaluations before the end take at most %.0f %% of the time, so this one is left out; "
                "trainer.eval_every=<n> fixes their steps.", 100 * EVALUATION_SHARE,
            )  # fmt: skip
        self._has_skipped = True

    def evaluate(self, stop: StopSignals) -> None:
        """Evaluate the current step; a signal aborts the evaluation."""
        evaluator, algorithm, began = self.member.evaluator, self.algorithm, self._clock()
        assert evaluator is not None
        with stop.immediate():
            result = evaluator(algorithm.snapshot(), algorithm.progress)
        self.last_evaluation_s = self._clock() - began
        self.evaluation_s += self.last_evaluation_s
        self.evaluated = algorithm.progress
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
                "evaluated": self.evaluated,
                "elapsed_s": self.elapsed(),
                "cpu_s": self.cpu(),
                "evaluation_s": self.evaluation_s,
                "last_evaluation_s": self.last_evaluation_s,
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
        row = {**values, "time/elapsed_s": self.elapsed(), "time/cpu_s": self.cpu()}
        step = self.algorithm.progress
        self.run.log(row, step)
        for logger in self.loggers:
            logger.write(row, step)
        self.fresh |= row

    def elapsed(self) -> float:
        """Return the time so far [s], over all attempts, with evaluations."""
        return self.elapsed_s + self._clock() - self.started

    def cpu(self) -> float:
        """Return the processor time so far [s], over all attempts, with evaluations and workers.

        It is that of the whole process, also if several runs are trained in it; of several processes
        (`algos.training.ranks`), of the first.
        """
        return self.cpu_s + cpu_s() - self._cpu_started

    def _is_due(self, before: int, every: int | None) -> bool:
        total = self.algorithm.total
        return _due(before, self.algorithm.progress, max(total // 10, 1) if every is None else every, total)

    def _diverged(self, what: str) -> TrainingError:
        saved = f"{self.run.path} has no earlier checkpoint."
        if self.saved:
            saved = f"The last good checkpoint is {self.run.checkpoint_path(self.saved)}."
        return TrainingError(
            f"{what} after {self.algorithm.progress} {self.algorithm.unit}. {saved} Lower the learning rate "
            f"or clip gradients."
        )


def is_affordable(training_s: float, spent_s: float, expected_s: float) -> bool:
    """Return whether one more evaluation keeps all of them within `EVALUATION_SHARE` of the time.

    Args:
        training_s: Time of training so far [s].
        spent_s: Time of evaluations so far [s].
        expected_s: Time of one more [s].
    """
    total = spent_s + expected_s
    return total <= EVALUATION_SHARE * (training_s + total)


def all_finite(policy: Policy) -> bool:
    """Return whether every weight and statistic of a policy is finite."""
    tensors: Sequence[torch.Tensor] = [v for v in policy.state_dict().values() if v.is_floating_point()]
    return bool(torch.stack([v.isfinite().all() for v in tensors]).all()) if tensors else True


def _due(before: int, now: int, every: int, total: int) -> bool:
    """Return whether a multiple of `every` (0: none) or the end lies after `before` (below 0: True)."""
    if now <= before:
        return False
    return before < 0 or now >= total or (every > 0 and now // every > before // every)
