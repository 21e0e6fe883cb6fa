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

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import burnish
from benchmarks import pages
from benchmarks.options import study_parser, words
from benchmarks.studies import once
from benchmarks.studies.definitions import STUDIES, Study
from benchmarks.studies.learning_page import CRITICS, blocks, report
from benchmarks.studies.once import trained, with_own_episodes
from benchmarks.studies.rows import (
    EPISODES,
    beside_baseline,
    busy,
    curve,
    describe_dataset,
    episode_columns,
)
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

OWN_EPISODES = 600
"""Episodes of its base, from which a run of `FROM_EPISODES` learns: about 30,000 control steps on `avoid`."""
FROM_EPISODES = ("recap",)
"""Runs that end with the data: the demonstrations of their base and its own episodes."""
OFF_POLICY = ("dsrl", "dsrl-sac", "dsrl-diffusion", "rlpd", *CRITICS, *FROM_EPISODES)
"""Runs that act and learn in turns, a chunk at a time, for which one process is fastest."""


def run_one(
    name: str, algo: str, seed: int, *, dataset: str | None, init: str | None, root: Path, workers: int
) -> Path:
    """Clone, unless `init` is the clone, fine-tune and evaluate one seed; returns the JSON file."""
    study, target = STUDIES[name], pages.RESULTS / name / f"{algo}-seed{seed}.json"
    if target.exists():
        print(f"{target} is there; remove it to repeat the run.")
        return target
    place, experiment = root / name / f"{algo}-seed{seed}", study.tuned[algo]
    content: dict[str, Any] = {"study": name, "algo": algo, "seed": seed, "experiment": experiment}
    if algo in study.bases:
        content |= _from_clone(study, algo, seed, place, dataset=dataset, init=init, workers=workers)
    else:
        content |= _from_scratch(study, algo, seed, place, dataset=dataset, workers=workers)
    return pages.keep(name, target.stem, content | without_sight(place))


def _from_clone(
    study: Study, algo: str, seed: int, place: Path, *, dataset: str | None, init: str | None, workers: int
) -> dict[str, Any]:
    """Clone, unless `init` is the clone, and fine-tune; returns what both do."""
    demos, experiment = demonstrations(study, seed, dataset, place.parent), study.tuned[algo]
    base_path = Path(init) if init else place.parent / f"{study.bases[algo].split()[0]}-seed{seed}"
    wall: dict[str, float] = {}
    configuration: dict[str, Any] = {}
    if init is None:
        base = trained(base_path, *recipe(study.bases[algo]), dataset=str(demos), seed=seed)
        wall["clone_s"] = busy(base.directory.metrics_path)
        configuration["clone"] = pages.configuration(base.directory)
    if algo in FROM_EPISODES:
        path = place.parent / f"episodes-{base_path.name}.hdf5"
        demos = with_own_episodes(path, demos, base_path, OWN_EPISODES, first=first(seed))
    values = processes(algo, workers) | ({"dataset": str(demos)} if reads_data(experiment) else {})
    tuned = trained(place, *recipe(experiment), init=str(base_path), seed=seed, **values)
    result = burnish.evaluate(
        tuned, baseline=str(base_path), episodes=EPISODES, num_workers=workers, out=str(place / "eval.json")
    )
    return {
        **beside_baseline(result),
        "dataset": describe_dataset(demos), "given_clone": None if init is None else about_clone(base_path),
        "curve": list(curve(tuned.directory.metrics_path)) or collected(demos),
        "wall": wall | {"tune_s": busy(tuned.directory.metrics_path)},
        "configuration": configuration | {"tune": pages.configuration(tuned.directory)},
        **from_zero({"zero_start": place, "zero_start_before": base_path}, workers),
    }  # fmt: skip


def starts(study: Study, algo: str, seed: int, place: Path) -> tuple[Path, dict[str, str]]:
    """Return demonstrations of a seed and the overrides by which they, or a clone of them, lead episodes."""
    demos = demonstrations(study, seed, None, place)
    if not study.led[algo]:
        return demos, {"start.dataset": str(demos)}
    guide, experiment = place / f"{study.led[algo]}-seed{seed}", recipe(study.led[algo])
    trained(guide, *experiment, dataset=str(demos), seed=seed)
    return demos, {"start.guide": str(guide)}


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
    path = root / f"demonstrations-seed{seed}.hdf5"
    return once.demonstrations(
        path, study.env, study.demonstrations, *study.options, seed=seed, noise=study.noise
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


@cache
def reads_data(experiment: str) -> bool:
    """Say whether a run takes the data of its base too, all of it or for a part of its batches."""
    config = compose_config("train", recipe(experiment)).algo
    share = getattr(config, "offline_ratio", None)
    return getattr(config, "takes_dataset", True) if share is None else share > 0


def _from_scratch(
    study: Study, algo: str, seed: int, place: Path, *, dataset: str | None, workers: int
) -> dict[str, Any]:
    """Train from the reward, and demonstrations where there are any; there is no policy to compare with."""
    demos: Path | None = None
    data: dict[str, Any] = {}
    if algo in study.led:
        demos, data = starts(study, algo, seed, place.parent)
    elif study.bases:
        demos = demonstrations(study, seed, dataset, place.parent)
        data = {"dataset": str(demos)}
    run = trained(
        place, *recipe(study.tuned[algo]), seed=seed, **data
    )  # with the processes of the experiment
    result = burnish.evaluate(run, episodes=EPISODES, num_workers=workers, out=str(place / "eval.json"))
    return {
        "dataset": None if demos is None else describe_dataset(demos),
        "after": episode_columns(result.evaluation), "protocol": result.evaluation.protocol,
        "curve": list(curve(run.directory.metrics_path)),
        "wall": {"tune_s": busy(run.directory.metrics_path)},
        "configuration": {"tune": pages.configuration(run.directory)},
        **from_zero({"zero_start": place}, workers),
    }  # fmt: skip


def without_sight(place: Path) -> dict[str, Any]:
    """Return the episodes of a policy that sees, with other frames; nothing of one that does not."""
    policy = burnish.load_policy(place / "checkpoints" / "last" / "policy")
    if not policy.images:
        return {}
    task, settings = task_of(locate(str(place))), EvaluationSettings(episodes=EPISODES)
    found = {frames: evaluate(Blindfolded(policy, frames), task, settings) for frames in FRAMES}
    return {"blindfolded": {frames: episode_columns(one) for frames, one in found.items()}}


def from_zero(runs: dict[str, Path], workers: int) -> dict[str, dict[str, list[float]]]:
    """Return the episodes of runs that start from zero instead of noise, up to one with other randomness."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, run in runs.items():
        if (episodes := _from_zero(run, workers)) is None:
            break
        found[key] = episodes
    return found


@cache
def _from_zero(run: Path, workers: int) -> dict[str, list[float]] | None:
    if not (run / "checkpoints" / "last").exists():  # a policy directory, given as the clone
        return None
    policy = burnish.load_policy(run / "checkpoints" / "last" / "policy")
    if not (isinstance(policy, DenoisingPolicy) and policy.is_deterministic):
        return None
    zero = burnish.evaluate(str(run), episodes=EPISODES, num_workers=workers, start_noise="zero")
    return episode_columns(zero.evaluation)


# -- commands -------------------------------------------------------------------------------------------


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0,1,2", root="runs/study", workers=2)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--algos", type=words, default="dppo,ppo")
    parser.add_argument("--dataset", help="a file of demonstrations, instead of those of each seed")
    parser.add_argument(
        "--init", help="a policy directory that every seed fine-tunes, instead of its own clone"
    )
    options = parser.parse_args()
    known = list(STUDIES[options.study].tuned)
    if not options.report and (unknown := set(options.algos) - set(known)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; {options.study} has {', '.join(known)}")
    given = {name: getattr(options, name) for name in ("dataset", "init", "root", "workers")}
    for algo, seed in () if options.report else product(options.algos, options.seeds):
        print(f"written: {run_one(options.study, algo, seed, **given)}", flush=True)
    print(f"written: {report(options.study)}")
    for page, block, lines in blocks():
        pages.replace_block(page, block, lines)


if __name__ == "__main__":
    main()
