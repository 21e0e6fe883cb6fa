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
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import burnish
import burnish.api
from algos.training.metrics import read_jsonl
from algos.training.provenance import describe_environment
from algos.training.resume_checks import digest_of
from benchmarks import pages
from benchmarks.studies.learning import EPISODES, RESULTS, busy, describe_dataset, episode_columns
from benchmarks.studies.once import episodes_of, first_seed, trained
from burnish.config.overrides import experiments
from burnish.runs.best_evaluation import best_evaluation
from envs.datasets import EpisodeDataset, read_dataset, write_dataset
from envs.evaluation.comparison import FEWEST_EPISODES
from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.intervals import (
    RISK_SHARE,
    Interval,
    bootstrap_iqm,
    conditional_value_at_risk,
    paired_difference,
    value_at_risk,
)
from policies.policy import Policy
from policies.processes.gaussian import GaussianPolicy
from policies.registry import lookup
from policies.threads import torch_threads
from policies.wrappers.score_correction import Perturbation

FOLDER = RESULTS / "offline"
BASES = {"flow": "study_flow_bc", "diffusion": "study_bc"}  # experiments that clone what is tuned
STEPS = 100_000  # gradient steps, unless others are asked for
COLLECTED = 100  # episodes of a dataset that the study records itself
RATED = 100  # actions of which the time is measured
PLAIN = (
    "algo=bc", "algo.batch_size=256", "algo.lr=3e-4", "algo.min_lr=3e-4", "algo.warmup_steps=0",
    "algo.weight_decay=0", "algo.ema_decay=0", "process=deterministic", "policy.horizon=1",
    "policy.act_steps=1", "policy.normalizer.state=gaussian", "policy.observation_clip=null",
    "backbone.residual=false", "backbone.hidden_dims=[256,256]",
)  # fmt: skip
"""The actor of TD3+BC, cloned by the same optimiser."""


@dataclass(frozen=True)
class Data:
    """The task of a dataset, and the experts that record it where no file is given."""

    task: str
    parts: tuple[Part, ...] = ()

    @property
    def is_mixed(self) -> bool:
        return len(self.parts) > 1


class Part(NamedTuple):
    """Episodes of one expert."""

    expert: str
    episodes: int
    noise: float | None = None  # on its actions: without, critics know nothing beside one action per state


DATA = {
    "hopper-medium": Data("hopper"),
    "hopper-medium-expert": Data("hopper"),
    "halfcheetah-medium": Data("halfcheetah", (Part("medium", COLLECTED, noise=0.3),)),
    "hopper-mixed": Data("hopper", (Part("medium", 90, noise=0.3), Part("expert", 10))),
}

CURATIONS = {
    "return": ("curation.weighting=return",),
    "advantage": ("curation.weighting=advantage",),
    "top": ("curation.keep=return", "curation.share=0.1"),
}
"""Overrides of what stands behind an @."""


def dataset_of(name: str, given: str | None, root: Path) -> Path:
    """Return the file of a dataset, recording it where the study knows how."""
    data, path = DATA[name], root / f"{name}.hdf5"
    if given is not None:
        return Path(given)
    if not data.parts:
        raise SystemExit(f"{name} needs --dataset FILE")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if not data.is_mixed:
        recorded(path, data.task, data.parts[0], "d4rl")
        return path
    files = [path.with_suffix(f".{number}.hdf5") for number in range(len(data.parts))]
    for number, (file, part) in enumerate(zip(files, data.parts, strict=True)):
        recorded(file, data.task, part, "robomimic", first_seed=first_seed(number))
    read = [read_dataset(file) for file in files]
    episodes = [one for each in read for one in episodes_of(each)]
    write_dataset(path, EpisodeDataset.from_episodes(episodes, meta=read[0].meta), lookup("env", data.task)())
    return path


def recorded(file: Path, task: str, part: Part, form: str, **first: int) -> None:
    """Record the episodes of one expert, unless they are there."""
    if not file.exists():
        wished: dict[str, Any] = {"expert": part.expert, "noise": part.noise, **first}
        burnish.collect(env=task, episodes=part.episodes, format=form, out=str(file), **wished)


def experiment_of(data: str, base: str, algo: str) -> str:
    """Return the experiment of an algorithm: to tune a base, or of the data, or else of the task."""
    task, own = DATA[data].task, f"{data.replace('-', '_')}_{algo}"
    if base:
        tuned = f"{task}_{algo}_tuning"
        return tuned if tuned in experiments() else f"{task}_study_{algo}"
    return own if own in experiments() else f"{task}_{algo}"


def settings_of(data: str, base: str, algo: str, options: argparse.Namespace) -> list[str]:
    """Return the overrides that choose an algorithm by its published settings, or by those for tuning."""
    algo, _, curated = algo.partition("@")
    rows = CURATIONS[curated] if curated else ()
    if algo == "bc":
        return [f"env={DATA[data].task}", *PLAIN, f"algo.steps={(options.steps or STEPS) // 2}", *rows]
    name = experiment_of(data, base, algo)
    steps = options.steps if base else options.steps or STEPS
    more = [] if steps is None else [f"algo.steps={steps}"]
    more += [] if options.autocast is None else [f"algo.autocast={options.autocast}"]
    return [f"experiment={name}", *more, *rows, *options.set]


def run_one(name: str, algo: str, seed: int, options: argparse.Namespace) -> Path:
    """Train and evaluate one seed; returns the JSON file."""
    target = FOLDER / f"{name}-{algo}-seed{seed}.json"
    if target.exists():
        return target
    task, file = DATA[name].task, dataset_of(name, options.dataset, options.root)
    folder, values = options.root / name, {"dataset": str(file), "seed": seed}
    base, _, tuner = algo.rpartition("+")
    settings, place = settings_of(name, base, tuner, options), folder / f"{algo}-seed{seed}"
    if base:
        cloned = folder / f"{base}-seed{seed}"
        trained(cloned, f"experiment={task}_{BASES[base]}", **values)
        run = trained(place, *settings, episodes=10, init=str(cloned), **values)
        policies = {"cloned": _policy(cloned, "last"), "last": _policy(place, "last")}
    elif DATA[name].is_mixed:
        run = trained(place, *settings, episodes=10, **values)
        policies = {"last": _policy(place, "last")}
    else:
        run = trained(place, *settings, episodes=10, **values)
        actor = _policy(place, "last")
        corrected = correction_of(folder, seed, actor)
        steps = f"algo.steps={options.cdsa_steps}"
        wished = {**values, "init": str(place)}  # whichever actor came first
        trained(corrected, "algo=cdsa", f"env={task}", steps, indifferent=["init"], **wished)
        policies = variants(actor, _policy(corrected, "last"), options.std)
    judged = best_evaluation(run.directory)
    step = None if judged is None else judged.best.step
    if step is not None and step != run.directory.latest():
        policies["best"] = _policy(place, str(step))
    found = played(task, policies, options)
    content = {
        "data": name, "algo": algo, "seed": seed, "steps": run.directory.latest(), "std": options.std,
        "settings": settings, "cdsa_steps": options.cdsa_steps, "dataset": describe_dataset(file),
        "gate_quantile": policies["corrected"].wrapper.gate_quantile if "corrected" in policies else None,
        "actions_per_s": {key: action_rate(one) for key, one in policies.items()},
        "evaluations": {key: episode_columns(one) for key, one in found.items()},
        "best_step": step, "protocol": found["last"].protocol,
        "curve": list(curve(run.directory.metrics_path)), "wall_s": busy(run.directory.metrics_path),
        "configuration": pages.configuration(run.directory), "environment": describe_environment(),
    }  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content) + "\n")
    return target


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
    env, noise = lookup("env", task)(), "random"
    if isinstance(policies["last"], GaussianPolicy):
        noise = "zero"
    return {
        key: evaluate(
            policy, env, episodes=options.episodes, num_workers=options.workers, sampling_noise=noise
        )
        for key, policy in policies.items()
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


# -- report ---------------------------------------------------------------------------------------------


def load(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results on a dataset by algorithm, seeds in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(FOLDER.glob(f"{name}-*-seed*.json")):
        content = json.loads(path.read_text())
        if content["data"] == name:
            found.setdefault(content["algo"], []).append(content)
    return found


def scores(runs: Sequence[dict[str, Any]], variant: str) -> np.ndarray | None:
    """Return D4RL scores (S, E) of a variant, None where a seed has none.

    The last checkpoint stands in for the best one of seeds where that is the last.
    """
    found = [run["evaluations"].get(variant) for run in runs]
    if variant == "best" and any(found):
        found = [one or run["evaluations"]["last"] for one, run in zip(found, runs, strict=True)]
    if not all(found):
        return None
    random, expert = runs[0]["protocol"]["env"]["reference_scores"]
    returns = np.array([one["return"] for one in found if one])
    return 100.0 * (returns - random) / (expert - random)


def _cell(interval: Interval, sign: str = "") -> str:
    value, low, high = (format(x, f"{sign}z.1f") for x in (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})"


VARIANTS = ("cloned", "last", "best", "corrected", "perturbed", "perturbed, corrected")


def rows_of(algo: str, runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one line per variant: score with interval, its worst tenth (CVaR), and the best of that (VaR)."""
    for variant in VARIANTS:
        found = scores(runs, variant)
        if found is None:
            continue
        judged = (
            _cell(bootstrap_iqm(found)),
            _cell(conditional_value_at_risk(found)),
            f"{value_at_risk(found.flatten()):.1f}",
        )
        cells = (algo, variant, len(runs), f"{runs[0]['steps']:,}", *judged)
        yield "| " + " | ".join(map(str, cells)) + " |"


RIVALS = ("bc", "td3_bc", "study_td3_bc")
"""What every algorithm is compared with, at the last checkpoint."""

CHANGES = (("last", "cloned"), ("corrected", "last"), ("perturbed, corrected", "perturbed"))
"""What tuning and the correction change of a policy: after and before."""


def differences(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield one line per comparison of two policies on the episodes that both have played."""
    for algo in found:
        for rival in RIVALS[: RIVALS.index(algo) if algo in RIVALS else None]:
            yield from _difference(found, (algo, "last"), (rival, "last"))
    for algo in found:
        for after, before in CHANGES:
            yield from _difference(found, (algo, after), (algo, before))


def _difference(
    found: dict[str, list[dict[str, Any]]], after: tuple[str, str], before: tuple[str, str]
) -> Iterator[str]:
    """Yield the line that compares two of (algorithm, checkpoint) on the seeds of both, if there are any."""
    runs = [{run["seed"]: run for run in found.get(algo, [])} for algo, _ in (after, before)]
    common = sorted(runs[0].keys() & runs[1].keys())
    if not common:
        return
    one, other = (
        scores([each[seed] for seed in common], variant)
        for each, (_, variant) in zip(runs, (after, before), strict=True)
    )
    if one is None or other is None or one.shape != other.shape:
        return
    interval = paired_difference(other, one)
    cells = (": ".join(after), ": ".join(before), len(common), _cell(interval, "+"))
    yield f"| {' | '.join(map(str, cells))} | {_verdict(interval, one.size)} |"


def _verdict(interval: Interval, episodes: int) -> str:
    """Say in words what a difference is, as far as the episodes can tell."""
    if episodes < FEWEST_EPISODES:
        return "too few episodes to tell"
    if not interval.excludes_zero:
        return f"within noise (± {interval.half_width:.1f})"
    return "clearly above" if interval.value > 0 else "clearly below"


def report() -> Path:
    """Write docs/results/offline.md and a curve per dataset."""
    lines = [
        "# Offline learning", "",
        "`python -m benchmarks.studies.offline <data> --dataset FILE`: the experiment of the data, or else "
        "of "
        "the task, `<task>_<algorithm>`; D4RL scores (0 random, 100 expert) with 95 % intervals over seeds "
        "and episodes, the mean of the worst tenth of all episodes (CVaR), and the best score among that "
        f"tenth (VaR); α = {RISK_SHARE:g} of both. *Best* is the checkpoint that evaluated best on the way, "
        "left out where that is the last of every seed; choosing it needs the simulator. *Corrected*: "
        "`algo=cdsa` on top. *Perturbed*: normal noise on the actions, before anything corrects them. "
        "`flow+iql` and its like: a cloned policy (*cloned*), tuned by `<task>_iql_tuning`. `@return`, "
        "`@advantage`: rows drawn by `curation.weighting`; `@top`: the tenth of the episodes that has the "
        "highest returns.", "",
        "The second table of a dataset has paired differences: episode by episode, on the seeds that both "
        "sides have. *Clearly* above or below means that the 95 % interval, over seeds and episodes, "
        "excludes 0; of a single seed it covers episodes only, not the luck of training.",
    ]  # fmt: skip
    for name in DATA:
        if found := load(name):
            lines += section(name, found)
    path = RESULTS / "offline.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def section(name: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the part of the page on one dataset, and draw its curve."""
    first = next(iter(found.values()))[0]
    data, std, episodes = first["dataset"], first["std"], len(first["evaluations"]["last"]["return"])
    is_corrected = any("corrected" in run["evaluations"] for runs in found.values() for run in runs)
    about = f"; noise of {std} on perturbed actions; {first['cdsa_steps']:,} steps for the correction"
    about = about if is_corrected else ""
    lines = [
        "", f"## {name}", "",
        f"`{data['name']}`: {data['episodes']} episodes, {data['steps']:,} steps, mean return "
        f"{data['mean_return']:.0f}; SHA-256 `{data['sha256']}`. {episodes} episodes per seed{about}.",
        "",
        "| algorithm | checkpoint | seeds | gradient steps | score | worst tenth | VaR |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for algo, runs in found.items():
        lines += rows_of(algo, runs)
    if compared := list(differences(found)):
        columns = ("score of", "against", "seeds", "paired difference", "in words")
        lines += ["", *pages.table(columns, ()), *compared]
    lines += asked_for(found) + by_others(name, found) + gates(found) + rates(found)
    commits = pages.commits(run for runs in found.values() for run in runs)
    draw(name, found)
    picture = f"![evaluations on the way](offline-{name}.png)"
    about = pages.about_commits(run for runs in found.values() for run in runs)
    return [*lines, "", picture, "", f"Commits {commits}; the episodes are in `offline/`.{about}"]


def asked_for(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Say which overrides were given beside the experiment, where there are any."""
    told = ("experiment=", "algo.steps=")  # in the table
    given = {
        algo: [{one for one in run["settings"] if not one.startswith(told)} for run in runs]
        for algo, runs in found.items()
        if algo.partition("@")[0] != "bc"  # which has no experiment
    }
    common = set.intersection(*(one for each in given.values() for one in each)) if given else set()
    said = [f"all of them with {_code(common)}"] if common else []
    for algo, each in given.items():
        others = sorted({_code(one - common) for one in each} - {""})
        if others:
            said.append(f"{algo} with {' or '.join(others)}")
    return ["", f"Beside the settings of the experiments: {'; '.join(said)}."] if said else []


def by_others(name: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Say which algorithms were measured with another experiment than the study would take today."""
    said = []
    for algo, runs in found.items():
        base, _, tuner = algo.partition("@")[0].rpartition("+")
        today = f"experiment={experiment_of(name, base, tuner)}"
        used = {one for run in runs for one in run["settings"] if one.startswith("experiment=")} - {today}
        said += [f"{algo} was measured with `{one}`, not with `{today}`" for one in sorted(used)]
    return ["", f"{'; '.join(said)}."] if said else []


GATE = 0.9  # the quantile of corrections whose results name none


def gates(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Say at which quantile of the data the corrections of each algorithm begin."""
    said: dict[float, list[str]] = {}
    for algo, runs in found.items():
        corrected = [run for run in runs if "corrected" in run["evaluations"]]
        chosen = {run["seed"]: run.get("gate_quantile", GATE) for run in corrected}
        for gate in sorted(set(chosen.values())):
            seeds = [str(seed) for seed, one in chosen.items() if one == gate]
            some = "" if len(seeds) == len(chosen) else f" (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})"
            said.setdefault(gate, []).append(algo + some)
    told = [f"{gate:g} for {', '.join(algos)}" for gate, algos in sorted(said.items())]
    return ["", f"Corrected with `gate_quantile` {'; '.join(told)}."] if told else []


def rates(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Say how fast tuned policies act, where that was measured."""
    said = []
    for algo, runs in found.items():
        each = [run["actions_per_s"] for run in runs if "cloned" in run.get("actions_per_s", {})]
        if each:
            cloned, last = (np.median([one[key] for one in each]) for key in ("cloned", "last"))
            said.append(f"{algo} {last:.0f}, its clone {cloned:.0f} ({last / cloned:.1f} times)")
    told = "Chunks per second of one core, one observation at a time"
    return ["", f"{told}: {'; '.join(said)}."] if said else []


def _code(overrides: set[str]) -> str:
    return " ".join(f"`{override}`" for override in sorted(overrides))


def draw(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the evaluations on the way, one line per seed; tuned clones, which take few steps, apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TABLEAU_COLORS
    from matplotlib.figure import Figure

    tuned = {algo: runs for algo, runs in found.items() if "+" in algo}
    fresh = {algo: runs for algo, runs in found.items() if algo not in tuned}
    panels = [(title, runs) for title, runs in ((name, fresh), (f"{name}: tuned clones", tuned)) if runs]
    figure = Figure(figsize=(8.0, 3.8 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, shown) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for color, (algo, runs) in zip(cycle(TABLEAU_COLORS), shown.items(), strict=False):
            for index, run in enumerate(runs):
                points = [(p["step"], p["eval/return"]) for p in run["curve"] if "eval/return" in p]
                label = algo if index == 0 else None
                axes.plot(*np.array(points).T, color=color, marker="o", markersize=3, label=label)
        axes.set_xlabel("gradient steps")
        axes.set_ylabel("return, 10 episodes")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(RESULTS / f"offline-{name}.png", dpi=120)


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


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=list(DATA))
    parser.add_argument("--dataset")
    parser.add_argument("--algos", default="bc,td3_bc,iql,prdc,a2pr")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, help="gradient steps; 100,000 where nothing is tuned")
    parser.add_argument("--autocast", choices=["bfloat16"], help="number type of the algorithms' products")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides of the algorithms, written down")
    parser.add_argument("--cdsa-steps", type=int, default=10_000)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--std", type=float, default=0.3, help="of the noise on perturbed actions")
    parser.add_argument("--root", type=Path, default=Path("runs/offline"))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only write the report of what is there")
    parser.add_argument("--discounts", action="store_true", help="only print what discounts tell of the data")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.discounts:
        print("\n".join(discounts(str(dataset_of(options.data, options.dataset, options.root)))))
        return 0
    if not options.report:
        for algo in options.algos.split(","):
            for seed in map(int, options.seeds.split(",")):
                print(f"written: {run_one(options.data, algo, seed, options)}", flush=True)
    print(f"written: {report()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
