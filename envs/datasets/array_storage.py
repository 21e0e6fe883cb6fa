"""Storage of dataset arrays: in memory if they fit, else in memory-mapped files.

Mapped arrays support the same operations, in pieces. Their files (`tempfile.TemporaryFile`) have no name:
their space is freed with the last reference, also after a killed program.

Legend: N rows, M requested rows.
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
"""Bytes per piece."""
_GIBI = 2**30

_log = logging.getLogger(__name__)


class ArrayStorage:
    """Storage in memory; base class of storage on disk."""

    on_disk = False

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype)

    def converted(self, values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        """Return an array as another dtype; the same object if unchanged."""
        if values.dtype == np.dtype(dtype):
            return values
        out = self.empty(values.shape, dtype)
        with np.errstate(over="ignore"):  # infinity is refused later, with its position
            for part in pieces(values):
                out[part] = values[part]
        return out

    def take_array(self, values: np.ndarray, rows: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
        """Return rows (M,) of an array (N, ...), optionally as another dtype."""
        out = self.empty((len(rows), *values.shape[1:]), values.dtype if dtype is None else dtype)
        with np.errstate(over="ignore"):  # see `converted`
            for part in pieces(out):
                out[part] = values[rows[part]]
        return out

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return rows (M,) of a tensor (N, ...)."""
        return values[rows]


class Disk(ArrayStorage):
    """Storage in unnamed files of a folder."""

    on_disk = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size == 0:
            return np.empty(shape, dtype)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # Writing a page without a disk block would kill the process; this raises an error instead.
                os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, dtype, "r+", shape=shape)
        except OSError as error:
            raise DatasetError(
                f"{self.folder}: no space for {size / _GIBI:.2f} GiB ({error.strerror or error}). Name a "
                f"folder on another disk, reader.cache=<folder>."
            ) from error

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        return torch.from_numpy(self.take_array(values.numpy(), rows.numpy()))


MEMORY = ArrayStorage()


def choose_storage(
    needed: int, source: str | Path, *, cache: str | Path | None = None, advice: str = ""
) -> ArrayStorage:
    """Return storage for `needed` bytes: memory, else the folder `cache`; `advice` completes the error."""
    if free_memory.fits(needed):
        free_memory.log_use(needed, source)
        return MEMORY
    folder = spill_folder(cache)
    free = free_disk(folder)
    free_gib = (free_memory.free_memory() or 0) / _GIBI
    have = f"{free_gib:.2f} GiB of memory are free, of which {free_memory.SHARE:.0%} may be taken"
    takes = f"{source}: reading takes {needed / _GIBI:.2f} GiB; {have}"
    if needed > free:
        raise DatasetError(
            f"{takes}, and {folder} has {free / _GIBI:.2f} GiB. {advice} Name a folder on a larger disk, "
            f"reader.cache=<folder>, or use a machine with more memory."
        )
    _log.info("%s, so that its arrays are kept in files in %s.", takes, folder)
    return Disk(folder)


def spill_folder(cache: str | Path | None) -> Path:
    """Return the folder for arrays on disk: given, $TMPDIR, or /var/tmp (/tmp may be RAM)."""
    known = cache or os.environ.get("TMPDIR")
    default = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    folder = Path(known or default).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"{folder}: expected a folder to write to; {error.strerror or error}.") from error
    return folder


def free_disk(folder: Path) -> int:
    """Return the free bytes on the disk of a folder."""
    return shutil.disk_usage(folder).free


def pieces(values: np.ndarray | Tensor, at_once: int | None = None) -> Iterator[slice]:
    """Yield slices that cover all rows of an array, each of limited bytes; None: `PIECE`."""
    size = values.nbytes // max(len(values), 1)
    step = max((at_once or PIECE) // max(size, 1), 1)
    for first in range(0, len(values), step):
        yield slice(first, min(first + step, len(values)))


class Column:
    """Array of one key, grown by appending rows; `expected` is the estimated number of rows."""

    def __init__(self, storage: ArrayStorage, expected: int = 0) -> None:
        self._storage, self._expected = storage, expected
        self._values: np.ndarray | None = None
        self._count = 0

    def add(self, rows: np.ndarray) -> None:
        """Append rows (n, ...) of equal shape; dtypes are promoted as in `np.concatenate`."""
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
        assert self._values is not None
        return self._values[: self._count]


class Frames:
    """Frames by key, collected per episode; keys missing in an episode are dropped."""

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
        return {key: column.joined() for key, column in (self._columns or {}).items()}
