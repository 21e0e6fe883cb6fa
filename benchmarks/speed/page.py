"""The figures of `benchmarks.speed` that are kept, and their tables in the pages, processors side by side.

    python -m benchmarks.speed.page

writes the tables in docs/speed.md and docs/results.md again from docs/results/speed/<processor>.json.
`python -m benchmarks.speed --keep` adds its figures there. Of every figure the last two runs are kept.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from algos.training.provenance import describe_environment
from benchmarks.pages import grouped, keep, kept, processor, record, replace_block, table

PAGE, SUMMARY = "docs/speed.md", "docs/results.md"
RUNS = 2
PROGRAMS = "Against other programs"
THEMES = {
    "Deciding": ("sampling", "flow", "unet", "transformer", "exported", "steered", "evaluate"),
    "Cloning and on-policy": ("cloning", "gather", "rollout", "update", "iteration", "reinflow"),
    "Offline": ("offline", "neighbours"),
    "Off-policy and critics": ("replay", "ensembles", "dsrl", "critics"),
    "Several seeds": ("seeds",),
    PROGRAMS: ("ppo", "dsrl_sac", "lerobot", "d3rlpy", "released"),
}
"""Title of a table -> its cases."""

AIMS = {
    ("evaluation, 20 episodes, a decision", "SyncVectorEnv"): 4.0,
    ("whole DPPO iteration", "reference style"): 5.0,
    ("PPO iteration, 64 x 64, batch 64", "Stable-Baselines3"): 1.5,
    ("DSRL by SAC, 512 steps", "Stable-Baselines3"): 2.0,
    ("U-Net of 66 M, a decision", "LeRobot"): 1.7,
    ("U-Net, BC step, batch 64", "LeRobot"): 1.5,
    ("TD3+BC step", "CORL"): 1.4,
    ("IQL step", "CORL"): 1.4,
    ("A2PR step", "released A2PR"): 1.5,
    ("PRDC step, a fresh actor", "released PRDC"): 2.0,
    ("PRDC step, near the data", "released PRDC"): 2.0,
}
"""Figure and peer -> the ratio that is wanted."""

Run = Mapping[str, Any]
Key = tuple[str, str, str, str]


def key(run: Run) -> Key:
    """Return what makes two runs comparable: case, figure, peer and data."""
    return run["case"], run["figure"], run["peer"], run["dataset"] or ""


def last_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the last two runs of every figure."""
    return [run for same in grouped(runs, key).values() for run in same[-RUNS:]]


def add(runs: Iterable[Run]) -> None:
    """Keep runs of this processor beside its earlier ones."""
    name = processor(describe_environment())
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    before = record("speed", slug).get("runs", [])
    keep("speed", slug, {"processor": name, "runs": last_runs([*before, *runs])}, indent=1)


def records() -> dict[str, list[Run]]:
    """Return the kept runs by processor, in the order of their names."""
    found = {content["processor"]: content["runs"] for content in kept("speed") if "runs" in content}
    return {name: found[name] for name in sorted(found, key=str.casefold)}


def milliseconds(seconds: float | None) -> str:
    """Write a time in milliseconds with three digits, or a dash."""
    if seconds is None:
        return "–"
    digits = max(0, 2 - math.floor(math.log10(1e3 * seconds)))
    return f"{1e3 * seconds:,.{digits}f}"


def _ratio(value: float) -> str:
    return f"{round(value, 2 if value < 10 else 1 if value < 100 else 0):g}"


def _place(cases: Sequence[str], key: Key) -> tuple[Any, ...]:
    """Return where a figure stands in a table: by case, then by name, numbers by their size."""
    case, figure, *rest = key
    words = re.split(r"(\d+)", figure.replace(",", ""))
    return cases.index(case), [int(word) if word.isdigit() else word for word in words], *rest


def _cells(same: Sequence[Run]) -> tuple[str, str]:
    """Return our time and the ratios of the runs of a figure."""
    times = [run["ours_s"] for run in same if run["ours_s"] is not None]
    ratios = " / ".join(_ratio(run["ratio"]) for run in same)
    return milliseconds(statistics.median(times) if times else None), f"**{ratios}**" if same else "–"


def theme(found: Mapping[str, Sequence[Run]], cases: Sequence[str]) -> list[str]:
    """Return the table of some cases: the processors that have any of them, aims where there are any."""
    by_processor = {
        name: grouped((run for run in runs if run["case"] in cases), key) for name, runs in found.items()
    }
    by_processor = {name: figures for name, figures in by_processor.items() if figures}
    keys = sorted({one for figures in by_processor.values() for one in figures}, key=partial(_place, cases))
    has_aims = any((figure, peer) in AIMS for _, figure, peer, _ in keys)
    rows = []
    for one in keys:
        _, figure, peer, dataset = one
        same = [figures.get(one, []) for figures in by_processor.values()]
        newest = max((run for runs in same for run in runs), key=lambda run: run["date"] or "")
        label = f"{figure} ({dataset.removesuffix('.hdf5')})" if dataset else figure
        measured = [cell for runs in same for cell in _cells(runs)]
        wanted = [newest["floor"], *[AIMS.get((figure, peer))] * has_aims]
        rows.append([label, peer, *measured, *(f"{ratio:g}" if ratio else "–" for ratio in wanted)])
    columns = [column for name in by_processor for column in (f"{name} [ms]", "ratio")]
    return table(["hot path", "against", *columns, "floor", *["aim"] * has_aims], rows)


def _origin(name: str, runs: Sequence[Run]) -> str:
    """Say in a line what is known of the runs of a processor."""
    commits, dates = ({run[part] for run in runs} - {None} for part in ("commit", "date"))
    loads = [run["load"] for run in runs if run["load"] is not None]
    said = [
        f"commit {', '.join(sorted(commits))}".replace("-dirty", " (with changes)") if commits else "",
        f"load {min(loads):.1f} to {max(loads):.1f}" if loads else "",
        " to ".join(sorted({min(dates), max(dates)})) if dates else "",
    ]
    return f"- {name}: {'; '.join(filter(None, said)) or 'commits and dates were not kept'}."


def lines(found: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Yield the lines of docs/speed.md."""
    yield from (_origin(name, runs) for name, runs in found.items())
    for title, cases in THEMES.items():
        yield from ("", f"### {title}", "", *theme(found, cases))


def summary(found: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return the lines of docs/results.md: the table of other programs."""
    head = (
        "How many times faster than other programs, in the last two runs. [Speed](speed.md) has all figures."
    )
    return [head, "", *theme(found, THEMES[PROGRAMS])]


def write() -> None:
    """Write the tables of the pages."""
    found = records()
    replace_block(PAGE, "speed", lines(found))
    replace_block(SUMMARY, "speed", summary(found))


if __name__ == "__main__":
    write()
