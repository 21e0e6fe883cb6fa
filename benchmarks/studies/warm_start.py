"""Warm start: full sampling, a few steps from the plan before, and the same few steps from noise.

    python -m benchmarks.studies.warm_start avoid=runs/a/policy cube-single=runs/b/policy
    python -m benchmarks.studies.warm_start avoid --seeds 0,1,2    clones the policies first, by `RECIPES`
    python -m benchmarks.studies.warm_start --report               the page from what is there

All variants of a policy play the same episodes. A policy per seed: `avoid=<seed 0>,<seed 1>`. Every policy
leaves one JSON file in docs/results/warm_start/ (per-episode numbers of every variant, protocols, versions);
the page docs/results/warm_start.md is made of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from algos.training.run_directory import RunDirectory
from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from burnish.runs.locate import Located, locate
from burnish.runs.tasks import task_of
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.intervals import Interval, paired_difference, success_rate
from envs.evaluation.settings import EvaluationSettings
from policies.denoising import DenoisingPolicy
from policies.execution.replanning import WarmStart
from policies.samplers.ode import Euler

EPISODES = 100
CALLS, START = (1, 2, 3), 0.8  # evaluations of the short runs, and the sampling time at which they begin
FULL, GOAL = "full", 0.2  # what all are compared with, and the share of its calls that is aimed at

SHAPE = ("policy.horizon=8", "policy.act_steps=2", "process.num_levels=100")
"""Chunks of which most is left after a decision, and the hundred levels of Diffusion Policy."""


RECIPES = {
    "avoid": once.Recipe(
        300,
        ("experiment=avoid_bc", "algo.steps=28000", "algo.batch_size=256", "process.prediction=x0", *SHAPE),
    ),
    "cube-single": once.Recipe(
        50,
        (
            "experiment=cube_single_bc",
            "algo.steps=10000",
            "algo.batch_size=128",
            "backbone.width=256",
            *SHAPE,
        ),
    ),
}


@dataclass(frozen=True)
class Variant:
    """One way to decide.

    Attributes:
        name: What the table calls it.
        calls: Evaluations of the network after the first decision; None: the policy's own.
        warm_start: How later decisions begin; off: from noise.
    """

    name: str
    calls: int | None
    warm_start: WarmStart

    @property
    def cold(self) -> str | None:
        """The name of the variant with as many calls from noise."""
        return None if self.calls is None else f"{self.calls} from noise"


def variants() -> Iterator[Variant]:
    """Yield what is compared: full sampling first, then by number of calls."""
    yield Variant(FULL, None, WarmStart())
    for n in CALLS:
        yield Variant(f"{n} from noise", n, WarmStart())
        for renoise in (True, False):
            words = "corrupted" if renoise else "as it is"
            warm = WarmStart(steps=n, start=START, renoise=renoise)
            yield Variant(f"{n} from t = {START:g}, plan {words}", n, warm)


def play(found: Located, variant: Variant, workers: int) -> Evaluation:
    """Play a policy's episodes in one way, with a decision at every control step."""
    policy = found.load()
    assert isinstance(policy, DenoisingPolicy)
    if variant.calls is not None and not variant.warm_start.is_on:
        own = policy.sampler
        policy = policy.with_sampler(
            Euler(steps=variant.calls, grid="uniform", clip_x0=own.clip_x0, clip_action=own.clip_action)
        )
    settings = EvaluationSettings(episodes=EPISODES, act_steps=1, warm_start=variant.warm_start)
    return evaluate(policy, task_of(found), settings, num_workers=workers)


def calls_of(evaluation: Evaluation, own: int) -> float:
    """Return the evaluations of the network per decision, the first ones of episodes included."""
    counted = evaluation.summary().get("network_calls")
    return float(counted["value"]) if counted else float(own)


def measure(task: str, seed: int, path: str, workers: int) -> Path:
    """Play every variant of a policy; returns the JSON file."""
    found = locate(path)
    policy: Any = found.load()
    rows: dict[str, Any] = {}
    for variant in variants():
        evaluation = play(found, variant, workers)
        calls = calls_of(evaluation, variant.calls or policy.table.num_steps)
        rows[variant.name] = {
            "calls": calls,
            "cold": variant.cold,
            "success": evaluation.values("success").tolist(),
            "length": evaluation.values("length").tolist(),
            "protocol": evaluation.protocol,
        }
        share = np.mean(rows[variant.name]["success"])
        print(f"{task} seed {seed}: {variant.name}: {100 * share:.0f} % at {calls:.1f} calls", flush=True)
    content = {
        "task": task, "seed": seed, "label": found.label,
        "configuration": None if found.run is None else pages.configuration(RunDirectory(found.run)),
        "policy": f"{pages.describe(policy)}, Ta = 1",
        "variants": rows,
    }  # fmt: skip
    return pages.keep("warm_start", f"{task}-seed{seed}", content)


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = """`{command}`: cloned policies that decide again after every few control steps.

- *full*: every decision by the policy's own sampler, from noise.
- *n from noise*: every decision by n first-order steps over the whole range.
- *n from t*: the first decision of an episode in full, every later one by n first-order steps that begin
  at sampling time t (0 noise, 1 action) from what is left of the plan before, corrupted to the noise level
  there, or as it is.

Calls are evaluations of the network per decision, first decisions included. Differences are those on the
same episodes. {intervals}"""


def report() -> Path:
    """Write the page."""
    found = pages.grouped(pages.kept("warm_start"), lambda row: row["task"])
    command = " ".join(("python -m benchmarks.studies.warm_start", *found))
    lines = ["# Warm start", "", INTRODUCTION.format(command=command, intervals=pages.INTERVALS)]
    for task, runs in found.items():
        lines += ["", f"## {task}", "", *_section(runs)]
    lines += pages.origin("warm_start", next(iter(found.values()))[0])
    return pages.write("warm_start", lines)


def _section(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of a task over its seeds, and what follows from it."""
    names = [name for name in runs[0]["variants"] if all(name in run["variants"] for run in runs)]
    success = {name: np.array([run["variants"][name]["success"] for run in runs]) for name in names}
    calls = {name: float(np.mean([run["variants"][name]["calls"] for run in runs])) for name in names}
    cold = {name: runs[0]["variants"][name]["cold"] for name in names}
    yield f"{runs[0]['policy']}; {len(runs)} seed{'s' * (len(runs) > 1)} × {success[FULL].shape[1]} episodes."
    yield ""
    holding, rows = [], []
    for name in names:
        rate = success_rate(success[name])
        share = calls[name] / calls[FULL]
        others = {other: success[other] for other in (FULL, cold[name]) if other not in (None, name)}
        changes = [paired_difference(before, success[name]) for before in others.values()]
        shown = [_shown(change, signed=True) for change in changes]
        cells = (name, f"{calls[name]:.1f}", f"{share:.2f}", _shown(rate), *shown, *[""] * (2 - len(shown)))
        rows.append(cells)
        if share <= GOAL and len(changes) == 2 and changes[0].high >= 0 and changes[1].low > 0:
            holding.append(name)
    columns = ("decision", "calls", "of full", "success", "− full", "− as many from noise")
    yield from pages.table(columns, rows)
    yield ""
    yield f"Not clearly worse than full at {GOAL:g} of its calls, and clearly better than as many from noise:"
    yield f"{'; '.join(holding) or 'none'}."


def _shown(interval: Interval, *, signed: bool = False) -> str:
    return pages.estimate(interval, "+.0f" if signed else ".0f", scale=100, unit=" %")


def main() -> None:
    """Measure what is asked for and write the page."""
    parser = study_parser(__doc__, seeds="0", root="runs/warm_start", workers=0)
    parser.add_argument(
        "tasks", nargs="*", help=f"task, or task=<policy>[,<policy>…]; of {', '.join(RECIPES)}"
    )
    options = parser.parse_args()
    for text in () if options.report else options.tasks:
        task, _, paths = text.partition("=")
        chosen = list(enumerate(paths.split(","))) if paths else [(seed, None) for seed in options.seeds]
        for seed, path in chosen:
            place = RECIPES[task].cloned(task, seed, options.root) if path is None else path
            print(f"written: {measure(task, seed, place, options.workers)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
