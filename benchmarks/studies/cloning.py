"""Lift, can and square, cloned from the scripted demonstrator and evaluated.

    python -m benchmarks.studies.cloning                               every task and seed
    python -m benchmarks.studies.cloning --tasks lift --seeds 0
    python -m benchmarks.studies.cloning --report                      the page from what is there

Every task and seed records 100 successful demonstrations of its own, clones them with the experiment
`<task>_scripted_bc`, and plays 100 episodes with the last checkpoint. What came out is one JSON file in
docs/results/cloning/; a policy whose file is there is not cloned again. Needs the extra `robosuite`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import burnish
from benchmarks import pages
from benchmarks.options import study_parser, words
from benchmarks.studies import once
from benchmarks.studies.rows import busy, describe_dataset, episode_columns
from envs.datasets import read_dataset
from envs.evaluation.intervals import wilson

PAGE = "cloning"
TASKS = ("lift", "can", "square")
DEMONSTRATIONS, EPISODES = 100, 100


def run_one(task: str, seed: int, *, root: Path, workers: int) -> Path:
    """Record, clone and evaluate one policy; returns its file."""
    target = pages.RESULTS / PAGE / f"{task}-seed{seed}.json"
    if target.exists():
        return target
    place = root / f"{task}-seed{seed}"
    demos = once.demonstrations(root / f"{task}-seed{seed}.hdf5", task, DEMONSTRATIONS, seed=seed)
    run = once.trained(place, f"experiment={task}_scripted_bc", dataset=str(demos), seed=seed)
    found = burnish.evaluate(
        run, episodes=EPISODES, num_workers=workers, out=str(place / "eval.json")
    ).evaluation
    content = {
        "task": task, "seed": seed, "experiment": f"{task}_scripted_bc",
        "dataset": describe_dataset(demos) | {"attempts": attempts(demos, once.first_seed(seed))},
        "steps": run.directory.latest(), "clone_s": busy(run.directory.metrics_path),
        "parameters": sum(p.numel() for p in run.load_policy().parameters()),
        "episodes": episode_columns(found), "protocol": found.protocol,
        "configuration": pages.configuration(run.directory),
    }  # fmt: skip
    return pages.keep(PAGE, target.stem, content)


def attempts(demos: Path, first_seed: int) -> int:
    """Return how many attempts the demonstrations took: one per seed, up to that of the last success."""
    return int(read_dataset(demos).episode_extras["seed"][-1]) - first_seed + 1


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.studies.cloning`: per task and seed, {demonstrations} successful
demonstrations of the scripted demonstrator, one diffusion policy cloned from them
(`experiment=<task>_scripted_bc`), and {episodes} episodes with its last checkpoint, whose seeds no
demonstration has. Demonstrator: successes among its attempts at those demonstrations. Control steps: of a
demonstration, mean. {intervals}
The demonstrator is the same with every seed; its interval is Wilson's."""


def report() -> Path:
    """Write docs/results/cloning.md from what is there."""
    found = pages.kept(PAGE, advice="run it without --report first")
    introduction = INTRODUCTION.format(
        demonstrations=DEMONSTRATIONS, episodes=EPISODES, intervals=pages.INTERVALS
    )
    columns = ("task", "seed", "demonstrator", "control steps", "clone", "gradient steps", "wall, cloning")
    lines = ["# Clones of scripted demonstrators", "", introduction, "", *pages.table(columns, ())]
    for task in TASKS:
        lines += _rows(task, [one for one in found if one["task"] == task])
    first = found[0]["environment"]
    packages = pages.versions(found[0], ("torch", "mujoco", "robosuite"))
    lines += [
        "",
        f"Measured on {first['cpu_count']} CPU cores shared with other work, one thread; "
        f"{packages}; commits {pages.commits(found)}. The episodes are in `{PAGE}/`.",
    ]
    return pages.write(PAGE, lines)


def _rows(task: str, runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: of every seed, and of all of them."""
    for run in runs:
        data, (demonstrator, clone) = run["dataset"], _shares([run])
        length, wall = data["steps"] / data["episodes"], run["clone_s"] / 60
        cells = f"{task} | {run['seed']} | {demonstrator} | {length:.0f} | {clone} | {run['steps']:,}"
        yield f"| {cells} | {wall:.1f} min |"
    if len(runs) > 1:
        demonstrator, clone = _shares(runs)
        yield f"| **{task}** | **all** | **{demonstrator}** | | **{clone}** | | |"


def _shares(contents: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the success of the demonstrator and of the clone."""
    data = [content["dataset"] for content in contents]
    demonstrator = wilson(sum(d["episodes"] for d in data), sum(d["attempts"] for d in data))
    clone = pages.success([content["episodes"]["success"] for content in contents])
    return pages.percent(demonstrator), clone


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0,1", root="runs/cloning", workers=0)
    parser.add_argument("--tasks", type=words, default=",".join(TASKS))
    options = parser.parse_args()
    for seed, task in () if options.report else product(options.seeds, options.tasks):
        print(f"written: {run_one(task, seed, root=options.root, workers=options.workers)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
