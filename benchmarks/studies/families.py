"""Every process on the same tasks: cloned with one backbone and one budget, evaluated, timed.

    python -m benchmarks.studies.families                               every family, task and seed
    python -m benchmarks.studies.families --tasks avoid --families flow,edm --seeds 0
    python -m benchmarks.studies.families --report                      the table from what is there

Each cloned policy leaves one JSON file in docs/results/families/ (per-episode numbers under each of its
samplers, evaluations of the network per decision, latency, versions); one whose file is there is not cloned
again. The policy that is evaluated is the last one, averaged as cloning does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import pages
from benchmarks.options import study_parser, words
from benchmarks.speed.timing import interleave
from benchmarks.studies import once
from benchmarks.studies.rows import describe_dataset, episode_columns
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from envs.make import env as make_env
from policies import registry
from policies.policy import Policy

EPISODES = 100
BATCH, WIDTH = 128, 256


@dataclass(frozen=True)
class Task:
    """A task, what its policies are cloned from, for how long, and how many samplers are shown of each."""

    demonstrations: int
    steps: int
    lr: float
    samplers: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A process with the samplers that it is shown with: titles and settings (`name`, then fields).

    Attributes:
        process: Overrides that choose it.
        samplers: Settings by title.
        lr: Learning rate where that of the task is too large for it; None: that of the task.
    """

    process: tuple[str, ...]
    samplers: dict[str, dict[str, Any]]
    lr: float | None = None


TASKS = {
    "avoid": Task(100, 12_000, 2e-3, 2),
    "cube-single": Task(20, 6_000, 2e-3, 1, ("policy.observation_clip=2.0",)),
}
EULER = {"name": "euler", "clip_action": 1.0}
DIFFUSION: dict[str, dict[str, Any]] = {
    "DDPM 20": {"name": "ddpm"},
    "DDIM 5": {"name": "ddim", "steps": 5, "spacing": "trailing"},
}
FAMILIES = {
    "diffusion, eps": Family(("process=diffusion_eps",), DIFFUSION),
    "diffusion, x0": Family(("process=diffusion",), DIFFUSION),
    "vp, v": Family(("process=vp",), {f"DPM++ 2M {n}": {"name": "dpmpp_2m", "steps": n} for n in (10, 4)}),
    "edm": Family(("process=edm",), {f"Euler {n}": EULER | {"steps": n} for n in (10, 3)}),
    "flow": Family(("process=flow",), {f"Euler {n}": EULER | {"steps": n} for n in (10, 3)}),
    "shortcut": Family(("process=shortcut",), {f"Euler {n}": EULER | {"steps": n} for n in (8, 2)}),
    "meanflow": Family(("process=meanflow",), {f"Euler {n}": EULER | {"steps": n} for n in (4, 1)}),
    "consistency": Family(
        ("process=consistency",), {f"consistency {n}": {"name": "consistency", "steps": n} for n in (3, 1)}
    ),
    "score energy, dot": Family(
        ("process=energy", "process.prediction=eps"), {"DDIM 10": {"name": "ddim", "steps": 10}}
    ),
    "energy descent (EBT)": Family(("process=ebt",), {"descent": {"name": "descent"}}, lr=3e-4),
    "MIP": Family(("process=mip",), {"two steps": {}}),
    "regression": Family(("process=regression",), {"one step": {}}),
    "Gaussian": Family(("process=gaussian",), {"mean": {"name": "mean"}}),
    "mixture": Family(("process=mixture",), {"mean of a drawn mode": {"name": "mode_mean"}}),
}


# -- measuring ------------------------------------------------------------------------------------------


def run_one(task: str, family: str, seed: int, root: Path) -> Path:
    """Clone and evaluate one policy; returns its file."""
    name = "".join(c if c.isalnum() else "-" for c in family.lower()).replace("--", "-").strip("-")
    target = pages.RESULTS / "families" / f"{task}-{name}-seed{seed}.json"
    if target.exists():
        return target
    setting, place = TASKS[task], root / task / target.stem
    demos = demonstrations(task, seed, root)
    lr = FAMILIES[family].lr or setting.lr
    budget = {"steps": setting.steps, "lr": lr, "batch_size": BATCH, "validation_fraction": 0.0}
    run = clone(task, FAMILIES[family].process, demos, place, seed=seed, budget=budget)
    policy = run.load_policy()
    content = {
        "task": task, "family": family, "seed": seed,
        "dataset": describe_dataset(demos), "budget": budget | {"width": WIDTH},
        "configuration": pages.configuration(run.directory),
        "parameters": sum(p.numel() for p in policy.parameters()),
        "samplers": {
            title: measure(_with(policy, settings), task)
            for title, settings in list(FAMILIES[family].samplers.items())[: setting.samplers]
        },
    }  # fmt: skip
    return pages.keep("families", target.stem, content)


def demonstrations(task: str, seed: int, root: Path) -> Path:
    """Collect what the policies of a seed are cloned from, unless it is there; returns the file."""
    path = root / task / f"demonstrations-seed{seed}.hdf5"
    return once.demonstrations(path, task, TASKS[task].demonstrations, seed=seed)


def clone(
    task: str, process: Sequence[str], demos: Path, place: Path, *, seed: int, budget: dict[str, Any]
) -> Any:
    """Clone a policy with a process; returns the run."""
    overrides = ("algo=bc", f"env={task}", *process, *TASKS[task].overrides, f"backbone.width={WIDTH}")
    return once.trained(place, *overrides, dataset=str(demos), seed=seed, algo=budget)


def _with(policy: Any, settings: dict[str, Any]) -> Any:
    return policy.with_sampler(registry.from_json("sampler", settings)) if settings else policy


def measure(policy: Policy, task: str) -> dict[str, Any]:
    """Evaluate a policy, and time one decision on one thread."""
    evaluation = evaluate(policy, make_env(task), EvaluationSettings(episodes=EPISODES))  # type: ignore[arg-type]
    obs = torch.zeros(1, policy.chunk.obs_steps, policy.obs_dim)
    noise = policy.sample_noise(1, generator=torch.Generator().manual_seed(0))
    times = interleave({"act": lambda: policy.act(obs, noise=noise)}, rounds=5)
    table, sampler = getattr(policy, "table", None), getattr(policy, "sampler", None)
    return {
        "calls": getattr(table, "num_steps", getattr(sampler, "steps", None)),
        "latency_s": times["act"],
        "episodes": episode_columns(evaluation),
        "protocol": evaluation.protocol,
    }


# -- report ---------------------------------------------------------------------------------------------


def report() -> Path:
    """Write docs/results/families.md from what is there."""
    everything = pages.kept("families", advice="run it without --report first")
    found = pages.grouped(everything, lambda row: (row["task"], row["family"]))
    lines = [
        "# Every process, cloned",
        "",
        f"`python -m benchmarks.studies.families`: the same MLP ({WIDTH} wide) and the same gradient "
        f"steps for all; {EPISODES} episodes per seed, last checkpoint. Success: mean over seeds. "
        f"{pages.INTERVALS} "
        "Ways: distinct ways around the obstacles among the successful episodes of a seed, and how many "
        "equally frequent ways would be as diverse (exp of the entropy), averaged over seeds. Calls: "
        "evaluations of the network per decision. Latency: one decision for one observation, on one thread, "
        "median.",
    ]
    for task, setting in TASKS.items():
        lines += [
            "",
            f"## {task}",
            "",
            f"Cloned from {setting.demonstrations} demonstrations per seed, {setting.steps:,} steps at a "
            f"learning rate of {setting.lr:g}{_exceptions(task, found)}.",
            "",
        ]
        lines += _table([row for family in FAMILIES for row in found.get((task, family), [])])
    packages = pages.versions(everything[0], ("torch", "mujoco", "gymnasium"))
    lines += [
        "",
        f"Measured on {everything[0]['environment']['cpu_count']} shared CPU cores; {packages}; commits "
        f"{pages.commits(everything)}. The episodes are in `families/`.",
    ]
    return pages.write("families", lines)


def _exceptions(task: str, found: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Name the families of a task that were cloned with a learning rate of their own."""
    own = [
        f"{name} {family.lr:g}" for name, family in FAMILIES.items() if family.lr and (task, name) in found
    ]
    return f" ({', '.join(own)})" if own else ""


def _table(contents: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of a task, one per family and sampler."""
    played = [(row["family"], title, result) for row in contents for title, result in row["samplers"].items()]
    has_ways = any("mode" in result["episodes"] for *_, result in played)
    ways = ("distinct ways", "effective ways") if has_ways else ()
    rows = []
    for (family, title), same in pages.grouped(played, lambda one: one[:2]).items():
        results = [result for *_, result in same]
        success = pages.success([result["episodes"]["success"] for result in results])
        cells = [family, title, str(len(results)), success]
        if has_ways:
            counts = np.array([_ways(result["episodes"]) for result in results]).mean(axis=0)
            cells += [f"{counts[0]:.1f}", f"{counts[1]:.1f}"]
        calls = results[0]["calls"]
        latency = float(np.median([result["latency_s"] for result in results]))
        cells += ["1" if calls is None else str(calls), f"{1e3 * latency:.2f} ms"]
        rows.append(cells)
    return pages.table(("process", "sampler", "seeds", "success", *ways, "calls", "latency"), rows)


def _ways(episodes: dict[str, list[float]]) -> tuple[float, float]:
    """Return the number of distinct ways among successful episodes, and exp of their entropy."""
    modes, success = (np.array(episodes[key]) for key in ("mode", "success"))
    counts = np.unique(modes[(success > 0) & (modes >= 0)], return_counts=True)[1]
    if not counts.size:
        return 0.0, 0.0
    share = counts / counts.sum()
    return float(counts.size), float(np.exp(-(share * np.log(share)).sum()))


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0,1,2", root="runs/families")
    parser.add_argument("--tasks", type=words, default=",".join(TASKS))
    parser.add_argument("--families", default=";".join(FAMILIES), help="separated by ;")
    options = parser.parse_args()
    wanted = product(options.tasks, options.seeds, options.families.split(";"))
    for task, seed, family in () if options.report else wanted:
        print(f"written: {run_one(task, family, seed, options.root)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
