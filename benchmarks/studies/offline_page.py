"""The page of `benchmarks.studies.offline`: scores, differences, what corrections and weights change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.studies.offline_data import DATA, JUDGED, experiment_of
from burnish.reports.figures import new_figure
from envs.evaluation.comparison import FEWEST_EPISODES
from envs.evaluation.intervals import (
    IQM_FROM_SEEDS,
    RISK_SHARE,
    Interval,
    bootstrap_iqm,
    conditional_value_at_risk,
    paired_difference,
    value_at_risk,
)

PAGE = "offline"


def load(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results on a dataset by algorithm, seeds in order."""
    paths = sorted((pages.RESULTS / PAGE).glob(f"{name}-*-seed*.json"))
    runs = (json.loads(path.read_text()) for path in paths)
    return pages.grouped((run for run in runs if run["data"] == name), lambda run: run["algo"])


def scores(runs: Sequence[dict[str, Any]], variant: str) -> np.ndarray | None:
    """Return D4RL scores (S, E) of a variant, None where a seed has none.

    The last checkpoint stands in for the best one of seeds where that is the last. Episodes by which the best
    one was chosen do not count for it.
    """
    found = [run["evaluations"].get(variant) for run in runs]
    if variant == "best" and any(found):
        found = [one or run["evaluations"]["last"] for one, run in zip(found, runs, strict=True)]
    if not all(found):
        return None
    random, expert = runs[0]["protocol"]["env"]["reference_scores"]
    returns = np.array([one["return"] for one in found if one])
    if variant == "best":
        returns = returns[:, JUDGED:]
    if not returns.size:
        return None
    return 100.0 * (returns - random) / (expert - random)


VARIANTS = ("cloned", "last", "best", "corrected", "perturbed", "perturbed, corrected")


def rows_of(algo: str, runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one line per variant: score with interval, its worst tenth (CVaR), and the best of that (VaR)."""
    for variant in VARIANTS:
        found = scores(runs, variant)
        if found is None:
            continue
        judged = (
            pages.estimate(bootstrap_iqm(found), "z.1f"),
            pages.estimate(conditional_value_at_risk(found), "z.1f"),
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
    cells = (": ".join(after), ": ".join(before), len(common), pages.estimate(interval, "+z.1f"))
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
        "of the task, `<task>_<algorithm>`; D4RL scores (0 random, 100 expert): their mean, from "
        f"{IQM_FROM_SEEDS} seeds on the interquartile mean of the means of seeds, with 95 % intervals over "
        "seeds and episodes, the mean of the worst tenth of all episodes (CVaR), and the best score among "
        f"that tenth (VaR); α = {RISK_SHARE:g} of both. *Best* is the checkpoint that evaluated best on the "
        f"way, in the first {JUDGED} of the episodes, which do not count in its row; it is left out where "
        "that is the last of every seed, and choosing it needs the simulator. *Corrected*: "
        "`algo=cdsa` on top. *Perturbed*: normal noise on the actions, before anything corrects them. "
        "`flow+iql` and its like: a cloned policy (*cloned*), tuned by `<task>_iql_tuning`. `@return`, "
        "`@advantage`: rows drawn by `curation.weighting`; `@top`: the tenth of the episodes that has the "
        "highest returns.", "",
        "The second table of a dataset has paired differences: means, episode by episode, on the seeds that "
        "both sides have. *Clearly* above or below means that the 95 % interval, over seeds and episodes, "
        "excludes 0; of a single seed it covers episodes only, not the luck of training.",
    ]  # fmt: skip
    for name in DATA:
        if found := load(name):
            lines += section(name, found)
    return pages.write(PAGE, lines)


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
        f"{data['mean_return']:.0f}; {pages.digest(first)}. {episodes} episodes per seed{about}.",
        "",
    ]  # fmt: skip
    columns = ("algorithm", "checkpoint", "seeds", "gradient steps", "score", "worst tenth", "VaR")
    lines += pages.table(columns, ())
    for algo, runs in found.items():
        lines += rows_of(algo, runs)
    if compared := list(differences(found)):
        head = ("score of", "against", "seeds", "paired difference", "in words")
        lines += ["", *pages.table(head, ()), *compared]
    lines += asked_for(found) + by_others(name, found) + gates(found) + rates(found)
    draw(name, found)
    everything = [run for runs in found.values() for run in runs]
    picture = f"![evaluations on the way](offline-{name}.png)"
    commits = f"Commits {pages.commits(everything)}; the episodes are in `offline/`."
    return [*lines, "", picture, "", commits]


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
    from matplotlib.colors import TABLEAU_COLORS

    tuned = {algo: runs for algo, runs in found.items() if "+" in algo}
    fresh = {algo: runs for algo, runs in found.items() if algo not in tuned}
    panels = [(title, runs) for title, runs in ((name, fresh), (f"{name}: tuned clones", tuned)) if runs]
    figure = new_figure(8.0, 3.8 * len(panels))
    for axes, (title, shown) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for color, (algo, runs) in zip(cycle(TABLEAU_COLORS), shown.items(), strict=False):
            for index, run in enumerate(runs):
                points = [(p["step"], p["eval/return"]) for p in run["curve"] if "eval/return" in p]
                label = algo if index == 0 else None
                axes.plot(*np.array(points).T, color=color, marker="o", markersize=3, label=label)
        axes.set_xlabel("gradient steps")
        axes.set_ylabel(f"return, {JUDGED} episodes")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(pages.RESULTS / f"offline-{name}.png", dpi=120)
