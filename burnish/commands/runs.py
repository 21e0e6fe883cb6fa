"""`burnish runs`: a table of the runs below a folder, with the keys in which they differ."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.console import output, table
from burnish.reports.facts import elapsed_s
from burnish.runs.best_evaluation import best_evaluation
from burnish.runs.locate import runs_below
from burnish.runs.tasks import task_label
from policies.errors import BurnishError
from policies.policy_config import PART_GROUPS

_log = logging.getLogger(__name__)
_NOT_COMPARED = ("name", "progress", "num_workers", "fleet", "init", "dataset")
MOST_KEYS = 8  # columns of differing keys
_FACTS = ("run", "algo", "task", "step", "budget", "last", "best", "hours")
_BUDGETS = ("steps", "env_steps", "total_steps", "iterations")  # keys of the length of a run


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="burnish runs", description="List runs.")
    parser.add_argument("folder", nargs="?", default="runs", help="folder with runs, searched to any depth")
    folder = Path(parser.parse_args(arguments).folder).expanduser()
    found = readable_runs(runs_below(folder))
    if not found:
        output().print(f"no runs below {folder}", markup=False)
        return 0
    columns, rows = tabulate(found, folder)
    console, shown = output(), len(columns)
    widths = [max(len(str(cell)) for cell in cells) + 2 for cells in zip(columns, *rows, strict=True)]
    while shown > len(_FACTS) and sum(widths[:shown]) > console.width:
        shown -= 1
    console.print(table("", columns[:shown], [row[:shown] for row in rows]))
    if hidden := columns[shown:]:
        console.print(f"In a wider window: {', '.join(hidden)}, in which the runs differ too.", markup=False)
    return 0


def readable_runs(
    paths: Sequence[Path], also: Callable[[RunDirectory], object] | None = None
) -> list[RunDirectory]:
    """Open runs; damaged ones are skipped with a warning, as are those of which `also` cannot be read."""
    found = []
    for path in paths:
        try:
            run = RunDirectory.open(path)
            run.section("algo"), run.section("env"), run.latest()  # reads the files
            if also is not None:
                also(run)
            found.append(run)
        except (BurnishError, OSError) as error:
            _log.warning("%s is left out: %s", path, error)
    return found


def tabulate(runs: Sequence[RunDirectory], folder: Path) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return columns and rows: newest facts of every run, then the keys that differ between them."""
    keys = differing_keys(runs)[:MOST_KEYS]
    return (*_FACTS, *keys), [_row(run, folder, keys) for run in runs]


def differing_keys(runs: Sequence[RunDirectory]) -> list[str]:
    """Return the configuration keys whose values differ between runs that have them, in order."""
    configs = [settings_of(run) for run in runs]
    names = dict.fromkeys(key for config in configs for key in config)
    shown = (
        key
        for key in names
        if key.split(".")[0] not in _NOT_COMPARED and key not in ("algo.name", "env.name")
    )
    return [key for key in shown if _values(configs, key) > 1]


def _values(configs: Sequence[Mapping[str, Any]], key: str) -> int:
    return len({json.dumps(config[key], default=str) for config in configs if key in config})


def _row(run: RunDirectory, folder: Path, keys: Sequence[str]) -> tuple[object, ...]:
    config, algo = settings_of(run), run.section("algo")
    seconds = elapsed_s(read_jsonl(run.metrics_path))
    both = best_evaluation(run)
    last, best = ("", "") if both is None else (_shown(both.last), _shown(both.best))
    budget = next((algo[key] for key in _BUDGETS if algo.get(key) is not None), "")
    online = algo.get("online_steps")
    if isinstance(budget, int) and isinstance(online, int):  # gradient steps on data, then control steps
        budget += online
    name = run.path.relative_to(folder) if run.path != folder else run.path.name
    facts = (name, algo.get("name", ""), task_label(run), run.latest() or 0, budget, last, best)
    return *facts, f"{seconds / 3600:.2f}", *("" if config.get(key) is None else config[key] for key in keys)


def _shown(one: Any) -> str:
    return f"{100 * one.value:.1f} %" if one.quantity == "success" else f"{one.value:.4g}"


def settings_of(run: RunDirectory) -> dict[str, Any]:
    """Return key and value of the settings of a run, without those of a new policy where it has `init`."""
    unused = (*PART_GROUPS, "policy") if run.config.get("init") else ()
    return {key: value for key, value in flat_config(run.config) if key.split(".")[0] not in unused}


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield key and value of every setting."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
