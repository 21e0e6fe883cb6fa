"""Read npz archives; nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from envs.datasets.array_storage import ArrayStorage, choose_storage, pieces
from envs.datasets.files.arrays import Arrays, StoredArray, check_keys, is_numeric, readable
from policies.errors import DatasetError

_COPIES = 2  # arrays as stored, and converted or sorted
_KIND = "npz archive without Python objects, which are never loaded"


@contextmanager
def _open(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    with readable(path, _KIND), np.load(path, allow_pickle=False) as archive:
        yield archive


def peek_npz(path: str | Path) -> tuple[str, ...] | None:
    """Return the keys of an archive; None if the file is no zip archive."""
    path = Path(path)
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        if file.read(4) not in (b"PK\x03\x04", b"PK\x05\x06"):
            return None
    with _open(path) as archive:
        return tuple(archive.files)


def walk_npz(path: str | Path, at_once: int) -> Iterator[StoredArray]:
    """Yield the arrays of an archive with flat pieces of `at_once` bytes; only numbers are read."""
    path = Path(path)
    with _open(path) as archive:
        for key in archive.files:
            with _member(archive, key) as member:
                shape, _, dtype = _header(member) or ((), False, np.dtype(object))
                yield StoredArray(key, shape, dtype, _flat(member, shape, dtype, at_once, path, key))


def _flat(
    member: IO[bytes], shape: tuple[int, ...], dtype: np.dtype, at_once: int, path: Path, key: str
) -> Iterator[np.ndarray]:
    left = math.prod(shape) if dtype.kind in "biuf" else 0
    step = max(at_once // max(dtype.itemsize, 1), 1)
    for first in range(0, left, step):
        with readable(path, _KIND):
            values = np.frombuffer(_exactly(member, dtype.itemsize * min(step, left - first), key), dtype)
        yield values


def read_npz(path: str | Path, required: Collection[str]) -> Arrays:
    """Read arrays of real numbers by name, in the machine's byte order; see `read_npz_into`."""
    return read_npz_into(path, required)[0]


def read_npz_into(
    path: str | Path,
    required: Collection[str],
    optional: Collection[str] = (),
    *,
    cache: str | Path | None = None,
) -> tuple[Arrays, ArrayStorage]:
    """Read arrays of real numbers by name; also return their storage.

    Args:
        path: The archive.
        required: Keys that must exist.
        optional: Keys that are read if they exist.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.
    """
    path = Path(path)
    with _open(path) as archive:
        check_keys(path, required, archive.files)
        wanted = [*required, *(key for key in optional if key in archive.files)]
        storage = choose_storage(_COPIES * _unpacked(archive, wanted), path, cache=cache)
        read = _copied if storage.on_disk else lambda archive, key, _: archive[key]
        return {key: _numbers(read(archive, key, storage), path, key) for key in wanted}, storage


def _copied(archive: np.lib.npyio.NpzFile, key: str, storage: ArrayStorage) -> np.ndarray:
    """Copy a member in pieces; members of unusual layout or type are read whole."""
    with _member(archive, key) as member:
        shape, by_columns, dtype = _header(member) or ((), False, np.dtype(object))
        if by_columns or not shape or dtype.kind not in "biuf":
            return archive[key]
        out = storage.empty(shape, dtype)
        for part in pieces(out):
            content = _exactly(member, out[part].nbytes, key)
            out[part] = np.frombuffer(content, dtype).reshape(out[part].shape)
    return out


def _member(archive: np.lib.npyio.NpzFile, key: str) -> IO[bytes]:
    assert archive.zip is not None
    return archive.zip.open(f"{key}.npy" if f"{key}.npy" in archive.zip.namelist() else key)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype] | None:
    """Read shape, whether columns come first, and type; None for unknown versions of the format."""
    version = np.lib.format.read_magic(member)
    known = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    return known[version](member) if version in known else None


def _exactly(member: IO[bytes], size: int, key: str) -> bytes:
    found = member.read(size)
    if len(found) < size:
        raise ValueError(f"{key} ends {size - len(found)} bytes too early")
    return found


def _unpacked(archive: np.lib.npyio.NpzFile, keys: Collection[str]) -> int:
    """Return the unpacked bytes of arrays, as declared by the archive's directory."""
    files = {f"{key}.npy" for key in keys} | set(keys)
    members: list[zipfile.ZipInfo] = archive.zip.infolist() if archive.zip is not None else []
    return sum(member.file_size for member in members if member.filename in files)


def _numbers(value: np.ndarray, path: Path, key: str) -> np.ndarray:
    if not is_numeric(value):
        raise DatasetError(f"{path}: key '{key}' must hold real numbers; got type {value.dtype}.")
    return value.astype(value.dtype.newbyteorder("="), copy=False)
