"""Opening HDF5 files so that every way of being unreadable ends in one clear error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

from policies.errors import DatasetError


@contextmanager
def read_hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Open a file for reading; what goes wrong while reading becomes a `DatasetError` naming the file.

    Raises:
        DatasetError: If the file is missing, is not HDF5, or is truncated or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise DatasetError(f"{path}: expected an HDF5 file; there is no such file. Check the path.")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except DatasetError:
        raise
    except (OSError, RuntimeError, KeyError) as error:
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
