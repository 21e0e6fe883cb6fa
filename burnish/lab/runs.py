"""The runs below a folder, as they grow; nothing is written.

A run is asked for by its name in the list, so no path comes from outside. Files that are links to elsewhere,
or larger than the run's own would be, are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from algos.training.metrics import read_jsonl
from algos.training.run_directory import RunDirectory
from burnish.reports.curves import learning_charts, short_value
from burnish.reports.facts import machine_of, part_name
from burnish.reports.html import render
from burnish.reports.results import intervals_over
from burnish.reports.rollouts import outcome
from burnish.runs.locate import Located, runs_below
from burnish.runs.tasks import known_task, task_label
from envs.evaluation.evaluate import Evaluation
from policies.errors import BurnishError
from policies.storage.strict_json import own_file, read_small

MOST_RUNS = 200  # in the list, the newest first
_METRICS_BYTES = 2**26
_SEARCH_S = 5.0  # between two searches for runs
_EVALUATION_BYTES = 2**22


class RunFolder:
    """The runs below a folder.

    Args:
        folder: Searched to any depth.
        clock: Time [s].
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._found: dict[str, RunDirectory] = {}
        self._searched = -_SEARCH_S

    def runs(self) -> Mapping[str, RunDirectory]:
        """Return the runs by name: the path below the folder."""
        if self._clock() - self._searched >= _SEARCH_S:
            self._searched = self._clock()
            home, found = self._folder.resolve(), {}
            for path in runs_below(self._folder):
                if home == path.resolve() or home in path.resolve().parents:
                    name = path.relative_to(self._folder).as_posix()
                    name = name.encode("utf-8", "backslashreplace").decode()  # what a browser can ask for
                    found[self._folder.name if name == "." else name] = RunDirectory.open(path)
            self._found = {name: self._found.get(name, run) for name, run in found.items()}
        return self._found

    def listed(self) -> list[dict[str, Any]]:
        """Return name, algorithm, task, newest checkpoint and age [s] of every run, the youngest first."""
        rows: list[dict[str, Any]] = []
        for name, run in self.runs().items():
            with suppress(BurnishError, OSError, ValueError):  # a damaged run is left out
                facts = {"algo": part_name(run, "algo"), "task": task_label(run)}
                age = max(self._clock() - _changed(run), 0.0)
                rows.append({"name": name, **facts, "step": run.latest(), "age_s": round(age)})
        return sorted(rows, key=lambda row: row["age_s"])[:MOST_RUNS]

    def shown(self, name: str, version: str) -> dict[str, Any] | None:
        """Return a run's `version`, and its `html` if the one given is another; None: no such run."""
        run = self.runs().get(name)
        if run is None:
            return None
        now = f"{_size(run.metrics_path)}-{len(run.evals())}"
        if now == version:
            return {"version": now}
        try:
            html = _drawn(name, run)
        except (BurnishError, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            html = render("damaged.html", name=name, error=error)
        return {"version": now, "html": html}


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _changed(run: RunDirectory) -> float:
    """Return when a run last wrote numbers, or began [s]."""
    path = run.metrics_path
    return (path if path.exists() else run.path).stat().st_mtime


def _drawn(name: str, run: RunDirectory) -> str:
    """Return curves, and the episodes of the newest evaluation, as HTML."""
    rows: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):  # what is damaged, or no file of the run, is left out; so below
        if _size(own_file(run.metrics_path)) <= _METRICS_BYTES:
            rows = read_jsonl(run.metrics_path)
    evaluations = {}
    for one in run.evals():
        with suppress(BurnishError, OSError, ValueError, KeyError, TypeError):
            content = read_small(own_file(one.path), _EVALUATION_BYTES)
            evaluations[one.step, one.is_of_training] = Evaluation.from_json(content)
    training = {step: one for (step, is_of_training), one in evaluations.items() if is_of_training}
    charts = learning_charts({name: rows}, "steps", intervals={name: intervals_over([training])})
    newest = max(evaluations, default=None)
    env = known_task(Located(run.policy_path(), run.path)) if run.latest() is not None else None
    episodes, result = [], ""
    if newest is not None and env is not None:
        episodes = [(outcome(env, row), row) for row in evaluations[newest].rows]
        result = _result(evaluations[newest])
    last = rows[-1] if rows else {}
    facts = {"step": last.get("step"), "seconds": last.get("time/elapsed_s"), "result": result}
    facts |= {"newest": newest and newest[0], "machine": machine_of(run), "load": os.getloadavg()[0]}
    return render("run.html", name=name, charts=charts, episodes=episodes, **facts)


def _result(evaluation: Evaluation) -> str:
    """Return the main quantity of an evaluation in words."""
    values = evaluation.values(evaluation.quantity)
    if evaluation.quantity == "success":
        return f"{int(values.sum())} of {len(values)} succeeded"
    return f"mean return {short_value(values.mean())} of {len(values)}"
