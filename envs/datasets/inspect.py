"""Summary of a file's keys; also for files that are no valid dataset.

HDF5 and npz arrays are read in pieces, so a file may exceed memory. Keys of episodes are grouped:
`data/demo_*/actions` stands for the actions of all demonstrations, `*/actions` for those of numbered folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import pieces
from envs.datasets.files.arrays import StoredArray, is_numeric, readable
from envs.datasets.files.hdf5 import datasets_of, read_hdf5
from envs.datasets.files.minari import read_table
from envs.datasets.files.npz import peek_npz, walk_npz
from policies.errors import DatasetError

_PIECE = 16 * 2**20  # bytes per piece
_NUMBERED = re.compile(r"\b(demo|episode)_\d+")

Progress = Callable[[int], None]
"""Called with the number of bytes read so far."""


@dataclass
class KeyFacts:
    """One key, or the same key of all episodes, whose number is `*`; `low` and `high` are finite."""

    key: str
    dtype: str
    arrays: int = 0
    rows: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    nan: int = 0
    infinite: int = 0
    low: float | None = None
    high: float | None = None

    def update(self, values: np.ndarray) -> None:
        """Update the summary with an array."""
        if not is_numeric(values) or not values.size:
            return
        finite = values
        if values.dtype.kind == "f":
            self.nan += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            finite = values[np.isfinite(values)]
        if finite.size:
            low, high = float(finite.min()), float(finite.max())
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)


def size_of(path: str | Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    path = Path(path)
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(item.stat().st_size for item in files if item.is_file())


def describe_file(path: str | Path, progress: Progress | None = None) -> list[KeyFacts]:
    """Describe every key of an HDF5 or npz file, or of all such files of a folder.

    `progress` is called with the bytes read, which exceed the file size for compressed files.
    """
    found: dict[str, KeyFacts] = {}
    seen = 0
    for stored in _arrays(Path(path)):
        name = _NUMBERED.sub(r"\1_*", stored.key)
        facts = found.setdefault(name, KeyFacts(name, str(stored.dtype)))
        facts.arrays += 1
        facts.rows += stored.shape[0] if stored.shape else 1
        if stored.shape[1:] not in facts.shapes:
            facts.shapes.append(stored.shape[1:])
        for piece in stored.pieces:
            facts.update(piece)
            seen += piece.nbytes
            if progress is not None:
                progress(seen)
    if not found:
        raise DatasetError(
            f"{path}: expected HDF5, npz, Parquet or Arrow files with data in them; found none."
        )
    return list(found.values())


def _arrays(path: Path) -> Iterator[StoredArray]:
    """Yield the arrays of a file, or of the files below a folder."""
    if path.is_dir():
        for item in sorted(path.rglob("*")):
            if item.suffix in (".hdf5", ".h5", ".npz", ".parquet", ".arrow"):
                yield from _arrays(item)
    elif path.suffix in (".parquet", ".arrow"):
        yield from _columns(path)
    elif peek_npz(path) is not None:
        yield from walk_npz(path, _PIECE)
    else:
        with read_hdf5(path) as file:
            for key, item in datasets_of(file).items():
                yield StoredArray(key, item.shape or (), item.dtype, _pieces(item))


def _pieces(item: h5py.Dataset) -> Iterator[np.ndarray]:
    """Yield an HDF5 dataset of numbers in rows that make up about one piece."""
    if item.shape == () and is_numeric(item):
        yield np.asarray(item[()])
    elif item.shape and is_numeric(item):
        for rows in pieces(item, _PIECE):
            yield item[rows]


def _columns(path: Path) -> Iterator[StoredArray]:
    form = path.suffix.removeprefix(".")
    with readable(path, f"{form} file"):
        columns, _ = read_table(str(path), form)
    folder = "*" if path.parent.name.isdecimal() else path.parent.name
    for name, column in columns.items():
        if name.startswith("stats/"):
            continue  # LeRobot's numbers about the columns that are described here
        for key, values in _flat(name, column):
            yield StoredArray(f"{folder}/{key}", values.shape, values.dtype, iter([values]))


def _flat(name: str, column: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(column, dict):
        for key, inner in column.items():
            yield from _flat(f"{name}/{key}", inner)
    else:
        yield name, np.asarray(column)
