"""How much of a task the frozen policies of the steering studies contain: the best of many noises per start.

    python -m benchmarks.studies.contained avoid lift-varied      clones the policies as the study does
    python -m benchmarks.studies.contained hopper --dataset FILE
    python -m benchmarks.studies.contained --report               the page from what is there

Steering chooses among what noises make a policy do. Every start state, those of the study's evaluation, is
played with one stream of noise after another: up to the first success, or with all of them where returns are
what counts. Every seed leaves one JSON file in docs/results/contained/; the page docs/results/contained.md
is made of these. A run whose file is there is not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies.definitions import STUDIES
from benchmarks.studies.learning import demonstrations, recipe
from benchmarks.studies.learning_page import load
from benchmarks.studies.once import trained
from benchmarks.studies.rows import describe_dataset
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.evaluation.evaluate import evaluate
from envs.evaluation.intervals import bootstrap_mean
from envs.evaluation.settings import EvaluationSettings

PAGE, ALGO = "contained", "dsrl"
NOISES, STARTS = 32, 100
TOGETHER = 4  # rounds that play all starts at once, before those that are left are played alone
COUNTS = (1, 4, 8, 32)  # numbers of noises that the page tells

Round = Callable[[int, list[int]], list[float]]
"""(noise, starts) -> what each start ended with: success 0 or 1, or the return."""


def first_successes(play: Round, starts: int, noises: int) -> list[int | None]:
    """Return for every start the first noise that succeeds, counted from 1; None: none of them does."""
    found: list[int | None] = [None] * starts
    for noise in range(noises):
        left = [start for start in range(starts) if found[start] is None]
        if not left:
            break
        for start, success in zip(left, play(noise, left), strict=True):
            if success:
                found[start] = noise + 1
    return found


def run_one(name: str, seed: int, options: argparse.Namespace) -> Path:
    """Clone the policy of a seed and play its starts; returns the JSON file."""
    target = pages.RESULTS / PAGE / f"{name}-seed{seed}.json"
    if target.exists():
        return target
    study = STUDIES[name]
    demos = demonstrations(study, seed, options.dataset, options.root / name)
    base = options.root / name / f"{study.bases[ALGO].split()[0]}-seed{seed}"
    trained(base, *recipe(study.bases[ALGO]), dataset=str(demos), seed=seed)
    clone = locate(str(base), "policy")
    policy, env = clone.load(), task_of(clone)

    def play(noise: int, starts: list[int]) -> list[float]:
        print(f"{name}, seed {seed}: noise {noise + 1}, {len(starts)} starts", flush=True)
        if noise < TOGETHER or study.quantity != "success":
            settings = EvaluationSettings(episodes=STARTS, noise_seed=noise)
            found = evaluate(policy, env, settings, num_workers=options.workers)
            played = found.values(study.quantity)
            return [float(played[start]) for start in starts]
        first = EvaluationSettings.first_seed
        alone = (
            evaluate(policy, env, EvaluationSettings(episodes=1, first_seed=first + start, noise_seed=noise))
            for start in starts
        )
        return [float(one.values(study.quantity)[0]) for one in alone]

    content = {
        "study": name, "seed": seed, "noises": NOISES, "starts": STARTS,
        "experiment": study.bases[ALGO], "dataset": describe_dataset(demos),
    }  # fmt: skip
    if study.quantity == "success":
        content["first_success"] = first_successes(play, STARTS, NOISES)
    else:
        content["returns"] = [play(noise, list(range(STARTS))) for noise in range(NOISES)]
    return pages.keep(PAGE, f"{name}-seed{seed}", content)


def best_of(content: dict[str, Any], count: int) -> np.ndarray:
    """Return what every start reaches with the best of so many noises: success 0 or 1, or the return."""
    if "returns" in content:
        best: np.ndarray = np.array(content["returns"])[:count].max(axis=0)
        return best
    return np.array([first is not None and first <= count for first in content["first_success"]])


def report() -> Path:
    """Write docs/results/contained.md."""
    everything = pages.kept(PAGE, advice="name a study first")
    found = pages.grouped(everything, lambda row: row["study"])
    lines = [
        "# What a frozen policy contains", "",
        "`python -m benchmarks.studies.contained <study>`: the clones that DSRL steers in the study of "
        f"learning, as they are, on the start states that it is evaluated on.{made_anew(found)} Of the best "
        "of so many streams of noise per start: how many starts are solved at all, or the mean of the best "
        "returns. Steering, which chooses at every decision, may find more than so few streams do. "
        f"{pages.INTERVALS}", "",
        *pages.table(
            ("study", "seed", *(f"best of {count}" for count in COUNTS)),
            (row for name, runs in found.items() for row in _rows(name, runs)),
        ), "",
        f"Measured with {pages.versions(everything[0])}; commits {pages.commits(everything)}. "
        f"The numbers of every start are in `{PAGE}/`.",
    ]  # fmt: skip
    return pages.write(PAGE, lines)


def made_anew(found: dict[str, list[dict[str, Any]]]) -> str:
    """Say in which studies DSRL steered other clones: they end the same episodes otherwise."""
    names = []
    for name, runs in found.items():
        steered = {run["seed"]: run["before"][STUDIES[name].quantity] for run in load(name).get(ALGO, [])}
        pairs = [(best_of(run, 1), steered[run["seed"]]) for run in runs if run["seed"] in steered]
        if not all(np.allclose(*pair, atol=1e-5) for pair in pairs):
            names.append(f"`{name}`")
    return f" Those of {', '.join(names)} are made anew by the same recipe." if names else ""


def _rows(name: str, runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    for content in runs:
        yield [name, content["seed"], *_cells([content])]
    if len(runs) > 1:
        yield [f"**{name}**", "**all**", *(f"**{cell}**" for cell in _cells(runs))]


def _cells(runs: list[dict[str, Any]]) -> Iterator[str]:
    for count in COUNTS:
        best = np.array([best_of(content, count) for content in runs])
        if "returns" not in runs[0]:
            yield pages.success(best)
            continue
        yield pages.estimate(bootstrap_mean(best), ",.0f", to="–")


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0,1,2", root="runs/study", workers=0)
    steered = [name for name, study in STUDIES.items() if ALGO in study.bases]
    parser.add_argument("studies", nargs="*", help=", ".join(steered))
    parser.add_argument("--dataset")
    options = parser.parse_args()
    if unknown := sorted(set(options.studies) - set(steered)):
        parser.error(f"no study with a steered policy: {', '.join(unknown)}; there are {', '.join(steered)}")
    for name, seed in () if options.report else product(options.studies, options.seeds):
        print(f"written: {run_one(name, seed, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
