"""Read and write HDF5 files.

A file can refer to other files by links, external storage or virtual datasets, and thereby select files of
this machine to read. Such files are refused on opening.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import MEMORY, ArrayStorage, pieces
from envs.datasets.files.arrays import is_numeric, readable
from envs.datasets.free_memory import require_memory
from policies.errors import DatasetError
from policies.storage.atomic_write import atomic_file

_LARGE = 2**26  # arrays of at least this many bytes are checked against free memory
_SMALL = 2**12  # arrays up to this many bytes are not checked for storage


@contextmanager
def read_hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Open a file for reading; a `DatasetError` names a missing, damaged or unsafe file."""
    path = Path(path)
    if not path.is_file():
        raise DatasetError(f"{path}: expected a dataset; there is no such file. Check the path.")
    with readable(path, "HDF5 file"):
        facts = path.stat()
        _check_content(path.absolute(), (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        with h5py.File(path, "r") as file:
            yield file


@lru_cache(maxsize=256)
def _check_content(path: Path, stamp: tuple[int, ...]) -> None:
    """Refuse files that refer to others, hold a group twice, or declare data they do not store.

    The result is cached per version of the file, its `stamp`.
    """
    with h5py.File(path, "r") as file:
        links: list[tuple[str, int, int]] = []  # name, kind, and where in the file it leads
        file.id.links.visit(lambda name, info: links.append((_text(name), info.type, info.u)), info=True)
        groups, unstored = {h5py.h5o.get_info(file.id).addr}, 0
        for name, kind, _ in links:
            if kind not in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT):
                raise _not_stored(path, name, "a link to another file")
        for name, kind, place in links:
            if kind == h5py.h5l.TYPE_SOFT:
                if file.get(name, getclass=True) is h5py.Group:
                    raise _not_stored(path, name, "another name of a group")
                continue
            item = h5py.h5o.open(file.id, name.encode(errors="surrogateescape"))
            if isinstance(item, h5py.h5g.GroupID):
                if place in groups:
                    raise _not_stored(path, name, "another name of a group")
                groups.add(place)
            elif isinstance(item, h5py.h5d.DatasetID):
                unstored += _unstored_bytes(item, path, name)
                if unstored > _LARGE:
                    raise _not_stored(
                        path, name, f"{unstored / 2**20:.0f} MiB or more that are only declared"
                    )


def _unstored_bytes(item: Any, path: Path, name: str) -> int:
    """Return the bytes of a dataset by its shape beyond those stored; refuses storage in other files."""
    layout = item.get_create_plist()
    if layout.get_layout() == h5py.h5d.VIRTUAL:
        raise _not_stored(path, name, "a virtual dataset")
    if layout.get_external_count():
        raise _not_stored(path, name, "external storage")
    shape = item.shape or ()
    declared = math.prod(max(size, 1) for size in shape) * int(item.get_type().get_size())
    if declared <= _SMALL:
        return 0
    if layout.get_layout() != h5py.h5d.CHUNKED:
        return max(declared - int(item.get_storage_size()), 0)
    chunk = layout.get_chunk()
    num = math.prod(max(-(-size // step), 1) for size, step in zip(shape, chunk, strict=True))
    return declared * max(num - item.get_num_chunks(), 0) // num


def _not_stored(path: Path, name: str, found: str) -> DatasetError:
    return DatasetError(
        f"{path}: key '{name}' must be stored in this file, once; got {found}, which is not read. Write the "
        f"data into the file itself (h5repack, or read and write it)."
    )


def _text(name: bytes | str) -> str:
    return name.decode(errors="surrogateescape") if isinstance(name, bytes) else name


@contextmanager
def peek_hdf5(path: str | Path) -> Iterator[h5py.File | None]:
    """Open a file for inspection; None if it is no HDF5 file."""
    if not (Path(path).is_file() and h5py.is_hdf5(path)):
        yield None
        return
    with read_hdf5(path) as file:
        yield file


def datasets_of(file: h5py.Group) -> dict[str, h5py.Dataset]:
    """Return all datasets below a group by path."""
    found: dict[str, h5py.Dataset] = {}
    file.visititems(lambda key, item: found.update({key: item}) if isinstance(item, h5py.Dataset) else None)
    return found


def num_rows(groups: Iterable[Any], key: str) -> int:
    """Return the total rows of one key of some groups; other items count nothing."""
    items = (group.get(key) for group in groups if isinstance(group, h5py.Group))
    return sum(len(item) for item in items if isinstance(item, h5py.Dataset) and item.shape)


def json_attribute(item: Any, name: str, source: str | Path, kind: type = dict) -> Any:
    """Parse an attribute that must hold JSON of one kind."""
    text = item.attrs[name]
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise DatasetError(
            f"{source}: attribute '{name}' must be a JSON {'object' if kind is dict else 'array'}; got "
            f"{str(text)[:60]!r}. Remove or repair the attribute."
        )
    return value


def read_value(item: Any, source: str, key: str, storage: ArrayStorage = MEMORY) -> Any:
    """Read a whole dataset: an array in the machine's byte order, or a scalar.

    Args:
        item: The dataset.
        source: File and position, for messages.
        key: Name of the dataset there.
        storage: Storage of the array; on disk for numbers only.
    """
    if not isinstance(item, h5py.Dataset):
        raise DatasetError(f"{source}: key '{key}' must be a dataset; got a {type(item).__name__.lower()}.")
    spilled = storage.on_disk and bool(item.shape) and is_numeric(item)
    if item.nbytes > _LARGE and not spilled:
        require_memory(item.nbytes, f"{source}, key '{key}'")
    with readable(f"{source}: key '{key}'", "array"):
        if spilled:
            value = storage.empty(item.shape, _native(item.dtype))
            for part in pieces(value):
                value[part] = item[part]
            return value
        value = item[()]
        if isinstance(value, np.ndarray) and value.dtype.kind in "iufc":
            value = value.astype(_native(value.dtype), copy=False)
    return value


def read_numbers(item: Any, source: str, key: str, storage: ArrayStorage = MEMORY) -> np.ndarray:
    """Read a whole dataset of real numbers; see `read_value`."""
    value = read_value(item, source, key, storage)
    if isinstance(value, h5py.Empty) or not is_numeric(value):
        kind = getattr(value, "dtype", type(value).__name__)
        got = "nothing" if isinstance(value, h5py.Empty) else f"type {kind}, shape {np.shape(value)}"
        raise DatasetError(f"{source}: key '{key}' must hold 1 or more real numbers; got {got}.")
    return np.asarray(value)


def _native(dtype: np.dtype) -> np.dtype:
    """Return the type of this machine's byte order; long doubles become float64."""
    return np.dtype(np.float64) if dtype.kind == "f" and dtype.itemsize > 8 else dtype.newbyteorder("=")


@contextmanager
def write_hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Write a file atomically: flushed under another name, then renamed."""
    with atomic_file(Path(path)) as content, h5py.File(content, "w") as file:
        yield file
