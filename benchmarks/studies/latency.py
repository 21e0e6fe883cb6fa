"""Success against latency, for every way to execute plans that take time to make.

    python -m benchmarks.studies.latency avoid cube-single --seeds 0,1,2    clones by `RECIPES` first
    python -m benchmarks.studies.latency avoid=<run or policy directory>    a policy that is there
    python -m benchmarks.studies.latency --report                           the page from what is there

All ways play the same episodes with the same noise. The latency is simulated: a plan arrives that many
control steps after its observation. Every policy leaves one JSON file in docs/results/latency/; one whose
file is there is not measured again. The page docs/results/latency.md and its picture are made of these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.options import numbers, study_parser
from benchmarks.studies import once
from burnish.reports.figures import new_figure
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.evaluation.intervals import paired_difference, success_rate
from envs.spec import EnvConfig
from policies.execution.executor import Execution, Executor
from policies.execution.replanning import WarmStart
from policies.policy import Policy
from policies.seeds import seeded_generator

WAYS = {
    "late rows first": Execution(compensate=False),
    "late rows skipped": Execution(),
    "inpainting": Execution(inpaint=True),
    "warm start": Execution(warm_start=WarmStart(steps=2, start=0.8, renoise=True)),
    "ensembling": Execution(ensemble=0.1),
}
"""What the table calls it -> how it is done."""

PAGE, BASELINE = "latency", "late rows first"
ACT_STEPS = 4  # control steps between decisions
SHAPE = ("policy.horizon=16", f"policy.act_steps={ACT_STEPS}")
RECIPES = {
    "avoid": once.Recipe(
        300,
        ("experiment=avoid_bc", "algo.steps=12000", "algo.batch_size=256", "process.prediction=x0", *SHAPE),
    ),
    "cube-single": once.Recipe(
        50, ("experiment=cube_single_flow_bc", "algo.steps=10000", "backbone.width=256", *SHAPE)
    ),
}
"""Policies with plans that reach beyond the latencies."""


@dataclass(frozen=True)
class Played:
    """What came of the episodes of one way at one latency, in their order."""

    success: list[bool]
    length: list[int]
    starved: int
    decisions: int


def play(policy: Policy, env: EnvConfig, execution: Execution, episodes: int) -> Played:
    """Play episodes 0 to E - 1 side by side, one control step at a time."""
    spec = env.spec
    vector = env.make_vector(episodes, obs_steps=policy.chunk.obs_steps)
    executor = Executor(policy, execution, low=spec.action_low, high=spec.action_high)
    generators = [seeded_generator(0, "latency benchmark", episode) for episode in range(episodes)]
    obs = vector.reset(list(range(episodes))).copy()
    active, success = np.ones(episodes, bool), np.zeros(episodes, bool)
    length, decisions = np.zeros(episodes, int), 0
    while active.any():
        rows = np.flatnonzero(active)
        noise = torch.cat([executor.sample_noise(1, generator=generators[i]) for i in rows.tolist()])
        state = torch.from_numpy(obs[rows]).float()
        commands = executor.act({"state": state}, lanes=rows.tolist(), noise=noise)
        decisions += sum(call > 0 for call in executor.calls)
        actions = np.zeros((episodes, 1, spec.action_dim), np.float32)
        actions[rows, 0] = commands.numpy()
        step = vector.step_chunk(actions, active)
        obs[rows] = step.obs[rows]
        success |= step.success
        length[rows] += 1
        active &= ~step.done
    vector.close()
    starved = sum(executor.track(i).starved for i in range(episodes))
    return Played(success.tolist(), length.tolist(), starved, decisions)


def measure(task: str, seed: int, path: str | None, options: argparse.Namespace) -> Path:
    """Clone where no policy is given, and play every way at every latency; returns the JSON file."""
    name = f"{task}-seed{seed}"
    if (target := pages.RESULTS / PAGE / f"{name}.json").exists():
        return target
    found = locate(path or RECIPES[task].cloned(task, seed, options.root))
    policy, env = found.load().eval(), task_of(found)
    rows = []
    for latency in options.latencies:
        for way_name, way in WAYS.items():
            played = play(policy, env, replace(way, latency=latency, act_steps=ACT_STEPS), options.episodes)
            rows.append({"way": way_name, "latency": latency, **asdict(played)})
            share = 100 * float(np.mean(played.success))
            print(f"{name}: latency {latency}, {way_name}: {share:.0f} %", flush=True)
    content = {
        "task": task,
        "seed": seed,
        "label": found.label,
        "configuration": None if found.run is None else pages.configuration(RunDirectory(found.run)),
        "policy": pages.describe(policy),
        "act_steps": ACT_STEPS,
        "control_hz": env.spec.control_hz,
        "rows": rows,
    }
    return pages.keep(PAGE, name, content)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`{command}`: a plan arrives the given number of control steps after its observation, and
meanwhile the plans before it are executed ([how](../executor.md)). All ways play the same episodes with the
same noise.

- *late rows first*: a plan begins with its first row when it arrives.
- *late rows skipped*: it begins with the row of the step at which it arrives.
- *inpainting*: the same, and what is executed before it arrives is held fixed while it is sampled.
- *warm start*: the same, and a plan begins at t = 0.8 from what is left of the one before, in two steps.
- *ensembling*: all plans that speak of a step are averaged, weights exp(-0.1 i), i = 0 the oldest.

A star marks ways that are clearly better than *late rows first* at the same latency, a minus ways that are
clearly worse (95 % bootstrap interval of the paired difference). {intervals}

![success against latency](latency.png)"""


def report() -> Path:
    """Write the page and its picture."""
    kept = pages.kept(PAGE, advice="name tasks first")
    found = pages.grouped(kept, lambda one: one["task"])
    command = " ".join(("python -m benchmarks.studies.latency", *found))
    introduction = INTRODUCTION.format(command=command, intervals=pages.INTERVALS)
    lines = ["# Success against latency", "", introduction]
    for task, seeds in found.items():
        lines += ["", f"## {task}", "", *_section(seeds)]
    _draw(found, pages.RESULTS / f"{PAGE}.png")
    lines += ["", f"Commits: {pages.commits(kept)}."]
    return pages.write(PAGE, lines + pages.origin(PAGE, kept[0]))


def _successes(seeds: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], np.ndarray]:
    """Return the successes (S, E) of every way at every latency."""
    by_way: dict[tuple[str, int], list[Any]] = {}
    for row in (row for one in seeds for row in one["rows"]):
        by_way.setdefault((row["way"], row["latency"]), []).append(row["success"])
    return {key: np.array(successes) for key, successes in by_way.items()}


def _section(seeds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of a task: a row per way, a column per latency."""
    one, success = seeds[0], _successes(seeds)
    latencies = sorted({latency for _, latency in success})
    episodes = success[BASELINE, latencies[0]].shape[1]
    yield (
        f"{one['policy']}; a decision every {one['act_steps']} steps of {1e3 / one['control_hz']:g} ms; "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)} × {episodes} episodes."
    )
    yield ""
    yield from pages.table(
        ("way", *(f"{n} steps" for n in latencies)),
        [(way, *(_cell(success[way, n], success[BASELINE, n]) for n in latencies)) for way in WAYS],
    )


def _cell(success: np.ndarray, baseline: np.ndarray) -> str:
    change = paired_difference(baseline * 1.0, success * 1.0)
    mark = "*" if change.low > 0 else "−" if change.high < 0 else ""
    return f"{pages.success(success)}{mark}"


def _draw(found: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw success against latency, one panel per task."""
    figure = new_figure(4.6 * len(found), 3.4)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (task, seeds) in zip(axes, found.items(), strict=True):
        success = _successes(seeds)
        latencies = sorted({latency for _, latency in success})
        x = np.array(latencies) * 1e3 / seeds[0]["control_hz"]
        for number, way in enumerate(WAYS):
            rates = [success_rate(success[way, latency]) for latency in latencies]
            offset = (number - 2) * 0.01 * max(x.max(), 1)
            y = np.array([100 * rate.value for rate in rates])
            low, high = (np.array([100 * getattr(rate, side) for rate in rates]) for side in ("low", "high"))
            axis.errorbar(x + offset, y, [y - low, high - y], marker="o", ms=3, lw=1.2, capsize=2, label=way)
        axis.set(title=task, xlabel="latency [ms]", ylabel="success [%]", ylim=(-3, 103))
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure what is asked for and write the page."""
    parser = study_parser(__doc__, seeds="0,1,2", root="runs/latency")
    parser.add_argument("tasks", nargs="*", help=f"task, or task=<policy>; of {', '.join(RECIPES)}")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--latencies", type=numbers, default="0,3,6", help="control steps, by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for text in () if options.report else options.tasks:
        task, _, path = text.partition("=")
        for seed in options.seeds[:1] if path else options.seeds:
            print(f"written: {measure(task, seed, path or None, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
