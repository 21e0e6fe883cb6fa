"""What a chunked generative clone costs on locomotion, against regression and a plain actor.

    python -m benchmarks.studies.locomotion hopper-medium --dataset FILE
    python -m benchmarks.studies.locomotion walker2d                    records its dataset itself
    python -m benchmarks.studies.locomotion --report                    the page from what is there

Every clone differs from the default one (`diffusion, x0`) in one thing, or is the actor of TD3+BC cloned by
the same optimiser (`benchmarks.studies.offline`). It leaves one JSON file in docs/results/locomotion/, with
the episodes of its last checkpoint under every way of acting; a clone whose file is there is not cloned
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import pages
from benchmarks.options import study_parser
from benchmarks.studies import once
from benchmarks.studies.offline_data import PLAIN
from benchmarks.studies.rows import busy, describe_dataset, episode_columns
from envs.evaluation.evaluate import evaluate
from envs.evaluation.intervals import bootstrap_mean, paired_difference
from envs.evaluation.settings import EvaluationSettings
from envs.make import env as make_env

PAGE, EPISODES, STEPS, WIDTH = "locomotion", 50, 20_000, 256
RECORDED, NOISE = 100, 0.1  # episodes of a recorded dataset, and noise on the actions of its expert
DATA = {"hopper-medium": "hopper", "walker2d": "walker2d"}
"""The task of a dataset; one that has the name of its task is recorded."""

DEFAULT, AS_IS = "diffusion, x0", "4 actions"
LONG = 2 * STEPS
ACTING: dict[str, dict[str, Any]] = {
    AS_IS: {},
    "2 actions": {"act_steps": 2},
    "1 action": {"act_steps": 1},
    "4 actions, zero noise": {"start_noise": "zero", "sampling_noise": "zero"},
}


class Clone(NamedTuple):
    """What differs from the default clone, and the ways in which it acts."""

    overrides: tuple[str, ...] = ()
    acting: tuple[str, ...] = (AS_IS,)


CLONES = {
    DEFAULT: Clone(acting=tuple(ACTING)),
    "regression": Clone(("process=regression",), (AS_IS, "1 action")),
    "plain actor": Clone(PLAIN, ("1 action",)),
    "diffusion, eps": Clone(("process=diffusion_eps",)),
    "flow": Clone(("process=flow",)),
    "edm": Clone(("process=edm",)),
    f"{DEFAULT}, {LONG:,} steps": Clone((f"algo.steps={LONG}",)),
}


# -- measuring ------------------------------------------------------------------------------------------


def file_of(data: str, clone: str, seed: int) -> Path:
    """Return where a result is kept."""
    name = "-".join("".join(c if c.isalnum() else " " for c in clone).split())
    return pages.RESULTS / PAGE / f"{data}-{name}-seed{seed}.json"


def dataset_of(data: str, given: str | None, root: Path) -> Path:
    """Return the file of a dataset, recorded if it is one of the task's own expert.

    Raises:
        SystemExit: If it cannot be recorded and no file is given.
    """
    if given is not None:
        return Path(given)
    if data != DATA[data]:
        raise SystemExit(f"{data} needs --dataset FILE")
    return once.demonstrations(root / f"{data}.hdf5", data, RECORDED, seed=0, noise=NOISE)


def run_one(data: str, clone: str, seed: int, *, dataset: Path, root: Path) -> Path:
    """Clone a policy and let it act; returns its file."""
    target, setting = file_of(data, clone, seed), CLONES[clone]
    if target.exists():
        return target
    task = DATA[data]
    width = () if clone == "plain actor" else (f"backbone.width={WIDTH}",)
    wished = ("algo=bc", f"env={task}", f"algo.steps={STEPS}", *width, *setting.overrides)
    run = once.trained(root / target.stem, *_last(wished), dataset=str(dataset), seed=seed)
    policy, episodes = run.load_policy(), {}
    for title in setting.acting:
        options = {} if policy.chunk.act_steps == 1 else ACTING[title]
        settings = EvaluationSettings(episodes=EPISODES, **options)
        found = evaluate(policy, make_env(task), settings)
        episodes[title] = {"episodes": episode_columns(found), "protocol": found.protocol}
    content = {
        "data": data, "clone": clone, "seed": seed, "dataset": describe_dataset(dataset),
        "steps": run.directory.latest(), "clone_s": busy(run.directory.metrics_path),
        "parameters": sum(p.numel() for p in policy.parameters()), "acting": episodes,
        "configuration": pages.configuration(run.directory),
    }  # fmt: skip
    return pages.keep(PAGE, target.stem, content)


def _last(overrides: Iterable[str]) -> list[str]:
    """Return overrides without those that a later one of the same key replaces."""
    return list({one.partition("=")[0]: one for one in overrides}.values())


# -- report ---------------------------------------------------------------------------------------------

INTRODUCTION = f"""`python -m benchmarks.studies.locomotion <data>`: clones of recorded walking, {STEPS:,}
gradient steps unless said otherwise, an MLP {WIDTH} wide, everything else as `algo=bc` has it: chunks of four
actions, of which as many are executed as the row says. The *plain actor* is that of TD3+BC: one action by
regression, 256 × 256, Adam at 3e-4, weights not averaged. {EPISODES} episodes per seed with the last
checkpoint; scores of D4RL (0 random, 100 expert). *Against* has the paired difference of the score from the
default clone with four actions, on the same seeds and episodes. *Zero noise* acts without noise, at the start
and on the way."""
COLUMNS = ("clone", "executed", "seeds", "return", "score", "against")


def report() -> Path:
    """Write the page."""
    found = pages.kept(PAGE, advice="clone something first")
    lines = ["# Clones of locomotion", "", INTRODUCTION, "", pages.INTERVALS]
    for data in DATA:
        runs = [one for one in found if one["data"] == data]
        if runs:
            lines += ["", f"## {data}", "", _about(data, runs[0]), ""]
            lines += pages.table(COLUMNS, rows_of(runs))
    lines += ["", f"Commits: {pages.commits(found)}."]
    return pages.write(PAGE, [*lines, *pages.origin(PAGE, found[0])])


def _about(data: str, run: dict[str, Any]) -> str:
    told, reference = run["dataset"], next(iter(run["acting"].values()))["protocol"]["env"]
    said = f"`{told['name']}`, {pages.digest(run)}"
    if data == DATA[data]:
        said = (
            f"`burnish collect env={data} noise={NOISE} episodes={RECORDED} "
            f"first_seed={once.first_seed(0)} out={told['name']}`"
        )
    mean = told["mean_return"]
    score = float(_scores(mean, reference["reference_scores"]))
    size = f"{told['episodes']} episodes, {told['steps']:,} rows"
    return f"{said}: {size}, mean return {mean:.0f}, score {score:.1f}."


def rows_of(runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row per clone and way of acting."""
    default = {run["seed"]: scores(run, AS_IS) for run in runs if run["clone"] == DEFAULT}
    for clone, setting in CLONES.items():
        alike = [run for run in runs if run["clone"] == clone]
        for title in setting.acting if alike else ():
            returns = np.array([run["acting"][title]["episodes"]["return"] for run in alike])
            rated = np.array([scores(run, title) for run in alike])
            cells = (
                pages.estimate(bootstrap_mean(x), form) for x, form in ((returns, ".0f"), (rated, ".1f"))
            )
            paired = [run for run in alike if run["seed"] in default]
            against = "–"
            if paired and (clone, title) != (DEFAULT, AS_IS):
                before = np.array([default[run["seed"]] for run in paired])
                after = np.array([scores(run, title) for run in paired])
                against = pages.estimate(paired_difference(before, after), "+.1f")
            yield [clone, title, f"{len(alike)}", *cells, against]


def scores(run: dict[str, Any], title: str) -> np.ndarray:
    """Return D4RL scores (E,) of a clone under a way of acting."""
    acted = run["acting"][title]
    return _scores(acted["episodes"]["return"], acted["protocol"]["env"]["reference_scores"])


def _scores(returns: Any, reference: tuple[float, float]) -> np.ndarray:
    random, expert = reference
    return 100.0 * (np.asarray(returns) - random) / (expert - random)


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0,1", root="runs/locomotion")
    parser.add_argument("data", nargs="?", choices=list(DATA))
    parser.add_argument("--dataset", help="file of a dataset that cannot be recorded")
    options = parser.parse_args()
    if not options.report:
        if options.data is None:
            parser.error(f"name the data: {', '.join(DATA)}")
        dataset = dataset_of(options.data, options.dataset, options.root)
        for clone, seed in product(CLONES, options.seeds):
            path = run_one(options.data, clone, seed, dataset=dataset, root=options.root)
            print(f"written: {path}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
