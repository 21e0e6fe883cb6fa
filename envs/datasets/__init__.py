"""Datasets of episodes: readers, writers, windows and reference scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from envs.datasets.d4rl import is_d4rl, read_d4rl
from envs.datasets.episodes import Episode, EpisodeDataset, Transitions
from envs.datasets.hdf5 import read_hdf5
from envs.datasets.robomimic import is_robomimic, read_robomimic, write_robomimic
from envs.datasets.scores import normalized_score
from envs.datasets.windows import Batch, Windows
from policies.errors import DatasetError

READERS: dict[str, tuple[Callable[[h5py.File], bool], Callable[..., EpisodeDataset]]] = {
    "robomimic": (is_robomimic, read_robomimic),
    "d4rl": (is_d4rl, read_d4rl),
}


def dataset_format(path: str | Path) -> str:
    """Return the name of a file's format, told by its content.

    Raises:
        DatasetError: If the file is unreadable or of no known format.
    """
    with read_hdf5(path) as file:
        for name, (matches, _) in READERS.items():
            if matches(file):
                return name
        raise DatasetError(
            f"{path}: expected one of the formats {', '.join(READERS)} (data/demo_<i>, or observations and "
            f"actions at the top); found the keys {sorted(file)}."
        )


def read_dataset(path: str | Path, **options: Any) -> EpisodeDataset:
    """Read a dataset, whatever its format.

    Args:
        path: HDF5 file.
        **options: Passed to the format's reader: `read_robomimic` or `read_d4rl`.

    Raises:
        DatasetError: If the file does not hold a usable dataset; names file, key, and expected and found.
    """
    return READERS[dataset_format(path)][1](path, **options)


__all__ = [
    "Batch",
    "Episode",
    "EpisodeDataset",
    "Transitions",
    "Windows",
    "dataset_format",
    "normalized_score",
    "read_d4rl",
    "read_dataset",
    "read_robomimic",
    "write_robomimic",
]
