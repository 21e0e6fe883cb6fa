"""`burnish report`: one self-contained page with curves, results and pictures."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.commands.evaluate import SUMMARISED, describe_comparison
from burnish.commands.runs import differing_keys, flat_config
from burnish.config.overrides import RunContext
from burnish.console import output
from burnish.reports.figures import learning_curves, run_colours
from burnish.reports.html import Page
from burnish.reports.rollouts import ReportRollouts, describe_modes, draw_behaviour
from burnish.runs.best_evaluation import best_evaluation
from burnish.runs.locate import (
    RUN_CONFIG,
    check_folder_to_fill,
    locate,
    name_of_run,
    runs_below,
    seed_folders,
)
from burnish.runs.seeds import require_complete
from burnish.runs.tasks import description_of, options_that_differ, task_label
from envs.evaluation.comparison import format_interval
from envs.evaluation.evaluate import Evaluation
from envs.evaluation.intervals import bootstrap_iqm, conditional_value_at_risk, success_rate, value_at_risk
from envs.evaluation.settings import check_seeds
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, CheckpointError, ConfigError, MissingExtraError
from policies.paths import path_field
from policies.storage.atomic_write import draft_folder, move_into

_log = logging.getLogger(__name__)

INDEX = "index.html"
_MOST_NAMES, _MOST_KEYS = 3, 8  # names in a title, columns of differing keys
PICTURE = re.compile(r"(learning|behaviour)(-\d+)?\.(png|webp)")


@dataclass(frozen=True)
class ReportConfig(Checked):
    """Configuration of `burnish report`."""

    run: Any = (
        path_field()
    )  # a run, a folder of runs (seeds, a sweep), or several: [a,b]; similar runs are pooled
    out: str | None = path_field()  # directory; null: <run>/report, or report for several runs
    episodes: int = bounded(24, ge=0)  # episodes for the pictures; 0: none
    first_seed: int = 0  # seed of the first of these episodes
    num_workers: int = bounded(2, ge=0)  # rollout processes; 0: this process
    overwrite: bool = False  # replace the report in an existing directory

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds("first_seed", self.first_seed, self.episodes)

    def runs(self) -> list[RunDirectory]:
        given = self.run if isinstance(self.run, list) else [self.run]
        if given in ([], [None]):
            raise ConfigError("report needs run=<run directory>, or run=[<run>,<run>].")
        for path in given:
            require_complete(str(path), "run")
        return [RunDirectory.open(run) for path in given for run in _runs_of(path)]

    def folder(self, runs: Sequence[RunDirectory]) -> Path:
        if self.out is not None:
            return Path(self.out)
        if isinstance(self.run, list) and len(runs) > 1:
            return Path("report")
        return (Path(str(self.run)) if len(runs) > 1 else runs[0].path) / "report"


def run(config: ReportConfig, context: RunContext) -> None:
    """Write the page and print its path."""
    output().print(f"written: {report(config)}", markup=False, soft_wrap=True)


def report(config: ReportConfig) -> Path:
    """Write index.html and its pictures; return the path of the page."""
    runs = config.runs()
    target = config.folder(runs)
    check_folder_to_fill(target, config.overwrite)
    named: dict[str, RunDirectory] = {}
    for one in runs:
        named[_unused(name_of_run(one.path), named)] = one
    first = next(iter(named))
    page = Page(first if len(runs) == 1 else f"{len(runs)} runs: {_title(config, list(named))}")
    groups = grouped(named)
    _facts(page, named)
    pictures = _curves(page, named, groups)
    _numbers(page, groups)
    if config.episodes:
        pictures |= _behaviour(page, config, named)
    return _write(target, page, pictures)


def _runs_of(path: Any) -> list[Path]:
    """Return the runs of a path: itself, those of its seeds, or those below it, such as of a sweep."""
    given = Path(str(path))
    if (given / RUN_CONFIG).is_file():
        return [given]
    return seed_folders(given) or runs_below(given) or [given]


def _title(config: ReportConfig, names: Sequence[str]) -> str:
    """Return the folder of the runs, or their names."""
    if not isinstance(config.run, list):
        return Path(str(config.run)).resolve().name
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")


def _write(target: Path, page: Page, pictures: Mapping[str, bytes]) -> Path:
    with draft_folder(target) as draft:  # an earlier report stays if the disk is full
        for name, png in pictures.items():
            (draft / name).write_bytes(png)
        (draft / INDEX).write_text(page.render())
        for path in target.glob("*.*"):
            if PICTURE.fullmatch(path.name):
                path.unlink()
        move_into(draft, target)
    return target / INDEX


def _unused(name: str, taken: Mapping[str, object]) -> str:
    unused, number = name, 2
    while unused in taken:
        unused, number = f"{name} ({number})", number + 1
    return unused


class Group(NamedTuple):
    """Runs of one algorithm on one task, which may be pooled."""

    title: str
    task: str  # description of the task with its options; empty without a task
    unit: str  # of their steps
    runs: dict[str, RunDirectory]


def grouped(named: Mapping[str, RunDirectory]) -> list[Group]:
    """Group runs by algorithm, task (with options) and unit."""
    found: dict[tuple[str, str, str], dict[str, RunDirectory]] = {}
    for name, one in named.items():
        task = json.dumps(one.section("env"), sort_keys=True)
        found.setdefault((_part(one, "algo"), task, _unit(one)), {})[name] = one
    groups: dict[str, Group] = {}
    for (algo, task, unit), runs in found.items():
        env = task_label(next(iter(runs.values())))
        title = _unused(f"{algo} on {env}" if env else algo, groups)
        groups[title] = Group(title, task, unit, runs)
    return list(groups.values())


def _part(directory: RunDirectory, group: str) -> str:
    return str(directory.section(group).get("name", ""))


def _facts(page: Page, runs: Mapping[str, RunDirectory]) -> None:
    rows: list[tuple[object, ...]] = []
    for name, one in runs.items():
        source = one.config.get("dataset") or one.config.get("init") or ""
        parts = _part(one, "algo"), task_label(one)
        rows.append((name, *parts, one.config.get("seed"), source, one.latest() or "none"))
    known = ("seed", "trainer", "evaluation")
    keys = [key for key in differing_keys(list(runs.values())) if key.split(".")[0] not in known]
    shown = keys[:_MOST_KEYS]
    for i, one in enumerate(runs.values()):
        config = dict(flat_config(one.config))
        rows[i] = (*rows[i], *("" if config.get(key) is None else config[key] for key in shown))
    page.rows(("run", "algo", "task", "seed", "from", "last checkpoint", *shown), rows)


def _curves(page: Page, named: Mapping[str, RunDirectory], groups: Sequence[Group]) -> dict[str, bytes]:
    """Draw logged metrics: one picture per task and unit; a run has the same colour everywhere."""
    labels = {name: f"{name} (seed {one.config.get('seed')})" for name, one in named.items()}
    colours = run_colours(list(labels.values()))
    shared: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        shared.setdefault((group.task, group.unit), []).append(group)
    page.heading("Learning")
    pictures: dict[str, bytes] = {}
    for number, ((_, unit), together) in enumerate(shared.items(), 1):
        drawn = {name: one for group in together for name, one in group.runs.items()}
        metrics = {labels[name]: read_jsonl(one.metrics_path) for name, one in drawn.items()}
        means = {group.title: [labels[name] for name in group.runs] for group in together}
        png = learning_curves(metrics, unit, colours=colours, means=means)
        subject = f"{' and '.join(means)}: " if len(groups) > 1 else ""
        if png is None:
            what = "success, return, held-out error, losses"
            page.text(f"{subject}Nothing to draw: none of what is drawn ({what}) was logged twice.")
            continue
        pictures["learning.png" if len(shared) == 1 else f"learning-{number}.png"] = png
        page.picture(png, f"{subject}Numbers logged while training, over {unit.replace('_', ' ')}.")
    return pictures


def _unit(directory: RunDirectory) -> str:
    if directory.latest() is None:
        return "steps"
    return str(locate(directory.path, "run").provenance().get("unit", "steps"))


def _numbers(page: Page, groups: Sequence[Group]) -> None:
    found = {
        group.title: {name: e for name, one in group.runs.items() if (e := _last_evaluation(one)) is not None}
        for group in groups
    }
    if not any(found.values()):
        return
    page.heading("Evaluation")
    for title, contents in found.items():
        if contents:
            if len(groups) > 1:
                page.text(f"{title}:")
            _tabulate(page, contents, f"all runs of {title}" if len(groups) > 1 else "all runs")
    for name, one in (run for group in groups for run in group.runs.items()):
        if (both := best_evaluation(one)) is not None and both.count > 1:
            page.text(f"{name}, {both.last.quantity} while training: {both}.")
    page.text("Per-episode rows are in eval/ of each run; those on other tasks are not shown here.")


def _tabulate(page: Page, contents: Mapping[str, dict[str, Any]], together: str) -> None:
    """Tabulate the evaluations of a group; runs with one protocol are pooled."""
    evaluations = {name: Evaluation.from_json(json.dumps(content)) for name, content in contents.items()}
    rows = [row for name, evaluation in evaluations.items() for row in _rows(name, evaluation.summary())]
    page.rows(("run", "quantity", "mean", "95 % interval", "episodes"), rows)
    protocols = sorted({evaluation.protocol_hash[:12] for evaluation in evaluations.values()})
    if len(evaluations) > 1 and len(protocols) == 1:
        pooled = list(_pooled(list(evaluations.values())))
        page.rows((together, "mean", "95 % interval", "episodes"), pooled)
    for name, content in contents.items():
        if versus := content.get("versus"):
            page.text(f"{name} against {versus['policy']}: {describe_comparison(versus)}")
    page.text(f"Protocol {', '.join(protocols)}{'; not pooled' if len(protocols) > 1 else ''}.")


def _last_evaluation(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the evaluation of the last checkpoint with one: most episodes, then a comparison.

    Evaluations on another task than the run's own (possible with `burnish eval`) are excluded.
    """
    own = None if directory.latest() is None else description_of(locate(directory.path, "run"))
    found: list[tuple[int, int, bool, dict[str, Any]]] = []
    for one in directory.evals():
        content = json.loads(one.path.read_text())
        if own is None or _is_same(own, content["protocol"]["env"]):
            found.append((one.step, len(content["rows"]), "versus" in content, content))
    return max(found, key=lambda item: item[:3])[3] if found else None


def _is_same(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(own["name"] == other["name"]) and not options_that_differ(own, other)


def _rows(name: str, summary: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for quantity in SUMMARISED:
        if quantity in summary:
            yield name, quantity, *format_interval(quantity, summary[quantity]), summary["episodes"]


def _pooled(evaluations: Sequence[Evaluation]) -> Iterator[tuple[object, ...]]:
    """Summarise several seeds; intervals cover the variance of seeds and episodes."""

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


def _behaviour(page: Page, config: ReportConfig, named: Mapping[str, RunDirectory]) -> dict[str, bytes]:
    """Run and draw a few episodes per run; on failure the page shows the reason."""
    page.heading("Behaviour")
    stage = ReportRollouts(config.episodes, config.first_seed, config.num_workers)
    pictures: dict[str, bytes] = {}
    for number, (name, directory) in enumerate(named.items(), 1):
        subject = f"{name}: " if len(named) > 1 else ""
        try:
            env, played = stage.play(directory)
            png, caption, moving = draw_behaviour(env, played)
        except (CapabilityError, CheckpointError, ConfigError, MissingExtraError) as error:
            _log.warning("no pictures of the behaviour of %s: %s", name, error)
            page.text(f"{subject}No pictures: {error}")
            continue
        stem = "behaviour" if len(named) == 1 else f"behaviour-{number}"
        pictures[f"{stem}.png"] = png
        page.picture(png, f"{subject}{caption}")
        if moving is not None:
            pictures[f"{stem}.webp"] = moving
            page.picture(moving, f"{subject}the same episode, in real time.", "webp")
        for title, rows in played.items():
            if ways := describe_modes(env, rows):
                page.text(f"{subject}{title}: {ways}")
    return pictures
