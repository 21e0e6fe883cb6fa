"""Read and write HDF5 files with one error class for unreadable files.

A file can refer to other files by links, external storage or virtual datasets, and thereby select files of
this machine to read. Such files are refused on opening.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import MEMORY, ArrayStorage, pieces
from envs.datasets.free_memory import require_memory
from policies.errors import BurnishError, DatasetError
from policies.storage.atomic_write import atomic_file

_UNREADABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, MemoryError)
"""What h5py and numpy raise over damaged files and over objects of a kind that was not expected."""
_LARGE = 2**26  # arrays of at least this many bytes are checked against free memory
_SMALL = 2**12  # arrays up to this many bytes are not checked for storage


@contextmanager
def read_hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Open a file for reading; read errors become a `DatasetError` that names the file.

    Raises:
        DatasetError: If the file is missing, is not HDF5, is truncated or damaged, refers to other files, or
            has unexpected content.
    """
    path = Path(path)
    if not path.is_file():
        raise DatasetError(f"{path}: expected an HDF5 file; there is no such file. Check the path.")
    try:
        facts = path.stat()
        _check_content(path.absolute(), (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        with h5py.File(path, "r") as file:
            yield file
    except BurnishError:
        raise
    except _UNREADABLE as error:
        raise DatasetError(
            f"{path}: expected a readable HDF5 file; reading failed with '{error}'. The file is truncated, "
            f"damaged, or of another kind: copy or download it again."
        ) from error


@lru_cache(maxsize=256)
def _check_content(path: Path, stamp: tuple[int, ...]) -> None:
    """Refuse files that refer to others, hold a group twice, or declare data they do not store.

    Args:
        path: The file.
        stamp: Version of the file; the result is cached per version.

    Raises:
        DatasetError: Names the key.
    """
    with h5py.File(path, "r") as file:
        links: list[tuple[str, int, int]] = []  # name, kind, and where in the file it leads
        file.id.links.visit(lambda name, info: links.append((_text(name), info.type, info.u)), info=True)
        groups, unstored = {h5py.h5o.get_info(file.id).addr}, 0
        for name, kind, _ in links:
            if kind not in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT):
                raise _not_here(path, name, "a link to another file")
        for name, kind, place in links:
            if kind == h5py.h5l.TYPE_SOFT:
                if file.get(name, getclass=True) is h5py.Group:
                    raise _not_here(path, name, "another name of a group")
                continue
            item = h5py.h5o.open(file.id, name.encode(errors="surrogateescape"))
            if isinstance(item, h5py.h5g.GroupID):
                if place in groups:
                    raise _not_here(path, name, "another name of a group")
                groups.add(place)
            elif isinstance(item, h5py.h5d.DatasetID):
                unstored += _unstored_bytes(item, path, name)
                if unstored > _LARGE:
                    raise _not_here(path, name, f"{unstored / 2**20:.0f} MiB or more that are only declared")


def _unstored_bytes(item: Any, path: Path, name: str) -> int:
    """Return the bytes of a dataset by its shape beyond those stored in the file.

    Raises:
        DatasetError: If they are in other files.
    """
    layout = item.get_create_plist()
    if layout.get_layout() == h5py.h5d.VIRTUAL:
        raise _not_here(path, name, "a virtual dataset")
    if layout.get_external_count():
        raise _not_here(path, name, "external storage")
    shape = item.shape or ()
    declared = math.prod(max(size, 1) for size in shape) * int(item.get_type().get_size())
    if declared <= _SMALL:
        return 0
    if layout.get_layout() != h5py.h5d.CHUNKED:
        return max(declared - int(item.get_storage_size()), 0)
    chunk = layout.get_chunk()
    num = math.prod(max(-(-size // step), 1) for size, step in zip(shape, chunk, strict=True))
    return declared * max(num - item.get_num_chunks(), 0) // num


def _not_here(path: Path, name: str, found: str) -> DatasetError:
    return DatasetError(
        f"{path}: key '{name}' must be stored in this file, once; got {found}, which is not read. Write the "
        f"data into the file itself (h5repack, or read and write it)."
    )


def _text(name: bytes | str) -> str:
    return name.decode(errors="surrogateescape") if isinstance(name, bytes) else name


@contextmanager
def peek_hdf5(path: str | Path) -> Iterator[h5py.File | None]:
    """Open a file for inspection; None if it is no HDF5 file.

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
        source: File and position, for messages.
        key: Name of the dataset there.
        storage: Storage of the array; on disk for numbers only.

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
    """Write a file atomically: flushed under another name, then renamed.

    Raises:
        WriteError: If the disk is full.
    """
    with atomic_file(Path(path)) as content, h5py.File(content, "w") as file:
        yield file
