"""Content of LeRobot files, checked for completeness.

    meta/info.json                    features, their types and shapes; numbers of frames and of episodes
    meta/tasks.parquet                tasks in words
    meta/episodes/chunk-<c>/…         one row per episode: its length, and the positions of its videos
    meta/burnish.json                 limits, units and recorded task; in datasets written here
    data/chunk-<c>/file-<f>.parquet   one row per frame

Every frame has a number in the dataset, `index`, one in its episode, `frame_index`, and that of its
episode, `episode_index`. Rows may be stored in any order: they are sorted by `index`. Missing and duplicate
frames are found by these numbers and refused: the frames around a gap would look like neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import ArrayStorage, Frames
from envs.datasets.files.arrays import Arrays, check_keys, readable
from envs.datasets.images import BlobColumn
from policies.errors import DatasetError
from policies.extras import require
from policies.storage.strict_json import read_json

INFO, TASKS, DATA = "meta/info.json", "meta/tasks.parquet", "data/chunk-*/file-*.parquet"
STATS, OWN = "meta/stats.json", "meta/burnish.json"  # OWN: what LeRobot has no place for
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes/chunk-*/file-*.parquet"
DONE, SUCCESS, TERMINATED = "next.done", "next.success", "next.terminated"
GOAL = "observation.goal"
SCALARS = ("next.reward", DONE, SUCCESS, TERMINATED, "timestamp", "task_index", "frame_index")
INDEX = ("episode_index", "index")

EpisodeTable = Mapping[str, Sequence[Any]]
"""Columns of the tables of episodes by name, all of one length."""


def read_info(path: str | Path) -> dict[str, Any]:
    """Read the description of a dataset, of version 3."""
    place = Path(path) / INFO
    with readable(place, "description of a LeRobot dataset"):
        info = read_json(place, finite=False)
        version, features = str(info["codebase_version"]), info["features"]
        shapes = {key: (str(one["dtype"]), [int(n) for n in one["shape"]]) for key, one in features.items()}
        counts = {key: int(info[key]) for key in ("total_frames", "total_episodes")}
        float(info.get("fps") or 0)
    if not version.startswith("v3."):
        raise DatasetError(
            f"{place}: key 'codebase_version' must be v3.x; got '{version}'. Convert the dataset with "
            f"LeRobot's script convert_dataset_v21_to_v30."
        )
    for key, count in counts.items():
        if count < 1:
            raise DatasetError(f"{place}: key '{key}' must be at least 1; got {count}.")
    for key, (kind, shape) in shapes.items():
        is_scalar = key in (*SCALARS, *INDEX)
        is_odd = shape not in ([], [1]) if is_scalar else kind in ("image", "video") and len(shape) != 3
        if is_odd or min(shape, default=1) < 1:
            wanted = "[1], one number per frame" if is_scalar else "whole numbers above 0, three for images"
            raise DatasetError(f"{place}: feature '{key}' must have the shape {wanted}; got {shape[:8]}.")
    described = {key: {**features[key], "dtype": kind, "shape": n} for key, (kind, n) in shapes.items()}
    return {**info, **counts, "features": described}


def read_own(path: str | Path) -> dict[str, Any]:
    """Return the metadata of `burnish.json`, which only our writer leaves; empty without it."""
    place = Path(path) / OWN
    if not place.is_file():
        return {}
    with readable(place, "metadata of burnish"):
        meta = read_json(place)["meta"]
        if not isinstance(meta, dict):
            raise ValueError("key 'meta' must be an object")
    return meta


def width_of(info: Mapping[str, Any], key: str) -> int:
    """Return how many numbers a frame has under a key."""
    shape = info["features"].get(key, {}).get("shape") or [1]
    return int(shape[0])


def numbered_names(key: str, width: int) -> list[str]:
    """Return the names of the entries of a feature that has none."""
    return [f"{key} {i}" for i in range(width)]


def data_files(path: str | Path, info: Mapping[str, Any]) -> list[Path]:
    """Return the files with the frames, which must hold `total_frames` frames."""
    files = sorted(Path(path).glob(DATA))
    if not files:
        raise DatasetError(f"{path}: expected {DATA}; there is no such file. Download the dataset again.")
    parquet = require("pyarrow.parquet", extra="lerobot")
    num = 0
    for file in files:
        with readable(file, "Parquet file"):
            num += int(parquet.read_metadata(file).num_rows)
    _check_total(path, info, "total_frames", num)
    return files


def read_frames(
    path: str | Path,
    files: Sequence[Path],
    info: Mapping[str, Any],
    keys: Sequence[str],
    cameras: Sequence[str],
    storage: ArrayStorage,
) -> tuple[Arrays, dict[str, Sequence[bytes]]]:
    """Read columns of numbers (`keys`) and image files (`cameras`), in the order of `index`."""
    frames = Frames(storage, int(info["total_frames"]))
    blobs = {key: BlobColumn(storage) for key in cameras}
    for file in files:
        for table in _tables(file, [*keys, *cameras]):
            frames.add({key: _column(table[key], file, key, width_of(info, key)) for key in keys})
            for key, found in blobs.items():
                found.add(_image_files(table[key], file, key))
    rows = frames.joined()
    _check_total(path, info, "total_frames", len(rows.get("index", ())))
    order = np.argsort(rows["index"], kind="stable")
    if not (order[1:] > order[:-1]).all():
        rows = {key: storage.take_array(value, order) for key, value in rows.items()}
    _check_counting(path, rows, "index", np.arange(len(order)), "all frames")
    return rows, {key: found.joined(order) for key, found in blobs.items()}


def _tables(file: Path, wanted: list[str]) -> Iterator[Any]:
    parquet = require("pyarrow.parquet", extra="lerobot")
    with readable(file, "Parquet file"):
        content = parquet.ParquetFile(file)
        check_keys(file, wanted, content.schema_arrow.names, "columns")
        for group in range(content.num_row_groups):
            yield content.read_row_group(group, columns=wanted)


def _image_files(values: Any, file: Path, key: str) -> list[bytes]:
    """Return the bytes of a column of images: {bytes, path}, of which the bytes are required."""
    found = [row.get("bytes") if isinstance(row, Mapping) else row for row in values.to_pylist()]
    files = [one for one in found if isinstance(one, bytes)]
    if len(files) < len(found):
        raise DatasetError(
            f"{file}: column '{key}' must hold images as bytes; some rows have none. Embed the images when "
            f"the dataset is written."
        )
    return files


def _column(values: Any, file: Path, key: str, width: int) -> np.ndarray:
    """Turn a column into an array: (n, width) for states and actions, (n,) for single numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = values.combine_chunks()
    is_list = any(test(array.type) for test in (pa.types.is_list, pa.types.is_large_list))
    is_list = is_list or pa.types.is_fixed_size_list(array.type)
    flat = array.flatten() if is_list else array
    kind, holes = flat.type, array.null_count + (flat.null_count if is_list else 0)
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DatasetError(f"{file}: column '{key}' must hold real numbers; got type {array.type}.")
    widths = set(pc.unique(pc.list_value_length(array)).to_pylist()) if is_list and not holes else {1}
    if holes or widths - {width}:
        found = f"{holes} missing values" if holes else f"{sorted(widths)[:5]}"
        raise DatasetError(
            f"{file}: column '{key}' must have {width} numbers in each of its {len(array)} rows; got {found}."
        )
    numbers: np.ndarray = flat.to_numpy(zero_copy_only=False)
    # A single number may be stored as such or as a list of one; states and actions are always vectors.
    is_vector = key == "action" or key.startswith("observation.")
    return numbers.reshape(len(array), width) if is_vector else numbers


def episode_starts(
    path: str | Path, rows: Arrays, info: Mapping[str, Any], table: EpisodeTable
) -> np.ndarray:
    """Return the first frame of every episode and, last, N; rows and tables must agree."""
    number = rows["episode_index"]
    first = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    _check_total(path, info, "total_episodes", len(first))
    if len(np.unique(number[first])) < len(first):
        raise DatasetError(
            f"{path}: column 'episode_index' of {DATA} must not change within an episode; got episodes in "
            f"several parts. Download the dataset again."
        )
    start = np.append(first, len(number))
    if "frame_index" in rows:
        expected = np.arange(len(number)) - np.repeat(first, np.diff(start))
        _check_counting(path, rows, "frame_index", expected, "the frames of every episode")
    _check_table(path, dict(zip(number[first].tolist(), np.diff(start).tolist(), strict=True)), table)
    return start


def _check_total(path: str | Path, info: Mapping[str, Any], key: str, got: int) -> None:
    if int(info[key]) != got:
        raise DatasetError(
            f"{path}: key '{key}' of {INFO} must be the number in {DATA}; got {info[key]} and {got}. Files "
            f"are missing, or episodes are mixed: download the dataset again."
        )


def _check_counting(path: str | Path, rows: Arrays, key: str, expected: np.ndarray, what: str) -> None:
    wrong = np.flatnonzero(rows[key] != expected)
    if len(wrong):
        at = wrong[0]
        raise DatasetError(
            f"{path}: column '{key}' of {DATA} must count {what} from 0; got {rows[key][at].item()} instead "
            f"of {expected[at]} in episode {rows['episode_index'][at].item()}. Frames are missing or stored "
            f"twice: download the dataset again."
        )


def _check_table(path: str | Path, lengths: Mapping[int, int], table: EpisodeTable) -> None:
    """Refuse tables of other episodes, or of episodes with another number of frames."""
    listed = table.get("episode_index", list(lengths))
    if len(listed) != len(lengths) or set(listed) != set(lengths):
        raise DatasetError(
            f"{path}: column 'episode_index' of {EPISODES} must name each of the {len(lengths)} episodes in "
            f"{DATA} once; got {len(listed)} rows, with {len(set(listed) & set(lengths))} of these."
        )
    for number, length in zip(listed, table.get("length", ()), strict=False):
        if length != lengths[number]:
            raise DatasetError(
                f"{path}: column 'length' of {EPISODES} must be the number of frames in {DATA}; got {length} "
                f"for episode {number}, which has {lengths[number]}."
            )


def read_episode_table(path: str | Path) -> EpisodeTable:
    """Return the columns `episode_index`, `length` and `videos/…`; none if there are no such tables."""
    columns: dict[str, list[Any]] = {}
    for number, file in enumerate(sorted(Path(path).glob(EPISODES))):
        parquet = require("pyarrow.parquet", extra="lerobot")
        with readable(file, "table of episodes"):
            names = parquet.read_schema(file).names
            wanted = [name for name in names if name in ("episode_index", "length") or "videos/" in name]
            found = parquet.read_table(file, columns=wanted).to_pydict()
            for name, values in found.items():
                if odd := [one for one in values if type(one) not in (int, float)]:
                    raise ValueError(f"column '{name}' must hold numbers; got {str(odd[0])[:80]}")
        if number and set(found) != set(columns):
            raise DatasetError(
                f"{file}: expected the columns {sorted(columns)} of the other tables of episodes; got "
                f"{sorted(found)}."
            )
        for name, values in found.items():
            columns.setdefault(name, []).extend(values)
    return columns if "episode_index" in columns else {}


def read_tasks(path: str | Path) -> list[str]:
    """Return the tasks in words, by their index; none if there is no table of them."""
    place = Path(path) / TASKS
    if not place.is_file():
        return []
    parquet = require("pyarrow.parquet", extra="lerobot")
    with readable(place, "table of tasks"):
        columns = parquet.read_table(place).to_pydict()
        texts = [values for values in columns.values() if all(isinstance(one, str) for one in values)]
        return [word for _, word in sorted(zip(columns["task_index"], texts[0], strict=True))]
