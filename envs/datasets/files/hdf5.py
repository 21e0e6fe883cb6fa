"""Reading and writing HDF5 files so that every way of being unreadable ends in one clear error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import MEMORY, ArrayStorage, pieces
from envs.datasets.free_memory import require_memory
from policies.errors import BurnishError, DatasetError

_UNREADABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)
"""What h5py and numpy raise over damaged files and over objects of a kind that was not expected."""
_LARGE = 2**26  # bytes of an array from which on it is asked whether it fits


@contextmanager
def read_hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Open a file for reading; what goes wrong while reading becomes a `DatasetError` naming the file.

    Raises:
        DatasetError: If the file is missing, is not HDF5, is truncated or damaged, or holds something else
            than the code inside expects.
    """
    path = Path(path)
    if not path.is_file():
        raise DatasetError(f"{path}: expected an HDF5 file; there is no such file. Check the path.")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except BurnishError:
        raise
    except _UNREADABLE as error:
        raise DatasetError(
            f"{path}: expected a readable HDF5 file; reading failed with '{error}'. The file is truncated, "
            f"damaged, or of another kind: copy or download it again."
        ) from error


@contextmanager
def peek_hdf5(path: str | Path) -> Iterator[h5py.File | None]:
    """Open a file to see what it holds; None where it is no HDF5 at all, so that others may look at it.

    Raises:
        DatasetError: If it is HDF5, but truncated or damaged.
    """
    if not (Path(path).is_file() and h5py.is_hdf5(path)):
        yield None
        return
    with read_hdf5(path) as file:
        yield file


def read_value(item: Any, source: str, key: str, storage: ArrayStorage = MEMORY) -> Any:
    """Read a whole dataset: an array in the machine's byte order, or a scalar.

    Args:
        item: The dataset.
        source: Names the file, and where in it, in error messages.
        key: Names the dataset there.
        storage: Where the array goes; numbers only on a disk.

    Raises:
        DatasetError: If there is a group in its place, there is no room for it, or reading fails.
    """
    if not isinstance(item, h5py.Dataset):
        raise DatasetError(f"{source}: key '{key}' must be a dataset; got a {type(item).__name__.lower()}.")
    spilled = storage.on_disk and bool(item.shape) and item.dtype.kind in "biuf"
    if item.nbytes > _LARGE and not spilled:
        require_memory(item.nbytes, f"{source}, key '{key}'")
    try:
        value = _copied(item, storage) if spilled else item[()]
        if isinstance(value, np.ndarray) and value.dtype.kind in "iufc":
            value = value.astype(_native(value.dtype), copy=False)
    except _UNREADABLE as error:
        raise DatasetError(
            f"{source}: key '{key}' must be readable; reading failed with '{error}'. The file is truncated "
            f"or damaged: copy or download it again."
        ) from error
    return value


def _copied(item: h5py.Dataset, storage: ArrayStorage) -> np.ndarray:
    out = storage.empty(item.shape, _native(item.dtype))
    for part in pieces(out):
        out[part] = item[part]
    return out


def read_numbers(item: Any, source: str, key: str) -> np.ndarray:
    """Read a whole dataset of real numbers; see `read_value`.

    Raises:
        DatasetError: If it is no dataset, cannot be read, or holds text, complex numbers or nothing.
    """
    value = read_value(item, source, key)
    kind = getattr(value, "dtype", None)
    if isinstance(value, h5py.Empty) or kind is None or kind.kind not in "biuf":
        got = "nothing" if isinstance(value, h5py.Empty) else f"type {kind or type(value).__name__}"
        raise DatasetError(f"{source}: key '{key}' must hold real numbers; got {got}.")
    return np.asarray(value)


def _native(dtype: np.dtype) -> np.dtype:
    """Return the type of this machine's byte order; long doubles become float64."""
    return np.dtype(np.float64) if dtype.kind == "f" and dtype.itemsize > 8 else dtype.newbyteorder("=")


@contextmanager
def write_hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Write a file under a temporary name and move it into place when everything is on disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with h5py.File(draft, "w") as file:
            yield file
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
