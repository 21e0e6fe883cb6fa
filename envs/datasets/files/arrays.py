"""Checks that all readers make of a file's content, each with one error that names file and key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policies.errors import BurnishError, DatasetError, reason_of

Arrays = dict[str, np.ndarray]
"""Key -> array of real numbers."""


class StoredArray(NamedTuple):
    """An array of a file: its key, shape and type, and its numbers in pieces."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Iterator[np.ndarray]


@contextmanager
def readable(path: str | Path, what: str) -> Iterator[None]:
    """Turn whatever a library raises over a file's content into one `DatasetError` that names the file."""
    try:
        yield
    except BurnishError:
        raise
    except Exception as error:  # untrusted content may break any assumption
        raise DatasetError(
            f"{path}: expected a readable {what}; reading failed with '{reason_of(error)}'. It is missing, "
            f"truncated, damaged, too large or of another kind: copy or download it again."
        ) from error


def is_numeric(value: Any) -> bool:
    """Whether an array or HDF5 dataset holds real numbers."""
    return getattr(getattr(value, "dtype", None), "kind", "") in ("b", "i", "u", "f")


def check_keys(
    source: str | Path, required: Collection[str], found: Collection[str], what: str = "keys"
) -> None:
    """Refuse a file without the required keys."""
    if missing := [key for key in required if key not in found]:
        raise DatasetError(
            f"{source}: expected the {what} {list(required)}; missing {missing}, found {sorted(found)[:99]}."
        )


def check_rows(path: str | Path, arrays: Mapping[str, Any], first: str) -> int:
    """Return the number of rows of `first`, which every other array must have, too."""
    num = next(iter(np.shape(arrays[first])), 0)
    if num == 0:
        raise DatasetError(
            f"{path}: key '{first}' is empty, of shape {np.shape(arrays[first])}; expected at least 1 row."
        )
    for key, value in arrays.items():
        if np.shape(value)[:1] != (num,):
            raise DatasetError(
                f"{path}: key '{key}' must have {num} rows, one per step; got shape {np.shape(value)}."
            )
    return num


def column(values: np.ndarray) -> np.ndarray:
    """Return one number per row, stored as (N,) or (N, 1), as (N,); other shapes stay as they are."""
    return values[:, 0] if values.shape[1:] == (1,) else values


def check_flags(path: str | Path, key: str, flags: np.ndarray) -> np.ndarray:
    """Return flags (N,) or (N, 1), all 0 or 1, as bool (N,)."""
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
