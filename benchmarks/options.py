"""Command lines of the benchmarks: help as the module has it, and the options that studies share."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)


def study_parser(
    doc: str | None, *, seeds: str | None = None, root: str | None = None, workers: int | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a study: `--report`, and the options whose default is given.

    Args:
        doc: The module's docstring.
        seeds: By commas; parsed to a list of integers.
        root: Where recordings and runs are kept.
        workers: Processes that play episodes.
    """
    found = parser(doc)
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
