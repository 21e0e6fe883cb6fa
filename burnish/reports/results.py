"""Results of runs for a report: the headline, intervals side by side, tables of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from algos.training.run_directory import RunDirectory
from burnish.reports.curves import Intervals, alike_steps
from burnish.runs.best_evaluation import read_evaluations
from burnish.runs.locate import locate
from burnish.runs.tasks import description_of, options_that_differ
from envs.evaluation.comparison import Comparison, compare, format_interval
from envs.evaluation.evaluate import Evaluation
from envs.evaluation.intervals import (
    Interval,
    bootstrap_iqm,
    conditional_value_at_risk,
    stated,
    success_rate,
    value_at_risk,
    wilson,
)
from policies.errors import CheckpointError, ConfigError

SUMMARISED = ("success", "d4rl_score", "return", "return_value_at_risk", "return_cvar", "length")
"""Quantities of an evaluation in tables and reports, if defined."""


@dataclass(frozen=True)
class Table:
    """Rows under names of columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Level:
    """A quantity of one policy, or of several runs together, with its interval where it is known."""

    label: str
    quantity: str
    interval: Mapping[str, float]  # value and, if known, low and high
    episodes: int

    @property
    def mean(self) -> str:
        return format_interval(self.quantity, self.interval)[0]

    @property
    def around(self) -> str:
        return format_interval(self.quantity, self.interval)[1] if "low" in self.interval else ""

    def named(self, label: str) -> Level:
        return replace(self, label=label)


@dataclass(frozen=True)
class Headline:
    """The result of a run: the level of its policy and, if known, that of the policy that it began with."""

    after: Level
    before: Level | None = None
    comparison: Comparison | None = None
    rule: str = ""  # what counts as success

    def replaced(self, after: Level) -> Headline:
        return replace(self, after=after)

    @property
    def difference(self) -> str:
        """The paired difference with its interval, signed; in points for success."""
        if self.comparison is None:
            return ""
        is_share, one = self.comparison.quantity == "success", self.comparison.difference
        scale, unit = (100.0, " points") if is_share else (1.0, "")
        known = stated(one, self.comparison.episodes)
        ends = [
            f"{scale * known[end]:+.3g}".replace("-", "−") for end in ("value", "low", "high") if end in known
        ]
        return f"{ends[0]}{unit}" + (f" ({ends[1]} to {ends[2]})" if len(ends) > 1 else "")


class Stored(NamedTuple):
    """An evaluation in a run directory, and its comparison with a baseline if it has one."""

    evaluation: Evaluation
    versus: Mapping[str, Any] | None


def stored_evaluation(directory: RunDirectory) -> Stored | None:
    """Return the evaluation of the last checkpoint with one: most episodes, then a comparison.

    Evaluations on another task than the run's own (possible with `burnish eval`) are excluded.
    """
    own = None if directory.latest() is None else description_of(locate(directory.path, "run"))
    found = [
        ((file.step, len(one.rows), "versus" in content), Stored(one, content.get("versus")))
        for file, content, one in read_evaluations(directory)
        if own is None or is_same_task(own, one.protocol["env"])
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


def is_same_task(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Compare two descriptions of a task by the options that both know."""
    return bool(own["name"] == other["name"]) and not options_that_differ(own, other)


def headline(
    directory: RunDirectory, stored: Stored | None, played: Mapping[str, Evaluation]
) -> Headline | None:
    """Return the result of a run; None if it was never evaluated.

    The policy before comes from the stored comparison, else from the stored evaluation of `init`, else from
    the episodes that were played for the report, by title: `before` and the run's own. A run that began
    from scratch has no policy before; the one that it was compared with is called the baseline.
    """
    last = list(played.values())[-1] if played else None
    own = last if stored is None else stored.evaluation
    if own is None:
        return None
    first, second = ("before", "after") if directory.config.get("init") else ("baseline", "policy")
    after, rule = level_of(second, [own]), str(own.protocol["env"]["success_rule"] or "")
    if stored is not None and stored.versus:
        return Headline(after, _level_of_baseline(first, stored.versus), comparison_of(stored.versus), rule)
    for before, beside in ((_evaluation_of_init(directory), own), (played.get("before"), last)):
        if before is None or beside is None:
            continue
        try:
            return Headline(after, level_of("before", [before]), compare(before, beside), rule)
        except ConfigError:  # other episodes, or other options of the task
            continue
    return Headline(after, rule=rule)


def level_of(label: str, evaluations: Sequence[Evaluation]) -> Level:
    """Return the main quantity of one policy, or of several seeds together."""
    quantity, episodes = evaluations[0].quantity, sum(len(one.rows) for one in evaluations)
    interval = main_interval(evaluations)
    known = asdict(interval) if quantity == "success" else stated(interval, episodes)
    return Level(label, quantity, known, episodes)


def main_interval(evaluations: Sequence[Evaluation]) -> Interval:
    """Return the main quantity of one policy, or of several seeds together, with its interval."""
    quantity = evaluations[0].quantity
    values = np.stack([one.values(quantity) for one in evaluations])
    return success_rate(values) if quantity == "success" else bootstrap_iqm(values)


def _level_of_baseline(label: str, versus: Mapping[str, Any]) -> Level:
    quantity, episodes = str(versus["quantity"]), int(versus["episodes"])
    known = versus.get("interval")
    if known is None and quantity == "success":  # of earlier versions
        known = asdict(wilson(round(versus["before"] * episodes), episodes))
    return Level(label, quantity, known or {"value": float(versus["before"])}, episodes)


def comparison_of(versus: Mapping[str, Any]) -> Comparison:
    """Return the comparison stored with an evaluation."""
    values = {f.name: versus[f.name] for f in fields(Comparison)}
    return Comparison(**{**values, "difference": Interval(**values["difference"])})


def _evaluation_of_init(directory: RunDirectory) -> Evaluation | None:
    """Return the stored evaluation of the run that the policy began from."""
    init = directory.config.get("init")
    if not init or not Path(init).exists():
        return None
    try:
        found = locate(init, "init")
        stored = None if found.run is None else stored_evaluation(RunDirectory.open(found.run))
    except CheckpointError:
        return None
    return None if stored is None else stored.evaluation


def evaluations_while_training(directory: RunDirectory) -> dict[int, Evaluation]:
    """Return the evaluations of a run's checkpoints, by step."""
    return {file.step: one for file, _, one in read_evaluations(directory) if file.is_of_training}


def intervals_over(runs: Sequence[Mapping[int, Evaluation]]) -> Intervals:
    """Return the intervals of the main quantity of runs with alike steps, by metric and step."""
    found: dict[str, dict[int, Interval]] = {}
    steps = alike_steps([np.array(list(run)) for run in runs])
    if steps is None:
        return found
    for step, *together in zip(steps, *(run.values() for run in runs), strict=True):
        if len({one.protocol_hash for one in together}) == 1:
            found.setdefault(f"eval/{together[0].quantity}", {})[int(step)] = main_interval(together)
    return found


def is_one_protocol(evaluations: Sequence[Evaluation]) -> bool:
    """Whether there are several evaluations, all by the same protocol: they may be pooled."""
    return len(evaluations) > 1 and len({one.protocol_hash for one in evaluations}) == 1


def table_of(evaluations: Mapping[str, Evaluation]) -> Table:
    """Return a row per run and quantity."""
    rows = [row for name, one in evaluations.items() for row in _rows(name, one.summary())]
    return Table(("run", "quantity", "mean", "95 % interval", "episodes"), tuple(rows))


def pooled_table(label: str, evaluations: Sequence[Evaluation]) -> Table:
    """Return a row per quantity of several seeds; intervals cover the variance of seeds and episodes."""
    return Table((label, "mean", "95 % interval", "episodes"), tuple(_pooled(evaluations)))


def _rows(name: str, summary: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for quantity in SUMMARISED:
        if quantity in summary:
            yield name, quantity, *format_interval(quantity, summary[quantity]), summary["episodes"]


def _pooled(evaluations: Sequence[Evaluation]) -> Iterator[tuple[object, ...]]:
    def row(name: str, summary: Mapping[str, Any], values: np.ndarray) -> tuple[object, ...]:
        return name, *format_interval(name, summary), values.size

    if evaluations[0].quantity == "success":
        success = np.stack([e.values("success") for e in evaluations])
        yield row("success", asdict(success_rate(success)), success)
    if "d4rl_score" in evaluations[0].summary():
        scores = np.stack([e.d4rl_scores() for e in evaluations])
        yield row("d4rl_score", asdict(bootstrap_iqm(scores)), scores)
    returns = np.stack([e.values("return") for e in evaluations])
    yield row("return", asdict(bootstrap_iqm(returns)), returns)
    yield row("return_value_at_risk", {"value": value_at_risk(returns.flatten())}, returns)
    yield row("return_cvar", asdict(conditional_value_at_risk(returns)), returns)


class Row(NamedTuple):
    """A run in a comparison, or several runs together."""

    head: Headline
    colour: str
    facts: tuple[object, ...]  # the settings in which the run differs
    is_pooled: bool


class Whisker(NamedTuple):
    """A row on a scale, in percent of its width; `before` is where the run began, if known."""

    level: Level
    value: float
    low: float
    high: float
    before: float | None
    row: Row


def whiskers(rows: Sequence[Row], beside: Sequence[Row]) -> list[Whisker]:
    """Lay rows out on the scale of the rows beside them, which are of one task."""
    levels = [one for row in beside for one in (row.head.after, row.head.before) if one is not None]
    ends = [level.interval.get(end, level.interval["value"]) for level in levels for end in ("low", "high")]
    low, high = (0.0, 1.0) if levels[0].quantity == "success" else (min(ends), max(ends))

    def at(value: float) -> float:
        return round(2 + 96 * (value - low) / ((high - low) or 1.0), 2)

    out = []
    for row in rows:
        after, before = row.head.after, row.head.before
        known = after.interval
        value, least, most = (at(known.get(end, known["value"])) for end in ("value", "low", "high"))
        began = None if before is None else at(before.interval["value"])
        out.append(Whisker(after, value, least, most, began, row))
    return out
