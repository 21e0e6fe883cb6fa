"""Training loop of every algorithm: advance, log, checkpoint, evaluate, stop cleanly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from algos.base import Algorithm, Metrics
from algos.training.metrics import Scalars, TensorBoardWriter, Writer, broken, read_jsonl, read_out
from algos.training.progress import LONG_S, Display, announced, open_display, planned
from algos.training.run_directory import RunDirectory
from algos.training.serialization import capture_global_rng, restore_global_rng
from algos.training.settings import TrainerSettings
from algos.training.signals import Interrupted, StopSignals
from policies.errors import BurnishError, CheckpointError, TrainingError, WorkerError
from policies.policy import Policy

_log = logging.getLogger(__name__)

Evaluator = Callable[[Policy, int], Mapping[str, float]]
"""(policy, step) -> metrics; names without a component are logged as `eval/<name>`."""


SAID_AFTER = 2
"""Iterations after which a long run is announced."""


def train(
    algorithm: Algorithm,
    run: RunDirectory,
    settings: TrainerSettings | None = None,
    *,
    evaluator: Evaluator | None = None,
    progress: bool | None = None,
    provenance: Mapping[str, Any] | None = None,
    amendment: tuple[Mapping[str, Any], Sequence[str]] | None = None,
) -> None:
    """Train to the end, from the newest checkpoint of the run if present.

    A resumed run takes the same steps as an uninterrupted one, bitwise on the CPU. The first SIGINT or
    SIGTERM stops the run after the iteration, with a checkpoint and `Interrupted`; the second stops
    immediately. The caller closes the algorithm.

    Args:
        algorithm: Built from the configuration of the run.
        run: Run directory for all output.
        settings: Intervals.
        evaluator: Called with the exported policy, after the checkpoint of its step.
        progress: True: bar; False: log lines; None: bar on a terminal.
        provenance: Facts for the model card of every checkpoint.
        amendment: Changed configuration and overrides of a resumed run; recorded after its checkpoint has
            been accepted, unless the run is longer than they request.

    Raises:
        TrainingError: If a loss, a norm or a weight is not finite; earlier checkpoints are unchanged.
        CheckpointError: If another process holds the run, or its checkpoint does not fit.
        Interrupted: After a signal.
    """
    member = Member(algorithm, run, evaluator, provenance or {}, amendment)
    train_together([member], lambda: [algorithm.advance()], settings, title=run.path.name, progress=progress)


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
) -> None:
    """Train several runs of equal length with one `advance` call for all; otherwise as `train`.

    After a kill between two of their checkpoints, they resume from the latest common one. A non-finite loss
    or weight in one run stops all.

    Args:
        members: The runs.
        advance: Advances the runs with the fewest steps by one iteration; returns metrics per run, empty for
            the others.
        settings: Intervals.
        title: Title of the bar.
        progress: See `train`; displayed metrics are means over the runs.

    Raises:
        TrainingError: See `train`.
        CheckpointError: See `train`.
        Interrupted: See `train`.
    """
    settings = settings or TrainerSettings()
    with ExitStack() as held:
        for member in members:
            held.enter_context(member.run.claim())
        sessions = [_Session(member, settings, *place) for member, place in _places(members)]
        for session in sessions:
            session.rewind()
        for member, session in zip(members, sessions, strict=True):
            if member.amendment is not None and not session.is_beyond:
                member.run.amend(*member.amendment)
        group = _Group(sessions, advance)
        with group.opened(title, progress), StopSignals() as stop:
            group.train(stop)


def _places(members: Sequence[Member]) -> Iterator[tuple[Member, tuple[int | None, list[str] | None]]]:
    """Yield for every run its resume checkpoint (None: start) and the runs trained with it.

    The checkpoint is the newest, unless a run trained with it has only the previous one, or none: then the
    process was killed while writing checkpoints.
    """
    company = sorted(member.run.path.name for member in members) if len(members) > 1 else None
    newest = [member.run.latest() for member in members]
    slowest = None if None in newest else min(step for step in newest if step is not None)
    for member, step in zip(members, newest, strict=True):
        before = next(iter(member.run.checkpoints()[-2:-1]), None)
        if step != slowest == before and _company_of(member.run, step) == company:
            _log.info("%s goes back from %s to %s, where all are.", member.run.path, step, slowest or 0)
            step = slowest
        yield member, (step, company)


def _company_of(run: RunDirectory, step: int | None) -> list[str] | None:
    """Return the names of the runs trained together up to a checkpoint; None: a single run."""
    names: list[str] | None = run.load_training_state(step)["trainer"].get("together")
    return names


class _Group:
    """Runs that advance together.

    Args:
        sessions: Sessions of all runs.
        advance: See `train_together`.
    """

    def __init__(self, sessions: Sequence[_Session], advance: Callable[[], Sequence[Metrics]]) -> None:
        self.sessions, self._advance = sessions, advance
        self._display: Display | None = None
        self._advances = 0

    def train(self, stop: StopSignals) -> None:
        """Train to the end, or to a signal."""
        for session in self.sessions:
            session.say_if_finished()
        while True:
            if stop.number is not None:
                self._save_and_leave(stop.number)
            if any([session.checkpoint_if_due() for session in self.sessions]):
                self._forget_old_checkpoints()
            try:
                for session in self.sessions:
                    session.evaluate_if_due(stop)
            except Interrupted as signalled:
                self._save_and_leave(signalled.number)
            self._show()
            if all(session.is_finished for session in self.sessions):
                return
            self._iterate(stop)
            self._show()

    def _save_and_leave(self, number: int) -> None:
        for session in self.sessions:
            session.checkpoint()
        self._forget_old_checkpoints()
        raise Interrupted(number)

    def _forget_old_checkpoints(self) -> None:
        """Remove old checkpoints once all runs have the newest, so that a common one always exists."""
        for session in self.sessions:
            if (count := session.settings.keep_checkpoints) is not None:
                session.run.keep_newest(count)

    def _iterate(self, stop: StopSignals) -> None:
        before, began = [session.algorithm.progress for session in self.sessions], time.monotonic()
        is_first = self._advances == 0 and self._display is not None
        try:
            with announced("the first iteration") if is_first else nullcontext():
                found = self._advance()
        except WorkerError as error:
            if stop.number is None:
                raise
            # Workers received the signal too: the iteration cannot be finished.
            raise Interrupted(stop.number) from error
        self._say_plan(min(before), time.monotonic() - began)
        errors = []
        for session, done, values in zip(self.sessions, before, found, strict=True):
            if session.algorithm.progress > done:
                try:
                    session.report(done, read_out(values))
                except TrainingError as error:  # after all runs are recorded
                    errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else TrainingError(" ".join(map(str, errors)))

    def _say_plan(self, before: int, seconds: float) -> None:
        """Log the plan of a long run, once, from its second iteration: the first includes warm-up."""
        self._advances += 1
        algorithm = min((session.algorithm for session in self.sessions), key=lambda one: one.progress)
        units, left = algorithm.progress - before, algorithm.total - algorithm.progress
        if self._advances == SAID_AFTER and units > 0 and seconds * left > LONG_S * units:
            _log.info("%s", planned(algorithm.total, algorithm.unit, units / max(seconds, 1e-9)))

    def _show(self) -> None:
        """Display the metrics recorded since the last call, as means over the runs."""
        rows = [session.fresh for session in self.sessions if session.fresh]
        if not rows or self._display is None:
            return
        names = [name for name in rows[0] if all(name in row for row in rows)]
        values = {name: sum(row[name] for row in rows) / len(rows) for name in names}
        slowest = min((session.algorithm for session in self.sessions), key=lambda one: one.progress)
        self._display.show(slowest.progress, slowest.total, values)
        for session in self.sessions:
            session.fresh = {}

    @contextmanager
    def opened(self, title: str, progress: bool | None) -> Iterator[None]:
        """Hold the display and the writers open."""
        first = self.sessions[0].algorithm
        done = min(session.algorithm.progress for session in self.sessions)
        with ExitStack() as held:
            for session in self.sessions:
                held.enter_context(session.opened())
            self._display = open_display(title, first.unit, first.total, done, bar=progress)
            held.callback(self._display.close)
            yield


class _Session:
    """State of one run: last logged, saved and evaluated steps. Nothing is written before `rewind`.

    Args:
        member: The run.
        settings: Intervals.
        step: Checkpoint to resume from; None: start.
        company: Names of the runs trained together; None: a single run.
    """

    def __init__(
        self, member: Member, settings: TrainerSettings, step: int | None, company: list[str] | None
    ) -> None:
        self.algorithm, self.run, self.settings = member.algorithm, member.run, settings
        self.evaluator, self.provenance = member.evaluator, dict(member.provenance)
        self.writers: list[Writer] = []
        self.fresh: dict[str, float] = {}  # metrics not displayed yet
        self.elapsed_s, self.started = 0.0, time.monotonic()
        self.evaluated = -1 if settings.eval_first else 0
        self.saved, self._metrics_bytes, self._company = 0, 0, company
        if step is not None:
            self._load(step)

    @property
    def is_beyond(self) -> bool:
        return self.algorithm.progress > self.algorithm.total

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
            self._metrics_bytes = trainer["metrics_bytes"]
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, BurnishError):
                raise
            reason = str(error).rstrip(".")
            raise CheckpointError(
                f"checkpoint {step} of {self.run.path} does not fit this configuration: {reason}. "
                f"Resume with the configuration and data that the run was started with."
            ) from error
        self.saved = step

    def rewind(self) -> None:
        """Remove results of an earlier attempt after the resume checkpoint."""
        if not self.saved:
            self.run.rewind(None)
        elif not (self.is_finished and (self.evaluator is None or self._takes_over_evaluation())):
            self.run.rewind(self.saved, metrics_bytes=self._metrics_bytes)
            self._takes_over_evaluation()

    def _takes_over_evaluation(self) -> bool:
        """Return whether the last row evaluates the current step, which then counts as evaluated."""
        rows = read_jsonl(self.run.metrics_path)
        last = rows[-1] if rows else {}
        if last.get("step") != self.saved or not any(name.startswith("eval/") for name in last):
            return False
        self.evaluated = self.saved
        self.elapsed_s = max(self.elapsed_s, last.get("time/elapsed_s") or 0.0)
        return True

    def say_if_finished(self) -> None:
        """Log how to continue a finished run."""
        algorithm = self.algorithm
        if 0 < algorithm.total <= algorithm.progress == self.saved:
            budget, unit = getattr(algorithm, "budget", None), algorithm.unit.replace("_", " ")
            advice = f"start a new run from its policy: init={self.run.path}"
            advice = f"raise {budget}" if budget else advice
            _log.info(
                "%s is already finished: %d %s. To go on, %s.",
                self.run.path, algorithm.progress, unit, advice,
            )  # fmt: skip

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the writers open."""
        if self.settings.tensorboard:
            place, first = self.run.path / "tensorboard", self.algorithm.progress
            self.writers.append(TensorBoardWriter(place, first_step=first))
        try:
            yield
        finally:
            for writer in self.writers:
                writer.close()

    def report(self, before: int, values: Scalars) -> None:
        """Record an iteration that began at `before` units.

        Raises:
            TrainingError: If a metric is not finite.
        """
        now, bad = self.algorithm.progress, broken(values)
        if bad or _due(before, now, self.settings.log_every or 1, self.algorithm.total):
            self._record(values)
        if bad:
            raise TrainingError(
                f"{', '.join(bad)} must be finite; got {', '.join(str(values[name]) for name in bad)} after "
                f"{now} {self.algorithm.unit}. {self._last_good()} Lower the learning rate or clip gradients."
            )

    def checkpoint_if_due(self) -> bool:
        """Save at multiples of `checkpoint_every` and at the end; return whether saved."""
        algorithm, every = self.algorithm, self._tenth(self.settings.checkpoint_every)
        is_due = _due(self.saved, algorithm.progress, every, algorithm.total)
        if is_due:
            self.checkpoint()
        return is_due

    def evaluate_if_due(self, stop: StopSignals) -> None:
        """Evaluate at multiples of `eval_every` and at the end; a signal aborts the evaluation."""
        algorithm = self.algorithm
        every = self._tenth(self.settings.eval_every)
        if self.evaluator is None or not _due(self.evaluated, algorithm.progress, every, algorithm.total):
            return
        with stop.immediate():
            result = self.evaluator(algorithm.snapshot(), algorithm.progress)
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
            raise TrainingError(
                f"the weights must be finite; they are not after {step} {algorithm.unit}. "
                f"{self._last_good()} Lower the learning rate or clip gradients."
            )
        state = {
            "algorithm": algorithm.state_dict(),
            "global_rng": capture_global_rng(),
            "trainer": {
                "evaluated": self.evaluated,
                "elapsed_s": self._elapsed(),
                "metrics_bytes": self.run.metrics_bytes,
                "together": self._company,
            },
        }
        facts = {"unit": algorithm.unit, **self.provenance}
        self.run.save_checkpoint(step, policy, state, provenance=facts)
        self.saved = step

    def _record(self, values: Scalars) -> None:
        row, step = {**values, "time/elapsed_s": self._elapsed()}, self.algorithm.progress
        self.run.log(row, step)
        for writer in self.writers:
            writer.write(row, step)
        self.fresh |= row

    def _elapsed(self) -> float:
        """Training time so far [s], over all attempts."""
        return self.elapsed_s + time.monotonic() - self.started

    def _tenth(self, every: int | None) -> int:
        return max(self.algorithm.total // 10, 1) if every is None else every

    def _last_good(self) -> str:
        if self.saved == 0:
            return f"{self.run.path} has no earlier checkpoint."
        return f"The last good checkpoint is {self.run.checkpoint_path(self.saved)}."


def all_finite(policy: Policy) -> bool:
    """Return whether every weight and statistic of a policy is finite."""
    tensors: Sequence[torch.Tensor] = [v for v in policy.state_dict().values() if v.is_floating_point()]
    return bool(torch.stack([v.isfinite().all() for v in tensors]).all()) if tensors else True


def _due(before: int, now: int, every: int, total: int) -> bool:
    """Return whether a multiple of `every` (0: none) or the end lies after `before` (below 0: True)."""
    if now <= before:
        return False
    return before < 0 or now >= total or (every > 0 and now // every > before // every)
