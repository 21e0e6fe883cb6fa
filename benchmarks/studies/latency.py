"""Success against latency, for every way to execute plans that take time to make.

    python -m benchmarks.studies.latency avoid=runs/a/policy cube-single=runs/b/policy
    python -m benchmarks.studies.latency --report                       the page from what is there

All ways play the same episodes with the same noise. The latency is simulated: a plan arrives that many
control steps after its observation. Every policy leaves one JSON file in docs/results/latency/; the page
docs/results/latency.md and its picture are made of these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import pages
from benchmarks.options import numbers, study_parser
from burnish.reports.figures import new_figure
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.evaluation.intervals import paired_difference, wilson
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

BASELINE = "late rows first"
ACT_STEPS = 4  # control steps between decisions


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


def measure(task: str, path: str, options: argparse.Namespace) -> Path:
    """Play every way at every latency; returns the JSON file."""
    found = locate(path)
    policy, env = found.load().eval(), task_of(found)
    rows = []
    for latency in options.latencies:
        for name, way in WAYS.items():
            played = play(policy, env, replace(way, latency=latency, act_steps=ACT_STEPS), options.episodes)
            rows.append({"way": name, "latency": latency, **asdict(played)})
            share = 100 * float(np.mean(played.success))
            print(f"{task}: latency {latency}, {name}: {share:.0f} %", flush=True)
    content = {
        "task": task,
        "label": found.label,
        "policy": pages.describe(policy),
        "act_steps": ACT_STEPS,
        "control_hz": env.spec.control_hz,
        "rows": rows,
    }
    return pages.keep("latency", task, content)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`{command}`: a plan arrives the given number of control steps after its observation, and
meanwhile the plans before it are executed ([how](../executor.md)). All ways play the same episodes with the
same noise.

- *late rows first*: a plan begins with its first row when it arrives.
- *late rows skipped*: it begins with the row of the step at which it arrives.
- *inpainting*: the same, and what is executed before it arrives is held fixed while it is sampled.
- *warm start*: the same, and a plan begins at t = 0.8 from what is left of the one before, in two steps.
- *ensembling*: all plans that speak of a step are averaged, weights exp(-0.1 i), i = 0 the oldest.

Success with its 95 % Wilson interval; a star marks ways that are clearly better than *late rows first* at the
same latency, a minus ways that are clearly worse (95 % bootstrap interval of the paired difference).

![success against latency](latency.png)"""


def report() -> Path:
    """Write the page and its picture."""
    found = pages.kept("latency")
    latencies = sorted({row["latency"] for one in found for row in one["rows"]})
    tasks = (f"{one['task']}=<policy>" for one in found)
    command = " ".join(
        ("python -m benchmarks.studies.latency", *tasks, "--latencies", ",".join(map(str, latencies)))
    )
    lines = ["# Success against latency", "", INTRODUCTION.format(command=command)]
    for one in found:
        lines += ["", f"## {one['task']}", "", *_section(one)]
    _draw(found, pages.RESULTS / "latency.png")
    return pages.write("latency", lines + pages.origin("latency", found[0]))


def _section(one: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of a task: a row per way, a column per latency."""
    latencies = sorted({row["latency"] for row in one["rows"]})
    success = {(row["way"], row["latency"]): np.array([row["success"]]) for row in one["rows"]}
    episodes = len(one["rows"][0]["success"])
    yield (
        f"{one['policy']}; a decision every {one['act_steps']} steps of {1e3 / one['control_hz']:g} ms; "
        f"{episodes} episodes."
    )
    yield ""
    yield from pages.table(
        ("way", *(f"{n} steps" for n in latencies)),
        [(way, *(_cell(success[way, n], success[BASELINE, n]) for n in latencies)) for way in WAYS],
    )


def _cell(success: np.ndarray, baseline: np.ndarray) -> str:
    change = paired_difference(baseline * 1.0, success * 1.0)
    mark = "*" if change.low > 0 else "−" if change.high < 0 else ""
    return f"{pages.success(success.ravel())}{mark}"


def _draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw success against latency, one panel per task."""
    figure = new_figure(4.6 * len(found), 3.4)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, one in zip(axes, found, strict=True):
        for number, way in enumerate(WAYS):
            rows = sorted((row for row in one["rows"] if row["way"] == way), key=lambda row: row["latency"])
            rates = [wilson(sum(row["success"]), len(row["success"])) for row in rows]
            x = np.array([row["latency"] for row in rows]) * 1e3 / one["control_hz"]
            offset = (number - 2) * 0.01 * max(x.max(), 1)
            y = np.array([100 * rate.value for rate in rates])
            low, high = (np.array([100 * getattr(rate, side) for rate in rates]) for side in ("low", "high"))
            axis.errorbar(x + offset, y, [y - low, high - y], marker="o", ms=3, lw=1.2, capsize=2, label=way)
        axis.set(title=one["task"], xlabel="latency [ms]", ylabel="success [%]", ylim=(-3, 103))
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure what is asked for and write the page."""
    parser = study_parser(__doc__)
    parser.add_argument("tasks", nargs="*", help="task=<policy>")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--latencies", type=numbers, default="0,1,2,4,6", help="control steps, by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for text in () if options.report else options.tasks:
        task, _, path = text.partition("=")
        print(f"written: {measure(task, path, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
