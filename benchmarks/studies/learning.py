"""Learning studies: clone, fine-tune, evaluate, on several seeds, and write down what came out.

    python -m benchmarks.studies.learning avoid                         every seed and algorithm of a study
    python -m benchmarks.studies.learning hopper --dataset FILE --seeds 0,1,2 --algos dppo,ppo
    python -m benchmarks.studies.learning avoid-moved --init POLICY --dataset FILE    one clone for all seeds
    python -m benchmarks.studies.learning avoid --report                tables and curves from what is there

Each run leaves one JSON file in docs/results/<study>/ (per-episode numbers, curve, protocol, versions,
wall time); a run whose file is there is not repeated. The checkpoint that is evaluated is the last one.
A policy that sees is evaluated with black frames and with those of another episode too.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import burnish
from algos.training.provenance import describe_environment
from benchmarks import pages
from benchmarks.studies import once
from benchmarks.studies.definitions import STUDIES, Study
from benchmarks.studies.learning_page import (
    BLOCK,
    CRITICS,
    CRITICS_BLOCK,
    CRITICS_PAGE,
    SUMMARY,
    critics,
    report,
    summary,
)
from benchmarks.studies.once import trained, with_own_episodes
from benchmarks.studies.rows import EPISODES, busy, curve, describe_dataset, episode_columns
from benchmarks.studies.sight import FRAMES, Blindfolded
from burnish.config.schema import compose_config
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.datasets import read_dataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings
from policies.denoising import DenoisingPolicy
from policies.storage.checksums import sha256
from policies.storage.policy_folder import WEIGHTS

RESULTS = pages.RESULTS
OWN_EPISODES = 600
"""Episodes of its base, from which a run of `FROM_EPISODES` learns: about 30,000 control steps on `avoid`."""
FROM_EPISODES = ("recap",)
"""Runs that end with the data: the demonstrations of their base and its own episodes."""
FROM_DATA = ("demonstrations", *CRITICS, *FROM_EPISODES)
"""Runs that learn from the demonstrations of their base too."""
OFF_POLICY = ("dsrl", "dsrl-sac", "dsrl-diffusion", "rlpd", *CRITICS, *FROM_EPISODES)
"""Runs that act and learn in turns, a chunk at a time, for which one process is fastest."""


def run_one(
    name: str, algo: str, seed: int, *, dataset: str | None, init: str | None, root: Path, workers: int
) -> Path:
    """Clone, unless `init` is the clone, fine-tune and evaluate one seed; returns the JSON file."""
    study, target = STUDIES[name], RESULTS / name / f"{algo}-seed{seed}.json"
    place = root / name / f"{algo}-seed{seed}"
    own = root / name / f"{study.bases.get(algo, algo).split()[0]}-seed{seed}"
    base_path = own if init is None else Path(init)
    if target.exists():
        return add_zero_start(target, place, base_path, workers)
    if not study.bases:
        led = starts(study, algo, seed, root / name) if algo in study.led else {}
        found = _from_scratch(name, algo, seed, target, place, workers, **led)
        return add_zero_start(found, place, base_path, workers)
    demos = demonstrations(study, seed, dataset, root / name)
    if algo not in study.bases:
        return add_blindfolded(_from_scratch(name, algo, seed, target, place, workers, demos), place)
    experiment = study.tuned[algo]
    wall: dict[str, float] = {}
    configuration: dict[str, Any] = {}
    if init is None:
        base = trained(base_path, *recipe(study.bases[algo]), dataset=str(demos), seed=seed)
        wall["clone_s"] = busy(base.directory.metrics_path)
        configuration["clone"] = pages.configuration(base.directory)
    if algo in FROM_EPISODES:
        path = place.parent / f"episodes-{base_path.name}.hdf5"
        demos = with_own_episodes(path, demos, base_path, OWN_EPISODES, first=first(seed))
    values = processes(algo, workers) | ({"dataset": str(demos)} if reads_data(algo, experiment) else {})
    tuned = trained(place, *recipe(experiment), init=str(base_path), seed=seed, **values)
    result = burnish.evaluate(
        tuned, baseline=str(base_path), episodes=EPISODES, num_workers=workers, out=str(place / "eval.json")
    )
    assert result.baseline is not None and result.comparison is not None
    content = {
        "study": name, "algo": algo, "seed": seed, "experiment": experiment,
        "dataset": describe_dataset(demos), "given_clone": None if init is None else about_clone(base_path),
        "before": episode_columns(result.baseline), "after": episode_columns(result.evaluation),
        "difference": asdict(result.comparison), "protocol": result.evaluation.protocol,
        "curve": list(curve(tuned.directory.metrics_path)) or collected(demos),
        "wall": wall | {"tune_s": busy(tuned.directory.metrics_path)},
        "configuration": configuration | {"tune": pages.configuration(tuned.directory)},
        "environment": describe_environment() | {"num_workers": workers},
    }  # fmt: skip
    return add_zero_start(_written(target, content), place, base_path, workers)


def starts(study: Study, algo: str, seed: int, place: Path) -> dict[str, Any]:
    """Return demonstrations of a seed and the overrides by which they, or a clone of them, lead episodes."""
    demos = demonstrations(study, seed, None, place)
    if not study.led[algo]:
        return {"demos": demos, "data": {"start.dataset": str(demos)}}
    guide, experiment = place / f"{study.led[algo]}-seed{seed}", recipe(study.led[algo])
    trained(guide, *experiment, dataset=str(demos), seed=seed)
    return {"demos": demos, "data": {"start.guide": str(guide)}}


def about_clone(path: Path) -> dict[str, Any]:
    """Return what identifies a clone, a run too: digest of its weights, and the steps it was trained."""
    found = locate(path)
    facts = found.provenance()
    return {"sha256": sha256(found.path / WEIGHTS), "steps": facts.get("step"), "seed": facts.get("seed")}


def demonstrations(study: Study, seed: int, dataset: str | None, root: Path) -> Path:
    """Return the file that is given, else that of a seed's demonstrations, recorded if it is not there."""
    if dataset is not None:
        return Path(dataset)
    if study.demonstrations is None:
        raise SystemExit(f"a study of {study.env} needs --dataset FILE")
    path, first = root / f"demonstrations-seed{seed}.hdf5", once.first_seed(seed)
    return once.demonstrations(
        path, study.env, study.demonstrations, *study.options, first=first, noise=study.noise
    )


def first(seed: int) -> int:
    """Return the first of the own episodes of a seed, far from those of evaluation and demonstrations."""
    return 2_000_000 + 10_000 * seed


def collected(path: Path) -> list[dict[str, float]]:
    """Return what stands for the curve of a run that ends with the data: the own episodes in it."""
    data = read_dataset(path)
    own, success = slice(-OWN_EPISODES, None), data.success
    assert success is not None
    point = {"return": data.returns[own].mean(), "success": success[own].double().mean()}
    return [{"step": int(data.lengths[own].sum())} | {key: round(float(v), 4) for key, v in point.items()}]


def recipe(experiment: str) -> list[str]:
    """Return the overrides of an entry of `Study.bases` or `Study.tuned`."""
    name, *more = experiment.split()
    return [f"experiment={name}", *more]


def processes(algo: str, workers: int) -> dict[str, Any]:
    """Return the processes and threads of a run."""
    workers = 0 if algo in OFF_POLICY else workers
    return {"num_workers": workers, "num_threads": max(1, workers)}


def reads_data(algo: str, experiment: str) -> bool:
    """Say whether a run takes the data of its base too, all of it or for a part of its batches."""
    config = compose_config("train", recipe(experiment)).algo
    return algo in FROM_DATA or getattr(config, "offline_ratio", 0.0) > 0


def _from_scratch(
    name: str,
    algo: str,
    seed: int,
    target: Path,
    place: Path,
    workers: int,
    demos: Path | None = None,
    data: dict[str, str] | None = None,
) -> Path:
    """Train from the reward, and demonstrations where there are any; there is no policy to compare with.

    `data` are the overrides that give the demonstrations; by default they are the dataset.
    """
    experiment = STUDIES[name].tuned[algo]
    if data is None:
        data = {} if demos is None else {"dataset": str(demos)}
    run = trained(place, *recipe(experiment), seed=seed, **data)  # with the processes of the experiment
    result = burnish.evaluate(run, episodes=EPISODES, num_workers=workers, out=str(place / "eval.json"))
    content = {
        "study": name, "algo": algo, "seed": seed, "experiment": experiment,
        "dataset": None if demos is None else describe_dataset(demos),
        "after": episode_columns(result.evaluation), "protocol": result.evaluation.protocol,
        "curve": list(curve(run.directory.metrics_path)),
        "wall": {"tune_s": busy(run.directory.metrics_path)},
        "configuration": {"tune": pages.configuration(run.directory)},
        "environment": describe_environment() | {"num_workers": workers},
    }  # fmt: skip
    return _written(target, content)


def _written(target: Path, content: dict[str, Any]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content) + "\n")
    return target


def add_zero_start(target: Path, place: Path, base: Path, workers: int) -> Path:
    """Evaluate a tuned policy and its base from zero instead of noise, where nothing else is random in them.

    Left out if the numbers are there, or the policy is not.
    """
    content = json.loads(target.read_text())
    for key, run in (("zero_start", place), ("zero_start_before", base)):
        if key == "zero_start_before" and base == place:  # trained from scratch
            break
        if key not in content and (found := from_zero(run, workers)) is not None:
            content[key] = found
            target.write_text(json.dumps(content) + "\n")
        if "zero_start" not in content:
            break
    return add_blindfolded(target, place)


def add_blindfolded(target: Path, place: Path) -> Path:
    """Evaluate a tuned policy that sees with other frames, unless its numbers are there."""
    content = json.loads(target.read_text())
    weights = place / "checkpoints" / "last" / "policy"
    if "blindfolded" in content or not weights.exists():
        return target
    policy = burnish.load_policy(weights)
    if policy.images:
        task = task_of(locate(str(place)))
        content["blindfolded"] = {
            frames: episode_columns(
                evaluate(Blindfolded(policy, frames), task, EvaluationSettings(episodes=EPISODES))
            )
            for frames in FRAMES
        }
        target.write_text(json.dumps(content) + "\n")
    return target


@cache
def from_zero(run: Path, workers: int) -> dict[str, list[float]] | None:
    """Return the per-episode numbers of a policy that starts from zero; None where that is not all."""
    if not (run / "checkpoints" / "last").exists():
        return None
    policy = burnish.load_policy(run / "checkpoints" / "last" / "policy")
    if not (isinstance(policy, DenoisingPolicy) and policy.is_deterministic):
        return None
    zero = burnish.evaluate(str(run), episodes=EPISODES, num_workers=workers, start_noise="zero")
    return episode_columns(zero.evaluation)


# -- commands -------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--algos", default="dppo,ppo")
    parser.add_argument("--dataset", help="a file of demonstrations, instead of those of each seed")
    parser.add_argument(
        "--init", help="a policy directory that every seed fine-tunes, instead of its own clone"
    )
    parser.add_argument("--root", type=Path, default=Path("runs/study"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="only write the report of what is there")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not options.report:
        for algo in options.algos.split(","):
            for seed in map(int, options.seeds.split(",")):
                path = run_one(
                    options.study,
                    algo,
                    seed,
                    dataset=options.dataset,
                    init=options.init,
                    root=options.root,
                    workers=options.workers,
                )
                print(f"written: {path}", flush=True)
    print(f"written: {report(options.study)}")
    pages.replace_block(SUMMARY, BLOCK, summary())
    pages.replace_block(CRITICS_PAGE, CRITICS_BLOCK, critics())
    return 0


if __name__ == "__main__":
    sys.exit(main())
