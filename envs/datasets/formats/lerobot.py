"""LeRobot datasets, version 3: folders with Parquet files, read with pyarrow alone (extra `lerobot`).

    meta/info.json   meta/tasks.parquet   data/chunk-<c>/file-<f>.parquet   videos/<key>/…

The flat state is `observation.state`, followed by `observation.environment_state` where there is one.
Missing rewards (`next.reward`) are 0. Recorders set `next.done` on the last frame also at time limits: an
episode counts as terminated only if its last frame also has `next.success`, else as truncated;
`done_is_terminal` makes `next.done` a termination. Our writer adds `next.terminated`, which decides alone.
Successors are not stored: the last frame of an episode is a transition only if it terminated. Images (PNG,
JPEG or video frames, extra `video`) are decoded on access. Camera names are feature names without
`observation.images.` or `observation.`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import ArrayStorage, choose_storage, pieces
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.arrays import Arrays, check_flags
from envs.datasets.files.lerobot import (
    DONE,
    EPISODES,
    GOAL,
    INDEX,
    INFO,
    SCALARS,
    SUCCESS,
    TERMINATED,
    VIDEO,
    EpisodeTable,
    data_files,
    episode_starts,
    numbered_names,
    read_episode_table,
    read_frames,
    read_info,
    read_own,
    read_tasks,
    width_of,
)
from envs.datasets.files.videos import InVideos
from envs.datasets.images import Compressed, Images, camera_of
from policies.encoders import ImageShape
from policies.errors import DatasetError
from policies.storage.strict_json import peek

_FIELD = re.compile(r"\{(video_key|(chunk|file)_index(:0?[1-9]d)?)\}")
_STATE = ("observation.state", "observation.environment_state")
FLAGS = (DONE, SUCCESS, TERMINATED)
_KEPT_META = ("codebase_version", "robot_type", "fps")
_log = logging.getLogger(__name__)


def matches(path: str | Path) -> bool:
    """Whether a folder is a LeRobot dataset, of any version."""
    return "codebase_version" in peek(Path(path) / INFO)


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
        obs_keys: Features of the flat state, in order; None: see the module.
        done_is_terminal: Whether `next.done` on the last frame always means termination.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If it does not hold a usable dataset; names file and key.
        MissingExtraError: If pyarrow is not installed.
    """
    info, own = read_info(path), read_own(path)
    state = _state_keys(path, info["features"], obs_keys)
    goal = [GOAL] if own and GOAL in info["features"] and GOAL not in state else []
    wanted = [*state, *goal, "action", *(key for key in SCALARS if key in info["features"]), *INDEX]
    cameras = [key for key, one in info["features"].items() if one["dtype"] == "image"]
    parts = data_files(path, info)
    storage = choose_storage(_bytes_of(parts, info, wanted, cameras), path, cache=cache)
    rows, files = read_frames(path, parts, info, wanted, cameras, storage)
    table = read_episode_table(path)
    start = episode_starts(path, rows, info, table)
    last = np.zeros(len(rows["action"]), dtype=bool)
    last[start[1:] - 1] = True
    flags = {key: check_flags(f"{path}", key, rows[key]) for key in FLAGS if key in rows}
    terminated = last & _terminal(path, flags, last, done_is_terminal)
    extras: dict[str, Any] = {key: rows[key] for key in ("timestamp", "task_index") if key in rows}
    extras |= {"goal": rows[GOAL]} if goal else {}
    episode_extras = {}
    if SUCCESS in flags:
        episode_extras["success"] = np.logical_or.reduceat(flags[SUCCESS], start[:-1])
    meta = own | {key: info[key] for key in _KEPT_META if info.get(key) is not None}
    meta |= {"source": str(path), "format": "lerobot", "tasks": read_tasks(path)}
    meta["interface"] = _interface(info, state, meta["tasks"]) | _own_interface(own, state)
    images = {
        camera_of(key): Images(
            Compressed(files[key], _image_shape(info["features"][key]), f"{path}: column '{key}'")
        )
        for key in cameras
    }
    videos, unreadable = _video_images(path, info, rows, table)
    unread = _unread(info["features"], [*wanted, *cameras, *videos], unreadable)
    meta |= {"not_read": log_skipped_fields(path, unread), "obs_keys": list(state)}
    return EpisodeDataset.from_arrays(
        _side_by_side([rows[key] for key in state], storage),
        rows["action"],
        rows.get("next.reward", np.zeros(len(last))),
        terminated,
        None,
        start,
        extras=extras,
        episode_extras=episode_extras,
        images=images | {camera_of(key): one for key, one in videos.items()},
        meta=meta,
        storage=storage,
    )


def _interface(info: Mapping[str, Any], state: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """Return names, rate, robot and task texts, for `envs.datasets.interface`."""
    names = [_entry_names(info, key) for key in state]
    found = {
        "obs_names": [name for part in names for name in part],
        "action_names": _entry_names(info, "action"),
        "control_hz": info.get("fps"),
        "robot": info.get("robot_type"),
        "instructions": list(tasks),
    }
    return {key: value for key, value in found.items() if value is not None}


def _own_interface(own: Mapping[str, Any], state: Sequence[str]) -> dict[str, Any]:
    """Return the facts that our writer recorded; names of observations hold for the written state alone."""
    known = own.get("interface")
    found = dict(known) if isinstance(known, Mapping) else {}
    if tuple(state) != _STATE[:1]:
        found.pop("obs_names", None)
    return found


def _entry_names(info: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of a feature's entries; numbered ones where it has none."""
    names, width = info["features"][key].get("names"), width_of(info, key)
    while isinstance(names, Mapping) and names:  # e.g. {"motors": [...]}
        names = next(iter(names.values()))
    if isinstance(names, list) and len(names) == width:
        return [str(name) for name in names]
    return numbered_names(key, width)


def _bytes_of(
    files: Sequence[Path], info: Mapping[str, Any], keys: Sequence[str], cameras: Sequence[str]
) -> int:
    """Return the bytes required: numbers as stored, sorted, and concatenated; compressed images."""
    numbers = 8 * 3 * sum(width_of(info, key) for key in keys) * int(info["total_frames"])
    return numbers + (2 * sum(file.stat().st_size for file in files) if cameras else 0)


def _side_by_side(parts: Sequence[np.ndarray], storage: ArrayStorage) -> np.ndarray:
    """Join arrays (N, ...) to (N, D) float32."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    out = storage.empty((len(parts[0]), ends[-1]), np.float32)
    for rows in pieces(out):
        out[rows] = np.concatenate([part[rows] for part in parts], axis=1)
    return out


def _terminal(path: str | Path, flags: Arrays, last: np.ndarray, done_is_terminal: bool) -> np.ndarray:
    """Return terminated frames (N,), a subset of the `last` ones (N,); see the module."""
    done = flags.get(DONE, np.zeros(len(last), dtype=bool))
    if done_is_terminal:
        return done
    if TERMINATED in flags:
        return flags[TERMINATED]
    if SUCCESS in flags:
        return done & flags[SUCCESS]
    if count := int((done & last).sum()):
        _log.warning(
            "%s: %d of %d episodes end with next.done, which recorders also set at time limits, and there is "
            "no next.success: all count as truncated. If they are terminations, give "
            "reader.done_is_terminal=true.", path, count, int(last.sum()),
        )  # fmt: skip
    return np.zeros(len(last), dtype=bool)


def _is_vector(feature: Mapping[str, Any]) -> bool:
    return str(feature["dtype"])[:3] in ("flo", "int", "boo", "uin") and len(feature["shape"]) == 1


def _state_keys(
    path: str | Path, features: Mapping[str, Any], obs_keys: Sequence[str] | None
) -> tuple[str, ...]:
    vectors = [key for key, feature in features.items() if _is_vector(feature)]
    usual = [key for key in _STATE if key in vectors]
    keys = obs_keys or usual or [key for key in vectors if key.startswith("observation.")]
    missing = [key for key in (*keys, "action") if key not in vectors]
    if missing or not keys:
        raise DatasetError(
            f"{Path(path) / INFO}: expected the vector-valued features {missing or 'observation.state'}; "
            f"found {vectors}."
        )
    return tuple(keys)


def _unread(
    features: Mapping[str, Any], read_keys: Sequence[str], unreadable: Mapping[str, str]
) -> dict[str, str]:
    """Return the unread observations with reasons."""
    return {
        key: unreadable.get(key) or ("texts" if feature["dtype"] == "string" else "choose it by obs_keys")
        for key, feature in features.items()
        if key not in read_keys and key.startswith("observation.")
    }


def _image_shape(feature: Mapping[str, Any]) -> ImageShape:
    shape = tuple(int(size) for size in feature["shape"])
    if len(shape) == 3 and shape[0] == 3 != shape[2]:
        shape = (*shape[1:], shape[0])  # described channels-first
    return shape[0], shape[1], shape[2]


def _video_images(
    path: str | Path, info: Mapping[str, Any], rows: Arrays, table: EpisodeTable
) -> tuple[dict[str, Images], dict[str, str]]:
    """Return the images of videos by feature, and the reasons for unread videos."""
    features = {key: one for key, one in info["features"].items() if one["dtype"] == "video"}
    found: dict[str, Images] = {}
    unreadable: dict[str, str] = {}
    for key, feature in features.items():
        places = [f"videos/{key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")]
        if "timestamp" not in rows or not info.get("fps") or any(place not in table for place in places):
            unreadable[key] = f"videos without times: {EPISODES} lack columns, or frames a timestamp"
            continue
        chunk, file, begin = (table[place] for place in places)
        files = _video_files(path, info, key, chunk, file)
        if missing := {one for one in files if not one.is_file()}:
            unreadable[key] = f"videos, of which {len(missing)} files are missing"
            continue
        row = {number: i for i, number in enumerate(table["episode_index"])}
        episode = np.array([row[number] for number in rows["episode_index"].tolist()])
        times = np.array(begin, np.float64)[episode] + rows["timestamp"].reshape(-1)
        found[key] = Images(InVideos(files, episode, times, float(info["fps"]), _image_shape(feature)))
    return found, unreadable


def _video_files(
    path: str | Path, info: Mapping[str, Any], key: str, chunks: Sequence[int], numbers: Sequence[int]
) -> tuple[Path, ...]:
    """Return the video of every episode by the pattern `video_path`."""
    pattern, root = str(info.get("video_path") or VIDEO), Path(path).absolute()
    if {"{", "}"} & set(_FIELD.sub("", pattern)):
        raise DatasetError(
            f"{Path(path) / INFO}: key 'video_path' must be a pattern such as {VIDEO}; got '{pattern[:200]}'."
        )
    pairs = zip(chunks, numbers, strict=True)
    names = [pattern.format(video_key=key, chunk_index=c, file_index=number) for c, number in pairs]
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DatasetError(
                f"{Path(path) / INFO}: key 'video_path' must lead to files inside; got '{name[:200]}'."
            )
    return tuple(root / name for name in names)
