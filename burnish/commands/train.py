"""`burnish train`: resolve, build, then run the trainer with evaluations in between; resumable."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from algos.base import Algorithm
from algos.training.memory import keep_freed_memory
from algos.training.provenance import processor_name
from algos.training.ranks import current, join
from algos.training.run_directory import RunDirectory, eval_name
from algos.training.session import Member
from algos.training.signals import Interrupted
from algos.training.trainer import train_together
from burnish.config.overrides import RunContext
from burnish.config.saved import describe, describe_part
from burnish.config.train import TrainConfig
from burnish.console import output, table
from burnish.reports.beside_data import beside_data
from burnish.runs.best_evaluation import best_evaluation, read_evaluations
from burnish.runs.build import build, opened_directories
from burnish.runs.evaluation import means_of
from burnish.runs.resolve import ResolvedRun, has_seeds, resolve, resolve_seeds
from envs.datasets.interface import interface_of_task
from envs.evaluation.evaluate import evaluate as run_episodes
from envs.rollouts.fleet import LOCAL
from policies import registry
from policies.policy import Policy
from policies.seeds import derive_seed, seeded_global

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run."""

    directory: RunDirectory
    last_evaluation: dict[str, float]  # empty without rollouts
    quantity: str  # main quantity of the task; empty without a task


def run(config: TrainConfig, context: RunContext) -> float | None:
    """Train or resume, print the path; return the last success rate or return, averaged over seeds."""
    results = train_seeds(config, context) if has_seeds(config) else [train(config, context)]
    if current().rank == 0:
        output().print(result_table(results), "")
    return main_number(results)


def train(config: TrainConfig, context: RunContext) -> TrainResult:
    """Resolve, build and run a training, or resume one."""
    (result,) = launch(resolve(config, context))
    return result


def train_seeds(config: TrainConfig, context: RunContext) -> list[TrainResult]:
    """Train several seeds at once, or resume those in the folder `config.resume`."""
    return launch(resolve_seeds(config, context))


def launch(run: ResolvedRun) -> list[TrainResult]:
    """Build and train a resolved run, or resume it; return a result per seed, in the requested order."""
    join()
    keep_freed_memory()
    built, first = build(run), run.config
    directories: list[RunDirectory] = []
    found: list[dict[str, float]] = [{} for _ in run.configs]
    try:
        dropout = seeded_global(derive_seed(first.seed, "dropout"), run.device)
        with _resume_advised(directories), opened_directories(run, directories), dropout:
            members = [
                Member(
                    algorithm,
                    directory,
                    _evaluator(config, directory, last),
                    provenance(run, config) | facts_of_data(algorithm),
                    (describe(config), typed.texts) if typed.items and run.continued else None,
                )
                for algorithm, directory, config, typed, last in zip(
                    built.algorithms, directories, run.configs, run.overrides, found, strict=True
                )
            ]
            several = f" ({len(members)} seeds)" if len(members) > 1 else ""
            title = f"{_place_of(directories).name}{several}"
            train_together(members, built.advance, first.trainer, title=title, progress=first.progress)
    finally:
        built.close()
    quantity = "" if first.env is None else first.env.spec.quantity
    for directory, last in zip(directories, found, strict=True):
        if not last and first.env is not None:
            last |= _known_evaluation(directory)
    results = {
        config.seed: TrainResult(directory, last, quantity)
        for config, directory, last in zip(run.configs, directories, found, strict=True)
    }
    return [results[seed] for seed in run.order or results]


def _known_evaluation(directory: RunDirectory) -> dict[str, float]:
    """Return the means of the last checkpoint's evaluation by an earlier attempt; empty without one."""
    of_training = [(file.step, one) for file, _, one in read_evaluations(directory) if file.is_of_training]
    return next((means_of(one) for step, one in of_training if step == directory.latest()), {})


def provenance(run: ResolvedRun, config: TrainConfig) -> dict[str, Any]:
    """Return the provenance stored with the policy of one run.

    Seeds trained together are listed: training a seed alone gives equal results up to rounding only.
    """
    facts: dict[str, Any] = {
        "algo": registry.name_of("algo", config.algo),
        "seed": config.seed,
        "env": None if config.env is None else describe_part("env", config.env),
        "dataset": None if config.dataset is None else Path(config.dataset).name,
        "reader": config.reader or None,
        "interface": run.interface or _interface_of(config),
        "init": None if run.init is None else run.init.label,
        "teacher": None if run.teacher is None else run.teacher.label,
        "num_workers": config.num_workers,
        "processor": processor_name(),
        "seeds_together": [one.seed for one in run.configs] if len(run.configs) > 1 else None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def facts_of_data(algorithm: Algorithm) -> dict[str, Any]:
    """Return how good the data of cloning are, as provenance; empty if they do not say it."""
    found = getattr(algorithm, "data_quality", None)
    return {"data": found} if found else {}


def _interface_of(config: TrainConfig) -> dict[str, Any] | None:
    """Return rate, limits and names of the task's actions."""
    found = {} if config.env is None else interface_of_task(config.env.spec)
    return {key: value for key, value in found.items() if key != "obs_names"} or None


def result_table(results: Sequence[TrainResult]) -> Table:
    """Return the printed table of one or several runs."""
    if len(results) == 1:
        (one,) = results
        rows: list[tuple[str, object]] = [
            ("run", one.directory.path),
            ("policy", one.directory.policy_path()),
        ]
        rows += [(name, f"{value:.4g}") for name, value in one.last_evaluation.items()]
        if (both := best_evaluation(one.directory)) is not None and both.count > 1:
            rows.append((both.last.quantity, both))
        if text := beside_data(one.directory):
            rows.append(("data", text))
        return table("", ("", ""), rows)
    names = list(dict.fromkeys(name for one in results for name in one.last_evaluation))
    cells = []
    for one in results:
        found = {name: f"{value:.4g}" for name, value in one.last_evaluation.items()}
        cells.append((one.directory.path.name, *(found.get(name, "") for name in names)))
    return table(str(results[0].directory.path.parent), ("run", *names), cells)


def main_number(results: Sequence[TrainResult]) -> float | None:
    """Return the mean over runs of their task's main quantity; None without rollouts."""
    judged = [one.last_evaluation.get(one.quantity) for one in results]
    known = [value for value in judged if value is not None]
    return sum(known) / len(known) if known else None


def _place_of(directories: Sequence[RunDirectory]) -> Path:
    return directories[0].path if len(directories) == 1 else directories[0].path.parent


@contextmanager
def _resume_advised(directories: Sequence[RunDirectory]) -> Iterator[None]:
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if directories and directories[0].path.is_dir():
            steps = [run.latest() for run in directories]
            known = [step for step in steps if step is not None]
            saved = f"its last checkpoint is {min(known)}" if known else "before its first checkpoint"
            place = _place_of(directories)
            _log.warning("stopped; %s. Continue with: burnish train resume=%s", saved, place)
        raise


def _evaluator(
    config: TrainConfig, directory: RunDirectory, last: dict[str, float]
) -> Callable[[Policy, int], Mapping[str, float]] | None:
    if not config.is_evaluated or current().rank:
        return None

    def evaluate(policy: Policy, step: int) -> Mapping[str, float]:
        evaluation = run_episodes(
            policy, config.env, config.evaluation, num_workers=config.num_workers, fleet=config.fleet or LOCAL
        )
        directory.write_eval(eval_name(step), json.loads(evaluation.to_json()))
        last.clear()
        last.update(means_of(evaluation))
        return last

    return evaluate
