"""The pages of `benchmarks.studies.learning`: tables, curves, milestones, ways."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pages
from benchmarks.studies.definitions import STUDIES, Study
from benchmarks.studies.milestones import milestones
from benchmarks.studies.rows import EPISODES
from benchmarks.studies.sight import FRAMES
from burnish.reports.figures import new_figure
from envs.evaluation.intervals import Interval, bootstrap_mean, paired_difference, success_rate

SUMMARY, BLOCK = "docs/results.md", "learning"
SUMMARISED = {
    "hopper": "Hopper-v5, return, cloned from medium data",
    "avoid": "`avoid`, success, cloned from 20 demonstrations",
    "cube-single": "`cube-single`, success, cloned from 9 demonstrations",
    "lift": "`lift`, success, cloned from 4 demonstrations",
    "lift-varied": "`lift`, success, cloned from 15 demonstrations with noise",
    "cube-single-varied": "`cube-single`, success, cloned from 60 demonstrations with noise",
    "can-varied": "`can`, success, cloned from 40 demonstrations with noise",
}
"""Studies in the summary, and how it calls their tasks."""
METHODS = {
    "dppo": "DPPO", "reinflow-r": "ReinFlow, rectified flow", "reinflow-s": "ReinFlow, shortcut model",
    "fpo++": "FPO++", "dsrl": "DSRL, rectified flow", "dsrl-diffusion": "DSRL, diffusion",
    "dsrl-sac": "DSRL by SAC, rectified flow", "qc": "Q-chunking, rectified flow",
    "idql": "IDQL, rectified flow", "rlpd": "RLPD, from scratch with the data", "ppo": "Gaussian PPO",
}  # fmt: skip
"""Methods in the summary, in its order, and how it calls them."""
CRITICS_PAGE, CRITICS_BLOCK, MEASURED_BLOCK = "docs/algorithms/critics.md", "critics", "measured"
COMPARED = {
    "avoid": "`avoid`", "lift-varied": "`lift`", "cube-single-varied": "`cube-single`",
    "cube-single-play": "`cube-single`, from play",
}  # fmt: skip
"""Studies in which critics of chunks are compared, and how their table calls the tasks."""
CRITICS = {
    "qam": "[QAM](qam.md#measured)", "qam_fql": "QAM with a student", "qam_edit": "QAM with edits",
    "trqam": "TRQAM", "pa_rl": "PA-RL", "dqc": "DQC", "idql": "IDQL", "qc": "Q-chunking",
    "residual": "`residual`", "expo": "EXPO", "famo2o": "FamO2O", "fql": "QC-FQL",
}  # fmt: skip
"""Methods of that table, in its order, and how it calls them."""
MEASURED = {
    "docs/algorithms/fpo.md": {
        "avoid": {"fpo++": "FPO++", "fpo": "FPO", "awm": "AWM"},
        "lift": {"fpo++": "FPO++, `algo.action_noise=0.1`"},
        "cube-single": {"fpo++": "FPO++, without that noise"},
        "hopper": {"fpo++": "FPO++"},
    },
    "docs/algorithms/reinflow.md": {
        study: {"reinflow-r": "rectified flow", "reinflow-s": "shortcut model"}
        for study in ("avoid", "cube-single", "lift", "hopper")
    },
    "docs/algorithms/dsrl.md": {
        "avoid": {
            "dsrl": "flow",
            "dsrl-diffusion": "diffusion of 20 steps, steered by 5 of DDIM",
            "dsrl-sac": "flow, `sac`: a row of noise for a chunk, twice the updates, a shorter discount",
        },
        **{
            study: {"dsrl": "flow"} for study in ("lift-varied", "cube-single-varied", "can-varied", "hopper")
        },
    },
}
"""Pages of algorithms with a table of their own: studies, and how it calls the methods."""


def load(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of a study by algorithm, seeds in order."""
    paths = sorted((pages.RESULTS / name).glob("*-seed*.json"))
    return pages.grouped((json.loads(path.read_text()) for path in paths), lambda run: run["algo"])


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
        *((study.remark, "") if study.remark else ()),
    ]
    columns = ("algorithm", "seed", f"{study.quantity} before", "after", "after − before", "from zero")
    lines += pages.table((*columns, "env steps", "wall, tuning"), ())
    lines += [line for algo, runs in found.items() for line in _rows(study, algo, runs)]
    lines += ["", f"![learning curves]({name}.png)", "", *milestones(study.levels, study.quantity, found), ""]
    lines += _blindfolded(study, found)
    lines += _modes(found)
    everything = [content for runs in found.values() for content in runs]
    packages = pages.versions(everything[0], ("torch", "mujoco", "gymnasium"))
    lines.append(
        f"Measured on {everything[0]['environment']['cpu_count']} shared CPU cores; {packages}; commits "
        f"{pages.commits(everything)}. The episodes of every run are in `{name}/`."
    )
    draw(name, found)
    return pages.write(name, lines)


def summary() -> list[str]:
    """Return the table of docs/results.md: methods of several studies that have three seeds."""
    cells = []
    for name, task in SUMMARISED.items():
        study, rows = STUDIES[name], load(name)
        shown = [algo for algo in METHODS if len(rows.get(algo, ())) >= 3]
        for algo in shown:
            before, after = (
                _interval(study, np.array([row[when][study.quantity] for row in rows[algo]]))
                if all(when in row for row in rows[algo])
                else "–"
                for when in ("before", "after")
            )
            steps = np.mean([row["curve"][-1]["step"] for row in rows[algo]]) / 1e6
            cells.append((task if algo == shown[0] else "", METHODS[algo], before, after, f"{steps:.2f} M"))
    return pages.table(("task", "algorithm", "before", "after", "environment steps"), cells)


def critics() -> list[str]:
    """Return the table of docs/algorithms/critics.md: clones and what became of them, by method and task."""
    found = {name: load(name) for name in COMPARED}
    rows = [
        (call, *(_raised(name, found[name].get(algo)) for name in COMPARED)) for algo, call in CRITICS.items()
    ]
    return pages.table(("", *COMPARED.values()), rows)


def measured(page: str) -> list[str]:
    """Return the table of a page of an algorithm: policies before and after, by task."""
    cells = []
    for name, methods in MEASURED[page].items():
        study, found = STUDIES[name], load(name)
        shown = {algo: called for algo, called in methods.items() if algo in found}
        for number, (algo, called) in enumerate(shown.items()):
            runs, task = found[algo], f"[{name}](../results/{name}.md), {study.quantity}"
            ends = (
                _interval(study, np.array([run[when][study.quantity] for run in runs]))
                for when in ("before", "after")
            )
            steps = np.mean([run["curve"][-1]["step"] for run in runs]) / 1e6
            cells.append(("" if number else task, called, *ends, _zero(study, runs), f"{steps:.2f} M"))
    columns = ("study", "policy", "before", "after", "from zero", "environment steps")
    if not any(row[4] for row in cells):
        columns, cells = columns[:4] + columns[5:], [row[:4] + row[5:] for row in cells]
    return pages.table(columns, cells)


def blocks() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the tables on pages of other subjects: page, name of the block, lines."""
    yield SUMMARY, BLOCK, summary()
    yield CRITICS_PAGE, CRITICS_BLOCK, critics()
    for page in MEASURED:
        yield page, MEASURED_BLOCK, measured(page)


def _raised(name: str, runs: Sequence[dict[str, Any]] | None) -> str:
    """Write success before and after, bold where it is clearly better, and how many seeds if not three."""
    if not runs:
        return ""
    before, after = (np.array([c[when]["success"] for c in runs]) for when in ("before", "after"))
    told = f"{100 * before.mean():.0f} % → {_interval(STUDIES[name], after)}"
    told = f"**{told}**" if paired_difference(before, after).low > 0 else told
    return told if len(runs) >= 3 else f"{told}, {len(runs)} of 3 seeds"


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
    files = {c["dataset"]["sha256"]: c for runs in found.values() for c in runs}
    return (
        "Cloned from "
        + "; ".join(
            f"`{d['name']}` ({d['episodes']} episodes, {d['steps']:,} steps, mean return "
            f"{d['mean_return']:.0f}; {pages.digest(row)})"
            for row in files.values()
            for d in (row["dataset"],)
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
    return pages.estimate(bootstrap_mean(values), ".0f", to="–")


def _change(study: Study, difference: Interval) -> str:
    """Write a paired difference, with the interval."""
    return pages.estimate(difference, "+.0f", scale=100 if study.quantity == "success" else 1)


def _rows(study: Study, algo: str, runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: of every seed, and of all of them."""
    quantity = study.quantity
    for run in runs:
        before, change = "", ""
        if "before" in run:
            before = _interval(study, np.array(run["before"][quantity]))
            change = _change(study, Interval(**run["difference"]["difference"]))
        after, zero = _interval(study, np.array(run["after"][quantity])), _zero(study, [run])
        steps, wall = run["curve"][-1]["step"], run["wall"]["tune_s"] / 60
        cells = f"{algo} | {run['seed']} | {before} | {after} | {change} | {zero}"
        yield f"| {cells} | {steps:,} | {wall:.1f} min |"
    every, first, change = np.array([run["after"][quantity] for run in runs]), "", ""
    if all("before" in run for run in runs):
        clones = np.array([run["before"][quantity] for run in runs])
        first, change = f"**{_interval(study, clones)}**", _change(study, paired_difference(clones, every))
    after, zero = _interval(study, every), _zero(study, runs)
    yield f"| **{algo}** | **all** | {first} | **{after}** | {change} | {zero} | | |"


def _zero(study: Study, runs: Sequence[dict[str, Any]]) -> str:
    """Return the intervals of starts from zero, or nothing where they were not evaluated."""
    known = [key for key in ("zero_start_before", "zero_start") if all(key in content for content in runs)]
    values = ([content[key][study.quantity] for content in runs] for key in known)
    return " → ".join(_interval(study, np.array(one)) for one in values)


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
    from matplotlib.colors import TABLEAU_COLORS

    study, figure = STUDIES[name], new_figure(8.0, max(3.8, 0.24 * len(found)))
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
    figure.savefig(pages.RESULTS / f"{name}.png", dpi=120)
