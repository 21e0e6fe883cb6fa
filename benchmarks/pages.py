"""What pages of results share: a JSON file per measurement in docs/results/<page>, a page made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import ArrayLike

from algos.training.provenance import describe_environment
from algos.training.run_directory import RunDirectory
from envs.evaluation.intervals import Interval, success_rate

RESULTS = Path("docs/results")
Key = TypeVar("Key")

INTERVALS = (
    "Intervals: 95 %, by bootstrap over seeds and, inside them, episodes; for success never narrower than "
    "Wilson's, which a single seed has."
)
"""What intervals speak of, for the heads of pages."""


def keep(page: str, name: str, content: Mapping[str, Any], *, indent: int | None = None) -> Path:
    """Write a measurement, with what it was measured on; returns its file."""
    target = RESULTS / page / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = {**content, "environment": describe_environment()}
    target.write_text(json.dumps(whole, indent=indent) + "\n")
    return target


def configuration(run: RunDirectory) -> dict[str, Any]:
    """Return the composed configuration of a run for a row of results; of paths only the last part."""
    return without_folders(run.config)


def without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the last part of its paths."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        is_path = key in ("dataset", "init", "resume", "guide") and isinstance(value, str)
        found[key] = Path(value).name if is_path else value
        if isinstance(value, Mapping):
            found[key] = without_folders(value)
    return found


def kept(page: str, *, advice: str = "give task=<policy> first") -> list[Any]:
    """Read the measurements of a page, in the order of their names.

    Raises:
        SystemExit: If there is none.
    """
    files = sorted((RESULTS / page).glob("*.json"))
    if not files:
        raise SystemExit(f"{RESULTS / page} holds no results; {advice}.")
    return [json.loads(path.read_text()) for path in files]


def record(page: str, name: str) -> dict[str, Any]:
    """Read one measurement of a page; empty where there is none yet."""
    path = RESULTS / page / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def grouped(rows: Iterable[Any], key: Callable[[Any], Key]) -> dict[Key, list[Any]]:
    """Return rows by a key, in their order."""
    found: dict[Key, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def write(page: str, lines: Iterable[str]) -> Path:
    """Write a page."""
    path = RESULTS / f"{page}.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"] + [
        f"| {' | '.join(map(str, row))} |" for row in rows
    ]


def versions(content: Mapping[str, Any], packages: Sequence[str] = ("torch", "mujoco")) -> str:
    """Name the versions of packages that a measurement was made with."""
    found = content["environment"]["packages"]
    return ", ".join(f"{name} {found[name]}" for name in packages)


def commits(contents: Iterable[Mapping[str, Any]]) -> str:
    """Name the commits that measurements were made at."""
    found = sorted({content["environment"]["commit"] for content in contents})
    edits = " with changes that are in no commit"
    return ", ".join(f"{commit[:7]}{edits * commit.endswith('dirty')}" for commit in found)


def origin(page: str, content: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a page: versions, and where the episodes are."""
    return ["", f"Measured with {versions(content)}. Per-episode numbers are in `{page}/`."]


def success(successes: ArrayLike) -> str:
    """Write the share of successes (S, E) or (E,) with its 95 % interval."""
    return percent(success_rate(successes))


def digest(row: Mapping[str, Any]) -> str:
    """Write the digest of a row's data; rows without a configuration, which are earlier, have the file's."""
    return f"SHA-256{' of its contents' * ('configuration' in row)} `{row['dataset']['sha256']}`"


def percent(interval: Interval) -> str:
    """Write a share and its interval in percent."""
    return estimate(interval, ".0f", scale=100, unit=" %", to="–")


def points(interval: Interval) -> str:
    """Write a difference of shares and its interval in percentage points."""
    return estimate(interval, "+.0f", scale=100)


def estimate(interval: Interval, form: str, *, scale: float = 1, unit: str = "", to: str = " to ") -> str:
    """Write an estimate and its interval, multiplied by a scale: `2.1 (1.8 to 2.4)`."""
    value, low, high = (format(scale * x, form) for x in (interval.value, interval.low, interval.high))
    return f"{value}{unit} ({low}{to}{high})"


def describe(policy: Any) -> str:
    """Say in a few words what a policy is."""
    process, horizon = type(policy.process).__name__, policy.chunk.horizon
    if not hasattr(policy, "table"):
        return f"{process}; Th = {horizon}"
    steps, sampler = policy.table.num_steps, type(policy.sampler).__name__
    return f"{process} predicting {policy.process.kind}, {steps} steps of {sampler}; Th = {horizon}"


def processor(where: Mapping[str, Any]) -> str:
    """Return the processor of a measurement and its widest instructions, which one name does not tell."""
    return f"{where['processor']} ({where['instructions']})"


def replace_block(page: str, name: str, lines: Iterable[str]) -> None:
    """Replace the lines between the marks `results: <name>` of a page."""
    path, first, last = Path(page), f"<!-- results: {name} -->", f"<!-- /results: {name} -->"
    head, _, rest = path.read_text(encoding="utf-8").partition(first)
    tail = rest.partition(last)[2]
    path.write_text(head + "\n".join([first, *lines, last]) + tail, encoding="utf-8")
