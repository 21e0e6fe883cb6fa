"""Arrays under plain names: npz archives and HDF5 files of no other format.

    observations (N, Do)   actions (N, Da)   and any of the keys of `envs.datasets.convert`

Rewards are 0 where there are none. `observations/<name>` or `observations.<name>` are parts of the state, and
uint8 arrays (N, H, W, 3) among them are camera images. Other names are not read, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import choose_storage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.convert import HINT, as_dataset, names_to_read
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.hdf5 import datasets_of, peek_hdf5, read_hdf5, read_numbers
from envs.datasets.files.npz import peek_npz, read_npz_into
from envs.datasets.formats import d4rl, dppo, ogbench
from policies.errors import DatasetError


def matches(path: str | Path) -> bool:
    """Whether a file holds observations and actions, and is of no other format."""
    keys = peek_npz(path)
    if keys is None:
        with peek_hdf5(path) as file:
            keys = None if file is None or "data" in file else tuple(file)
    if keys is None or not {"observations", "actions"} <= set(map(_top, keys)):
        return False
    return not any(other.matches(path) for other in (d4rl, dppo, ogbench))


def read(path: str | Path, *, cache: str | Path | None = None) -> EpisodeDataset:
    """Read arrays under plain names, `observations` and `actions`, from npz or HDF5.

    Args:
        path: The file.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If arrays disagree, or only `dones` or `done` marks ends of episodes; names file, key
            and shapes.
    """
    keys = peek_npz(path)
    if keys is not None:
        wanted, unread = _chosen(keys, path)
        arrays, storage = read_npz_into(path, wanted, cache=cache)
    else:
        with read_hdf5(path) as file:
            stored = datasets_of(file)
            wanted, unread = _chosen(stored, path)
            items = {key: stored[key] for key in wanted}
            storage = choose_storage(2 * sum(one.nbytes for one in items.values()), path, cache=cache)
            arrays = {key: read_numbers(one, str(path), key, storage) for key, one in items.items()}
    data = as_dataset(_nested(arrays, path), source=str(path), storage=storage)
    data.meta["format"] = "arrays"
    data.meta["not_read"] = log_skipped_fields(path, unread, hint=HINT)
    return data


def _chosen(keys: Iterable[str], path: str | Path) -> tuple[list[str], dict[str, str]]:
    """Return the keys to read, and every other key with the reason why it is not read."""
    tops = {key: _top(key) for key in keys}
    used, unread = names_to_read(tuple(dict.fromkeys(tops.values())), str(path))
    wanted = [key for key, top in tops.items() if top in used.values()]
    return wanted, {key: unread[top] for key, top in tops.items() if top in unread}


def _top(key: str) -> str:
    return key.replace(".", "/").split("/")[0]


def _nested(arrays: Mapping[str, np.ndarray], path: str | Path) -> dict[str, Any]:
    """Return `observations/<name>` and `images/<name>` as dicts by name."""
    found: dict[str, Any] = {}
    for key, value in arrays.items():
        top, _, name = key.replace(".", "/").partition("/")
        if top in found and (not name or not isinstance(found[top], dict)):
            raise DatasetError(f"{path}: expected the key '{top}', or arrays '{top}/<name>'; both are there.")
        if name:
            found.setdefault(top, {})[name] = value
        else:
            found[top] = value
    return found
