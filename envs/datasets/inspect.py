"""Summary of a file's keys; also for files that are no valid dataset.

HDF5 and npz arrays are read in pieces, so a file may exceed memory; tables of Parquet and Arrow files are
read one by one. Keys of episodes are grouped: `data/demo_*/actions` stands for the actions of all
demonstrations, `*/actions` for those of numbered folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.files.hdf5 import peek_hdf5, read_hdf5
from envs.datasets.files.npz import peek_npz, walk_npz
from policies.errors import DatasetError

_PIECE = 16 * 2**20  # bytes per piece
_NUMBERED = re.compile(r"\b(demo|episode)_\d+")

Progress = Callable[[int], None]
"""Is told the number of bytes seen so far."""


@dataclass
class KeyFacts:
    """One key, or the same key of all episodes.

    Attributes:
        key: Path in the file; `*` stands for the number of an episode.
        arrays: Number of arrays under it.
        rows: Rows of all of them.
        shapes: Shapes of a row; more than one if arrays differ.
        dtype: Type of the numbers.
        nan: Entries that are not a number.
        infinite: Entries that are infinite.
        low: Smallest finite entry; None where there is none.
        high: Largest finite entry.
    """

    key: str
    dtype: str
    arrays: int = 0
    rows: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    nan: int = 0
    infinite: int = 0
    low: float | None = None
    high: float | None = None

    def see(self, values: np.ndarray) -> None:
        """Update the summary with an array."""
        if values.dtype.kind not in "biuf" or not values.size:
            return
        finite = values
        if values.dtype.kind == "f":
            good = np.isfinite(values)
            self.nan += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            finite = values[good]
        if finite.size:
            low, high = float(finite.min()), float(finite.max())
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)


@dataclass(frozen=True)
class Stored:
    """One stored array: its key, shape, type, and its contents in pieces."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    pieces: Iterator[np.ndarray]


def size_of(path: str | Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    path = Path(path)
    files = [item for item in path.rglob("*") if item.is_file()] if path.is_dir() else [path]
    return sum(item.stat().st_size for item in files if item.is_file())


def describe_file(path: str | Path, progress: Progress | None = None) -> list[KeyFacts]:
    """Describe every key of an HDF5 or npz file, or of all such files of a folder.

    Args:
        path: File or folder.
        progress: Called with the bytes read, which exceed the file size for compressed files.

    Raises:
        DatasetError: If a file is truncated or damaged, or there is none that can be described.
    """
    found: dict[str, KeyFacts] = {}
    seen = 0
    for stored in _arrays(Path(path)):
        name = _NUMBERED.sub(r"\1_*", stored.key)
        facts = found.setdefault(name, KeyFacts(name, stored.dtype))
        facts.arrays += 1
        facts.rows += stored.shape[0] if stored.shape else 1
        if stored.shape[1:] not in facts.shapes:
            facts.shapes.append(stored.shape[1:])
        for piece in stored.pieces:
            facts.see(piece)
            seen += piece.nbytes
            if progress is not None:
                progress(seen)
    if not found:
        raise DatasetError(
            f"{path}: expected HDF5, npz, Parquet or Arrow files with data in them; found none."
        )
    return list(found.values())


def _arrays(path: Path) -> Iterator[Stored]:
    """Yield the arrays of a file, or of the files below a folder."""
    if path.is_dir():
        for item in sorted(path.rglob("*")):
            if item.suffix in (".hdf5", ".h5", ".npz", ".parquet", ".arrow"):
                yield from _arrays(item)
        return
    if path.suffix in (".parquet", ".arrow"):
        yield from _columns(path)
        return
    if peek_npz(path) is not None:
        for key, shape, dtype, parts in walk_npz(path, _PIECE):
            yield Stored(key, shape, str(dtype), parts)
        return
    with peek_hdf5(path) as file:
        is_hdf5 = file is not None
    if not is_hdf5:
        with read_hdf5(path):  # raises the specific error
            return
    yield from _datasets(path)


def _datasets(path: Path) -> Iterator[Stored]:
    with read_hdf5(path) as file:
        items: list[h5py.Dataset] = []
        file.visititems(lambda _, item: items.append(item) if isinstance(item, h5py.Dataset) else None)
        for item in items:
            shape = item.shape or ()
            yield Stored(item.name.lstrip("/"), shape, str(item.dtype), _pieces(item))


def _pieces(item: h5py.Dataset) -> Iterator[np.ndarray]:
    """Yield an HDF5 dataset in rows that make up about one piece."""
    if item.shape is None or item.dtype.kind not in "biuf":
        return
    if item.shape == ():
        yield np.asarray(item[()])
        return
    row = max(int(np.prod(item.shape[1:])) * item.dtype.itemsize, 1)
    step = max(_PIECE // row, 1)
    for first in range(0, item.shape[0], step):
        yield item[first : first + step]


def _columns(path: Path) -> Iterator[Stored]:
    from envs.datasets.files.minari import column_of
    from policies.extras import require

    tables = require("pyarrow.dataset", extra="lerobot")
    form = path.suffix.removeprefix(".")
    try:
        table = tables.dataset(str(path), format=form).to_table()
        columns = {name: column_of(table[name].combine_chunks()) for name in table.column_names}
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise DatasetError(
            f"{path}: expected a readable {form} file; reading failed with '{error}'. The file is truncated "
            f"or damaged: copy or download it again."
        ) from error
    for name, column in columns.items():
        for key, values in _flat(name, column):
            known = values if values.dtype.kind in "biuf" else np.zeros(0)
            folder = "*" if path.parent.name.isdecimal() else path.parent.name
            yield Stored(f"{folder}/{key}", values.shape, str(values.dtype), iter([known]))


def _flat(name: str, column: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(column, dict):
        for key, inner in column.items():
            yield from _flat(f"{name}/{key}", inner)
    else:
        yield name, np.asarray(column)
