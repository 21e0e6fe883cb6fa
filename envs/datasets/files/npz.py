"""Reading npz archives: every way of being unreadable is one clear error, and nothing is unpickled."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from envs.datasets.array_storage import ArrayStorage, choose_storage, pieces
from policies.errors import BurnishError, DatasetError

Arrays = dict[str, np.ndarray]
"""Key -> array of real numbers."""

_COPIES = 2  # of what is stored: as it is, and converted or sorted
_UNREADABLE = (
    *(OSError, ValueError, EOFError, LookupError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(MemoryError, RuntimeError),
)
"""What numpy and zipfile raise over damaged archives and over arrays of Python objects."""


@contextmanager
def _open(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    with _readable(path), np.load(path, allow_pickle=False) as archive:
        yield archive


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except BurnishError:
        raise
    except _UNREADABLE as error:
        raise DatasetError(
            f"{path}: expected a readable npz archive; reading failed with '{error}'. The file is truncated, "
            f"damaged, or holds Python objects, which are never loaded: copy or download it again."
        ) from error


def peek_npz(path: str | Path) -> tuple[str, ...] | None:
    """Return the keys of an archive; None where it is no zip archive at all.

    Raises:
        DatasetError: If it begins like one, but is truncated or damaged.
    """
    path = Path(path)
    if not path.is_file() or not _begins_like_a_zip(path):
        return None
    with _open(path) as archive:
        return tuple(archive.files)


def _begins_like_a_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


class Member(NamedTuple):
    """An array of an archive; its numbers come in pieces, flat and in the order of the file."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Iterator[np.ndarray]


def walk_npz(path: str | Path, at_once: int) -> Iterator[Member]:
    """Yield the arrays of an archive, to be looked at one after another; only numbers are read.

    Args:
        path: The archive.
        at_once: Bytes of a piece.

    Raises:
        DatasetError: If it is damaged.
    """
    path = Path(path)
    with _open(path) as archive:
        assert archive.zip is not None
        for key in archive.files:
            with archive.zip.open(_name_of(archive, key)) as member:
                shape, _, dtype = _header(member) or ((), False, np.dtype(object))
                yield Member(key, shape, dtype, _flat(member, shape, dtype, at_once, path, key))


def _flat(
    member: IO[bytes], shape: tuple[int, ...], dtype: np.dtype, at_once: int, path: Path, key: str
) -> Iterator[np.ndarray]:
    """Yield numbers (n,); nothing where there are none."""
    left = math.prod(shape) if dtype.kind in "biuf" else 0
    step = max(at_once // max(dtype.itemsize, 1), 1)
    for first in range(0, left, step):
        size = dtype.itemsize * min(step, left - first)
        with _readable(path):
            values = np.frombuffer(_whole(member, size, key), dtype)
        yield values


def read_npz(path: str | Path, required: Collection[str], optional: Collection[str] = ()) -> Arrays:
    """Read arrays of real numbers by name, in the machine's byte order; see `read_npz_into`."""
    return read_npz_into(path, required, optional)[0]


def read_npz_into(
    path: str | Path,
    required: Collection[str],
    optional: Collection[str] = (),
    *,
    cache: str | Path | None = None,
) -> tuple[Arrays, ArrayStorage]:
    """Read arrays of real numbers by name, and say where there was room for them.

    Args:
        path: The archive.
        required: Keys that must be there.
        optional: Keys that are read if they are there.
        cache: Folder for what does not fit into memory; None: that of temporary files.

    Raises:
        DatasetError: If the file is missing or damaged, there is no room for it, a required key is missing,
            or an array holds something else than real numbers; names file and key.
    """
    path = Path(path)
    if not path.is_file():
        raise DatasetError(f"{path}: expected an npz archive; there is no such file. Check the path.")
    with _open(path) as archive:
        missing = [key for key in required if key not in archive.files]
        if missing:
            raise DatasetError(
                f"{path}: expected the keys {sorted(required)}; missing {missing}, found "
                f"{sorted(archive.files)}."
            )
        wanted = [*required, *(key for key in optional if key in archive.files)]
        storage = choose_storage(_COPIES * _unpacked(archive, wanted), path, cache=cache)
        found = (
            (key, _spilled(archive, key, storage) if storage.on_disk else archive[key]) for key in wanted
        )
        return {key: _numbers(value, path, key) for key, value in found}, storage


def _spilled(archive: np.lib.npyio.NpzFile, key: str, storage: ArrayStorage) -> np.ndarray:
    """Copy a member out piece by piece; what is laid out or typed unusually is read whole."""
    assert archive.zip is not None
    with archive.zip.open(_name_of(archive, key)) as member:
        header = _header(member)
        if header is None:
            return archive[key]
        shape, by_columns, dtype = header
        if by_columns or not shape or dtype.kind not in "biuf":
            return archive[key]
        out = storage.empty(shape, dtype)
        for part in pieces(out):
            size = out[part].nbytes
            out[part] = np.frombuffer(_whole(member, size, key), dtype).reshape(out[part].shape)
    return out


def _name_of(archive: np.lib.npyio.NpzFile, key: str) -> str:
    """Return what the file of an array is called in its archive."""
    assert archive.zip is not None
    return f"{key}.npy" if f"{key}.npy" in archive.zip.namelist() else key


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype] | None:
    """Read shape, whether columns come first, and type; None for arrays of unusual types."""
    version = np.lib.format.read_magic(member)
    known = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    return known[version](member) if version in known else None


def _whole(member: IO[bytes], size: int, key: str) -> bytes:
    found = member.read(size)
    if len(found) < size:
        raise ValueError(f"{key} ends {size - len(found)} bytes too early")
    return found


def _unpacked(archive: np.lib.npyio.NpzFile, keys: Collection[str]) -> int:
    """Return the bytes of some arrays after unpacking, as the archive's directory has them."""
    files = {f"{key}.npy" for key in keys} | set(keys)
    members: list[zipfile.ZipInfo] = archive.zip.infolist() if archive.zip is not None else []
    return sum(member.file_size for member in members if member.filename in files)


def _numbers(value: np.ndarray, path: Path, key: str) -> np.ndarray:
    if value.dtype.kind not in "biuf":
        raise DatasetError(f"{path}: key '{key}' must hold real numbers; got type {value.dtype}.")
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def check_rows(path: str | Path, arrays: Arrays, first: str) -> int:
    """Return the number of rows of `first`, which every other array must have, too.

    Raises:
        DatasetError: If there is none, or another array has more or fewer; names file and key.
    """
    num = len(arrays[first]) if arrays[first].ndim else 0
    if num == 0:
        raise DatasetError(
            f"{path}: key '{first}' must have at least one row; got shape {arrays[first].shape}."
        )
    for key, value in arrays.items():
        if value.shape[:1] != (num,):
            raise DatasetError(f"{path}: key '{key}' must have {num} rows, one per step; got {value.shape}.")
    return num


def column(values: np.ndarray) -> np.ndarray:
    """Return one number per row, stored as (N,) or (N, 1), as (N,); other shapes stay as they are."""
    return values[:, 0] if values.shape[1:] == (1,) else values


def check_flags(path: str | Path, key: str, flags: np.ndarray) -> np.ndarray:
    """Return flags (N,) as bool; a column (N, 1) becomes a row.

    Raises:
        DatasetError: If a flag is neither 0 nor 1, or there are several per step; names file and key.
    """
    flat = column(flags)
    if flat.ndim != 1:
        raise DatasetError(f"{path}: key '{key}' must have shape ({len(flags)},); got {flags.shape}.")
    bad = np.flatnonzero(~np.isin(flat, (0, 1)))
    if len(bad):
        raise DatasetError(
            f"{path}: key '{key}' must be 0 or 1 in every row; got {flat[bad[0]]} in row {bad[0]} "
            f"({len(bad)} such rows). Repair the flags, or remove the affected episodes."
        )
    return flat.astype(bool)
