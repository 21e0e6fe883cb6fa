"""Datasets from Python objects: arrays, dicts of arrays, lists of episodes.

Legend: N frames of E episodes, Do and Da observation and action widths, T frames of one episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from envs.datasets.array_storage import MEMORY, ArrayStorage
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.windows import DECISION
from policies.errors import DatasetError

KEYS = {
    "observations": ("observations", "observation", "obs", "states", "state"),
    "actions": ("actions", "action"),
    "rewards": ("rewards", "reward"),
    "terminated": ("terminated", "terminations", "terminals"),
    "truncated": ("truncated", "truncations", "timeouts"),
    "next_observations": ("next_observations", "next_obs"),
    "episode_start": ("episode_start",),
    "episode_ends": ("episode_ends",),
    "lengths": ("lengths", "traj_lengths"),
    "episode": ("episode", "episodes", "episode_index"),
    "images": ("images",),
}
"""Key -> names under which it is accepted."""
_OF_FRAMES = ("rewards", "terminated", "truncated", "next_observations")
_FORMS = (
    "an EpisodeDataset, (observations, actions), a dict with these two keys, or a list of episodes, each one "
    "of these"
)


def as_dataset(data: Any, *, source: str = "data", storage: ArrayStorage = MEMORY) -> EpisodeDataset:
    """Return a dataset of Python objects.

    Args:
        data: An `EpisodeDataset`; a pair (observations, actions) of arrays (N, Do) and (N, Da); a mapping of
            arrays under the names in `KEYS`; or a list of episodes in any of these forms. Observations may be
            a mapping of arrays by name: vectors are joined by sorted name, uint8 arrays (N, H, W, 3) are
            camera images. Rewards are 0 where there are none. Episodes end where `terminated` or `truncated`
            is set, unless `episode_start` (E+1,), `episode_ends` (E,), `lengths` (E,) or `episode` (N,)
            divide the frames; without any of them all frames are one episode. One episode may have N + 1
            observations.
        source: Name in error messages.
        storage: Where large tensors go.

    Raises:
        DatasetError: If it is something else, or arrays disagree; names keys and shapes, never values.
    """
    if isinstance(data, EpisodeDataset):
        return data
    if isinstance(data, Mapping):
        return _of_arrays(data, source, storage)
    if isinstance(data, tuple) and len(data) == 2:
        return _of_arrays({"observations": data[0], "actions": data[1]}, source, storage)
    if not isinstance(data, Sequence) or isinstance(data, (str, bytes)) or not data:
        raise DatasetError(f"{source}: expected {_FORMS}; got {_kind(data)}.")
    if all(isinstance(one, Episode) for one in data):
        return EpisodeDataset.from_episodes(data, meta={"source": source})
    parts = [as_dataset(one, source=f"{source}[{number}]") for number, one in enumerate(data)]
    return _joined(parts, source)


def _of_arrays(data: Mapping[str, Any], source: str, storage: ArrayStorage) -> EpisodeDataset:
    found = {key: data[name] for key, names in KEYS.items() for name in names if name in data}
    missing = [key for key in ("observations", "actions") if key not in found]
    if missing:
        raise DatasetError(
            f"{source}: expected the keys observations and actions; missing {missing}, found "
            f"{sorted(map(str, data))[:20]}."
        )
    observations, names, images = _observations(found["observations"], source)
    images |= {str(name): np.asarray(one) for name, one in dict(found.get("images") or {}).items()}
    actions = _array(found["actions"], f"{source}: key 'actions'")
    count = len(actions)
    if len(observations) == count + 1 and not images:  # one episode with its last observation
        found.setdefault("next_observations", observations[1:])
        observations = observations[:-1]
    _rows(observations, count, "observations", source)
    columns = {key: _array(found[key], f"{source}: key '{key}'").reshape(count, -1) for key in _OF_FRAMES
               if key in found and _rows(found[key], count, key, source)}  # fmt: skip
    no = np.zeros(count, bool)
    flags = {key: columns.get(key, no).reshape(-1).astype(bool) for key in ("terminated", "truncated")}
    start = _starts(found, flags["terminated"] | flags["truncated"], source)
    following = columns.get("next_observations")
    meta: dict[str, Any] = {"source": source} | ({"interface": {"obs_names": list(names)}} if names else {})
    return EpisodeDataset.from_arrays(
        observations,
        actions,
        columns.get("rewards", np.zeros(count)).reshape(-1),
        flags["terminated"],
        flags["truncated"] if "truncated" in found else None,
        start,
        next_observations=following,
        images=images,
        extras={key: _array(data[key], f"{source}: key '{key}'") for key in ("goal",) if key in data},
        meta=meta,
        storage=storage,
    )


def _observations(given: Any, source: str) -> tuple[np.ndarray, tuple[str, ...], dict[str, np.ndarray]]:
    """Return the state (N, Do), names of its entries if there are some, and images by camera."""
    if not isinstance(given, Mapping):
        return _array(given, f"{source}: key 'observations'"), (), {}
    arrays = {str(key): np.asarray(value) for key, value in given.items()}
    images = {key: value for key, value in arrays.items() if value.dtype == np.uint8 and value.ndim == 4}
    vectors = {key: arrays[key].reshape(len(arrays[key]), -1) for key in sorted(arrays) if key not in images}
    if not vectors:
        raise DatasetError(f"{source}: observations need a vector beside the images {sorted(images)}.")
    names = tuple(f"{key} {i}" for key, value in vectors.items() for i in range(value.shape[1]))
    return np.concatenate(list(vectors.values()), axis=1), names, images


def _starts(found: Mapping[str, Any], ends: np.ndarray, source: str) -> np.ndarray:
    """Return first frames and, last, N, (E+1,)."""
    count = len(ends)
    given = [key for key in ("episode_start", "episode_ends", "lengths", "episode") if key in found]
    if len(given) > 1:
        raise DatasetError(f"{source}: {' and '.join(given)} all divide the episodes; give one of them.")
    if not given:
        inside = np.flatnonzero(ends) + 1
        return np.unique(np.concatenate([[0], inside, [count]]))
    values = np.asarray(found[given[0]]).reshape(-1).astype(np.int64)
    if given == ["episode_start"]:
        return values if values[-1:].tolist() == [count] else np.append(values, count)
    if given == ["episode"] and _rows(values, count, "episode", source):
        return np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [count]])
    starts = np.concatenate([[0], values if given == ["episode_ends"] else np.cumsum(values)])
    if starts[-1] != count:
        raise DatasetError(
            f"{source}: key '{given[0]}' must divide all {count} rows; the last episode ends at {starts[-1]}."
        )
    return starts


def _rows(value: Any, count: int, key: str, source: str) -> bool:
    shape = np.shape(value)
    if shape[:1] != (count,):
        raise DatasetError(f"{source}: key '{key}' must have {count} rows, as actions; got shape {shape}.")
    return True


def _array(value: Any, where: str) -> np.ndarray:
    """Return numbers as an array; the error names type and shape."""
    value = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty((0,), dtype=object)
    if array.dtype.kind not in "biuf" or array.ndim < 1:
        raise DatasetError(f"{where} must hold an array of numbers; got {_kind(value)}.")
    return array


def _common_extras(parts: Sequence[EpisodeDataset]) -> list[str]:
    """Return the extra keys that all parts have, and `decision` where one has it; others decide always."""
    common = [key for key in parts[0].extras if all(key in one.extras for one in parts)]
    decided = any(DECISION in one.extras for one in parts) and DECISION not in common
    return [*common, DECISION] if decided else common


def _extra(one: EpisodeDataset, key: str) -> np.ndarray:
    return one.extras[key].numpy() if key in one.extras else np.ones(one.num_frames, dtype=bool)


def _joined(parts: Sequence[EpisodeDataset], source: str) -> EpisodeDataset:
    """Concatenate datasets of equal widths."""
    first = parts[0]
    for number, one in enumerate(parts):
        widths, expected = (one.obs_dim, one.action_dim), (first.obs_dim, first.action_dim)
        if widths != expected or one.image_shapes != first.image_shapes:
            raise DatasetError(
                f"{source}[{number}]: expected observations and actions of widths {expected} and the images "
                f"{first.image_shapes}, as in {source}[0]; got {widths} and {one.image_shapes}."
            )
    offsets = np.cumsum([0, *(one.num_frames for one in parts)])
    starts = [one.episode_start[:-1].numpy() + at for one, at in zip(parts, offsets, strict=False)]
    every = [one.next_observations for one in parts]
    followed = None if any(one is None for one in every) else np.concatenate([one.numpy() for one in every])  # type: ignore[union-attr]

    def column(key: str) -> np.ndarray:
        return np.concatenate([getattr(one, key).numpy() for one in parts])

    return EpisodeDataset.from_arrays(
        column("observations"),
        column("actions"),
        column("rewards"),
        column("terminated"),
        column("truncated"),
        np.concatenate([*starts, offsets[-1:]]),
        next_observations=followed,
        extras={key: np.concatenate([_extra(one, key) for one in parts]) for key in _common_extras(parts)},
        images={
            camera: np.concatenate(
                [one.images[camera][torch.arange(one.num_frames)].numpy() for one in parts]
            )
            for camera in first.images
        },
        meta=first.meta | {"source": source},
    )


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if shape is not None else ""
    length = f" of length {len(value)}" if shape is None and hasattr(value, "__len__") else ""
    return f"an object {type(value).__name__}{size}{length}"
