"""Composition: pairs of policies, their weights estimated and searched, compared with both members.

    python -m benchmarks.composition                            every pair on both tasks
    python -m benchmarks.composition avoid --episodes 50        one task, a smaller comparison
    python -m benchmarks.composition --report                   the page from what is there

Every pair leaves one JSON file in docs/results/composition/; a pair whose file is there is not repeated. The
page docs/results/composition.md is made of these. What is cloned stays under --root and is not cloned again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import burnish
from algos.provenance import describe_environment

RESULTS = Path("docs/results")
HELD_OUT = "held-out"


@dataclass(frozen=True)
class Clone:
    """A policy: its demonstrations (by name) and what differs from the recipe of its task."""

    data: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """How the policies of a task are cloned.

    Attributes:
        recipe: Overrides of every policy.
        steps: Gradient steps.
        data: Episodes of every file of demonstrations, by name; the files share no seed.
    """

    env: str
    recipe: tuple[str, ...]
    steps: int
    data: dict[str, int]


TASKS = {
    "avoid": Task(
        "avoid",
        ("experiment=avoid_bc", "backbone.width=256"),
        4000,
        {"a": 20, "b": 20, HELD_OUT: 20},
    ),
    "cube-single": Task(
        "cube-single",
        ("experiment=cube_single_bc", "backbone.width=256"),
        4000,
        {"a": 10, "b": 10, HELD_OUT: 10},
    ),
}
PAIRS = {
    "diffusion and flow": (Clone("a"), Clone("a", ("process=flow",))),
    "different demonstrations": (Clone("a"), Clone("b")),
    "one and three observations": (Clone("a"), Clone("a", ("policy.obs_steps=3",))),
}


def slug(text: str) -> str:
    """Return a name for files."""
    return text.replace(" ", "-")


def demonstrations(task: Task, name: str, root: Path) -> Path:
    """Record a file of demonstrations, once."""
    path = root / f"{name}.hdf5"
    if not path.exists():
        number = list(task.data).index(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        burnish.collect(
            env=task.env, episodes=task.data[name], first_seed=1_000_000 + 10_000 * number, out=str(path)
        )
    return path


def cloned(task: Task, clone: Clone, root: Path, steps: int) -> Path:
    """Clone a policy, once."""
    name = "-".join([clone.data, *(override.replace("=", "-") for override in clone.overrides)])
    place = root / name
    if not (place / "checkpoints" / "last").exists():
        overrides = (*task.recipe, *clone.overrides, "evaluation.episodes=0", f"algo.steps={steps}")
        burnish.train(
            *overrides, env=task.env, dataset=str(demonstrations(task, clone.data, root)), directory=place
        )
    return place


def measure(name: str, pair: str, options: argparse.Namespace) -> Path:
    """Clone, estimate, search and compare one pair; returns the JSON file."""
    target = RESULTS / "composition" / f"{name}-{slug(pair)}.json"
    if target.exists():
        return target
    task, root = TASKS[name], options.root / name
    members = [cloned(task, clone, root, options.steps or task.steps) for clone in PAIRS[pair]]
    place = root / f"composed-{slug(pair)}"
    result = burnish.compose(
        members,
        env=task.env,
        dataset=str(demonstrations(task, HELD_OUT, root)),
        episodes=options.episodes,
        search={"episodes": options.search, "keep": [3] * (len(options.search) - 1)},
        num_workers=options.workers,
        out=str(place),
    )
    facts = json.loads((result.path / "composition.json").read_text())
    content = {
        "task": name,
        "pair": pair,
        **facts,
        "members": describe_pair(pair),
        "tables": [section.markdown() for section in result.sections()],
        "environment": describe_environment(),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")
    return target


def describe_pair(pair: str) -> list[str]:
    """Say what each member is."""
    return [" ".join([f"demonstrations {clone.data}", *clone.overrides]) for clone in PAIRS[pair]]


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.composition`: policies cloned from few demonstrations, in pairs.
Weights are estimated from held-out demonstrations and searched by rollouts; the composition with the searched
weights then plays fresh episodes, and so do its members ([how](../gpc.md)). Intervals: 95 %. Each pair is one
training seed: differences are those of these policies, not of recipes."""


def report() -> Path:
    """Write the page."""
    found = [json.loads(path.read_text()) for path in sorted((RESULTS / "composition").glob("*.json"))]
    lines = ["# Composition", "", INTRODUCTION, "", *summary(found)]
    for content in found:
        lines += ["", f"## {content['task']}: {content['pair']}", ""]
        lines += [f"Members: {'; '.join(content['members'])}.", ""]
        lines += [table.replace("## ", "### ", 1) for table in content["tables"]]
    packages = found[0]["environment"]["packages"]
    lines += ["", f"Measured with torch {packages['torch']}, mujoco {packages['mujoco']}."]
    path = RESULTS / "composition.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    return path


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    """Tabulate all pairs: weights of the first member, success, differences to both."""
    head = (
        "task", "pair", "weight searched", "weight estimated", "composition", "− first", "− second",
    )  # fmt: skip
    rows = [
        (
            content["task"],
            content["pair"],
            f"{content['composition']['weights'][0]:g}",
            estimated(content["estimate"][0]),
            percent(content["evaluation"]["success"]),
            *(percent(one["difference"]) for one in content["comparisons"].values()),
        )
        for content in found
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def estimated(estimate: dict[str, Any]) -> str:
    """Format the estimated weight of the first member."""
    return f"{estimate['weights'][0]:.2f} ({estimate['low'][0]:.2f} to {estimate['high'][0]:.2f})"


def percent(interval: dict[str, float]) -> str:
    """Format a share or a difference of shares."""
    value, low, high = (100 * interval[key] for key in ("value", "low", "high"))
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--episodes", type=int, default=100, help="of the final comparison")
    parser.add_argument("--search", type=int, nargs="+", default=[20, 100], help="episodes of every round")
    parser.add_argument("--steps", type=int, help="gradient steps of every policy")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path("runs/composition"))
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not options.report:
        for name in options.tasks:
            for pair in PAIRS:
                print(f"written: {measure(name, pair, options)}", flush=True)
    print(f"written: {report()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
