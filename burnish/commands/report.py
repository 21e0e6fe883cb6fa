"""`burnish report`: one self-contained page with results, curves, episodes and what was run."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.commands.runs import MOST_KEYS, differing_keys, readable_runs, settings_of
from burnish.config.overrides import RunContext
from burnish.console import output
from burnish.reports.beside_data import beside_data
from burnish.reports.curves import MEAN_COLOURS, Chart, learning_charts, run_colours, short_value
from burnish.reports.facts import Facts, facts_of, part_name
from burnish.reports.html import render
from burnish.reports.results import (
    Headline,
    Row,
    Stored,
    Table,
    Whisker,
    comparison_of,
    evaluations_while_training,
    headline,
    intervals_over,
    is_one_protocol,
    level_of,
    pooled_table,
    stored_evaluation,
    table_of,
    whiskers,
)
from burnish.reports.rollouts import (
    Episode,
    Picture,
    ReportRollouts,
    describe_modes,
    draw_moving,
    draw_paths,
    grid_of,
)
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
from burnish.runs.tasks import task_label
from envs.evaluation.evaluate import Evaluation
from envs.evaluation.settings import check_seeds
from policies.bounds import Checked, bounded
from policies.errors import BurnishError, ConfigError
from policies.paths import path_field
from policies.storage.atomic_write import draft_folder, move_into

_log = logging.getLogger(__name__)

INDEX = "index.html"
_MOST_NAMES = 3  # in a title
_SHOWN = 24  # episodes with frames and actions on a page, shared out among its runs
_PICTURE_BYTES = 9 * 2**19  # of a page, which stays below 8 MB: in its text they take a third more
PICTURE = re.compile(r"(learning|behaviour)(-\d+)?\.(png|webp)")


@dataclass(frozen=True)
class ReportConfig(Checked):
    """Configuration of `burnish report`."""

    run: Any = path_field()  # a run, a folder of runs (seeds, a sweep) or a list [a,b]; similar are pooled
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
        found = {run.path.resolve(): run for path in given for run in _runs_of(path)}  # each is pooled once
        return list(found.values())

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
    """Write index.html and the pictures of episodes beside it; return the path of the page."""
    runs = config.runs()
    target = config.folder(runs)
    check_folder_to_fill(target, config.overwrite)
    named = _by_name(runs)
    first = next(iter(named))
    groups = grouped(named)
    one_group = groups[0].title if len(groups) == 1 else ""
    several = f"{len(runs)} runs: {_title(config, list(named))}"
    title, subtitle = (one_group, first) if len(runs) == 1 else (several, one_group)
    colours = run_colours(list(named))
    shown = _behaviours(config, named)
    stored = {name: found for name, one in named.items() if (found := stored_evaluation(one)) is not None}
    heads = {name: headline(one, stored.get(name), shown[name].played) for name, one in named.items()}
    facts = {name: facts_of(one) for name, one in named.items()}
    page = render(
        "report.html",
        title=title,
        subtitle=subtitle,
        head=heads[first] if len(runs) == 1 else None,
        moving=shown[first].moving if len(runs) == 1 else None,
        comparisons=_comparisons(groups, heads, stored, colours) if len(runs) > 1 else [],
        panels=_panels(groups, heads, colours),
        behaviours=list(shown.values()) if config.episodes else [],
        tables=_tables(groups, stored),
        overview=_overview(named, facts) if len(runs) > 1 else None,
        runs=facts,
        data={key: value for one in shown.values() for key, value in one.data()},
    )
    return _write(target, page, dict(_files(shown)))


def _runs_of(path: Any) -> list[RunDirectory]:
    """Return the runs of a path: itself, or those of its seeds or below it, such as of a sweep.

    Damaged runs of a folder are left out with a warning, unless all are.
    """
    given = Path(str(path))
    several = [] if (given / RUN_CONFIG).is_file() else seed_folders(given) or runs_below(given)
    found = readable_runs(several, also=lambda run: (run.overrides, _unit(run)))
    return found or [RunDirectory.open(run) for run in several or [given]]


def _title(config: ReportConfig, names: Sequence[str]) -> str:
    """Return the folder of the runs, or their names."""
    if not isinstance(config.run, list):
        return Path(str(config.run)).resolve().name
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")


def _files(shown: Mapping[str, Behaviour]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the pictures beside the page, for slides."""
    for one in shown.values():
        stem = "behaviour" if len(shown) == 1 else f"behaviour-{one.number}"
        for picture in (one.paths, one.moving):
            if picture is not None:
                yield f"{stem}.{picture.kind}", picture.image


def _write(target: Path, page: str, pictures: Mapping[str, bytes]) -> Path:
    with draft_folder(target) as draft:  # an earlier report stays if the disk is full
        for name, image in pictures.items():
            (draft / name).write_bytes(image)
        (draft / INDEX).write_text(page, encoding="utf-8", errors="backslashreplace")  # names of files
        for path in target.glob("*.*"):
            if PICTURE.fullmatch(path.name):
                path.unlink()
        move_into(draft, target)
    return target / INDEX


def _by_name(runs: Sequence[RunDirectory]) -> dict[str, RunDirectory]:
    """Return runs by name; runs with one name, such as jobs of several sweeps, have the parent's in front."""
    count = Counter(name_of_run(one.path) for one in runs)
    named: dict[str, RunDirectory] = {}
    for one in runs:
        name = name_of_run(one.path)
        parent = f"{one.path.resolve().parent.name}-" if count[name] > 1 else ""
        named[_unused(parent + name, named)] = one
    return named


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
        found.setdefault((part_name(one, "algo"), task, _unit(one)), {})[name] = one
    groups: dict[str, Group] = {}
    for (algo, task, unit), runs in found.items():
        env = task_label(next(iter(runs.values())))
        title = _unused(f"{algo} on {env}" if env else algo, groups)
        groups[title] = Group(title, task, unit, runs)
    return list(groups.values())


class SideBySide(NamedTuple):
    """Runs of a group side by side; settings in which they differ are `keys`."""

    title: str
    keys: tuple[str, ...]
    quantity: str
    rows: list[Whisker]
    note: str


def _comparisons(
    groups: Sequence[Group],
    heads: Mapping[str, Headline | None],
    stored: Mapping[str, Stored],
    colours: Mapping[str, str],
) -> list[SideBySide]:
    """Lay the runs of every group side by side, best first; groups on one task share a scale."""
    found = []
    for group in groups:
        keys, rows = _shown_keys(list(group.runs.values())), []
        for name, one in group.runs.items():
            if (head := heads[name]) is not None:
                shown = head.replaced(head.after.named(name))
                rows.append(Row(shown, colours[name], _settings(one, keys), False))
        rows.sort(key=lambda row: -row.head.after.interval["value"])
        together = [stored[name].evaluation for name in group.runs if name in stored]
        if is_one_protocol(together):
            label = f"all runs of {group.title}" if len(groups) > 1 else "all runs"
            pooled = Headline(level_of(label, together))
            rows.append(Row(pooled, MEAN_COLOURS[0], ("",) * len(keys), True))
        if rows:
            found.append((group, keys, rows))
    on_task: dict[str, list[Row]] = {}
    for group, _, rows in found:
        on_task.setdefault(group.task, []).extend(rows)
    return [_comparison(group, keys, rows, on_task[group.task]) for group, keys, rows in found]


def _comparison(group: Group, keys: Sequence[str], rows: Sequence[Row], beside: Sequence[Row]) -> SideBySide:
    note = "Bars: 95 % intervals" + ("; pooled over seeds and episodes." if rows[-1].is_pooled else ".")
    if any(row.head.before is not None for row in rows):
        note += " Grey marks: the policy before training, or the baseline."
    quantity = rows[0].head.after.quantity
    return SideBySide(group.title, tuple(keys), quantity, whiskers(rows, beside), note)


def _shown_keys(runs: Sequence[RunDirectory]) -> list[str]:
    """Return the keys in which runs differ, the seed first."""
    known = ("trainer", "evaluation")
    keys = [key for key in differing_keys(runs) if key.split(".")[0] not in known]
    return sorted(keys, key=lambda key: key != "seed")[:MOST_KEYS]


def _settings(run: RunDirectory, keys: Sequence[str]) -> tuple[object, ...]:
    config = settings_of(run)
    return tuple("" if config.get(key) is None else config[key] for key in keys)


def _overview(runs: Mapping[str, RunDirectory], facts: Mapping[str, Facts]) -> Table:
    rows = []
    for name, one in runs.items():
        known = dict(facts[name].rows)
        shown = (known.get(key, "") for key in ("algorithm", "task", "seed", "from", "cost"))
        rows.append((name, *shown, one.latest() or "none"))
    return Table(("run", "algo", "task", "seed", "from", "cost", "last checkpoint"), tuple(rows))


class Panel(NamedTuple):
    """Charts of one task and unit."""

    subject: str
    charts: list[Chart]
    legend: list[tuple[str, str]]
    note: str


def _panels(
    groups: Sequence[Group], heads: Mapping[str, Headline | None], colours: Mapping[str, str]
) -> list[Panel]:
    """Draw logged metrics: one panel per task and unit; a run has the same colour everywhere."""
    shared: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        shared.setdefault((group.task, group.unit), []).append(group)
    return [_panel(unit, together, heads, colours, len(groups)) for (_, unit), together in shared.items()]


def _panel(
    unit: str,
    groups: Sequence[Group],
    heads: Mapping[str, Headline | None],
    colours: Mapping[str, str],
    num_groups: int,
) -> Panel:
    drawn = {name: one for group in groups for name, one in group.runs.items()}
    evaluated = {name: evaluations_while_training(one) for name, one in drawn.items()}
    intervals = {name: intervals_over([found]) for name, found in evaluated.items()}
    means = {group.title: list(group.runs) for group in groups}
    for group in groups:
        label = f"mean, {group.title}" if len(groups) > 1 else "mean"
        if len(group.runs) > 1:
            intervals[label] = intervals_over([evaluated[name] for name in group.runs])
    known = [
        head.before
        for name in drawn
        if (head := heads[name]) and head.before and drawn[name].config.get("init")
    ]
    befores = {(one.quantity, one.interval["value"]) for one in known}
    levels = dict(befores) if len(befores) == 1 else {}
    metrics = {name: read_jsonl(one.metrics_path) for name, one in drawn.items()}
    charts = learning_charts(metrics, unit, colours=colours, means=means, intervals=intervals, levels=levels)
    subject = " and ".join(means) if num_groups > 1 else ""
    if not charts:
        what = "success, return, held-out error, losses"
        return Panel(subject, [], [], f"Nothing to draw: none of what is drawn ({what}) was logged twice.")
    legend = [(name, colours[name]) for name in drawn] if len(drawn) > 1 else []
    legend += [(line.label, line.colour) for line in charts[0].lines if line.is_mean]
    note = f"Numbers logged while training, over {unit.replace('_', ' ')}."
    if any(chart.has_bands for chart in charts):
        note += " Bands: 95 % intervals of the evaluations."
    return Panel(subject, charts, legend, note)


def _unit(directory: RunDirectory) -> str:
    if directory.latest() is None:
        return "steps"
    return str(locate(directory.path, "run").provenance().get("unit", "steps"))


class Numbers(NamedTuple):
    """Tables and remarks of a group's evaluations."""

    subject: str
    tables: list[Table]
    notes: list[str]


def _tables(groups: Sequence[Group], stored: Mapping[str, Stored]) -> list[Numbers]:
    found = [_numbers(group, stored, len(groups)) for group in groups]
    return [numbers for numbers in found if numbers is not None]


def _numbers(group: Group, stored: Mapping[str, Stored], num_groups: int) -> Numbers | None:
    """Tabulate the evaluations of a group; runs with one protocol are pooled."""
    evaluations = {name: stored[name].evaluation for name in group.runs if name in stored}
    if not evaluations:
        return None
    tables, together = [table_of(evaluations)], list(evaluations.values())
    if is_one_protocol(together):
        label = f"all runs of {group.title}" if num_groups > 1 else "all runs"
        tables.append(pooled_table(label, together))
    notes = []
    for name, one in group.runs.items():
        if name in stored and (versus := stored[name].versus):
            notes.append(f"{name} against {versus['policy']}: {comparison_of(versus)}")
        if (both := best_evaluation(one)) is not None and both.count > 1:
            notes.append(f"{name}, {both.last.quantity} while training: {both}.")
        if text := beside_data(one):
            notes.append(f"{name}, beside its data: {text}.")
    protocols = sorted({one.protocol_hash[:12] for one in together})
    notes.append(f"Protocol {', '.join(protocols)}{'; not pooled' if len(protocols) > 1 else ''}.")
    return Numbers(group.title if num_groups > 1 else "", tables, notes)


@dataclass
class Behaviour:
    """Episodes of a run, played for the report."""

    name: str
    number: int
    played: Mapping[str, Evaluation] = field(default_factory=dict)
    moving: Picture | None = None
    paths: Picture | None = None
    episodes: Sequence[Episode] = ()
    names: tuple[str, ...] = ()  # of the actions
    hz: float = 1.0
    summary: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its pictures."""
        pictures = sum(len(one.image) for one in (self.moving, self.paths) if one is not None)
        return pictures + sum(one.size for one in self.episodes)

    def data(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what the page shows of an episode on demand, by its key, in JSON types."""
        for place, one in enumerate(self.episodes):
            clips = [
                {"title": clip.title, "outcome": clip.outcome, "length": clip.length, **clip.layout()}
                for clip in one.clips
            ]
            yield (
                f"{self.number}-{place}",
                {
                    **{"seed": one.row.seed, "outcome": one.outcome, "length": one.row.length},
                    **{"return": short_value(one.row.return_), "hz": self.hz, "names": self.names},
                    **{"actions": one.actions, "step": one.step, "clips": clips},
                },
            )


def _behaviours(config: ReportConfig, named: Mapping[str, RunDirectory]) -> dict[str, Behaviour]:
    """Run and draw a few episodes per run; on failure the page shows the reason."""
    stage = ReportRollouts(config.episodes, config.first_seed, config.num_workers)
    each, left = max(_SHOWN // len(named), 1), _PICTURE_BYTES
    found = {}
    for number, (name, directory) in enumerate(named.items(), 1):
        found[name] = one = Behaviour(name, number)
        if config.episodes:
            _play(one, stage, directory, each, left)
        left -= one.size
    return found


def _play(shown: Behaviour, stage: ReportRollouts, directory: RunDirectory, each: int, left: int) -> None:
    try:
        env, shown.played = stage.play(directory)
        own = list(shown.played.values())[-1]
        if env.spec.success_rule:
            won = sum(row.success for row in own.rows)
            shown.summary = f"{won} of {len(own.rows)} episodes succeed."
        shown.names, shown.hz = env.spec.action_names, env.spec.control_hz
        for title, one in shown.played.items():
            if ways := describe_modes(env, one.rows):
                shown.notes.append(f"{title}: {ways}")
        shown.episodes = grid_of(env, shown.played, each, 0)
        if left <= 0:
            shown.notes.append("No pictures: those of the other runs fill the page. Report this run alone.")
            return
        shown.paths = draw_paths(env, shown.played)
        shown.moving = draw_moving(env, shown.played)
        shown.episodes = grid_of(env, shown.played, each, left - shown.size)
    except BurnishError as error:
        _log.warning("no pictures of the behaviour of %s: %s", shown.name, error)
        shown.notes.append(f"No pictures: {error}")
