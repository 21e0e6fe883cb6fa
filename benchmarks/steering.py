"""Steering: how well the strategies of inference-time policy steering follow sketches through `avoid`.

    python -m benchmarks.steering policy=<run or policy directory>
    python -m benchmarks.steering            clones a policy first (experiment=avoid_steering_bc)
    python -m benchmarks.steering --report   the page from what is there

A sketch leads through one gap of every row. *Careful* ones are drawn where the disc fits; *rough* ones lie
beside them, further than the disc has room. All strategies play the same episodes. The numbers are written to
docs/results/steering/avoid.json, the page docs/results/steering.md and its picture are made of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import burnish
from algos.provenance import describe_environment
from burnish.config import register_configs
from burnish.locate import locate
from burnish.pictures import to_png
from envs.avoid import CONTROL_HZ, MAX_SPEED, Avoid, load_scene
from envs.episodes import EpisodeRow
from envs.evaluation import evaluate
from envs.experts.avoid import plan as draw_path
from envs.figures import draw_avoid
from envs.statistics import bootstrap_mean, wilson
from policies.denoising import DenoisingPolicy
from policies.sketches import PositionSketch
from policies.steering import SteeredPolicy, Steering

RESULTS = Path("docs/results")
DEMONSTRATIONS, FIRST_DEMONSTRATION = 200, 1_000_000
EPISODES = 9  # of every way through, on the same seeds for all strategies
PACE = 0.75 * MAX_SPEED / CONTROL_HZ  # what the demonstrator covers in a control step [m]
ROUGH_M = 0.025  # how far a rough sketch lies beside a careful one; the disc has 0.019 m of room
SKETCHES = {"careful": 0.0, "rough": ROUGH_M}
DRAWN = 3  # the way that the picture shows
MAZE_ROWS = 64  # of the plans for which the published weights of the gradient were chosen


def variants(horizon: int) -> dict[str, Steering]:
    """Return what is compared, by name; published weights, and the same for each row of a plan."""
    guided, stochastic = (weight * horizon / MAZE_ROWS for weight in (20.0, 60.0))
    alone = Steering("output_perturbation", candidates=1, guide_rows=horizon // 2)
    found = {"random": Steering("random"), "the sketch alone": alone}
    for name in ("output_perturbation", "post_hoc_ranking", "biased_initialization"):
        found[name] = Steering(name)
    for name, weights in (("guided_diffusion", (20.0, guided)), ("stochastic_sampling", (60.0, stochastic))):
        for weight in weights:
            for gradient in ("x", "x0"):
                steering = Steering(name, scale=weight, gradient=gradient)
                found[f"{name}, scale {weight:g} at {gradient}"] = steering
    return found


def sketch_of(way: int, beside: float) -> PositionSketch:
    """Draw a way through the pillars, moved to the left or right by `beside` metres."""
    scene = load_scene()
    path = draw_path(scene, scene.modes[way], np.zeros(2), noise=0.0, rng=np.random.default_rng(0))
    side = 1 if way % 2 else -1
    ys = np.linspace(0.0, scene.finish_y + 0.1, 40)
    points = tuple((round(float(path(y)) + side * beside, 4), round(float(y), 4)) for y in ys)
    return PositionSketch(points, pace=PACE, reach=MAX_SPEED / CONTROL_HZ)


def play(policy: SteeredPolicy, way: int, episodes: int, workers: int) -> tuple[EpisodeRow, ...]:
    """Play the episodes of one way."""
    first = 1000 * (way + 1)
    return evaluate(
        policy, Avoid(), episodes=episodes, first_seed=first, num_workers=workers, keep_observations=True
    ).rows  # fmt: skip


def off_sketch(row: EpisodeRow, sketch: PositionSketch) -> float:
    """Return the mean distance of an episode's positions from a sketch [m]: motion alignment."""
    return float(sketch.distance(torch.as_tensor(row.observations[:, :2])).mean())


def measure(path: str, options: argparse.Namespace) -> Path:
    """Play every strategy on every sketch; returns the JSON file."""
    found = locate(path, "policy")
    policy = found.load()
    assert isinstance(policy, DenoisingPolicy)
    results: dict[str, dict[str, Any]] = {kind: {} for kind in SKETCHES}
    trails: dict[str, tuple[EpisodeRow, ...]] = {}
    for kind, beside in SKETCHES.items():
        for name, steering in variants(policy.chunk.horizon).items():
            columns: dict[str, list[float]] = {key: [] for key in ("success", "free", "took", "off_m")}
            for way in range(load_scene().num_direct):
                sketch = sketch_of(way, beside)
                steered = SteeredPolicy(policy, sketch, steering)
                rows = play(steered, way, options.episodes, options.workers)
                if kind == "rough" and way == DRAWN:
                    trails[name] = rows
                columns["success"] += [float(row.success) for row in rows]
                columns["free"] += [float(row.success or not row.terminated) for row in rows]
                columns["took"] += [float(row.success and row.metrics["mode"] == way) for row in rows]
                columns["off_m"] += [round(off_sketch(row, sketch), 5) for row in rows]
            plans = steered.recipe.candidates
            results[kind][name] = {**columns, "calls": steered.calls, "plans": plans}
            shares = ", ".join(f"{key} {np.mean(values):.3g}" for key, values in columns.items())
            print(f"{kind}: {name}: {shares}", flush=True)
    content = {
        "policy": describe(policy), "label": found.label, "ways": load_scene().num_direct,
        "results": results, "environment": describe_environment(),
    }  # fmt: skip
    target = RESULTS / "steering" / "avoid.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content) + "\n")
    draw(trails, sketch_of(DRAWN, ROUGH_M))
    return target


def describe(policy: DenoisingPolicy) -> str:
    """Say in a few words what a policy is."""
    kind, sampler = type(policy.process).__name__, type(policy.sampler).__name__
    return (
        f"{kind} predicting {policy.process.kind}, {policy.table.num_steps} steps of {sampler}; "
        f"Th = {policy.chunk.horizon}, Ta = {policy.chunk.act_steps}"
    )


def draw(trails: Mapping[str, Sequence[EpisodeRow]], sketch: PositionSketch) -> None:
    """Draw the episodes of one rough sketch, a panel per strategy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = -(-len(trails) // 2)
    figure = Figure(figsize=(2.2 * columns, 7.8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, columns, squeeze=False).flatten()
    x, y = np.array(sketch.positions).T
    for axes, (name, rows) in zip(panels, trails.items(), strict=False):
        draw_avoid(axes, [row.observations for row in rows], [row.success for row in rows])
        axes.plot(x, y, color="#2f3640", linewidth=1.6, linestyle=(0, (4, 3)), zorder=5)
        axes.set_title(f"{name}\n{axes.get_title(loc='left')}", fontsize=6.5, loc="left")
        axes.get_legend().remove()
    for axes in panels[len(trails) :]:
        axes.set_axis_off()
    (RESULTS / "steering.png").write_bytes(to_png(figure))


def cloned(root: Path) -> str:
    """Clone the policy, unless it is there; returns the run."""
    demos, run = root / "demonstrations.hdf5", root / "cloned"
    if not demos.exists():
        burnish.collect(env="avoid", episodes=DEMONSTRATIONS, first_seed=FIRST_DEMONSTRATION, out=str(demos))
    if not (run / "checkpoints" / "last").exists():
        values: dict[str, Any] = {"dataset": str(demos), "directory": run}
        burnish.train("experiment=avoid_steering_bc", "evaluation.episodes=0", **values)
    return str(run)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`python -m benchmarks.steering`: one cloned policy follows sketches through `avoid`, without
being trained for it. A sketch leads through one gap of every row; careful ones are drawn where the disc fits,
rough ones lie 25 mm beside them, where a disc that keeps to the line hits the pillars. `avoid`'s actions are
velocities, so a sketch becomes the velocities that lead onto it and along it.

- *took the way*: success through the sketched gaps (task alignment). *free*: no contact (constraint
  satisfaction). *off*: mean distance from the sketch, up to the end of the episode (motion alignment).
- *calls*: evaluations of the network per decision, one after the other; *plans* are evaluated side by side.
- *the sketch alone*: the velocities of the sketch, executed without a policy.
- Published weights were chosen for plans of 64 rows, and the gradient of a mean over rows shrinks with their
  number. So they are given as published, and for each row.
- *at x*, *at x0*: where the gradient is taken, at the noisy plan as published, or at the clean one."""


def report() -> Path:
    """Write the page."""
    content = json.loads((RESULTS / "steering" / "avoid.json").read_text())
    lines = ["# Steering", "", INTRODUCTION, ""]
    first = next(iter(content["results"]["careful"].values()))
    episodes = len(first["success"])
    lines += [
        f"{content['policy']}. {episodes} episodes for every row, {content['ways']} ways; 95 % intervals."
    ]
    for kind, found in content["results"].items():
        lines += ["", f"## {kind.capitalize()} sketches", "", *_table(found)]
    lines += ["", "![rough sketches](steering.png)", ""]
    lines += ["Episodes along one rough sketch, dashed: successes in green, contacts in orange."]
    packages = content["environment"]["packages"]
    shown = ", ".join(f"{name} {packages[name]}" for name in ("torch", "mujoco"))
    lines += ["", f"Measured with {shown}. Per-episode numbers are in `steering/`."]
    path = RESULTS / "steering.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "| strategy | calls | plans | success | free | took the way | off, mm |"
    yield "|---|---|---|---|---|---|---|"
    for name, columns in found.items():
        shares = (wilson(int(sum(columns[key])), len(columns[key])) for key in ("success", "free", "took"))
        cells = [f"{100 * s.value:.0f} % ({100 * s.low:.0f}–{100 * s.high:.0f})" for s in shares]
        off = bootstrap_mean(1000 * np.array(columns["off_m"]))
        cells.append(f"{off.value:.1f} ({off.low:.1f}–{off.high:.1f})")
        yield f"| {name} | {columns['calls']} | {columns['plans']} | {' | '.join(cells)} |"


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", nargs="?", help="policy=<run or policy directory>; none: one is cloned")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of every way through")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path("runs/steering"))
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    register_configs()
    if not options.report:
        path = cloned(options.root) if options.policy is None else options.policy.removeprefix("policy=")
        print(f"written: {measure(path, options)}", flush=True)
    print(f"written: {report()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
