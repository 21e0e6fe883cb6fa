"""Composition: pairs of policies, their weights estimated and searched, compared with both members.

    python -m benchmarks.studies.composition                            every pair on both tasks
    python -m benchmarks.studies.composition avoid                      one task
    python -m benchmarks.studies.composition --report                   the page from what is there

Every pair leaves one JSON file per seed in docs/results/composition/; what has its file is not repeated. The
page docs/results/composition.md is made of these. What is cloned stays under --root and is not cloned again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import burnish
from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from envs.evaluation.intervals import Interval, paired_difference, success_rate

PAGE, HELD_OUT = "composition", "held-out"
EPISODES, SEARCH = 100, (20, 100)  # of the final comparison, and of every round of the search


@dataclass(frozen=True)
class Clone:
    """A policy: its demonstrations and its process (names in its task), and what else is its own."""

    data: str
    process: str = "diffusion"
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name for files and tables."""
        return "-".join([self.data, self.process, *(one.replace("=", "-") for one in self.overrides)])


@dataclass(frozen=True)
class Task:
    """How the policies of a task are cloned.

    Attributes:
        recipe: Overrides of every policy.
        processes: Overrides of every process.
        steps: Gradient steps.
        data: Episodes of every file of demonstrations, by name; the files share no seed.
    """

    env: str
    recipe: tuple[str, ...]
    processes: dict[str, tuple[str, ...]]
    steps: int
    data: dict[str, int]


TASKS = {
    "avoid": Task(
        "avoid",
        ("experiment=avoid_bc", "backbone.width=256"),
        {"diffusion": ("process.prediction=x0",), "flow": ("process=flow",)},
        12_000,
        {"a": 100, "b": 100, HELD_OUT: 20},
    ),
    "cube-single": Task(
        "cube-single",
        ("experiment=cube_single_bc", "backbone.width=256"),
        {"diffusion": (), "flow": ("process=flow",)},
        4000,
        {"a": 10, "b": 10, HELD_OUT: 10},
    ),
}
PAIRS = {
    "diffusion and flow": (Clone("a"), Clone("a", "flow")),
    "different demonstrations": (Clone("a"), Clone("b")),
    "one and three observations": (Clone("a"), Clone("a", overrides=("policy.obs_steps=3",))),
}


def slug(text: str) -> str:
    """Return a name for files."""
    return text.replace(" ", "-")


def demonstrations(task: Task, name: str, seed: int, root: Path) -> Path:
    """Record a file of demonstrations, once."""
    own = 10 * seed + list(task.data).index(name)
    return once.demonstrations(root / f"{name}-seed{seed}.hdf5", task.env, task.data[name], seed=own)


def cloned(task: Task, clone: Clone, seed: int, root: Path) -> Path:
    """Clone a policy, once."""
    place = root / f"{clone.name}-seed{seed}"
    own = (*task.processes[clone.process], *clone.overrides)
    demos = demonstrations(task, clone.data, seed, root)
    steps = f"algo.steps={task.steps}"
    once.trained(place, *task.recipe, *own, steps, env=task.env, seed=seed, dataset=str(demos))
    return place


def measure(name: str, pair: str, seed: int, options: argparse.Namespace) -> Path:
    """Clone, estimate, search and compare one pair; returns the JSON file."""
    target = pages.RESULTS / PAGE / f"{name}-{slug(pair)}-seed{seed}.json"
    if target.exists():
        return target
    task, root = TASKS[name], options.root / name
    members = [cloned(task, clone, seed, root) for clone in PAIRS[pair]]
    place = root / f"composed-{slug(pair)}-seed{seed}"
    result = burnish.compose(
        members,
        env=task.env,
        dataset=str(demonstrations(task, HELD_OUT, seed, root)),
        episodes=EPISODES,
        search={"episodes": [*SEARCH], "keep": [3]},
        num_workers=options.workers,
        out=str(place),
    )
    facts = json.loads((result.path / "composition.json").read_text())
    content = {
        "task": name,
        "pair": pair,
        "seed": seed,
        **facts,
        "members": describe_pair(name, pair),
        "configuration": configurations(members),
        "success": {
            "composition": result.evaluation.values("success").tolist(),
            "members": [one.values("success").tolist() for one in result.members.values()],
        },
        "tables": [section.markdown() for section in result.sections()],
    }
    return pages.keep(PAGE, target.stem, content, indent=1)


def configurations(members: Sequence[Path]) -> dict[str, Any]:
    """Return the composed configurations of a pair."""
    return {
        which: pages.configuration(RunDirectory(one))
        for which, one in zip(("first", "second"), members, strict=True)
    }


def describe_pair(task: str, pair: str) -> list[str]:
    """Say what each member is."""
    processes = TASKS[task].processes
    return [
        " ".join([f"demonstrations {clone.data}", *(processes[clone.process]), *clone.overrides])
        for clone in PAIRS[pair]
    ]


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.studies.composition`: cloned policies in pairs. Weights are estimated
from held-out demonstrations and searched by rollouts; the composition with the searched weights then plays
fresh episodes, and so do its members ([how](../gpc.md)). A seed has its own demonstrations, clones and
search.
{intervals}"""


def report() -> Path:
    """Write the page."""
    found = pages.kept(PAGE, advice="run it without --report first")
    groups = pages.grouped(found, lambda row: (row["task"], row["pair"]))
    lines = ["# Composition", "", INTRODUCTION.format(intervals=pages.INTERVALS), "", *summary(groups)]
    for (task, pair), contents in groups.items():
        lines += ["", f"## {task}: {pair}", "", f"Members: {'; '.join(contents[0]['members'])}."]
        for content in contents:
            lines += ["", f"### Seed {content['seed']}", ""]
            lines += [table.replace("## ", "#### ", 1) for table in content["tables"]]
    lines += ["", f"Measured with {pages.versions(found[0])}; commits {pages.commits(found)}."]
    return pages.write(PAGE, lines)


def summary(groups: Mapping[tuple[str, str], Sequence[dict[str, Any]]]) -> list[str]:
    """Tabulate all pairs: weights of the first member by seed, pooled success, differences to both."""
    head = (
        "task", "pair", "weights searched", "weights estimated",
        "first", "second", "composition", "− first", "− second",
    )  # fmt: skip
    rows = [
        (
            task,
            pair,
            ", ".join(f"{one['composition']['weights'][0]:g}" for one in contents),
            ", ".join(f"{one['estimate'][0]['weights'][0]:.2f}" for one in contents),
            *pooled([one["success"] for one in contents]),
        )
        for (task, pair), contents in groups.items()
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def pooled(seeds: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield success of both members and of the composition, and its difference to both."""
    composition = np.array([one["composition"] for one in seeds])
    members = np.array([one["members"] for one in seeds]).transpose(1, 0, 2)
    for successes in (*members, composition):
        yield percent(success_rate(successes))
    for successes in members:
        yield percent(paired_difference(successes, composition), "+")


def percent(interval: Interval, sign: str = "") -> str:
    """Format a share or a difference of shares."""
    return pages.estimate(interval, f"{sign}.0f", scale=100, unit=" %")


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0,1,2", root="runs/composition", workers=2)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=f"of {', '.join(TASKS)}")
    options = parser.parse_args()
    for name, seed, pair in () if options.report else product(options.tasks, options.seeds, PAIRS):
        print(f"written: {measure(name, pair, seed, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
