"""Recompute every published number of the studies from its rows, and look for what made them.

    python -m benchmarks.studies verify                 all pages of docs/results, and all their rows
    python -m benchmarks.studies verify avoid hopper    the pages of these studies

Pages are written again, in a copy, by the commands that made them, and compared line by line; so are their
tables on other pages, and pictures that are text. A row, the
JSON file of a run, is *whole* if it was made by code that can be checked out again (a commit of this
history, without changes), names an experiment of that code, and holds its composed configuration, the
digest of its data and its processor. Numbers that a row repeats are recomputed from its episodes, and what
earlier commits hold of a row that names the same code must be what it says. The exit code is 1 if a page
differs, a row contradicts itself or its history, or if a row is not whole that was made by code which
writes whole rows. Rows of earlier code are counted apart: their numbers are recomputed, their runs cannot be
repeated exactly.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import pages
from benchmarks.options import parser
from benchmarks.studies.definitions import STUDIES
from envs.evaluation.intervals import paired_difference

LEARNING = "benchmarks.studies.learning"
REPORTS = {
    **{name: (LEARNING, name) for name in STUDIES},
    "offline": ("benchmarks.studies.offline", "hopper-medium"),
    **{
        name: (f"benchmarks.studies.{name}",)
        for name in (
            "cloning", "composition", "contained", "demo", "door", "exported", "families", "foresight",
            "lab", "latency", "locomotion", "new_tasks", "published", "steering", "serving", "table",
            "tuning", "warm_start", "world",
        )
    },
    **{name: (f"benchmarks.{name}",) for name in ("draw", "fleet_learns")},
    "simulators": ("benchmarks.simulators.__main__",),
}  # fmt: skip
"""What writes a page again: a module, and what it is told beside --report."""

FIRST_WHOLE = "809571a7"
"""The commit from which on a study writes whole rows."""


def written_again(name: str, place: Path) -> str:
    """Write a page in `place`, which has a copy of docs/, and return its text."""
    module, *told = REPORTS[name]
    main = importlib.import_module(module).main
    with (
        contextlib.chdir(place),
        mock.patch.object(sys, "argv", [module, *told, "--report"]),
        mock.patch("matplotlib.figure.Figure.savefig"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        main()
    return (place / pages.RESULTS / f"{name}.md").read_text(encoding="utf-8")


def first_difference(one: str, other: str) -> str | None:
    """Return where two texts begin to differ; None where they do not."""
    for number, (left, right) in enumerate(zip(one.splitlines(), other.splitlines(), strict=False), 1):
        if left != right:
            return f"line {number} is\n    {left[:160]}\n  and becomes\n    {right[:160]}"
    return None if one == other else "one has more lines"


class History:
    """What this repository's commits hold."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[tuple[str, ...], bool] = {}

    def _succeeds(self, *words: str) -> bool:
        if words not in self._known:
            done = subprocess.run(["git", "-C", str(self._root), *words], capture_output=True)
            self._known[words] = done.returncode == 0
        return self._known[words]

    def has(self, commit: str, path: str = "") -> bool:
        """Whether a commit is there, and holds a file."""
        return self._succeeds("cat-file", "-e", f"{commit}:{path}" if path else f"{commit}^{{commit}}")

    @cached_property
    def _blobs(self) -> dict[str, list[str]]:
        """Versions of every file of results, by its place."""
        words = ("log", "--raw", "--no-renames", "--no-abbrev", "--format=", "--", str(pages.RESULTS))
        told = subprocess.run(["git", "-C", str(self._root), *words], capture_output=True, text=True)
        found: dict[str, list[str]] = {}
        for facts, _, place in (line.partition("\t") for line in told.stdout.splitlines()):
            found.setdefault(place, []).append(facts.split()[3])
        return found

    def versions(self, place: Path) -> Iterator[Any]:
        """Yield what commits hold of a JSON file of results."""
        for blob in self._blobs.get(place.as_posix(), ()):
            if blob.strip("0"):  # else the commit removes it
                words = ["git", "-C", str(self._root), "cat-file", "blob", blob]
                yield json.loads(subprocess.run(words, capture_output=True, check=True).stdout)

    def follows(self, commit: str, earlier: str) -> bool:
        return self._succeeds("merge-base", "--is-ancestor", earlier, commit)


def missing(row: Mapping[str, Any], history: History) -> Iterator[str]:
    """Yield what a row lacks to be repeated."""
    commit = str(row["environment"]["commit"])
    if commit.endswith("-dirty") or not history.has(commit):
        yield f"its commit, {commit[:12]}"
    else:
        for name in experiments_of(row):
            if not history.has(commit, f"configs/experiment/{name}.yaml"):
                yield f"its experiment, {name}"
    if not row.get("configuration"):
        yield "its configuration"
    if not row["environment"].get("processor"):
        yield "its processor"
    data = row.get("dataset")
    if data is not None and not data.get("sha256"):
        yield "the digest of its data"


def experiments_of(row: Mapping[str, Any]) -> list[str]:
    """Return the experiments that a row names."""
    words = [str(row.get("experiment", "")).split(), row.get("settings", [])]
    named = [words[0][0]] if words[0] else []
    return named + [word.removeprefix("experiment=") for word in words[1] if word.startswith("experiment=")]


def contradictions(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a row says twice and not alike: means, differences, numbers of episodes."""
    found = row.get("difference")
    if not found:
        return
    quantity = found["quantity"]
    before, after = (np.array(row[when][quantity], np.float64) for when in ("before", "after"))
    if before.shape != after.shape or before.size != found["episodes"]:
        yield f"{before.size} and {after.size} episodes, said to be {found['episodes']}"
        return
    own = paired_difference(before, after)
    said = found["difference"]
    values = {
        "mean before": (found["before"], before.mean()), "mean after": (found["after"], after.mean()),
        "difference": (said["value"], own.value), "lower end": (said["low"], own.low),
        "upper end": (said["high"], own.high),
    }  # fmt: skip
    for what, (one, other) in values.items():
        if not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{what} {one:.6g}, from its episodes {other:.6g}"
    if (protocol := row.get("protocol")) and protocol["episodes"] != before.size:
        yield f"{before.size} episodes, of a protocol of {protocol['episodes']}"


def edits(row: Mapping[str, Any], versions: Iterable[Any]) -> set[str]:
    """Return what other versions of a run's row say otherwise, although they name the same commit.

    Curves once counted steps otherwise, and configurations had folders.
    """
    commit, found = row["environment"]["commit"], set()
    for old in versions:
        if "seed" in row and old.get("environment", {}).get("commit") == commit:
            found |= {key for key in old.keys() & row.keys() if old[key] != row[key]}
    return found - {"curve", "configuration"}


def rows_of(name: str, results: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the rows of a page: files that name the code that made them."""
    read = [(path, json.loads(path.read_text())) for path in sorted((results / name).glob("*.json"))]
    return [(path, row) for path, row in read if isinstance(row, dict) and "environment" in row]


def verify(names: Sequence[str], root: Path, history: History) -> tuple[list[str], list[str]]:
    """Return what is wrong, and a line per page."""
    wrong, told = [], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(root / "docs", place / "docs", ignore=shutil.ignore_patterns("pictures"))
        shutil.copy(root / "README.md", place)
        (place / "configs").symlink_to(root / "configs")
        for name in names:
            page = (root / pages.RESULTS / f"{name}.md").read_text(encoding="utf-8")
            apart = first_difference(page, written_again(name, place))
            if apart:
                wrong.append(f"{name}.md: {apart}")
            rows, whole = rows_of(name, root / pages.RESULTS), 0
            for path, row in rows:
                lacking, own = list(missing(row, history)), f"{name}/{path.name}"
                whole += not lacking
                wrong += [f"{own}: {one}" for one in contradictions(row)]
                edited = edits(row, history.versions(path.relative_to(root)))
                wrong += [f"{own}: {key} is not what a commit holds of this row" for key in sorted(edited)]
                if is_expected_whole(row, history):
                    wrong += [f"{own} lacks {one}" for one in lacking]
            match = "differs from" if apart else "is that of"
            told.append(f"{name}: the page {match} its rows; {whole} of {len(rows)} rows are whole.")
        wrong += elsewhere({pages.RESULTS / f"{name}.md" for name in names}, root, place)
    return wrong, told


def elsewhere(compared: Collection[Path], root: Path, place: Path) -> Iterator[str]:
    """Yield where other files of text differ, after studies wrote their tables and pictures in `place`."""
    for path in sorted(one for one in place.rglob("*.*") if one.suffix in (".md", ".svg")):
        own = path.relative_to(place)
        if own in compared:
            continue
        before = (root / own).read_text(encoding="utf-8") if (root / own).exists() else ""
        if apart := first_difference(before, path.read_text(encoding="utf-8")):
            yield f"{own}: {apart}"


def is_expected_whole(row: Mapping[str, Any], history: History) -> bool:
    """Whether the code that made a row writes whole ones; what has no seed, such as a speed, is of no run."""
    commit = str(row["environment"]["commit"]).removesuffix("-dirty")
    return "configuration" in row or ("seed" in row and history.follows(commit, FIRST_WHOLE))


def main() -> int:
    """Verify what is asked for."""
    asked = parser(__doc__)
    asked.add_argument("studies", nargs="*", help=", ".join(REPORTS))
    options = asked.parse_args()
    root = Path.cwd()
    there = [name for name in REPORTS if (root / pages.RESULTS / f"{name}.md").exists()]
    if unknown := sorted(set(options.studies) - set(there)):
        asked.error(f"no page of {', '.join(unknown)}; there are {', '.join(there)}")
    wrong, told = verify(options.studies or there, root, History(root))
    print("\n".join([*told, *(f"WRONG  {one}" for one in wrong)]))
    return 1 if wrong else 0
