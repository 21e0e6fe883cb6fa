"""Lift, can and square, cloned from the scripted demonstrator and evaluated.

    python -m benchmarks.studies.cloning                               every task and seed
    python -m benchmarks.studies.cloning --tasks lift --seeds 0
    python -m benchmarks.studies.cloning --report                      the page from what is there

Every task and seed records 100 successful demonstrations of its own, clones them with the experiment
`<task>_scripted_bc`, and plays 100 episodes with the last checkpoint. What came out is one JSON file in
docs/results/cloning/; a policy whose file is there is not cloned again. Needs the extra `robosuite`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import burnish
from algos.training.provenance import describe_environment
from benchmarks import pages
from benchmarks.studies import once
from benchmarks.studies.rows import busy, describe_dataset, episode_columns
from envs.datasets import read_dataset
from envs.evaluation.intervals import wilson

RESULTS = Path("docs/results")
TASKS = ("lift", "can", "square")
DEMONSTRATIONS, EPISODES = 100, 100


# -- measuring ------------------------------------------------------------------------------------------


def file_of(task: str, seed: int) -> Path:
    """Return where a result is kept."""
    return RESULTS / "cloning" / f"{task}-seed{seed}.json"


def run_one(task: str, seed: int, *, root: Path, workers: int) -> Path:
    """Record, clone and evaluate one policy; returns its file."""
    target = file_of(task, seed)
    if target.exists():
        return target
    place, first = root / f"{task}-seed{seed}", once.first_seed(seed)
    demos = once.demonstrations(root / f"{task}-seed{seed}.hdf5", task, DEMONSTRATIONS, first=first)
    run = once.trained(place, f"experiment={task}_scripted_bc", dataset=str(demos), seed=seed)
    found = burnish.evaluate(
        run, episodes=EPISODES, num_workers=workers, out=str(place / "eval.json")
    ).evaluation
    content = {
        "task": task, "seed": seed, "experiment": f"{task}_scripted_bc",
        "dataset": describe_dataset(demos) | {"attempts": attempts(demos, first)},
        "steps": run.directory.latest(), "clone_s": busy(run.directory.metrics_path),
        "parameters": sum(p.numel() for p in run.load_policy().parameters()),
        "episodes": episode_columns(found), "protocol": found.protocol,
        "configuration": pages.configuration(run.directory), "environment": describe_environment(),
    }  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content) + "\n")
    return target


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
    files = [[p for seed in range(10) if (p := file_of(task, seed)).exists()] for task in TASKS]
    found = [[json.loads(p.read_text()) for p in group] for group in files]
    introduction = INTRODUCTION.format(
        demonstrations=DEMONSTRATIONS, episodes=EPISODES, intervals=pages.INTERVALS
    )
    lines = ["# Clones of scripted demonstrators", "", introduction, ""]
    lines += ["| task | seed | demonstrator | control steps | clone | gradient steps | wall, cloning |"]
    lines += ["|" + "---|" * 7]
    for contents in filter(None, found):
        lines += [_row(content) for content in contents]
        lines += [_pooled(contents)] if len(contents) > 1 else []
    everything = [content for contents in found for content in contents]
    if everything:
        lines += ["", _origin(everything)]
    path = RESULTS / "cloning.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _row(content: dict[str, Any]) -> str:
    data = content["dataset"]
    demonstrator, clone = _shares([content])
    length, wall = data["steps"] / data["episodes"], content["clone_s"] / 60
    cells = (content["task"], content["seed"], demonstrator, f"{length:.0f}", clone, f"{content['steps']:,}")
    return "| " + " | ".join(map(str, cells)) + f" | {wall:.1f} min |"


def _pooled(contents: Sequence[dict[str, Any]]) -> str:
    demonstrator, clone = _shares(contents)
    return f"| **{contents[0]['task']}** | **all** | **{demonstrator}** | | **{clone}** | | |"


def _shares(contents: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the success of the demonstrator and of the clone."""
    data = [content["dataset"] for content in contents]
    demonstrator = wilson(sum(d["episodes"] for d in data), sum(d["attempts"] for d in data))
    clone = pages.success([content["episodes"]["success"] for content in contents])
    return pages.percent(demonstrator), clone


def _origin(contents: Sequence[dict[str, Any]]) -> str:
    first = contents[0]["environment"]
    packages = ", ".join(f"{name} {first['packages'][name]}" for name in ("torch", "mujoco", "robosuite"))
    return (
        f"Measured on {first['cpu_count']} CPU cores shared with other work, one thread; "
        f"{packages}; commits {pages.commits(contents)}. The episodes are in `cloning/`."
        f"{pages.about_commits(contents)}"
    )


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--root", type=Path, default=Path("runs/cloning"))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only write the page of what is there")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not options.report:
        for seed in map(int, options.seeds.split(",")):
            for task in options.tasks.split(","):
                print(
                    f"written: {run_one(task, seed, root=options.root, workers=options.workers)}", flush=True
                )
    print(f"written: {report()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
