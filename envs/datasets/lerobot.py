"""LeRobot datasets, version 3: folders with Parquet files, read with pyarrow alone (extra `lerobot`).

    meta/info.json   meta/tasks.parquet   data/chunk-<c>/file-<f>.parquet   videos/<key>/…

The flat state is `observation.state`, followed by `observation.environment_state` where there is one; the
action is `action`. Rewards (`next.reward`) are 0 where none are stored. Recorders set `next.done` on the last
frame whatever the reason, also when the time was up: an episode counts as terminated only if its last frame
has `next.success` as well, any other as truncated, unless `done_is_terminal` says that the flag is meant.
Successors are not stored: the last frame of an episode is a transition only if it terminated. Images in the
Parquet files (features of type `image`, PNG or JPEG) stay compressed until somebody looks at them, and frames
of videos are decoded then (extra `video`); a camera is called what its feature is without
`observation.images.`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.images import BlobColumn, Compressed, Images, camera_of
from envs.datasets.npz import Arrays, check_flags
from envs.datasets.room import Frames, Room, pieces, room_for
from envs.datasets.unread import tell_unread
from envs.datasets.videos import InVideos
from envs.make import require
from policies.encoders import ImageShape
from policies.errors import DatasetError

INFO, TASKS, DATA = "meta/info.json", "meta/tasks.parquet", "data/chunk-*/file-*.parquet"
EPISODES = "meta/episodes/chunk-*/file-*.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_STATE = ("observation.state", "observation.environment_state")
DONE, SUCCESS = "next.done", "next.success"
_SCALARS = ("next.reward", DONE, SUCCESS, "timestamp", "task_index")
_INDEX = ("episode_index", "index")
_KEPT_META = ("codebase_version", "robot_type", "fps")
_log = logging.getLogger(__name__)


def matches(path: str | Path) -> bool:
    """Tell whether a folder is a LeRobot dataset, of whichever version."""
    info = Path(path) / INFO
    return info.is_file() and "codebase_version" in info.read_text(encoding="utf-8", errors="replace")


def read(
    path: str | Path,
    *,
    obs_keys: Sequence[str] | None = None,
    done_is_terminal: bool = False,
    cache: str | Path | None = None,
) -> EpisodeDataset:
    """Read the vectors of a LeRobot dataset (v3): a folder with meta/info.json and data/*.parquet.

    Args:
        path: The dataset's folder.
        obs_keys: Features that make up the flat state, in order; None: see the module.
        done_is_terminal: Whether `next.done` on the last frame always means that the task ended there.
        cache: Folder for what does not fit into memory; None: that of temporary files.

    Raises:
        DatasetError: If it does not hold a usable dataset; names file and key.
        MissingExtraError: If pyarrow is not installed.
    """
    info = read_info(path)
    state = _state_keys(path, info["features"], obs_keys)
    wanted = [*state, "action", *(key for key in _SCALARS if key in info["features"]), *_INDEX]
    cameras = [key for key, one in info["features"].items() if one["dtype"] == "image"]
    room = room_for(_bytes_of(path, info, wanted, cameras), path, cache=cache)
    rows, files = _read_frames(path, info, wanted, cameras, room)
    start = _episode_start(path, rows, info)
    last = np.zeros(len(rows["action"]), dtype=bool)
    last[start[1:] - 1] = True
    flags = {key: check_flags(f"{path}", key, rows[key]) for key in (DONE, SUCCESS) if key in rows}
    terminated = last & _terminal(path, flags, last, done_is_terminal)
    extras: dict[str, Any] = {key: rows[key] for key in ("timestamp", "task_index") if key in rows}
    episode_extras = {}
    if SUCCESS in flags:
        episode_extras["success"] = np.logical_or.reduceat(flags[SUCCESS], start[:-1])
    meta = {key: info[key] for key in _KEPT_META if info.get(key) is not None}
    meta |= {"source": str(path), "format": "lerobot", "tasks": _read_tasks(path)}
    images = {camera_of(key): _images(path, info, key, files[key]) for key in cameras}
    filmed, lacking = _filmed(path, info, rows)
    unread = _unread(info["features"], [*wanted, *cameras, *filmed], lacking)
    meta |= {"not_read": tell_unread(path, unread), "obs_keys": list(state)}
    return EpisodeDataset.from_arrays(
        _side_by_side([rows[key] for key in state], room),
        rows["action"],
        rows.get("next.reward", np.zeros(len(last))),
        terminated,
        last & ~terminated,
        start,
        extras=extras,
        episode_extras=episode_extras,
        images=images | {camera_of(key): one for key, one in filmed.items()},
        meta=meta,
        room=room,
    )


def _bytes_of(path: str | Path, info: Mapping[str, Any], keys: Sequence[str], cameras: Sequence[str]) -> int:
    """Return what reading takes: numbers as stored, in order, and side by side; compressed images."""
    widths = (int(info["features"].get(key, {"shape": [1]})["shape"][0]) for key in keys)
    numbers = 8 * 3 * sum(widths) * int(info["total_frames"])
    files = sum(file.stat().st_size for file in Path(path).glob(DATA)) if cameras else 0
    return numbers + 2 * files


def _side_by_side(parts: Sequence[np.ndarray], room: Room) -> np.ndarray:
    """Join arrays (N, ...) to (N, D), as float32."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    out = room.empty((len(parts[0]), ends[-1]), np.float32)
    for rows in pieces(out):
        out[rows] = np.concatenate([part[rows] for part in parts], axis=1)
    return out


def _terminal(path: str | Path, flags: Arrays, last: np.ndarray, done_is_terminal: bool) -> np.ndarray:
    """Tell in which frames (N,) the task ended, if they are the `last` ones (N,); see the module."""
    done = flags.get(DONE, np.zeros(len(last), dtype=bool))
    if done_is_terminal:
        return done
    if SUCCESS in flags:
        return done & flags[SUCCESS]
    if count := int((done & last).sum()):
        _log.warning(
            "%s: %d of %d episodes end with next.done, which recorders also set when time is up, and there "
            "is no next.success: all count as truncated. Where the task did end there, give the option "
            "data.done_is_terminal=true.", path, count, int(last.sum()),
        )  # fmt: skip
    return np.zeros(len(last), dtype=bool)


def read_info(path: str | Path) -> dict[str, Any]:
    """Read the description of a dataset.

    Raises:
        DatasetError: If it is damaged, or of another version than 3.
    """
    place = Path(path) / INFO
    try:
        info = json.loads(place.read_text(encoding="utf-8"))
        version, features = str(info["codebase_version"]), info["features"]
        {key: (str(one["dtype"]), tuple(one["shape"])) for key, one in features.items()}
        int(info["total_episodes"]), int(info["total_frames"])
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise DatasetError(
            f"{place}: expected LeRobot's description of a dataset; reading failed with '{error}'. Copy or "
            f"download the dataset again."
        ) from error
    if not version.startswith("v3."):
        raise DatasetError(
            f"{place}: key 'codebase_version' must be v3.x; got '{version}'. Convert the dataset with "
            f"LeRobot's script convert_dataset_v21_to_v30."
        )
    return dict(info)


def _is_vector(feature: Mapping[str, Any]) -> bool:
    return str(feature["dtype"])[:3] in ("flo", "int", "boo", "uin") and len(feature["shape"]) == 1


def _state_keys(
    path: str | Path, features: Mapping[str, Any], obs_keys: Sequence[str] | None
) -> tuple[str, ...]:
    """Decide which features make up the flat state."""
    vectors = [key for key, feature in features.items() if _is_vector(feature)]
    usual = [key for key in _STATE if key in vectors]
    keys = obs_keys or usual or [key for key in vectors if key.startswith("observation.")]
    missing = [key for key in (*keys, "action") if key not in vectors]
    if missing or not keys:
        raise DatasetError(
            f"{Path(path) / INFO}: expected the vector-valued features {missing or 'observation.state'}; "
            f"found {vectors}. Images do not make up a state."
        )
    return tuple(keys)


def _unread(
    features: Mapping[str, Any], read_keys: Sequence[str], lacking: Mapping[str, str]
) -> dict[str, str]:
    """Return the observations that are left out, and why."""
    reasons = {"image": "pictures", "string": "texts"}
    return {
        key: lacking.get(key) or reasons.get(str(feature["dtype"]), "choose it by obs_keys")
        for key, feature in features.items()
        if key not in read_keys and key.startswith("observation.")
    }


def _images(path: str | Path, info: Mapping[str, Any], key: str, files: Sequence[bytes]) -> Images:
    """Return the images of a feature, compressed."""
    return Images(Compressed(files, _image_shape(info["features"][key]), f"{path}: column '{key}'"))


def _image_shape(feature: Mapping[str, Any]) -> ImageShape:
    shape = tuple(int(size) for size in feature["shape"])
    if len(shape) == 3 and shape[0] == 3 != shape[2]:
        shape = (*shape[1:], shape[0])  # described with colours first
    return shape[0], shape[1], shape[2]


def _filmed(
    path: str | Path, info: Mapping[str, Any], rows: Arrays
) -> tuple[dict[str, Images], dict[str, str]]:
    """Return the images of videos by feature, and why those of other videos are not read."""
    features = {key: one for key, one in info["features"].items() if one["dtype"] == "video"}
    table = _episode_table(path) if features else {}
    found: dict[str, Images] = {}
    lacking: dict[str, str] = {}
    for key, feature in features.items():
        places = [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
        if "timestamp" not in rows or not info.get("fps") or any(place not in table for place in places):
            lacking[key] = f"videos whose times are not told: {EPISODES} lack columns, or frames a timestamp"
            continue
        chunk, file, begin = (table[place] for place in places)
        files = _video_files(path, info, key, chunk, file)
        if missing := {one for one in files if not one.is_file()}:
            lacking[key] = f"videos, of which {len(missing)} files are missing"
            continue
        row = {number: i for i, number in enumerate(table["episode_index"])}
        episode = np.array([row[number] for number in rows["episode_index"].tolist()])
        times = np.array(begin, np.float64)[episode] + rows["timestamp"].reshape(-1)
        found[key] = Images(InVideos(files, episode, times, float(info["fps"]), _image_shape(feature)))
    return found, lacking


def _video_files(
    path: str | Path, info: Mapping[str, Any], key: str, chunks: Sequence[int], numbers: Sequence[int]
) -> tuple[Path, ...]:
    """Return the video of every episode.

    Raises:
        DatasetError: If `video_path` is no pattern for them.
    """
    pattern, root = str(info.get("video_path") or VIDEO), Path(path).absolute()
    pairs = zip(chunks, numbers, strict=True)
    try:
        names = [pattern.format(video_key=key, chunk_index=c, file_index=number) for c, number in pairs]
    except (LookupError, ValueError) as error:
        raise DatasetError(
            f"{Path(path) / INFO}: key 'video_path' must be a pattern such as {VIDEO}; got '{pattern}' "
            f"({error})."
        ) from error
    return tuple(root / name for name in names)


def _episode_table(path: str | Path) -> dict[str, list[Any]]:
    """Return the columns of the tables of episodes; none where there are no such tables.

    Raises:
        DatasetError: If one is damaged.
    """
    parquet = require("pyarrow.parquet", extra="lerobot")
    columns: dict[str, list[Any]] = {}
    for file in sorted(Path(path).glob(EPISODES)):
        try:
            names = parquet.read_schema(file).names
            wanted = [name for name in names if name == "episode_index" or name.startswith("videos/")]
            found = parquet.read_table(file, columns=wanted).to_pydict()
        except (OSError, ValueError, LookupError) as error:
            raise DatasetError(
                f"{file}: expected a readable table of episodes; reading failed with '{error}'. Copy or "
                f"download it again."
            ) from error
        for name, values in found.items():
            columns.setdefault(name, []).extend(values)
    return columns


def _read_frames(
    path: str | Path, info: Mapping[str, Any], keys: Sequence[str], cameras: Sequence[str], room: Room
) -> tuple[Arrays, dict[str, Sequence[bytes]]]:
    """Read columns of all data files, in the order of the frames: numbers, and the files of images."""
    files = sorted(Path(path).glob(DATA))
    if not files:
        raise DatasetError(f"{path}: expected {DATA}; there is no such file. Download the dataset again.")
    widths = {key: int(info["features"].get(key, {"shape": [1]})["shape"][0]) for key in keys}
    frames = Frames(room, int(info["total_frames"]))
    blobs = {key: BlobColumn(room) for key in cameras}
    for file in files:
        for table in _tables(file, [*keys, *cameras]):
            frames.add({key: _column(table[key], file, key, widths[key]) for key in keys})
            for key, found in blobs.items():
                found.add(_picture_files(table[key], file, key))
    rows = frames.joined()
    order = np.argsort(rows["index"], kind="stable")
    if not (order[1:] > order[:-1]).all():
        rows = {key: room.taken(value, order) for key, value in rows.items()}
    return rows, {key: found.joined(order) for key, found in blobs.items()}


def _tables(file: Path, wanted: list[str]) -> Iterator[Any]:
    """Yield the row groups of a file.

    Raises:
        DatasetError: If it is damaged or lacks a column.
    """
    parquet = require("pyarrow.parquet", extra="lerobot")
    try:
        content = parquet.ParquetFile(file)
        missing = [key for key in wanted if key not in content.schema_arrow.names]
        if missing:
            raise DatasetError(f"{file}: expected the columns {wanted}; missing {missing}.")
        for group in range(content.num_row_groups):
            yield content.read_row_group(group, columns=wanted)
    except (OSError, ValueError, LookupError) as error:  # pyarrow's own derive from these
        raise DatasetError(
            f"{file}: expected a readable Parquet file; reading failed with '{error}'. The file is "
            f"truncated or damaged: copy or download it again."
        ) from error


def _picture_files(values: Any, file: Path, key: str) -> list[bytes]:
    """Return the bytes of a column of images: {bytes, path}, of which the bytes have to be there."""
    found = [row.get("bytes") if isinstance(row, Mapping) else row for row in values.to_pylist()]
    files = [one for one in found if isinstance(one, bytes)]
    if len(files) < len(found):
        raise DatasetError(
            f"{file}: column '{key}' must hold images as bytes; some rows have none. Embed the images when "
            f"the dataset is written."
        )
    return files


def _column(values: Any, file: Path, key: str, width: int) -> np.ndarray:
    """Turn a column into an array: (n, width) for lists, (n,) for numbers."""
    import pyarrow as pa

    array = values.combine_chunks()
    is_list = pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type)
    flat = array.flatten() if is_list else array
    kind, holes = flat.type, array.null_count + (flat.null_count if is_list else 0)
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DatasetError(f"{file}: column '{key}' must hold real numbers; got type {array.type}.")
    wanted = len(array) * (width if is_list else 1)
    if holes or len(flat) != wanted:
        got = f"{holes} missing values and {len(flat)} numbers"
        raise DatasetError(
            f"{file}: column '{key}' must have {width} numbers in each of its {len(array)} rows; got {got}."
        )
    numbers: np.ndarray = flat.to_numpy(zero_copy_only=False)
    # Features of one number are stored as plain columns; a state or an action is a vector all the same.
    is_vector = is_list or key == "action" or key.startswith("observation.")
    return numbers.reshape(len(array), width) if is_vector and key not in _SCALARS else numbers


def _episode_start(path: str | Path, rows: Arrays, info: Mapping[str, Any]) -> np.ndarray:
    """Return the first frame of every episode and, last, N; checks that nothing is missing."""
    number, frames = rows["episode_index"], len(rows["index"])
    first = np.flatnonzero(np.diff(number, prepend=number[:1] - 1))
    for key, got in (("total_frames", frames), ("total_episodes", len(first))):
        if int(info[key]) != got:
            raise DatasetError(
                f"{path}: key '{key}' of {INFO} must be what {DATA} hold; got {info[key]} and {got}. Files "
                f"are missing, or episodes are mixed: download the dataset again."
            )
    return np.append(first, frames)


def _read_tasks(path: str | Path) -> list[str]:
    """Return the tasks in words, by their index."""
    place = Path(path) / TASKS
    if not place.is_file():
        return []
    parquet = require("pyarrow.parquet", extra="lerobot")
    try:
        columns = parquet.read_table(place).to_pydict()
        words = next(values for values in columns.values() if all(isinstance(v, str) for v in values))
        return [word for _, word in sorted(zip(columns["task_index"], words, strict=True))]
    except (OSError, ValueError, LookupError, StopIteration) as error:
        raise DatasetError(
            f"{place}: expected a readable table of tasks; reading failed with '{error}'."
        ) from error
