"""Steering: how well the strategies of inference-time policy steering follow sketches.

    python -m benchmarks.studies.steering             clones a policy for every task, and measures it
    python -m benchmarks.studies.steering avoid pointmaze-large=<run or policy directory>
    python -m benchmarks.studies.steering --report    the page from what is there

A sketch leads along one of the ways through a task. *Careful* ones are drawn where there is room; *rough*
ones lie beside them, further than there is room. All strategies play the same episodes. The numbers are
written to docs/results/steering/<task>.json, the pictures beside them; docs/results/steering.md is made of
both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from benchmarks.studies.steering_tasks import TASKS, Task, off_sketch
from burnish.commands.collect import record
from burnish.reports.figures import new_figure, to_png
from burnish.runs.locate import locate
from envs.evaluation.evaluate import evaluate
from envs.evaluation.intervals import bootstrap_mean, wilson
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.episodes import EpisodeRow
from policies.policy import Policy
from policies.policy_config import ChunkSpec
from policies.protocols import PlanDecoder
from policies.wrappers.sketch_guidance import SketchedPolicy, SketchSettings

PAGE = "steering"
FIRST_DEMONSTRATION = 1_000_000
PAPER_ROWS = 64  # of the plans for which the published weights of the gradient were chosen
Columns = dict[str, list[float]]


def variants(chunk: ChunkSpec) -> dict[str, SketchSettings]:
    """Return what is compared, by name; published weights, and the same for each row of a plan."""
    guided, stochastic = (weight * chunk.horizon / PAPER_ROWS for weight in (20.0, 60.0))
    alone = SketchSettings("output_perturbation", candidates=1, guide_rows=chunk.act_steps)
    found = {"random": SketchSettings("random"), "the sketch alone": alone}
    for name in ("output_perturbation", "post_hoc_ranking", "biased_initialization"):
        found[name] = SketchSettings(name)
    for name, weights in (("guided_diffusion", (20.0, guided)), ("stochastic_sampling", (60.0, stochastic))):
        for weight in weights:
            for gradient in ("x", "x0"):
                steering = SketchSettings(name, scale=weight, gradient=gradient)
                found[f"{name}, scale {weight:g} at {gradient}"] = steering
    return found


def measure(name: str, path: str, options: argparse.Namespace) -> Path:
    """Play every strategy on every sketch of a task; returns the JSON file.

    Args:
        name: The task.
        path: The policy; empty: one is cloned.
        options: Of the command line.
    """
    task, found = TASKS[name], locate(path or cloned(name, options.root), "policy")
    recipe = " ".join(f"`{part}`" for part in (f"experiment={task.experiment}", *task.overrides))
    recipe = f"{recipe} from {task.demonstrations} recorded episodes"
    origin = "a policy from elsewhere" if path else f"trained by {recipe}"
    policy = found.load()
    assert isinstance(policy, PlanDecoder)
    results: dict[str, dict[str, Any]] = {}
    trails: dict[str, Sequence[EpisodeRow]] = {}
    for kind, beside in (("careful", 0.0), ("rough", task.rough_m)):
        results[kind] = {}
        for label, steering in variants(policy.chunk).items():
            columns, trails[label] = follow(task, policy, steering, beside, options)
            calls = SketchedPolicy(policy, task.sketch(0, 0.0), steering).calls
            results[kind][label] = {**columns, "calls": calls, "plans": steering.recipe.candidates}
            shares = ", ".join(f"{key} {np.mean(values):.3g}" for key, values in columns.items())
            print(f"{name}: {kind}: {label}: {shares}", flush=True)
    content = {
        "policy": f"{pages.describe(policy)}, Ta = {policy.chunk.act_steps}", "label": found.label,
        "origin": origin, "ways": task.num_ways,
        "configuration": None if found.run is None else pages.configuration(RunDirectory(found.run)),
        "results": results,
    }  # fmt: skip
    target = pages.keep(PAGE, name, content)
    target.with_suffix(".png").write_bytes(picture(task, trails))
    return target


def follow(
    task: Task, policy: Policy, steering: SketchSettings, beside: float, options: argparse.Namespace
) -> tuple[Columns, Sequence[EpisodeRow]]:
    """Follow the sketch of every way; returns numbers per episode, and the episodes of the way to draw."""
    columns: Columns = {key: [] for key in ("success", "free", "took", "off_m")}
    drawn: Sequence[EpisodeRow] = ()
    for way in range(task.num_ways):
        sketch = task.sketch(way, beside)
        settings = EvaluationSettings(episodes=task.episodes, first_seed=1000 * (way + 1))
        rows = evaluate(
            SketchedPolicy(policy, sketch, steering),
            task.env(way),
            settings,
            num_workers=options.workers,
            keep_observations=True,
        ).rows
        drawn = rows if way == task.drawn else drawn
        columns["success"] += [float(row.success) for row in rows]
        columns["free"] += [float(task.is_free(row)) for row in rows]
        columns["took"] += [float(task.took(row, way)) for row in rows]
        columns["off_m"] += [round(off_sketch(row, sketch), 5) for row in rows]
    return columns, drawn


def picture(task: Task, trails: Mapping[str, Sequence[EpisodeRow]]) -> bytes:
    """Draw the episodes of one rough sketch, a panel per strategy; returns a PNG."""
    columns = -(-len(trails) // 2)
    figure = new_figure(task.panel[0] * columns, task.panel[1] * 2)
    panels = figure.subplots(2, columns, squeeze=False).flatten()
    for axes, (name, rows) in zip(panels, trails.items(), strict=False):
        task.draw(axes, rows, task.rough_m)
        axes.set_title(f"{name}\n{axes.get_title(loc='left')}", fontsize=6.5, loc="left")
    for axes in panels[len(trails) :]:
        axes.set_axis_off()
    return to_png(figure)


def cloned(name: str, root: Path) -> str:
    """Clone the policy of a task, as far as that has not been done; returns the run."""
    task, demos, run = TASKS[name], root / f"{name}-demonstrations.hdf5", root / name
    if not demos.exists():
        wanted: dict[str, Any] = {
            "episodes": task.demonstrations,
            "first_seed": FIRST_DEMONSTRATION,
            "out": str(demos),
        }
        record(replace(task.recorded, **wanted))
    once.trained(run, f"experiment={task.experiment}", *task.overrides, dataset=str(demos))
    return str(run)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.studies.steering`: cloned policies follow sketches, without being
trained for it. Careful sketches are drawn where there is room, rough ones where there is none.

- *took the way*: success along the sketched way (task alignment). *free*: nothing touched (constraint
  satisfaction). *off*: mean distance from the sketch, up to the end of the episode (motion alignment).
- *calls*: evaluations of the network per decision, one after the other; *plans* are evaluated side by side.
- *the sketch alone*: its actions, executed without a policy.
- Published weights were chosen for plans of 64 rows, and the gradient of a mean over rows shrinks with their
  number. So they are given as published, and for each row.
- *at x*, *at x0*: where the gradient is taken, at the noisy plan as published, or at the clean one."""


def report() -> Path:
    """Write the page."""
    lines = ["# Steering", "", INTRODUCTION]
    for name, task in TASKS.items():
        if content := pages.record(PAGE, name):
            lines += ["", f"## {name}", "", *_section(name, task, content)]
    return pages.write(PAGE, lines)


def _section(name: str, task: Task, content: Mapping[str, Any]) -> Iterator[str]:
    """Say what was measured in one task."""
    episodes = len(content["results"]["careful"]["random"]["success"])
    yield from (task.about, "")
    yield f"{content['policy']}; {content.get('origin', 'its recipe was not recorded')}."
    yield f"{episodes} episodes for every row, {content['ways']} ways; 95 % intervals."
    yield f"Measured with {pages.versions(content)}; per-episode numbers are in `steering/{name}.json`."
    for kind, found in content["results"].items():
        yield from ("", f"**{kind.capitalize()} sketches**", "", *_table(task, found))
    yield from ("", f"![rough sketches](steering/{name}.png)", "")
    yield "Episodes along one rough sketch, dashed: successes in green, failures in orange."


def _table(task: Task, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name, columns in found.items():
        shares = (wilson(int(sum(columns[key])), len(columns[key])) for key in ("success", "free", "took"))
        off = bootstrap_mean(task.per_metre * np.array(columns["off_m"]))
        cells = [*map(pages.percent, shares), pages.estimate(off, ".1f", to="–")]
        rows.append([name, columns["calls"], columns["plans"], *cells])
    head = ("strategy", "calls", "plans", "success", "free", "took the way", f"off, {task.unit}")
    return pages.table(head, rows)


def main() -> None:
    """Measure and write the page."""
    parser = study_parser(__doc__, root="runs/steering", workers=0)
    choices = ", ".join(TASKS)
    parser.add_argument("tasks", nargs="*", help=f"task, or task=<policy>; of {choices}; none: all of them")
    options = parser.parse_args()
    for text in () if options.report else options.tasks or TASKS:
        name, _, path = text.partition("=")
        if name not in TASKS:
            parser.error(f"unknown task '{name}'; choose among {choices}.")
        print(f"written: {measure(name, path, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
