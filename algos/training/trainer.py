"""Training loop of every algorithm: advance, log, checkpoint, evaluate, stop cleanly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from algos.base import Algorithm, Metrics
from algos.training.loggers import open_logger
from algos.training.metrics import read_out
from algos.training.progress import LONG_ITERATION_S, LONG_S, Bar, Lines, announced, open_display, planned
from algos.training.ranks import current
from algos.training.run_directory import RunDirectory
from algos.training.schedule import are_affordable
from algos.training.session import Evaluator, Member, Session, survived
from algos.training.settings import TrainerSettings
from algos.training.signals import Interrupted, StopSignals
from policies.errors import TrainingError, WorkerError

_log = logging.getLogger(__name__)

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
        settings = replace(settings, loggers=())
    with ExitStack() as held:
        for member in members:
            held.enter_context(member.run.claim())
        names = sorted(member.run.path.name for member in members) if len(members) > 1 else None
        steps = ranks.share(_resume_steps(members, names) if ranks.rank == 0 else [])
        sessions = [
            Session(member, settings, step, names, clock) for member, step in zip(members, steps, strict=True)
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
        sessions: Sequence[Session],
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
            if (number := current().first(stop.number)) is None:  # a signal that reached any process
                if any([session.checkpoint_if_due() for session in self.sessions]):
                    self._remove_old_checkpoints()
                with suppress(Interrupted):
                    self._evaluate(stop)
                number = current().first(stop.number)
            if number is not None:
                self._save_and_stop(number)
            self._show()
            if all(session.is_finished for session in self.sessions):
                return
            self._iterate(stop)
            self._show()

    def _evaluate(self, stop: StopSignals) -> None:
        """Evaluate the runs that are due; the display does not count this time as training."""
        due = [session for session in self.sessions if session.is_evaluation_due]
        if not due:
            return
        spent_s = sum(session.evaluations.spent_s for session in self.sessions)
        if not are_affordable([one.evaluations for one in due], due[0].elapsed_s, spent_s):
            for session in due:
                session.evaluations.skip()
            return
        began = self._clock()
        with announced("the evaluation") if self._display is not None else nullcontext():
            for session in due:
                session.evaluate(stop)
        if self._display is not None:
            self._display.skip(self._clock() - began)

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
        total = getattr(algorithm, "expected", algorithm.total)
        units, left = algorithm.progress - min(before), total - algorithm.progress
        if not self._is_estimated and units > 0 and seconds * left > LONG_S * units:
            self._is_estimated = True
            rate, budget = units / max(seconds, 1e-9), getattr(algorithm, "budget", None) or ""
            _log.info("%s", planned(total, algorithm.unit, rate, budget))

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
                for name in session.settings.loggers:
                    logger = open_logger(name, session.run, first_step=session.algorithm.progress)
                    session.loggers.append(logger)
                    held.callback(survived, logger, logger.close)
            self._display = open_display(title, first.unit, first.total, done, bar=progress)
            held.callback(self._display.close)
            yield
