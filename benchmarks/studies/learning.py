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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import burnish
from algos.training.metrics import read_jsonl
from algos.training.provenance import describe_environment
from benchmarks import pages
from benchmarks.studies import once
from benchmarks.studies.definitions import STUDIES, Study
from benchmarks.studies.milestones import milestones
from benchmarks.studies.once import trained, with_own_episodes
from benchmarks.studies.sight import FRAMES, Blindfolded
from burnish.runs.locate import locate
from burnish.runs.tasks import task_of
from envs.datasets import read_dataset
from envs.evaluation.evaluate import evaluate
from envs.evaluation.intervals import Interval, bootstrap_mean, paired_difference, success_rate
from policies.denoising import DenoisingPolicy
from policies.storage.checksums import sha256
from policies.storage.policy_folder import WEIGHTS

RESULTS = Path("docs/results")
EPISODES = 100
OWN_EPISODES = 600
"""Episodes of its base, from which a run of `FROM_EPISODES` learns: about 30,000 control steps on `avoid`."""
FROM_EPISODES = ("recap",)
"""Runs that end with the data: the demonstrations of their base and its own episodes."""
CRITICS = (
    *("qc", "idql", "fql", "expo", "residual", "pa_rl", "dqc", "qam", "qam_edit", "trqam", "famo2o"),
    *FROM_EPISODES,
)
FROM_DATA = ("demonstrations", *CRITICS)
"""Runs that learn from the demonstrations of their base too."""
OFF_POLICY = ("dsrl", "dsrl-sac", "dsrl-diffusion", "rlpd", *CRITICS)
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
        found = _from_nothing(name, algo, seed, target, place, workers, **led)
        return add_zero_start(found, place, base_path, workers)
    demos = demonstrations(study, seed, dataset, root / name)
    if algo not in study.bases:
        return _from_nothing(name, algo, seed, target, place, workers, demos)
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
    values = processes(algo, workers) | ({"dataset": str(demos)} if algo in FROM_DATA else {})
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


def _from_nothing(
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
        if key == "zero_start_before" and base == place:  # trained from nothing
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
            frames: episode_columns(evaluate(Blindfolded(policy, frames), task, episodes=EPISODES))
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


def describe_dataset(path: Path) -> dict[str, Any]:
    """Return what identifies a file of demonstrations and says how good they are."""
    dataset = read_dataset(path)
    return {
        "name": path.name,
        "sha256": dataset.digest(),
        "episodes": dataset.num_episodes,
        "steps": dataset.num_frames,
        "mean_return": round(float(dataset.returns.mean()), 3),
    }


def busy(path: Path) -> float:
    """Return the seconds a run has spent collecting and updating, or on gradient steps."""
    rows = list(read_jsonl(path))
    parts = [sum(float(row.get(f"time/{what}_s") or 0.0) for row in rows) for what in ("rollout", "update")]
    return sum(parts) or float(rows[-1].get("time/elapsed_s") or 0.0)


def episode_columns(evaluation: Any) -> dict[str, list[float]]:
    """Return the per-episode numbers by name."""
    names = ["return", "success", "length", *evaluation.rows[0].metrics]
    return {name: [round(float(v), 6) for v in evaluation.values(name)] for name in names}


def curve(path: Path) -> Iterator[dict[str, float]]:
    """Yield training returns and success rates over environment steps, and the seconds they took.

    Seconds are those of collecting and updating, without checkpoints and evaluation. Gradient steps on data,
    before the task, count as seconds and not as environment steps.
    """
    wall_s, on_data, before = 0.0, 0, 0
    for row in read_jsonl(path):
        wall_s += _seconds(row, row["step"] - before)
        before = row["step"]
        if "time/steps_per_s" in row:
            on_data = before
        if row.get("rollout/return") is not None:
            yield {
                "step": before - on_data,
                "wall_s": round(wall_s, 2),
                "return": round(row["rollout/return"], 4),
                "success": round(row.get("rollout/success") or 0.0, 4),
            }


def _seconds(row: dict[str, Any], steps: int) -> float:
    """Return the seconds of a row, from its rate where it does not tell them apart."""
    parts = [row[key] for key in ("time/rollout_s", "time/update_s") if row.get(key) is not None]
    rate = row.get("time/steps_per_s") or row.get("time/env_steps_per_s")
    if parts or not rate:
        return float(sum(parts))
    return steps / float(rate)


# -- report ---------------------------------------------------------------------------------------------


def load(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of a study by algorithm, seeds in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((RESULTS / name).glob("*-seed*.json")):
        content = json.loads(path.read_text())
        found.setdefault(content["algo"], []).append(content)
    return found


def report(name: str) -> Path:
    """Write docs/results/<study>.md and its curve."""
    study, found = STUDIES[name], load(name)
    option = " --dataset FILE" if study.demonstrations is None and study.bases else ""
    what = "policies cloned per seed, fine-tuned" if study.bases else "policies trained per seed"
    if _given_clones(found):
        what, option = "one cloned policy, fine-tuned per seed", " --init POLICY --dataset FILE"
    when = " before and after" if study.bases else ""
    lines = [
        f"# {name}",
        "",
        f"`python -m benchmarks.studies.learning {name}{option}`: {what}, last "
        f"checkpoint, the same {EPISODES} episodes{when}. {pages.INTERVALS} *From zero*: "
        "before → after (alone: after), where a policy starts from zero instead of noise and draws no other.",
        "",
        _data(study, found),
        "",
        f"| algorithm | seed | {study.quantity} before | after | after − before | from zero | env steps "
        "| wall, tuning |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algo, runs in found.items():
        lines += [_row(study, algo, content) for content in runs]
        lines.append(_pooled(study, algo, runs))
    lines += ["", f"![learning curves]({name}.png)", "", *milestones(study.levels, study.quantity, found), ""]
    lines += _blindfolded(study, found)
    lines += _modes(found)
    first = next(iter(found.values()))[0]["environment"]
    packages = ", ".join(f"{p} {first['packages'][p]}" for p in ("torch", "mujoco", "gymnasium"))
    everything = [content for runs in found.values() for content in runs]
    lines += [
        f"Measured on {first['cpu_count']} shared CPU cores; {packages}; commits "
        f"{pages.commits(everything)}. The episodes of every run are in `{name}/`."
        f"{pages.about_commits(everything)}",
    ]
    draw(name, found)
    path = RESULTS / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _data(study: Study, found: dict[str, list[dict[str, Any]]]) -> str:
    """Say what the policies were cloned from."""
    if not study.bases:
        names = "`, `".join(study.led)
        led = f" Demonstrations, or a clone of them, lead the episodes of `{names}`." if names else ""
        return f"Every seed learns from the reward alone; there is nothing before.{led}"
    if study.demonstrations is not None:
        if clones := _given_clones(found):
            return (
                f"Every seed fine-tunes the same clone of {study.demonstrations} episodes, recorded from the "
                f"task's demonstrator{_noise(study)} (weights: SHA-256 `{'`, `'.join(sorted(clones))}`)."
            )
        return (
            f"Every seed clones from {study.demonstrations} episodes of its own, recorded from the task's "
            f"demonstrator{_noise(study)}."
        )
    files = {c["dataset"]["sha256"]: c["dataset"] for runs in found.values() for c in runs}
    return (
        "Cloned from "
        + "; ".join(
            f"`{d['name']}` ({d['episodes']} episodes, {d['steps']:,} steps, mean return "
            f"{d['mean_return']:.0f}; SHA-256 `{sha}`)"
            for sha, d in files.items()
        )
        + (f". {study.origin}" if study.origin else ".")
    )


def _given_clones(found: dict[str, list[dict[str, Any]]]) -> set[str]:
    """Return the digests of clones that were given to runs."""
    return {c["given_clone"]["sha256"] for runs in found.values() for c in runs if c.get("given_clone")}


def _noise(study: Study) -> str:
    return (
        "" if study.noise is None else f", with noise of {study.noise} on its actions (`noise={study.noise}`)"
    )


def _interval(study: Study, values: np.ndarray) -> str:
    """Write what values (S, E) or (E,) say, with the interval."""
    if study.quantity == "success":
        return pages.percent(success_rate(values))
    i = bootstrap_mean(values)
    return f"{i.value:.0f} ({i.low:.0f}–{i.high:.0f})"


def _change(study: Study, difference: Interval) -> str:
    """Write a paired difference, with the interval."""
    scale = 100 if study.quantity == "success" else 1
    value, low, high = (scale * x for x in (difference.value, difference.low, difference.high))
    return f"{value:+.0f} ({low:+.0f} to {high:+.0f})"


def _row(study: Study, algo: str, content: dict[str, Any]) -> str:
    before, change = "", ""
    if "before" in content:
        before = _interval(study, np.array(content["before"][study.quantity]))
        change = _change(study, Interval(**content["difference"]["difference"]))
    after = np.array(content["after"][study.quantity])
    steps, wall = content["curve"][-1]["step"], content["wall"]["tune_s"] / 60
    zero = _zero(study, [content])
    cells = (algo, content["seed"], before, _interval(study, after), change, zero)
    return "| " + " | ".join(map(str, cells)) + f" | {steps:,} | {wall:.1f} min |"


def _zero(study: Study, runs: Sequence[dict[str, Any]]) -> str:
    """Return the intervals of starts from zero, or nothing where they were not evaluated."""
    known = [key for key in ("zero_start_before", "zero_start") if all(key in content for content in runs)]
    values = ([content[key][study.quantity] for content in runs] for key in known)
    return " → ".join(_interval(study, np.array(one)) for one in values)


def _pooled(study: Study, algo: str, runs: Sequence[dict[str, Any]]) -> str:
    after = np.array([c["after"][study.quantity] for c in runs])
    first, change = "", ""
    if all("before" in content for content in runs):
        before = np.array([c["before"][study.quantity] for c in runs])
        first = f"**{_interval(study, before)}**"
        change = _change(study, paired_difference(before, after))
    return (
        f"| **{algo}** | **all** | {first} | **{_interval(study, after)}** | {change} | "
        f"{_zero(study, runs)} | | |"
    )


def _blindfolded(study: Study, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of a table of policies that see nothing, or something else; empty without them."""
    rows = []
    for algo, runs in found.items():
        seen = [content["blindfolded"] for content in runs if "blindfolded" in content]
        if seen:
            columns = (np.array([one[frames][study.quantity] for one in seen]) for frames in FRAMES)
            rows.append([algo, *(_interval(study, values) for values in columns)])
    head = pages.table(["algorithm", "black frames", "frames of another episode"], rows)
    return ["What the same policies do without sight, all seeds:", "", *head, ""] if rows else []


def _modes(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of a table of the ways that successful episodes take; empty without ways."""

    def count(content: dict[str, Any], when: str) -> str:
        if when not in content:
            return "–"
        modes, success = (np.array(content[when][key]) for key in ("mode", "success"))
        counts = np.unique(modes[(success > 0) & (modes >= 0)], return_counts=True)[1]
        share = counts / counts.sum()
        return f"{len(counts)} ({np.exp(-(share * np.log(share)).sum()):.1f})"

    rows = [
        [algo, *(" / ".join(count(content, when) for content in runs) for when in ("before", "after"))]
        for algo, runs in found.items()
        if "mode" in runs[0]["after"]
    ]
    intro = (
        "Distinct ways among successful episodes of each seed; in brackets, how many equally frequent ones "
    )
    head = pages.table(["algorithm", "before", "after"], rows)
    return [f"{intro}have their entropy:", "", *head, ""] if rows else []


def draw(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Draw training curves, thin per seed and thick for the mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TABLEAU_COLORS
    from matplotlib.figure import Figure

    study = STUDIES[name]
    figure = Figure(figsize=(8.0, max(3.8, 0.24 * len(found))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    budgets = [content["curve"][-1]["step"] for runs in found.values() for content in runs]
    if max(budgets) > 5 * min(budgets):
        axes.set_xscale("log")
    styles = product(("-", "--", ":", "-."), (*TABLEAU_COLORS, "black", "gold", "navy"))
    for (line, color), (algo, runs) in zip(styles, found.items(), strict=False):
        lines = [np.array([(p["step"], p[study.quantity]) for p in c["curve"]]).T for c in runs]
        for steps, values in lines:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9)
        grid = np.linspace(max(line[0][0] for line in lines), min(line[0][-1] for line in lines), 200)
        mean = np.mean([np.interp(grid, *line) for line in lines], axis=0)
        axes.plot(grid, mean, color=color, linestyle=line, linewidth=2.0, label=algo)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(f"{study.quantity}, training episodes")
    seeds = {len(runs) for runs in found.values()}
    axes.set_title(f"{name}: with exploration noise, mean of {'–'.join(map(str, sorted(seeds)))} seeds")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
