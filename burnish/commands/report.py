"""`burnish report`: one self-contained page with curves, numbers and pictures of what the policy does."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from algos.metrics import read_jsonl
from algos.state import RunDirectory
from burnish.commands.evaluate import describe_comparison, evaluate_with, format_interval, task_of
from burnish.console import Counting, output
from burnish.job import Job
from burnish.locate import Located, locate
from burnish.page import Page
from burnish.pictures import film_strip, learning_curves, to_png
from envs.episodes import EpisodeRow
from envs.evaluation import Evaluation, EvaluationSettings
from envs.statistics import bootstrap_iqm, wilson
from policies.errors import CheckpointError, ConfigError, MissingExtraError

_log = logging.getLogger(__name__)

FRAMES = 24  # of a film strip, before it is thinned out


@dataclass
class ReportConfig:
    """What `burnish report` does."""

    run: Any = None  # a run, or a list of runs (seeds) that belong together
    out: str | None = None  # directory; null: <run>/report, or report for several runs
    episodes: int = 24  # episodes that are played for the pictures; 0: none
    first_seed: int = 0  # seed of the first of these episodes
    num_workers: int = 2  # rollout processes; 0: this process

    def runs(self) -> list[RunDirectory]:
        """Open the runs.

        Raises:
            ConfigError: If none is given.
            CheckpointError: If one is not a run.
        """
        given = self.run if isinstance(self.run, list) else [self.run]
        if given in ([], [None]):
            raise ConfigError("report needs run=<run directory>, or run=[<run>,<run>].")
        return [RunDirectory.open(str(path)) for path in given]


def run(config: ReportConfig, job: Job) -> None:
    """Write the page and say where it is."""
    output().print(f"written: {report(config)}", markup=False, soft_wrap=True)


def report(config: ReportConfig) -> Path:
    """Write index.html and its pictures; returns the path of the page."""
    runs = config.runs()
    alone = runs[0].path / "report" if len(runs) == 1 else Path("report")
    target = Path(config.out) if config.out is not None else alone
    target.mkdir(parents=True, exist_ok=True)
    named = _named(runs)
    first = next(iter(named))
    page = Page(first if len(runs) == 1 else f"{len(runs)} runs: {first} …")
    _facts(page, named)
    _curves(page, named, target)
    _numbers(page, named)
    if config.episodes:
        _behaviour(page, config, runs[0], target)
    path = target / "index.html"
    path.write_text(page.render())
    return path


def _named(runs: Sequence[RunDirectory]) -> dict[str, RunDirectory]:
    """Give every run a name of its own."""
    named: dict[str, RunDirectory] = {}
    for one in runs:
        name, number = one.path.resolve().name, 2
        while name in named:
            name, number = f"{one.path.resolve().name} ({number})", number + 1
        named[name] = one
    return named


def _facts(page: Page, runs: Mapping[str, RunDirectory]) -> None:
    """Say what was run."""
    rows = []
    for name, one in runs.items():
        config = one.config
        algo, env = ((config.get(key) or {}).get("name", "") for key in ("algo", "env"))
        source = config.get("dataset") or config.get("init") or ""
        rows.append((name, algo, env, config.get("seed"), source, one.latest() or "none"))
    page.rows(("run", "algo", "task", "seed", "from", "last checkpoint"), rows)


def _curves(page: Page, runs: Mapping[str, RunDirectory], target: Path) -> None:
    """Draw what was logged."""
    metrics = {
        f"{name} (seed {one.config.get('seed')})": read_jsonl(one.metrics_path) for name, one in runs.items()
    }
    unit = _unit(next(iter(runs.values())))
    png = learning_curves(metrics, unit)
    page.heading("Learning")
    if png is None:
        page.text("Nothing to draw: fewer than two rows were logged.")
        return
    (target / "learning.png").write_bytes(png)
    page.picture(png, f"Numbers logged while training, over {unit.replace('_', ' ')}.")


def _unit(directory: RunDirectory) -> str:
    """Return the unit of a run's steps, as its last checkpoint states it."""
    if directory.latest() is None:
        return "steps"
    return str(locate(directory.path, "run").provenance().get("unit", "steps"))


def _numbers(page: Page, runs: Mapping[str, RunDirectory]) -> None:
    """Tabulate the last evaluation of every run, and all of them together."""
    found = {name: content for name, one in runs.items() if (content := _last_evaluation(one)) is not None}
    if not found:
        return
    page.heading("Evaluation")
    evaluations = {name: Evaluation.from_json(json.dumps(content)) for name, content in found.items()}
    rows = [row for name, evaluation in evaluations.items() for row in _rows(name, evaluation.summary())]
    page.rows(("run", "quantity", "mean", "95 % interval", "episodes"), rows)
    protocols = {evaluation.protocol_hash for evaluation in evaluations.values()}
    if len(evaluations) > 1 and len(protocols) == 1:
        pooled = list(_pooled(list(evaluations.values())))
        page.rows(("all runs", "mean", "95 % interval", "episodes"), pooled)
    for name, content in found.items():
        if versus := content.get("versus"):
            page.text(f"{name} against {versus['policy']}: {describe_comparison(versus)}")
    hashes = ", ".join(sorted(protocol[:12] for protocol in protocols))
    page.text(f"Protocol {hashes}; per-episode rows are in eval/ of each run.")


def _last_evaluation(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the evaluation of the last checkpoint that has one; the one with the most episodes."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    for path in (directory.path / "eval").glob("step-*.json"):
        content = json.loads(path.read_text())
        found.append((int(path.stem.split("-")[1]), len(content["rows"]), content))
    return max(found, key=lambda item: item[:2])[2] if found else None


def _rows(name: str, summary: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for quantity in ("success", "d4rl_score", "return", "length"):
        if quantity in summary:
            yield name, quantity, *format_interval(quantity, summary[quantity]), summary["episodes"]


def _pooled(evaluations: Sequence[Evaluation]) -> Iterator[tuple[object, ...]]:
    """Summarise several seeds: success over all episodes, return over seeds and episodes."""
    values = np.stack([e.values("return") for e in evaluations])
    if "success" in evaluations[0].summary():
        success = np.stack([e.values("success") for e in evaluations])
        interval = asdict(wilson(int(success.sum()), success.size))
        yield "success", *format_interval("success", interval), success.size
    yield "return", *format_interval("return", asdict(bootstrap_iqm(values))), values.size


def _behaviour(page: Page, config: ReportConfig, directory: RunDirectory, target: Path) -> None:
    """Play a few episodes and draw them; says why where it cannot."""
    page.heading("Behaviour")
    try:
        found = locate(directory.path, "run")
        env = task_of(found)
        policies = {**_before(directory), "after" if directory.config.get("init") else found.label: found}
        played = {title: _play(one, env, config) for title, one in policies.items()}
        png, caption = draw_behaviour(env, played)
    except (CheckpointError, ConfigError, MissingExtraError) as error:
        _log.warning("no pictures of the behaviour: %s", error)
        page.text(f"No pictures: {error}")
        return
    (target / "behaviour.png").write_bytes(png)
    page.picture(png, caption)
    for title, rows in played.items():
        if ways := describe_ways(env, rows):
            page.text(f"{title}: {ways}")


def _before(directory: RunDirectory) -> dict[str, Located]:
    """Return the policy that a fine-tuning run started from, if it is still there."""
    init = directory.config.get("init")
    if not init or not Path(init).exists():
        return {}
    return {"before": locate(init, "init")}


def _play(found: Located, env: Any, config: ReportConfig) -> tuple[EpisodeRow, ...]:
    """Play episodes and keep what happened in them; one is enough for a film strip."""
    episodes = config.episodes if hasattr(env, "figure") else 1
    settings = EvaluationSettings(episodes=episodes, first_seed=config.first_seed)
    with Counting(f"playing {found.label}", episodes) as counting:
        return evaluate_with(
            found.load(),
            env,
            settings,
            config.num_workers,
            keep_observations=True,
            on_progress=lambda done, _: counting.show(done),
        ).rows


def draw_behaviour(env: Any, played: Mapping[str, Sequence[EpisodeRow]]) -> tuple[bytes, str]:
    """Return a trajectory plot where the task has one, else a film strip of one episode, and its caption.

    Raises:
        MissingExtraError: If a film strip is needed and there is no GL stack.
    """
    if hasattr(env, "figure"):
        panels = {
            title: ([row.observations for row in rows], [row.success for row in rows])
            for title, rows in played.items()
        }
        return to_png(env.figure(panels)), f"Episodes on {env.spec.name}, all from the same starts."
    row = list(played.values())[-1][0]
    caption = describe_episode(row, env.spec.name)
    frames = env.render_frames(row.seed, row.actions, every=max(row.length // FRAMES, 1))
    return film_strip(frames, title=caption), caption


def describe_ways(env: Any, rows: Sequence[EpisodeRow]) -> str:
    """Count the ways to succeed that were used, for a task that names them; empty otherwise."""
    if not hasattr(env, "mode_names"):
        return ""
    names = env.mode_names()
    used = Counter(names[int(row.metrics["mode"])] for row in rows if row.success)
    counts = ", ".join(f"{name} ({count})" for name, count in used.most_common())
    return f"{len(used)} different ways in {len(rows)} episodes: {counts or 'none'}."


def describe_episode(row: EpisodeRow, task: str) -> str:
    """Say in one line how an episode went."""
    end = "success" if row.success else "terminated" if row.terminated else "time limit"
    return f"{task}, episode of seed {row.seed}: {row.length} steps, return {row.return_:.1f}, {end}."
