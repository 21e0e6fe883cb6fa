"""`burnish eval`: seeded episodes, intervals, paired comparison, composition, recorded episodes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.table import Table

from algos.training.run_directory import EVAL, RunDirectory, eval_name
from burnish.config.evaluate import EvalConfig
from burnish.config.overrides import RunContext
from burnish.console import output, table
from burnish.reports.html import render
from burnish.reports.results import SUMMARISED
from burnish.reports.videos import try_drawing, write_videos
from burnish.runs import open_loop
from burnish.runs.composition import CompositionResult, compose_and_compare
from burnish.runs.evaluation import means_of, naming, play, require_no_other_file
from burnish.runs.locate import Located, check_file_to_write, locate_actor, require_writable
from burnish.runs.tasks import require_task_of, task_of
from envs.evaluation.comparison import Comparison, compare, format_interval
from envs.evaluation.evaluate import Evaluation
from envs.evaluation.protocol import require_playable
from envs.rollouts.player import NETWORK_CALLS
from policies.errors import BurnishError, ConfigError
from policies.storage.atomic_write import write_errors, write_text

_log = logging.getLogger(__name__)

SUMMARY_COLUMNS = ("policy", "task", "quantity", "mean", "95 % interval", "episodes")


@dataclass(frozen=True)
class Result:
    """Result of an evaluation."""

    label: str
    evaluation: Evaluation
    baseline: Evaluation | None
    comparison: Comparison | None  # policy - baseline
    path: Path  # JSON
    videos: tuple[Path, ...] = ()  # moving pictures of the policy's episodes

    def __str__(self) -> str:
        """Return one line per quantity, and the comparison."""
        rows = summary_rows([(self.label, self.evaluation)])
        mean = (f"{name}: {value} ({around})".removesuffix(" (–)") for _, _, name, value, around, _ in rows)
        about = f"{self.label}, {len(self.evaluation.rows)} episodes (95 % intervals)"
        compared = [] if self.comparison is None else [str(self.comparison)]
        return "\n".join([about, *mean, *compared, f"written: {self.path}"])

    __repr__ = __str__  # the episodes are arrays of thousands of numbers

    def _repr_html_(self) -> str:
        """Return the summary, the comparison and the videos, for notebooks."""
        both = [(self.label, self.evaluation)]
        if self.baseline is not None:
            both.append(("baseline", self.baseline))
        summary = {"columns": SUMMARY_COLUMNS, "rows": summary_rows(both)}
        clips = [(path.name, path.suffix[1:], path.read_bytes()) for path in self.videos]
        return render("notebook.html", table=summary, comparison=self.comparison, clips=clips)


def run(config: EvalConfig, context: RunContext) -> float:
    """Evaluate, write, print; return the success rate, or the mean return without success.

    On recorded episodes return the unexplained variance.
    """
    if config.compose is not None:
        composed = compose_and_compare(config)
        _print_result(composed)
        return _main_number(composed.evaluation)
    if config.dataset is not None:
        compared = open_loop.measure(config)
        output().print(compared.shown())
        if compared.comparison is not None:
            output().print(str(compared.comparison), markup=False)
        if compared.path is not None:
            output().print(f"written: {compared.path}", markup=False, soft_wrap=True)
        return compared.errors.summary().value
    result = evaluate(config)
    _print_numbers(config, result.label, result.evaluation, result.baseline, result.comparison)
    for path in (result.path, *result.videos):
        output().print(f"written: {path}", markup=False, soft_wrap=True)
    return _main_number(result.evaluation)


def _print_numbers(
    config: EvalConfig,
    label: str,
    evaluation: Evaluation,
    baseline: Evaluation | None,
    comparison: Comparison | None,
) -> None:
    mine, other = shown_names(label, str(config.policy), str(config.baseline))
    both = [(mine, evaluation)]
    if baseline is not None:
        both.append((other, baseline))
    output().print(summary_table(both))
    if comparison is not None:
        output().print(str(comparison), markup=False)


def _print_result(result: CompositionResult) -> None:
    for section in result.sections():
        output().print(section.shown())
    for name, comparison in result.comparisons.items():
        output().print(f"composition - {name}: {comparison}", markup=False)
    output().print(f"written: {result.path}", markup=False, soft_wrap=True)


def _main_number(evaluation: Evaluation) -> float:
    return means_of(evaluation)[evaluation.quantity]


def shown_names(label: str, policy: str, baseline: str) -> tuple[str, str]:
    """Return table labels of two policies: label and path, or two distinct paths."""
    if label != baseline:
        return label, baseline
    if policy != baseline:
        return policy, baseline
    return f"{policy} (policy)", f"{baseline} (baseline)"


@dataclass(frozen=True)
class ResolvedEval:
    """A resolved evaluation; nothing is loaded yet."""

    policy: Located
    baseline: Located | None
    env: Any


def resolve(config: EvalConfig, given: Mapping[str, Located]) -> ResolvedEval:
    """Locate the policies that are not `given` by key, and the task; a policy of another task is refused."""
    if config.policy is None:
        raise ConfigError("eval needs policy=<run or policy directory>, or compose=[a,b].")
    if config.dataset is not None:
        raise ConfigError("dataset=FILE compares with recorded episodes: burnish.open_loop(policy, dataset).")
    config.require_single()
    if config.out is not None:
        check_file_to_write(config.out)
        require_no_other_file(Path(config.out))
    mine = given.get("policy") or locate_actor(config.policy, "policy")
    if config.out is None:
        folder = Path() if mine.run is None else mine.run / EVAL
        require_writable(folder / "eval.json", remedy="Give out=<file>")
    other = given.get("baseline")
    if config.baseline is not None and other is None:
        other = locate_actor(config.baseline, "baseline")
    env = config.env if config.env is not None else task_of(mine, " Give env=<name>.")
    for key, one in (("policy", mine), ("baseline", other)):
        if one is not None:
            require_task_of(one, env, key, allow_other_task=config.allow_other_task)
    return ResolvedEval(mine, other, env)


def evaluate(config: EvalConfig, given: Mapping[str, Located] = MappingProxyType({})) -> Result:
    """Evaluate the policy, and the baseline on the same episodes; write the results.

    `given` are policies that are objects, by key; the configuration names them.
    """
    found = resolve(config, given)
    if config.videos:
        try_drawing(found.env)
    policy, other = found.policy.load(), None if found.baseline is None else found.baseline.load()
    with naming("policy", config.policy):
        require_playable(policy, found.env, config)
    if other is not None:  # before the episodes of the policy, which may take long
        with naming("baseline", config.baseline):
            require_playable(other, found.env, config)
    keeps = config.videos > 0
    evaluation = play(found.policy.label, policy, found.env, config, keep_observations=keeps)
    baseline = comparison = None
    videos: Iterable[Path] = ()
    try:
        path = _write(config, found, evaluation, None, None)  # the baseline may fail, or take too long
        if found.baseline is not None:
            _log.info("the policy's episodes are in %s; next are the baseline's.", path)
            baseline = play(found.baseline.label, other, found.env, config)
            comparison = compare(baseline, evaluation)
            path = _write(config, found, evaluation, baseline, comparison)
        if config.videos:
            name = path.with_suffix("").name
            videos = write_videos(found.env, evaluation.rows, config.videos, path.parent, name)
    except (OSError, BurnishError):  # what was played is not lost
        _print_numbers(config, found.policy.label, evaluation, baseline, comparison)
        raise
    return Result(found.policy.label, evaluation, baseline, comparison, path, tuple(videos))


def summary_table(evaluations: Iterable[tuple[str, Evaluation]]) -> Table:
    """Return a table with the columns `SUMMARY_COLUMNS`."""
    return table("", SUMMARY_COLUMNS, summary_rows(evaluations))


def summary_rows(evaluations: Iterable[tuple[str, Evaluation]]) -> list[tuple[object, ...]]:
    """Return one row per policy and quantity."""
    rows: list[tuple[object, ...]] = []
    for label, evaluation in evaluations:
        summary = evaluation.summary()
        for name in (*SUMMARISED, NETWORK_CALLS):
            if name in summary:
                rows.append(
                    (label, summary["env"], name, *format_interval(name, summary[name]), summary["episodes"])
                )
                label = ""
    return rows


def _write(
    config: EvalConfig,
    found: ResolvedEval,
    evaluation: Evaluation,
    baseline: Evaluation | None,
    comparison: Comparison | None,
) -> Path:
    content, mine = json.loads(evaluation.to_json()), found.policy
    content["policy"] = mine.label
    if comparison is not None and baseline is not None:
        interval = baseline.summary()[comparison.quantity]
        content["versus"] = {"policy": str(config.baseline), **asdict(comparison), "interval": interval}
    name = _file_name(mine, found.baseline, evaluation.protocol_hash)
    if config.out is None and mine.run is not None:
        return RunDirectory.open(mine.run).write_eval(name, content)
    path = Path(config.out if config.out is not None else f"eval-{name}.json")
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")
    return path


def _file_name(mine: Located, other: Located | None, protocol_hash: str) -> str:
    """Return a file name from policy, protocol and baseline, unique per evaluation."""
    details = [protocol_hash[:8], *([] if other is None else ["versus", _identified(other)])]
    return "-".join([_identified(mine), *details]) if mine.step is None else eval_name(mine.step, *details)


def _identified(one: Located) -> str:
    return f"{one.label}-{hashlib.sha256(str(one.path.resolve()).encode()).hexdigest()[:6]}"
