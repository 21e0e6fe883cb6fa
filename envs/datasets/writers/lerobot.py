"""Write datasets as LeRobot stores them (version 3), so that its `LeRobotDataset` reads them.

    meta/info.json   meta/stats.json   meta/tasks.parquet   meta/episodes/chunk-<c>/file-<f>.parquet
    data/chunk-<c>/file-<f>.parquet    videos/<camera>/chunk-<c>/file-<f>.mp4

Features are `observation.state`, `action`, `next.reward`, `next.done` (last frame of an episode),
`next.success`, `next.terminated`, LeRobot's indices, `observation.goal` for data with goals, and
`observation.images.<camera>`: PNG files among the frames, or H.264 videos. Statistics are exact: those of
images come from histograms of all pixels. Successors, seeds and other extra values are not stored. Limits,
units and the recorded task, which LeRobot has no place for, are in `meta/burnish.json`.

Legend: N frames of E episodes, T frames of one episode, H and W height and width.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.lerobot import (
    DONE,
    GOAL,
    INFO,
    OWN,
    STATS,
    SUCCESS,
    TASKS,
    TERMINATED,
    VIDEO,
    numbered_names,
)
from envs.datasets.interface import interface_of, interface_of_task
from envs.datasets.recorded_task import meta_to_write
from policies.errors import DatasetError
from policies.extras import require
from policies.storage.atomic_write import draft_folder, replace_folder, sync_tree
from policies.storage.strict_json import peek

if TYPE_CHECKING:
    from envs.spec import EnvConfig

VERSION = "v3.0"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FILES_PER_FOLDER = 1000
DATA_BYTES, VIDEO_BYTES = 100 * 2**20, 200 * 2**20
"""Sizes after which the next episode begins a new file, LeRobot's own."""

_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_LEVELS = np.arange(256) / 255.0
_OWN_META = (
    *("source", "format", "not_read", "obs_keys", "codebase_version", "robot_type", "fps", "tasks"),
    "interface",
)
_CODEC = {"crf": "23", "g": "2", "bf": "0"}
"""Every second frame is a key frame, as LeRobot encodes: any frame is reached by decoding one."""

Arrays = Mapping[str, np.ndarray]


def write_lerobot(
    path: str | Path, dataset: EpisodeDataset, env: EnvConfig | None = None, *, video: bool = False
) -> None:
    """Write a dataset as a folder, all or nothing.

    Args:
        path: The dataset's folder; an existing LeRobot dataset is replaced when the new one is complete.
        dataset: Episodes on any device. `meta["interface"]` gives names, rate, robot and task texts.
        env: Task of the episodes; gives names, rate and limits that the dataset lacks.
        video: Whether images become videos (lossy, extra `video`) or PNG files.

    Raises:
        DatasetError: If the rate is unknown, or the folder holds something else.
        MissingExtraError: If pyarrow, or for videos PyAV, is not installed.
    """
    check_place(path)
    target, dataset = Path(path), dataset.to("cpu")
    facts = {} if env is None else interface_of_task(env.spec)
    facts |= interface_of(dataset.meta, dataset.obs_dim, dataset.action_dim)
    if "control_hz" not in facts:
        raise DatasetError(
            f"{dataset.source}: LeRobot's format needs the rate of the frames; give control_hz=…"
        )
    with draft_folder(target) as draft:
        _Writing(draft, dataset, facts, video).write()
        own = {"meta": meta_to_write(dataset.meta, env, _OWN_META) | {"interface": facts}}
        _write_json(draft / OWN, own)
        sync_tree(draft)
        replace_folder(draft, target)


def check_place(path: str | Path) -> None:
    """Refuse a folder that holds something other than a LeRobot dataset."""
    target = Path(path)
    if target.exists() and "codebase_version" not in peek(target / INFO):
        raise DatasetError(f"{path}: expected a free place or a LeRobot dataset to replace; found another.")


class _Writing:
    """A dataset on its way into a folder."""

    def __init__(self, folder: Path, dataset: EpisodeDataset, facts: Mapping[str, Any], video: bool) -> None:
        self._folder, self._data, self._facts, self._video = folder, dataset, facts, video
        rate = float(facts["control_hz"])
        self._fps = int(rate) if rate.is_integer() else rate
        texts = facts.get("instructions") or [str((dataset.meta.get("env") or {}).get("name", "unnamed"))]
        self._tasks = list(dict.fromkeys(texts))
        self._columns = _columns(dataset, self._fps, len(self._tasks))
        self._features = self._describe()

    def write(self) -> None:
        images = self._data.image_shapes.items()
        levels = {camera: np.zeros((3, 256), np.int64) for camera, _ in images}
        with ExitStack() as files:
            data = files.enter_context(_DataFiles(self._folder, DATA))
            videos = {
                camera: files.enter_context(_VideoFiles(self._folder, _key_of(camera), shape, self._fps))
                for camera, shape in images
                if self._video
            }
            rows = [
                {"episode_index": number, **self._write_episode(first, end, data, videos, levels)}
                for number, (first, end) in enumerate(pairwise(self._data.episode_start.tolist()))
            ]
        with _DataFiles(self._folder, EPISODES) as table:
            table.add({key: [row[key] for row in rows] for key in rows[0]})
        total = {key: _statistics(value) for key, value in self._columns.items()}
        total |= {_key_of(one): _pixel_statistics(n, self._data.num_frames) for one, n in levels.items()}
        listed = {key: {name: v.tolist() for name, v in found.items()} for key, found in total.items()}
        _write_json(self._folder / STATS, listed)
        _write_tasks(self._folder / TASKS, self._tasks)
        _write_json(self._folder / INFO, self._info())

    def _write_episode(
        self,
        first: int,
        end: int,
        data: _DataFiles,
        videos: Mapping[str, _VideoFiles],
        levels: Mapping[str, np.ndarray],
    ) -> dict[str, Any]:
        """Write the frames from `first` to `end`; returns their row in the table of episodes."""
        row: dict[str, Any] = {"tasks": self._tasks_of(first, end), "length": end - first}
        row |= {"dataset_from_index": first, "dataset_to_index": end}
        columns = {key: _column(value[first:end]) for key, value in self._columns.items()}
        stats = {key: _statistics(value[first:end]) for key, value in self._columns.items()}
        for camera, total in levels.items():
            seen = np.zeros_like(total)
            pixels = _counted(self._images(camera, first, end), seen)
            if camera in videos:
                row |= videos[camera].add(pixels)
            else:
                columns[_key_of(camera)] = _png_column(pixels)
            stats[_key_of(camera)] = _pixel_statistics(seen, end - first)
            total += seen
        row |= _named("data", data.add(columns)) | _named("meta/episodes", (0, 0))
        return row | {
            f"stats/{key}/{name}": value.tolist() for key, one in stats.items() for name, value in one.items()
        }

    def _tasks_of(self, first: int, end: int) -> list[str]:
        return [self._tasks[i] for i in np.unique(self._columns["task_index"][first:end]).tolist()]

    def _images(self, camera: str, first: int, end: int) -> Iterator[np.ndarray]:
        """Yield the images (H, W, 3) of an episode, read in blocks."""
        for begin in range(first, end, 64):
            yield from self._data.images[camera][torch.arange(begin, min(begin + 64, end))].numpy()

    def _describe(self) -> dict[str, Any]:
        names = {
            "observation.state": _bare(self._facts, "obs_names", self._data.obs_dim),
            "action": _bare(self._facts, "action_names", self._data.action_dim),
        }
        found: dict[str, Any] = {
            key: {"dtype": str(value.dtype), "shape": list(value.shape[1:]) or [1], "names": names.get(key)}
            for key, value in self._columns.items()
        }
        for camera, (height, width, channels) in self._data.image_shapes.items():
            found[_key_of(camera)] = {
                "dtype": "video" if self._video else "image",
                "shape": [height, width, channels],
                "names": ["height", "width", "channels"],
            }
            if self._video:
                found[_key_of(camera)]["info"] = {
                    "video.height": height, "video.width": width, "video.channels": channels,
                    "video.codec": "h264", "video.pix_fmt": _pixel_format(height, width),
                    "video.fps": self._fps, "video.is_depth_map": False, "has_audio": False,
                }  # fmt: skip
        return found

    def _info(self) -> dict[str, Any]:
        has_videos = self._video and bool(self._data.images)
        return {
            "codebase_version": VERSION,
            "robot_type": self._facts.get("robot"),
            "total_episodes": self._data.num_episodes,
            "total_frames": self._data.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_FOLDER,
            "data_files_size_in_mb": DATA_BYTES // 2**20,
            "video_files_size_in_mb": VIDEO_BYTES // 2**20,
            "fps": self._fps,
            "splits": {"train": f"0:{self._data.num_episodes}"},
            "data_path": DATA,
            "video_path": VIDEO if has_videos else None,
            "features": self._features,
        }


def _columns(dataset: EpisodeDataset, fps: float, num_tasks: int) -> dict[str, np.ndarray]:
    """Return the columns of numbers by feature: (N, width), or (N,) for single numbers."""
    last, lengths = dataset.is_last.numpy(), dataset.lengths.numpy()
    in_episode = np.arange(dataset.num_frames) - np.repeat(dataset.episode_start[:-1].numpy(), lengths)
    columns = {"observation.state": dataset.observations.numpy(), "action": dataset.actions.numpy()}
    if "goal" in dataset.extras:
        columns[GOAL] = dataset.extras["goal"].numpy()
    columns |= {
        "next.reward": dataset.rewards.numpy(),
        DONE: last,
        TERMINATED: dataset.terminated.numpy(),
    }
    if dataset.success is not None:
        columns[SUCCESS] = last & np.repeat(dataset.success.numpy().astype(bool), lengths)
    task = dataset.extras.get("task_index")
    is_known = task is not None and int(task.min()) >= 0 and int(task.max()) < num_tasks
    columns |= {
        "timestamp": (in_episode / fps).astype(np.float32),
        "frame_index": in_episode,
        "episode_index": np.repeat(np.arange(dataset.num_episodes), lengths),
        "index": np.arange(dataset.num_frames),
        "task_index": task.numpy().reshape(-1)
        if task is not None and is_known
        else np.zeros_like(in_episode),
    }
    return {key: value[:, 0] if value.ndim == 2 and value.shape[1] == 1 else value
            for key, value in columns.items()}  # fmt: skip


class _DataFiles:
    """Numbered Parquet files; a full one is followed by the next."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._parquet, self._pa = (require(one, extra="lerobot") for one in ("pyarrow.parquet", "pyarrow"))
        self._folder, self._pattern = folder, pattern
        self._number, self._place = -1, folder
        self._writer: Any = None

    def __enter__(self) -> _DataFiles:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def add(self, columns: Mapping[str, Any]) -> tuple[int, int]:
        """Append rows; returns the numbers of their folder and file."""
        table = self._pa.table(dict(columns))
        if self._writer is not None and self._place.stat().st_size >= DATA_BYTES:
            self.__exit__()
        if self._writer is None:
            self._number += 1
            self._place = self._folder / _numbered(self._pattern, self._number)
            self._place.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(self._place, table.schema)
        self._writer.write_table(table)
        return divmod(self._number, FILES_PER_FOLDER)


class _VideoFiles:
    """Numbered videos of one camera, whole episodes one behind the other."""

    def __init__(self, folder: Path, key: str, shape: Sequence[int], fps: float) -> None:
        self._av = require("av", extra="video")
        self._folder, self._key, (self._height, self._width, _) = folder, key, shape
        self._fps, self._rate = fps, Fraction(fps).limit_denominator(1000)
        self._number, self._frames, self._place = -1, 0, folder
        self._container: Any = None
        self._stream: Any = None

    def __enter__(self) -> _VideoFiles:
        return self

    def __exit__(self, *_: object) -> None:
        if self._container is not None:
            self._container.mux(self._stream.encode())
            self._container.close()
            self._container = None

    def add(self, images: Iterator[np.ndarray]) -> dict[str, Any]:
        """Append the images (H, W, 3) of an episode; returns its columns in the table of episodes."""
        if self._container is not None and self._place.stat().st_size >= VIDEO_BYTES:
            self.__exit__()
        if self._container is None:
            self._begin()
        first = self._frames
        for pixels in images:
            frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts, frame.time_base = self._frames, 1 / self._rate
            self._container.mux(self._stream.encode(frame))
            self._frames += 1
        times = {"from_timestamp": first / self._fps, "to_timestamp": self._frames / self._fps}
        where = _named(f"videos/{self._key}", divmod(self._number, FILES_PER_FOLDER))
        return where | {f"videos/{self._key}/{name}": value for name, value in times.items()}

    def _begin(self) -> None:
        self._number, self._frames = self._number + 1, 0
        self._place = self._folder / _numbered(VIDEO, self._number, video_key=self._key)
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._container = self._av.open(str(self._place), "w")
        self._stream = self._container.add_stream("libx264", rate=self._rate, options=_CODEC)
        self._stream.height, self._stream.width = self._height, self._width
        self._stream.pix_fmt = _pixel_format(self._height, self._width)
        self._stream.codec_context.time_base = 1 / self._rate


def _pixel_format(height: int, width: int) -> str:
    """Return the layout of pixels; half the colours need even sizes."""
    return "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"


def _numbered(pattern: str, number: int, **names: str) -> str:
    chunk, file = divmod(number, FILES_PER_FOLDER)
    return pattern.format(chunk_index=chunk, file_index=file, **names)


def _named(prefix: str, place: tuple[int, int]) -> dict[str, Any]:
    return {f"{prefix}/chunk_index": place[0], f"{prefix}/file_index": place[1]}


def _key_of(camera: str) -> str:
    return f"observation.images.{camera}"


def _bare(facts: Mapping[str, Any], key: str, width: int) -> list[str]:
    """Return names without units (`elbow_flex.pos [deg]` -> elbow_flex.pos), the keys of LeRobot's robots."""
    feature = {"obs_names": "observation.state", "action_names": "action"}[key]
    return [name.partition(" [")[0] for name in facts.get(key) or numbered_names(feature, width)]


def _column(values: np.ndarray) -> Any:
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _png_column(images: Iterator[np.ndarray]) -> Any:
    import pyarrow as pa
    from PIL import Image

    def file(pixels: np.ndarray) -> dict[str, Any]:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.array([file(pixels) for pixels in images], type=kind)


def _statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return LeRobot's statistics of rows (n, width) or (n,), per entry."""
    rows = values.reshape(len(values), -1).astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    quantiles = np.quantile(rows, _QUANTILES, axis=0)
    return found | _by_quantile(quantiles) | {"count": np.array([len(rows)])}


def _pixel_statistics(levels: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Return the same of pixels in [0, 1] from counts of their levels (3, 256), each (3, 1, 1)."""
    share = levels / levels.sum(axis=1, keepdims=True)
    mean = share @ _LEVELS
    std = np.sqrt(np.maximum(share @ _LEVELS**2 - mean**2, 0))
    there = [np.flatnonzero(row) for row in levels]
    found = {"min": _LEVELS[[one[0] for one in there]], "max": _LEVELS[[one[-1] for one in there]]}
    found |= {"mean": mean, "std": std}
    below = share.cumsum(axis=1)
    below[:, -1] = 1.0  # rounding
    quantiles = np.array([[_LEVELS[np.searchsorted(row, q)] for row in below] for q in _QUANTILES])
    shaped = {name: value.reshape(3, 1, 1) for name, value in (found | _by_quantile(quantiles)).items()}
    return shaped | {"count": np.array([count])}


def _by_quantile(values: np.ndarray) -> dict[str, np.ndarray]:
    return {f"q{round(100 * q):02d}": value for q, value in zip(_QUANTILES, values, strict=True)}


def _counted(images: Iterator[np.ndarray], levels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield images (H, W, 3), adding the counts of their levels to `levels` (3, 256)."""
    for pixels in images:
        for channel in range(3):
            levels[channel] += np.bincount(pixels[..., channel].reshape(-1), minlength=256)
        yield pixels


def _write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """Write the table of tasks, indexed by text as pandas would."""
    import pyarrow as pa

    parquet = require("pyarrow.parquet", extra="lerobot")
    index = "__index_level_0__"
    kinds = {"task_index": ("task_index", "int64"), index: (None, "unicode")}
    described = [
        {"name": name, "field_name": field, "pandas_type": kind, "metadata": None,
         "numpy_type": "int64" if kind == "int64" else "object"}
        for field, (name, kind) in kinds.items()
    ]  # fmt: skip
    pandas = {"index_columns": [index], "column_indexes": [], "columns": described}
    table = pa.table({"task_index": np.arange(len(tasks)), index: list(tasks)})
    parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4), encoding="utf-8")
