"""Episodes of a Minari dataset as trees of arrays, for all storage kinds; Minari is not needed.

    <dataset>/data/metadata.json      data_format, total_episodes, observation_space (JSON in a string), …
    <dataset>/data/main_data.hdf5     data_format hdf5: groups episode_<k> with attributes id, seed
    <dataset>/data/<k>/*.arrow        data_format arrow or parquet: a folder per episode, one padded last row

A tree is a mapping of names to trees or to arrays with one row per step; in a tuple the names are 0, 1, ….
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.files.arrays import is_numeric, readable
from envs.datasets.files.hdf5 import datasets_of, num_rows, read_hdf5, read_value
from policies.encoders import ImageShape
from policies.errors import DatasetError
from policies.extras import require
from policies.storage.strict_json import parse_json, peek, read_json

METADATA, MAIN_FILE = "metadata.json", "main_data.hdf5"
_TUPLE = "_index_"  # prefix of the number of a tuple's element in HDF5 files
_PER_STEP = ("actions", "rewards", "terminations", "truncations")

OBSERVATIONS, BARE = "observations", "observation"
"""Key of the observations, and name of an observation that is no tree."""

Tree = Mapping[str, Any]
Shapes = Mapping[str, ImageShape]
"""Shape (H, W, 3) of the images by the part of the observation."""


@dataclass(frozen=True)
class RawImages:
    """Images (T+1, H, W, 3) of an episode, which are read later.

    Attributes:
        key: Their dataset in the HDF5 file; None in other storage.
        values: Pixels or, if `encoded`, JPEG files in bytes; None in HDF5.
    """

    shape: tuple[int, ...]
    key: str | None = None
    values: Any = None
    encoded: bool = False


@dataclass(frozen=True)
class RawEpisode:
    """One stored episode: T actions, T+1 observations.

    Attributes:
        tree: `observations`, `actions`, `rewards`, `terminations`, `truncations` and, if stored, `infos`.
        attributes: `id`, `seed`, ….
    """

    name: str
    tree: Tree
    attributes: Mapping[str, Any]


def find_data(path: str | Path) -> Path | None:
    """Return the folder with the metadata: the path, its `data`, or the folder of the main file."""
    path = Path(path)
    if path.name == MAIN_FILE and path.is_file():
        path = path.parent
    for folder in (path / "data", path):
        if "data_format" in peek(folder / METADATA):
            return folder
    return None


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata; spaces are parsed."""
    path = folder / METADATA
    with readable(path, "metadata of a Minari dataset with data_format and total_episodes"):
        found = read_json(path, finite=False)
        for key in ("observation_space", "action_space"):
            if isinstance(found.get(key), str):
                found[key] = parse_json(found[key], f"'{key}'", finite=False)
        for key in ("burnish", "observation_space"):
            if not isinstance(found.get(key) or {}, dict):
                raise ValueError(f"'{key}' must be an object")
        count, form = int(found["total_episodes"]), str(found["data_format"])[:80]
    if count < 1:
        raise DatasetError(f"{path}: key 'total_episodes' must be at least 1; got {count}.")
    return {**found, "total_episodes": count, "data_format": form}


def read_episodes(
    folder: Path, metadata: Mapping[str, Any], images: Shapes | None = None
) -> Iterator[RawEpisode]:
    """Yield the episodes by number; `images` are the image parts of the environment's space."""
    form, count = metadata["data_format"], metadata["total_episodes"]
    if form == "hdf5":
        return _from_hdf5(folder / MAIN_FILE, count, images or {})
    if form in ("arrow", "parquet"):
        return _from_arrow(folder, count, form, images or {})
    raise DatasetError(
        f"{folder / METADATA}: key 'data_format' must be hdf5, arrow or parquet; got '{form}'."
    )


def bytes_of(folder: Path, metadata: Mapping[str, Any]) -> int:
    """Return the bytes required: observations twice, as such and as successors."""
    if metadata["data_format"] != "hdf5":
        return 2 * sum(file.stat().st_size for file in folder.glob(f"*/*.{metadata['data_format']}"))
    with read_hdf5(folder / MAIN_FILE) as file:
        return sum(_bytes_of(name, item) for name, item in datasets_of(file).items())


def num_frames(folder: Path, metadata: Mapping[str, Any]) -> int:
    """Return the number of actions; 0 where it is unknown before reading."""
    if metadata["data_format"] != "hdf5":
        return 0
    with read_hdf5(folder / MAIN_FILE) as file:
        return num_rows(file.values(), "actions")


def _bytes_of(name: str, item: h5py.Dataset) -> int:
    if not (item.shape and is_numeric(item)) or _is_raw_image(item):
        return 0
    stored: int = item.nbytes + (0 if item.dtype == np.float32 else 4 * item.size)
    return 2 * stored if f"/{OBSERVATIONS}" in name else stored


def _is_raw_image(item: h5py.Dataset) -> bool:
    return bool(item.dtype == np.uint8 and item.ndim == 4 and item.shape[3] == 3)


def _from_hdf5(path: Path, count: int, images: Shapes) -> Iterator[RawEpisode]:
    with read_hdf5(path) as file:
        names = [f"episode_{number}" for number in range(min(count, len(file) + 1))]
        missing = [name for name in names if not isinstance(file.get(name), h5py.Group)]
        if missing:
            raise DatasetError(
                f"{path}: expected {count} episodes as in the metadata; missing {missing[:3]}. Copy or "
                f"download the dataset again."
            )
        for name in names:
            tree = _group_tree(file[name], f"{path}: {name}", "", images)
            yield RawEpisode(f"{path}: {name}", tree, dict(file[name].attrs))


def _group_tree(group: h5py.Group, source: str, place: str, images: Shapes) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, item in group.items():
        key = name.removeprefix(_TUPLE)
        path = f"{place}/{key}" if place else key
        if isinstance(item, h5py.Group):
            tree[key] = _group_tree(item, f"{source}/{name}", path, images)
        else:
            tree[key] = _raw_images(item, images.get(_part(path))) or read_value(item, source, name)
    return tree


def _part(path: str) -> str:
    """Return the part of the observation at a path in an episode; empty if it is none."""
    return BARE if path == OBSERVATIONS else path.partition(f"{OBSERVATIONS}/")[2]


def _raw_images(item: Any, image: ImageShape | None) -> RawImages | None:
    if not isinstance(item, h5py.Dataset) or not item.shape:
        return None
    if _is_raw_image(item):
        return RawImages(item.shape, item.name)
    return None if image is None else RawImages((len(item), *image), item.name, encoded=True)


def _from_arrow(folder: Path, count: int, form: str, images: Shapes) -> Iterator[RawEpisode]:
    for number in range(count):
        place = folder / str(number)
        with readable(place, f"episode in {form} files"):
            files = sorted(str(item) for item in place.iterdir() if item.suffix == f".{form}")
            tree, rows = read_table(files, form)
            attributes = read_json(place / METADATA, finite=False)
            steps = int(attributes.get("total_steps", rows - 1))
        tree |= {key: tree[key][:steps] for key in _PER_STEP if isinstance(tree.get(key), np.ndarray)}
        tree = _with_images(tree, "", images)
        yield RawEpisode(str(place), tree, attributes)


def _with_images(tree: Any, place: str, images: Shapes) -> Any:
    """Return a tree in which columns of images are `RawImages`."""
    if isinstance(tree, Mapping):
        return {k: _with_images(v, f"{place}/{k}" if place else k, images) for k, v in tree.items()}
    image = images.get(_part(place))
    if image is None or not isinstance(tree, np.ndarray):
        return tree
    if tree.dtype == np.uint8 and tree.size == len(tree) * int(np.prod(image)):
        return RawImages((len(tree), *image), values=tree.reshape(len(tree), *image))
    is_encoded = tree.dtype == object and all(isinstance(one, bytes) for one in tree)
    return RawImages((len(tree), *image), values=tree, encoded=True) if is_encoded else tree


def read_table(files: str | list[str], form: str) -> tuple[dict[str, Any], int]:
    """Return the columns of Arrow or Parquet files as arrays or trees of them, and the number of rows."""
    table = require("pyarrow.dataset", extra="lerobot").dataset(files, format=form).to_table()
    columns = {name: _column_of(table[name].combine_chunks()) for name in table.column_names}
    return columns, table.num_rows


def _column_of(values: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_struct(values.type):
        return {field.name: _column_of(values.field(i)) for i, field in enumerate(values.type)}
    if pa.types.is_fixed_size_list(values.type):
        return np.asarray(values.flatten()).reshape(len(values), values.type.list_size)
    if pa.types.is_list(values.type) and len(values) and len(values.flatten()) % len(values) == 0:
        return np.asarray(values.flatten()).reshape(len(values), -1)
    return values.to_numpy(zero_copy_only=False)
