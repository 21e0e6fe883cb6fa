"""Tasks that no experiment knows: `experiment=auto` clones a policy and fine-tunes it, on several seeds.

    python -m benchmarks.studies.new_tasks reacher pick-place --seeds 0,1,2
    python -m benchmarks.studies.new_tasks adroit-door --dataset door-human.hdf5
    python -m benchmarks.studies.new_tasks --report                    the page from what is there

Every run leaves one JSON file in docs/results/new_tasks/ (per-episode numbers, curve, composed
configuration, versions); a run whose file is there is not repeated. The page docs/results/new_tasks.md is
made of them. The last checkpoint is evaluated, on the same episodes as its clone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import burnish
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from benchmarks.studies.rows import beside_baseline, busy, curve, describe_dataset
from burnish.api import Run
from envs.evaluation.intervals import Interval, bootstrap_mean, paired_difference

PAGE, EPISODES, AUTO = "new_tasks", 100, "experiment=auto"


@dataclass(frozen=True)
class Task:
    """A task, where its demonstrations come from, and what it is judged by."""

    env: tuple[str, ...]  # overrides that name it
    demonstrations: int | None  # None: a dataset file is given
    expert_steps: int | None = None  # of PPO, whose policy is the expert; None: the task's
    quantity: str = "success"  # or return
    algo: str = "dppo"  # that fine-tunes


TASKS = {
    "pointmaze-umaze": Task(("env=pointmaze-umaze",), 8),
    "door-open": Task(("env=metaworld", "env.task=door-open"), 2),
    "pick-place": Task(("env=metaworld", "env.task=pick-place"), 6),
    "scene": Task(("env=scene",), 20, algo="dsrl"),  # 60 iterations of DPPO take two hours of a core
    "adroit-door": Task(("env=adroit-door", "env.max_episode_steps=300"), None),
    "reacher": Task(("env=gym", "env.id=Reacher-v5"), 50, 15_000, quantity="return"),
    "pusher": Task(("env=gym", "env.id=Pusher-v5"), 50, 30_000, quantity="return"),
}


def run_one(name: str, seed: int, *, dataset: str | None, root: Path, workers: int) -> Path:
    """Record, clone, fine-tune and evaluate one seed, as far as that has not been done; returns its file."""
    task, target = TASKS[name], pages.RESULTS / PAGE / f"{name}-seed{seed}.json"
    if target.exists():
        return target
    place = root / name / f"seed{seed}"
    processes: dict[str, Any] = {"num_workers": workers, "num_threads": max(1, workers)}
    demos = Path(dataset) if dataset else recorded(task, seed, place, processes)
    # Evaluations on the way change nothing that is learned, and are left out.
    base = trained(place / "clone", *task.env, AUTO, dataset=str(demos), seed=seed, **processes)
    tuned = trained(
        place / task.algo, AUTO, f"algo={task.algo}", init=str(place / "clone"), seed=seed, **processes
    )
    out = str(place / "eval.json")
    result = burnish.evaluate(
        tuned, baseline=str(place / "clone"), episodes=EPISODES, num_workers=workers, out=out
    )
    content = {
        "study": PAGE, "task": name, "algo": task.algo, "seed": seed, "experiment": "auto",
        "dataset": describe_dataset(demos), **beside_baseline(result),
        "curve": list(curve(tuned.directory.metrics_path)),
        "wall": {"clone_s": busy(base.directory.metrics_path), "tune_s": busy(tuned.directory.metrics_path)},
        "configuration": {
            "clone": pages.configuration(base.directory), "tune": pages.configuration(tuned.directory)
        },
    }  # fmt: skip
    return pages.keep(PAGE, target.stem, content)


def trained(place: Path, *overrides: str, **values: Any) -> Run:
    """Train in a directory; a run that is there goes on with what was chosen for it."""
    if (place / "checkpoints" / "last").exists():
        return burnish.train(resume=str(place))
    return once.trained(place, *overrides, **values)


def recorded(task: Task, seed: int, place: Path, processes: Mapping[str, Any]) -> Path:
    """Return the file of a seed's demonstrations, recorded if it is not there."""
    if task.demonstrations is None:
        raise SystemExit(f"{task.env[0]} has no expert: give --dataset FILE")
    path, first = place / "demonstrations.hdf5", once.first_seed(seed)
    if task.expert_steps is None:
        name, *options = task.env
        return once.demonstrations(path, name.removeprefix("env="), task.demonstrations, *options, seed=seed)
    if not path.exists():
        steps = f"algo.env_steps={task.expert_steps}"
        trained(place / "expert", *task.env, AUTO, "algo=ppo", steps, seed=seed, **processes)
        burnish.collect(
            policy=str(place / "expert"), episodes=task.demonstrations, first_seed=first, out=str(path)
        )
    return path


# -- report ---------------------------------------------------------------------------------------------


def report() -> Path:
    """Write the page."""
    found = pages.kept(PAGE, advice="name a task first")
    rows = []
    for name in [name for name in TASKS if any(one["task"] == name for one in found)]:
        runs = [one for one in found if one["task"] == name]
        rows += [row(name, [one], str(one["seed"])) for one in runs]
        if len(runs) > 1:
            rows.append([f"**{cell}**" if cell else "" for cell in row(name, runs, "all")])
    lines = ["# New tasks", "", INTRODUCTION, "", pages.INTERVALS, ""]
    lines += pages.table(COLUMNS, rows)
    lines += [
        "",
        f"Commits: {pages.commits(found)}.",
        *pages.origin(PAGE, found[0]),
    ]
    return pages.write(PAGE, lines)


INTRODUCTION = """`python -m benchmarks.studies.new_tasks`: tasks without an experiment. A policy is cloned
from few demonstrations and fine-tuned, both as `experiment=auto` chooses; nothing else is set. Clone and
tuned policy play the same 100 episodes. Demonstrations of Reacher and Pusher come from a policy of PPO,
stopped early; those of the Adroit door are human, and its clones differ much between seeds
([how clones fare](door.md)); the others are those of the task's expert. *Steps* are control steps of
fine-tuning."""
COLUMNS = (
    *("task", "demonstrations", "algorithm", "seed"),
    *("clone", "tuned", "paired difference", "steps", "wall"),
)


def row(name: str, runs: list[Any], seed: str) -> list[str]:
    """Return the cells of one run, or of all seeds of a task."""
    task, first = TASKS[name], runs[0]
    before, after = (np.array([run[when][task.quantity] for run in runs]) for when in ("before", "after"))
    if len(runs) == 1:
        difference = Interval(**first["difference"]["difference"])
    else:
        difference = paired_difference(before, after)
    is_rate = task.quantity == "success"
    change = pages.points(difference) if is_rate else pages.estimate(difference, "+.1f")
    spent = ("", "")
    if len(runs) == 1:
        spent = f"{first['curve'][-1]['step']:,}", f"{sum(first['wall'].values()) / 60:.0f} min"
    shown = (
        pages.success(values) if is_rate else f"return {pages.estimate(bootstrap_mean(values), '.1f')}"
        for values in (before, after)
    )
    return [name, f"{first['dataset']['episodes']}", first["algo"], seed, *shown, change, *spent]


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0", root="runs/new_tasks", workers=2)
    parser.add_argument("tasks", nargs="*", help=", ".join(TASKS))
    parser.add_argument("--dataset", help="demonstrations of a task without an expert")
    options = parser.parse_args()
    if unknown := set(options.tasks) - set(TASKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}.")
    for seed, name in () if options.report else product(options.seeds, options.tasks):
        path = run_one(name, seed, dataset=options.dataset, root=options.root, workers=options.workers)
        print(f"written: {path}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
