"""Where the arrays of a dataset are: in memory while they fit there, else in files that are mapped into it.

A mapped array reads and computes as any other: the system fetches the rows that somebody looks at, and lets
go of them when memory is short. What would make a second array of the size of the first is done in pieces.

Files of arrays have no name (`tempfile.TemporaryFile`): their space is free again as soon as nobody holds the
array any more, also after a program was killed.

Legend: N rows, M of them asked for.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from envs.datasets import free_memory
from policies.errors import DatasetError

PIECE = 2**26
"""Bytes that are worked on in one go."""
_GIBI = 2**30

_log = logging.getLogger(__name__)


class ArrayStorage:
    """Memory; room on a disk derives from it."""

    on_disk = False

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return an array whose content is undefined.

        Raises:
            DatasetError: If there is no room for it.
        """
        return np.empty(shape, dtype)

    def converted(self, values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        """Return an array as another type; the same array where it has that type already."""
        if values.dtype == np.dtype(dtype):
            return values
        out = self.empty(values.shape, dtype)
        with np.errstate(over="ignore"):  # infinity, which no dataset may hold, is refused with its place
            for part in pieces(values):
                out[part] = values[part]
        return out

    def taken(self, values: np.ndarray, rows: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
        """Return rows (M,) of an array (N, ...), as another type if one is named."""
        out = self.empty((len(rows), *values.shape[1:]), values.dtype if dtype is None else dtype)
        with np.errstate(over="ignore"):  # see `converted`
            for part in pieces(out):
                out[part] = values[rows[part]]
        return out

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return rows (M,) of a tensor (N, ...)."""
        return values[rows]


class Disk(ArrayStorage):
    """Files without a name in a folder."""

    on_disk = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return a mapped array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size == 0:
            return np.empty(shape, dtype)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # A page without a block behind it would end the process when it is written; this is an error.
                os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, dtype, "r+", shape=shape)
        except OSError as error:
            raise DatasetError(
                f"{self.folder}: no room for {size / _GIBI:.2f} GiB of a dataset that does not fit into "
                f"memory ({error.strerror or error}). Name a folder on another disk, reader.cache=<folder>."
            ) from error

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return rows (M,) of a tensor (N, ...), mapped."""
        return torch.from_numpy(self.taken(values.numpy(), rows.numpy()))


MEMORY = ArrayStorage()
"""Where everything is that fits."""


def choose_storage(
    needed: int, source: str | Path, *, cache: str | Path | None = None, advice: str = ""
) -> ArrayStorage:
    """Return where the arrays of a file have room: in memory, else on a disk.

    Args:
        needed: Bytes that reading takes.
        source: Names the file in messages.
        cache: Folder on the disk; None: that of temporary files (see `spill_folder`).
        advice: How less of it can be read.

    Raises:
        DatasetError: If it fits on neither; names what is needed and what is free.
    """
    if free_memory.fits(needed):
        free_memory.log_use(needed, source)
        return MEMORY
    folder = spill_folder(cache)
    free = free_disk(folder)
    free_gib = (free_memory.free_memory() or 0) / _GIBI
    have = f"{free_gib:.2f} GiB of memory are free, of which {free_memory.SHARE:.0%}"
    if needed > free:
        raise DatasetError(
            f"{source}: reading it takes {needed / _GIBI:.2f} GiB; {have} may be taken, and {folder} has "
            f"{free / _GIBI:.2f} GiB. {f'{advice} ' if advice else ''}Name a folder on a larger disk, "
            f"reader.cache=<folder>, or use a machine with more memory."
        )
    _log.info(
        "%s: reading takes %.2f GiB; %s may be taken, so that its arrays are kept in files in %s.",
        source,
        needed / _GIBI,
        have,
        folder,
    )
    return Disk(folder)


def spill_folder(cache: str | Path | None) -> Path:
    """Return the folder for what does not fit into memory, which is made if it is missing.

    It is the one that is named, else $TMPDIR, else /var/tmp, because /tmp may itself be memory.

    Raises:
        DatasetError: If it cannot be made.
    """
    known = cache or os.environ.get("TMPDIR")
    default = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    folder = Path(known or default).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"{folder}: expected a folder to write to; {error.strerror or error}.") from error
    return folder


def free_disk(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder."""
    return shutil.disk_usage(folder).free


def pieces(values: np.ndarray | Tensor, at_once: int | None = None) -> Iterator[slice]:
    """Yield ranges of rows that together are all rows of an array, each of some bytes; None: `PIECE`."""
    size = values.nbytes // max(len(values), 1)
    step = max((at_once or PIECE) // max(size, 1), 1)
    for first in range(0, len(values), step):
        yield slice(first, min(first + step, len(values)))


class Column:
    """Rows of one key that come one after another; the array grows as they do.

    Args:
        storage: Where it is.
        expected: Rows that will come, as far as one knows.
    """

    def __init__(self, storage: ArrayStorage, expected: int = 0) -> None:
        self._storage, self._expected = storage, expected
        self._values: np.ndarray | None = None
        self._count = 0

    def add(self, rows: np.ndarray) -> None:
        """Append rows (n, ...), all shaped alike; types are promoted as `np.concatenate` does."""
        end = self._count + len(rows)
        if self._values is None:
            self._values = self._storage.empty((max(self._expected, end), *rows.shape[1:]), rows.dtype)
        dtype = np.result_type(self._values.dtype, rows.dtype)
        if end > len(self._values) or dtype != self._values.dtype:
            self._values = self._enlarged(self._values, end, dtype)
        self._values[self._count : end] = rows
        self._count = end

    def _enlarged(self, values: np.ndarray, end: int, dtype: np.dtype) -> np.ndarray:
        num = len(values) if end <= len(values) else max(2 * len(values), end)
        out = self._storage.empty((num, *values.shape[1:]), dtype)
        for part in pieces(values[: self._count]):
            out[part] = values[part]
        return out

    def joined(self) -> np.ndarray:
        """Return all rows (N, ...)."""
        assert self._values is not None
        return self._values[: self._count]


class Frames:
    """Frames of episodes by key, collected episode by episode; a key that one of them lacks is dropped."""

    def __init__(self, storage: ArrayStorage, expected: int = 0) -> None:
        self.storage, self._expected = storage, expected
        self._columns: dict[str, Column] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of a row of every key that all episodes so far have."""

    def add(self, rows: Mapping[str, np.ndarray]) -> None:
        """Append an episode: arrays (n, ...) by key."""
        if self._columns is None:
            self._columns = {key: Column(self.storage, self._expected) for key in rows}
        self._columns = {key: column for key, column in self._columns.items() if key in rows}
        self.shapes = {key: np.shape(rows[key])[1:] for key in self._columns}
        for key, column in self._columns.items():
            column.add(rows[key])

    def joined(self) -> dict[str, np.ndarray]:
        """Return all frames (N, ...) by key."""
        return {key: column.joined() for key, column in (self._columns or {}).items()}
