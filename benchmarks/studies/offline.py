"""Study of offline learning: datasets, algorithms and seeds, each with and without a correction of actions.

    python -m benchmarks.studies.offline hopper-medium --dataset FILE --algos bc,td3_bc --seeds 0,1,2
    python -m benchmarks.studies.offline halfcheetah-medium             records its dataset itself
    python -m benchmarks.studies.offline hopper-mixed --algos bc,bc@return,td3_bc@advantage      weighted rows
    python -m benchmarks.studies.offline hopper-medium --dataset FILE --algos flow+prdc   tunes a cloned flow
    python -m benchmarks.studies.offline hopper-medium --report         table and curve from what is there
    python -m benchmarks.studies.offline hopper-medium --dataset FILE --discounts   what a discount tells

Settings are those of the data's own experiment (`hopper_medium_expert_iql`), or else of the task's
(`hopper_iql`); `bc` clones the network of these actors, with as many steps as TD3 gives to its actor. Each
run leaves one JSON file in docs/results/offline/: episodes of the last checkpoint, of the one that evaluated
best on the way, of the corrected policy (`algo=cdsa`), and of both with noise on the actions; a run whose
file is there is not repeated. The actors of a seed that see states alike share a correction, which knows no
policy; ReBRAC's, which sees them as recorded, has one of its own. Gaussians act by their mean.

`flow+td3_bc` and its like tune a cloned policy by `experiment=<task>_<algorithm>_tuning`, for the steps
given there unless --steps says otherwise; they play beside the clone, neither corrected nor perturbed. So do
all on a mixed dataset, where `@return` and its like draw or keep episodes by what they are worth.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import burnish
import burnish.api
from algos.training.metrics import read_jsonl
from algos.training.resume_checks import digest_of
from benchmarks import pages
from benchmarks.options import study_parser, words
from benchmarks.studies.offline_data import BASES, DATA, JUDGED, RATED, dataset_of, settings_of
from benchmarks.studies.offline_page import report
from benchmarks.studies.once import trained
from benchmarks.studies.rows import EPISODES, busy, describe_dataset, episode_columns
from burnish.runs.best_evaluation import best_evaluation
from envs.datasets import read_dataset
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.settings import EvaluationSettings
from policies.policy import Policy
from policies.processes.gaussian import GaussianPolicy
from policies.registry import lookup
from policies.threads import torch_threads
from policies.wrappers.score_correction import Perturbation

PAGE = "offline"
STD, CORRECTION_STEPS = 0.3, 10_000  # of the noise on perturbed actions, and of `algo=cdsa`


def run_one(name: str, algo: str, seed: int, options: argparse.Namespace) -> Path:
    """Train and evaluate one seed; returns the JSON file."""
    target = pages.RESULTS / PAGE / f"{name}-{algo}-seed{seed}.json"
    if target.exists():
        return target
    task, file = DATA[name].task, dataset_of(name, options.dataset, options.root)
    folder, values = options.root / name, {"dataset": str(file), "seed": seed}
    base, _, tuner = algo.rpartition("+")
    settings, place = settings_of(name, base, tuner, options), folder / f"{algo}-seed{seed}"
    if base:
        cloned = folder / f"{base}-seed{seed}"
        trained(cloned, f"experiment={task}_{BASES[base]}", **values)
        run = trained(place, *settings, episodes=JUDGED, init=str(cloned), **values)
        policies = {"cloned": _policy(cloned, "last"), "last": _policy(place, "last")}
    elif DATA[name].is_mixed:
        run = trained(place, *settings, episodes=JUDGED, **values)
        policies = {"last": _policy(place, "last")}
    else:
        run = trained(place, *settings, episodes=JUDGED, **values)
        actor = _policy(place, "last")
        corrected = correction_of(folder, seed, actor)
        steps = f"algo.steps={CORRECTION_STEPS}"
        wished = {**values, "init": str(place)}  # whichever actor came first
        trained(corrected, "algo=cdsa", f"env={task}", steps, indifferent=["init"], **wished)
        policies = variants(actor, _policy(corrected, "last"), STD)
    judged = best_evaluation(run.directory)
    step = None if judged is None else judged.best.step
    if step is not None and step != run.directory.latest():
        policies["best"] = _policy(place, str(step))
    found = played(task, policies, options)
    content = {
        "data": name, "algo": algo, "seed": seed, "steps": run.directory.latest(), "std": STD,
        "settings": settings, "cdsa_steps": CORRECTION_STEPS, "dataset": describe_dataset(file),
        "gate_quantile": policies["corrected"].wrapper.gate_quantile if "corrected" in policies else None,
        "actions_per_s": {key: action_rate(one) for key, one in policies.items()},
        "evaluations": {key: episode_columns(one) for key, one in found.items()},
        "best_step": step, "protocol": found["last"].protocol,
        "curve": list(curve(run.directory.metrics_path)), "wall_s": busy(run.directory.metrics_path),
        "configuration": pages.configuration(run.directory),
    }  # fmt: skip
    return pages.keep(PAGE, target.stem, content)


def action_rate(policy: Policy) -> float:
    """Return how many observations per second the policy answers, one at a time, on one thread."""
    obs = torch.zeros(1, policy.chunk.obs_steps, policy.obs_dim)
    noise = policy.sample_noise(1, generator=torch.Generator().manual_seed(0))
    with torch_threads(1), torch.inference_mode():
        spent = []
        for _ in range(RATED):
            start = time.process_time()
            policy.act(obs, noise=noise)
            spent.append(time.process_time() - start)
    return 1 / float(np.median(spent))


def correction_of(folder: Path, seed: int, actor: Policy) -> Path:
    """Return the run of the correction for actors that see states as this one does.

    It is learned of states as they are seen. Standardised ones are nearly the same for all actors of a
    dataset.
    """
    standardised = actor.normalizer.modes["state"] == "gaussian"
    seen = "" if standardised else f"-{digest_of(actor.normalizer)[:8]}"
    return folder / f"actor-seed{seed}{seen}-cdsa"


def variants(last: Policy, corrected: Any, std: float) -> dict[str, Policy]:
    """Return a policy, its correction, and both with noise on the actions before anything corrects them."""
    corrected.base, noise = last, Perturbation(std)
    both = copy.deepcopy(corrected)
    both.base = noise.wrap(both.base)
    return {
        "last": last, "corrected": corrected, "perturbed": noise.wrap(last), "perturbed, corrected": both,
    }  # fmt: skip


def played(task: str, policies: dict[str, Policy], options: argparse.Namespace) -> dict[str, Evaluation]:
    """Play the same episodes with every policy."""
    env, noise = lookup("env", task)(), "zero" if isinstance(policies["last"], GaussianPolicy) else "random"
    settings = EvaluationSettings(episodes=options.episodes, sampling_noise=noise)
    return {
        key: evaluate(policy, env, settings, num_workers=options.workers) for key, policy in policies.items()
    }


def _policy(run: Path, checkpoint: str) -> Policy:
    policy: Policy = burnish.load_policy(run / "checkpoints" / checkpoint / "policy")
    return policy


def curve(path: Path) -> Iterator[dict[str, float]]:
    """Yield evaluations on the way, and how far values exceed the returns of the data."""
    for row in read_jsonl(path):
        names = ("eval/return", "critic/overestimation", "critic/value", "constraint/own_row")
        known = {key: round(float(row[key]), 4) for key in names if row.get(key) is not None}
        if known:
            yield {"step": row["step"], **known}


EARLY, FIRST = 600, 150  # steps: a fall before these is early; rows of an episode that are looked at


def discounts(file: str) -> list[str]:
    """Return (1 - gamma) times the return to go of first rows, where episodes fall early and elsewhere."""
    data = read_dataset(file)
    starts = data.episode_start[:-1]
    early = data.terminated[data.episode_start[1:] - 1] & (data.lengths < EARLY)
    rows = []
    for gamma in (0.95, 0.99, 0.995, 0.997):
        worth = (1 - gamma) * data.returns_to_go(gamma)
        means = torch.stack([worth[start : start + FIRST].mean() for start in starts.tolist()])
        rows.append((f"{gamma:g}", f"{means[early].mean():.2f}", f"{means[~early].mean():.2f}"))
    return pages.table(("γ", f"{int(early.sum())} fall early", f"{int((~early).sum())} others"), rows)


# -- commands -------------------------------------------------------------------------------------------


def main() -> None:
    """Run what is asked for."""
    parser = study_parser(__doc__, seeds="0", root="runs/offline", workers=0)
    parser.add_argument("data", choices=list(DATA))
    parser.add_argument("--dataset")
    parser.add_argument("--algos", type=words, default="bc,td3_bc,iql,prdc,a2pr")
    parser.add_argument("--steps", type=int, help="gradient steps; 100,000 where nothing is tuned")
    parser.add_argument("--autocast", choices=["bfloat16"], help="number type of the algorithms' products")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides of the algorithms, written down")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--discounts", action="store_true", help="only print what discounts tell of the data")
    options = parser.parse_args()
    if options.discounts:
        print("\n".join(discounts(str(dataset_of(options.data, options.dataset, options.root)))))
        return
    for algo, seed in () if options.report else product(options.algos, options.seeds):
        print(f"written: {run_one(options.data, algo, seed, options)}", flush=True)
    print(f"written: {report()}")


if __name__ == "__main__":
    main()
