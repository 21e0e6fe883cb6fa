"""Command lines of the benchmarks: help as the module has it, and the options that studies share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from algos.training.provenance import describe_environment


class StudyParser(argparse.ArgumentParser):
    """Refuses to measure in a working copy with changes: rows name a commit that others can check out."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Return the options, as argparse does; ends the program where there are changes."""
        options = super().parse_args(args, namespace)
        commit = str(describe_environment()["commit"])
        if commit.endswith("-dirty") and not options.report:
            self.error(f"commit first: rows name a commit, and there are changes on top of {commit[:8]}")
        return options


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)


def study_parser(
    doc: str | None, *, seeds: str | None = None, root: str | None = None, workers: int | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a study: `--report`, and the options whose default is given.

    It refuses a working copy with changes, unless only a page is written.

    Args:
        doc: The module's docstring.
        seeds: By commas; parsed to a list of integers.
        root: Where recordings and runs are kept.
        workers: Processes that play episodes.
    """
    found = StudyParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    if seeds is not None:
        found.add_argument("--seeds", type=numbers, default=seeds, help="by commas")
    if root is not None:
        found.add_argument("--root", type=Path, default=root, help="where recordings and runs are kept")
    if workers is not None:
        found.add_argument("--workers", type=int, default=workers, help="processes that play episodes")
    found.add_argument(
        "--report", action="store_true", help="only write the page, of the rows that are there"
    )
    return found


def numbers(text: str) -> list[int]:
    """Return the integers of a list by commas."""
    return [int(number) for number in text.split(",")]


def words(text: str) -> list[str]:
    """Return the parts of a list by commas."""
    return text.split(",")
