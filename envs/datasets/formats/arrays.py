"""Arrays under plain names: npz archives, and HDF5 files without D4RL's rewards or terminals.

    observations (N, Do)   actions (N, Da)   and any of the keys of `envs.datasets.convert`

Rewards are 0 where there are none. `observations/<name>` or `observations.<name>` are parts of the state, and
uint8 arrays (N, H, W, 3) among them are camera images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import choose_storage
from envs.datasets.convert import KEYS, as_dataset
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.hdf5 import datasets_of, peek_hdf5, read_hdf5, read_numbers
from envs.datasets.files.npz import peek_npz, read_npz_into

_NAMES = tuple(name for names in KEYS.values() for name in names)


def matches(path: str | Path) -> bool:
    """Whether a file holds observations and actions, and is of no other format."""
    keys = peek_npz(path)
    if keys is None:
        with peek_hdf5(path) as file:
            keys = None if file is None or "data" in file else tuple(file)
        is_other = keys is not None and {"rewards", "terminals"} <= set(keys)
    else:
        is_other = "terminals" in keys or "traj_lengths" in keys
    return keys is not None and not is_other and {"observations", "actions"} <= set(map(_top, keys))


def read(path: str | Path, *, cache: str | Path | None = None) -> EpisodeDataset:
    """Read arrays under plain names, `observations` and `actions`, from npz or HDF5.

    Args:
        path: The file.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If arrays disagree; names file, key and shapes.
    """
    keys = peek_npz(path)
    if keys is not None:
        wanted = [key for key in keys if _top(key) in (*_NAMES, "goal")]
        arrays, storage = read_npz_into(path, wanted, cache=cache)
    else:
        with read_hdf5(path) as file:
            items = {key: one for key, one in datasets_of(file).items() if _top(key) in (*_NAMES, "goal")}
            storage = choose_storage(2 * sum(one.nbytes for one in items.values()), path, cache=cache)
            arrays = {key: read_numbers(one, str(path), key, storage) for key, one in items.items()}
    data = as_dataset(_nested(arrays), source=str(path), storage=storage)
    data.meta["format"] = "arrays"
    return data


def _top(key: str) -> str:
    return key.replace(".", "/").split("/")[0]


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return `observations/<name>` and `images/<name>` as dicts by name."""
    found: dict[str, Any] = {}
    for key, value in arrays.items():
        top, _, name = key.replace(".", "/").partition("/")
        if name:
            found.setdefault(top, {})[name] = value
        else:
            found[top] = value
    return found
