"""Datasets of episodes: readers, writers, windows and reference scores.

A format is a module of `envs.datasets.formats` with two functions: `matches(path)` detects the format, and
`read(path, **options)` returns an `EpisodeDataset`. Formats are found by scanning the package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from envs.datasets import formats
from envs.datasets.catalogue import find_dataset
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.arrays import readable
from envs.datasets.files.hdf5 import read_hdf5
from envs.datasets.files.npz import peek_npz
from envs.datasets.formats.d4rl import read as read_d4rl
from envs.datasets.formats.robomimic import read as read_robomimic
from envs.datasets.options import Option, absolute_paths, checked_options, reader_options_of
from envs.datasets.writers import write_dataset
from envs.datasets.writers.d4rl import write_d4rl
from envs.datasets.writers.lerobot import write_lerobot
from envs.datasets.writers.minari import write_minari
from envs.datasets.writers.robomimic import write_robomimic
from envs.evaluation.scores import normalized_score
from policies.errors import DatasetError
from policies.registry import plugins


class Reader(Protocol):
    """A module that reads one format: `matches` is true for no other format."""

    def matches(self, path: str | Path) -> bool: ...

    def read(self, path: str | Path, **options: Any) -> EpisodeDataset: ...


@cache
def readers() -> dict[str, Reader]:
    """Return the readers by format name, which is the module name; plug-ins last."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    own = [importlib.import_module(f"{formats.__name__}.{name}") for name in names]
    others = [module for module in plugins() if hasattr(module, "matches") and hasattr(module, "read")]
    return {module.__name__.rpartition(".")[2]: cast(Reader, module) for module in (*own, *others)}


def dataset_format(path: str | Path) -> str:
    """Return the format of a file or folder, detected from its content."""
    for name, reader in readers().items():
        if reader.matches(path):
            return name
    if Path(path).is_dir():
        inside = sorted(item.name for item in Path(path).iterdir())
        found = f"a folder with {inside[:8] or 'nothing in it'}"
    elif (keys := peek_npz(path)) is not None:
        found = f"an npz archive with the keys {sorted(keys)}"
    else:
        with read_hdf5(path) as file:
            found = f"the keys {sorted(file)}"
    others = ", ".join(name for name in readers() if name != "arrays")
    known = f"'observations' and 'actions', or one of the formats {others} (`burnish list datasets`)"
    hint = "Arrays of other names go in from Python: burnish.clone([{'observations': …, 'actions': …}, …])."
    raise DatasetError(f"{path}: expected {known}; found {found}. {hint}")


def reader_options() -> dict[str, dict[str, Option]]:
    """Return the options of every format's reader, by format name."""
    return {name: reader_options_of(reader.read) for name, reader in readers().items()}


def absolute_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return reader options with absolute paths."""
    return absolute_paths(options, reader_options())


def supported_options(path: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subset of options supported by a dataset's reader."""
    known = reader_options()[dataset_format(find_dataset(path))]
    return {name: value for name, value in options.items() if name in known}


def read_dataset(path: str | Path, **options: Any) -> EpisodeDataset:
    """Read a dataset of any known format.

    Args:
        path: File, folder, or name of a downloaded dataset (`hopper-medium-v2`).
        **options: Options of the format's reader, e.g. `read_robomimic` or `read_d4rl`.

    Raises:
        ConfigError: If the format's reader lacks an option or refuses its value.
        DatasetError: If the file holds no usable dataset; names file, key, expected and found.
    """
    place = find_dataset(path)
    form = dataset_format(place)
    chosen = checked_options(options, form, reader_options(), place)
    with readable(place, f"dataset of the format {form}"):
        return readers()[form].read(place, **chosen)


__all__ = [
    "Episode",
    "EpisodeDataset",
    "Reader",
    "absolute_options",
    "dataset_format",
    "normalized_score",
    "read_d4rl",
    "read_dataset",
    "read_robomimic",
    "reader_options",
    "readers",
    "supported_options",
    "write_d4rl",
    "write_dataset",
    "write_lerobot",
    "write_minari",
    "write_robomimic",
]
