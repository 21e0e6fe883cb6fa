"""Minari datasets: folders with HDF5 (or Arrow) files and metadata; neither Minari nor jax is needed.

The flat state concatenates the environment's observation in the order of its space. For observations with
`desired_goal` (mazes, the kitchen, Fetch) it is the part `observation`; `desired_goal` becomes the extra key
`goal` of every frame, and `achieved_goal` an extra key of that name. Images (T+1, H, W, 3) beside numbers
become camera images; other images and texts are skipped with a warning. An episode with neither termination
nor truncation counts as truncated. An episode with `infos/success` in any row is a success. Of T+1 rows the
first belongs to the reset, and row t+1 is the result of step t.

Legend: T actions of an episode, and T+1 observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import ArrayStorage, Column, Frames, choose_storage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeCollector, EpisodeDataset, rows_of
from envs.datasets.files.arrays import check_flags, check_keys, check_rows, column, is_numeric
from envs.datasets.files.minari import (
    BARE,
    MAIN_FILE,
    RawEpisode,
    RawImages,
    bytes_of,
    find_data,
    num_frames,
    read_episodes,
    read_metadata,
)
from envs.datasets.images import (
    BlobColumn,
    Compressed,
    EncodedInHdf5,
    Images,
    InHdf5,
    InMemory,
    Store,
    camera_of,
)
from policies.encoders import ImageShape
from policies.errors import DatasetError

STATE, GOAL, ACHIEVED = BARE, "desired_goal", "achieved_goal"
SUCCESS = "infos/success"
_EXTRAS = {GOAL: "goal", ACHIEVED: ACHIEVED}  # part of the observation -> extra key
_KEPT_META = ("dataset_id", "env_spec", "algorithm_name", "ref_min_score", "ref_max_score", "minari_version")
OWN_ATTRIBUTE = "episode_extras/"


@dataclass(frozen=True)
class Layout:
    """Assignment of observation parts; names are paths such as `desired_goal/kettle`.

    Attributes:
        state: Parts of the flat state, in order.
        extras: Parts of every extra key.
        images: Part of every camera.
        unread: Reason for every skipped part.
    """

    state: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]
    images: Mapping[str, str]
    unread: Mapping[str, str]


def matches(path: str | Path) -> bool:
    """Whether a path is a Minari dataset: its folder, its `data` folder, or its main file."""
    return find_data(path) is not None


def read(
    path: str | Path,
    *,
    obs_keys: Sequence[str] | None = None,
    infos: bool = True,
    cache: str | Path | None = None,
) -> EpisodeDataset:
    """Read a Minari dataset: a folder with data/metadata.json, stored as HDF5, Arrow or Parquet.

    Args:
        path: The dataset's folder.
        obs_keys: Parts of the flat state, in order, e.g. `observation`, `desired_goal`; None: see the
            module.
        infos: Also keep numbers under `infos` present in every step of every episode, as `infos/<key>`.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If it does not hold a usable dataset; names file, episode and key.
    """
    folder = find_data(path)
    if folder is None:
        raise DatasetError(f"{path}: expected a Minari dataset: a folder with data/metadata.json.")
    metadata = read_metadata(folder)
    space, own = metadata.get("observation_space"), metadata.get("burnish") or {}
    storage = choose_storage(bytes_of(folder, metadata), path, cache=cache)
    raws = read_episodes(folder, metadata, image_shapes_of(space))
    first = next(raws)
    layout, own_extras = _layout(first, space, obs_keys), own.get("extras", ())
    meta = {key: metadata[key] for key in _KEPT_META if metadata.get(key) is not None}
    meta |= {"source": str(path), "format": "minari", "not_read": log_skipped_fields(path, layout.unread)}
    frames = Frames(storage, num_frames(folder, metadata))
    episodes = EpisodeCollector(str(path), frames, drop_unequal=True)
    images: dict[str, list[RawImages]] = {camera: [] for camera in layout.images}
    for raw in chain([first], raws):
        episode = _episode(raw, layout, infos, own_extras)
        ends = episode.terminated, episode.truncated
        episodes.add(raw.name, rows_of(episode), ends, _episode_extras(raw))
        for camera, name in layout.images.items():
            images[camera].append(_raw_images(raw, name))
    stores = {
        camera: Images(_store(camera, found, folder / MAIN_FILE, episodes.start, storage))
        for camera, found in images.items()
    }
    meta = {**dict(own.get("meta", {})), **meta}
    return episodes.dataset(meta, stores, has_successors=own.get("successors_recorded", True))


def _layout(raw: RawEpisode, space: Any, obs_keys: Sequence[str] | None) -> Layout:
    """Return the layout from the first episode, and from the recorded space if any."""
    check_keys(raw.name, ("observations",), raw.tree)
    parts = _leaves(raw.tree["observations"])
    kinds = {name: _kind(part) for name, part in _parts(space)}
    order = [name for name in kinds if name in parts] + [name for name in parts if name not in kinds]
    unread = {name: why for name in order if (why := kinds.get(name) or _reason(parts[name]))}
    usable = [name for name in order if name not in unread]
    images = {camera_of(name): name for name in unread if isinstance(parts[name], RawImages)}
    unread = {name: why for name, why in unread.items() if name not in images.values()}
    if obs_keys is not None:
        state = [name for key in obs_keys for name in usable if _is_below(name, key)]
        missing = [key for key in obs_keys if not any(_is_below(name, key) for name in usable)]
    else:
        has_goal = any(_is_below(name, GOAL) for name in usable)
        state = [name for name in usable if _is_below(name, STATE)] if has_goal else usable
        missing = []
    if missing or not state:
        raise DatasetError(
            f"{raw.name}: expected vectors of numbers as observations{f' {missing}' if missing else ''}; "
            f"found {usable or 'none'}{f', and not read: {list(unread)}' if unread else ''}."
        )
    extras = {
        extra: tuple(name for name in usable if _is_below(name, part)) for part, extra in _EXTRAS.items()
    }
    return Layout(tuple(state), {key: names for key, names in extras.items() if names}, images, unread)


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a tree by path; a bare array is the part `observation`."""
    if not isinstance(tree, Mapping):
        return {} if tree is None else {prefix or STATE: tree}
    found: dict[str, Any] = {}
    for key, item in tree.items():
        found |= _leaves(item, f"{prefix}/{key}" if prefix else str(key))
    return found


def _parts(space: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the leaf parts of a space, by path and in its order."""
    if not isinstance(space, Mapping):
        return
    inner = space.get("subspaces")
    if isinstance(inner, list):
        inner = dict(enumerate(inner))
    if not isinstance(inner, Mapping):
        yield prefix or STATE, space
        return
    for key, item in inner.items():
        yield from _parts(item, f"{prefix}/{key}" if prefix else str(key))


def _kind(part: Mapping[str, Any]) -> str:
    """Return why a part of a space cannot be part of the state; empty if it can."""
    if part.get("dtype") == "uint8" and len(part.get("shape", ())) == 3:
        return "no RGB images in bytes"
    return "texts" if part.get("type") == "Text" else ""


def image_shapes_of(space: Any) -> dict[str, ImageShape]:
    """Return the shapes (H, W, 3) of image parts of a space, by path."""
    found: dict[str, ImageShape] = {}
    for path, part in _parts(space):
        shape = tuple(part.get("shape") or ())
        if part.get("dtype") == "uint8" and len(shape) == 3 and shape[2] == 3:
            found[path] = (shape[0], shape[1], 3)
    return found


def _reason(values: Any) -> str:
    """Return why an array cannot be part of the state; empty if it can."""
    if isinstance(values, RawImages):
        return "no RGB images in bytes"
    if not is_numeric(values):
        return "texts"
    return "no RGB images in bytes" if values.dtype == np.uint8 and values.ndim > 2 else ""


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _episode(raw: RawEpisode, layout: Layout, infos: bool, own: Sequence[str]) -> Episode:
    check_keys(raw.name, ("actions",), raw.tree)
    actions = raw.tree["actions"]
    if not isinstance(actions, np.ndarray) or actions.ndim < 2 or not is_numeric(actions):
        got = f"shape {np.shape(actions)}, type {getattr(actions, 'dtype', type(actions).__name__)}"
        raise DatasetError(f"{raw.name}: key 'actions' must have shape (T, Da), continuous; got {got}.")
    num = check_rows(raw.name, {"actions": actions}, "actions")
    parts = _leaves(raw.tree.get("observations"))
    extras = {key: _joined(raw, parts, names, num)[:-1] for key, names in layout.extras.items()}
    if infos:
        extras |= _infos(raw, own)
    ends = {key: _end(raw, key, num) for key in ("terminations", "truncations")}
    return Episode(
        observations=_joined(raw, parts, layout.state, num),
        actions=actions.reshape(num, -1),
        rewards=_rows(raw, "rewards", num),
        terminated=ends["terminations"],
        truncated=ends["truncations"] or not ends["terminations"],
        extras=extras,
    )


def _raw_images(raw: RawEpisode, name: str) -> RawImages:
    """Return the camera images before each action and after the last."""
    values, num = _leaves(raw.tree.get("observations")).get(name), len(raw.tree["actions"])
    if not isinstance(values, RawImages) or values.shape[0] != num + 1:
        raise DatasetError(
            f"{raw.name}: key 'observations' must have {num + 1} images in '{name}', one more than there are "
            f"actions; got {'nothing' if values is None else getattr(values, 'shape', np.shape(values))}."
        )
    return values


def _joined(raw: RawEpisode, parts: Mapping[str, Any], names: Sequence[str], num: int) -> np.ndarray:
    """Join parts of the observation, each (T+1, ...), to (T+1, D)."""
    for name in names:
        shape = np.shape(parts[name]) if name in parts else "nothing"
        if name not in parts or shape[:1] != (num + 1,) or _reason(parts[name]):
            raise DatasetError(
                f"{raw.name}: key 'observations' must have {num + 1} rows of numbers in '{name}', one more "
                f"than there are actions; got {shape}."
            )
    return np.concatenate([parts[name].reshape(num + 1, -1) for name in names], axis=1)


def _rows(raw: RawEpisode, key: str, num: int) -> np.ndarray:
    values = raw.tree.get(key)
    values = column(values) if isinstance(values, np.ndarray) and values.ndim else values
    if not isinstance(values, np.ndarray) or values.shape != (num,) or not is_numeric(values):
        got = "nothing" if values is None else f"shape {np.shape(values)}"
        raise DatasetError(f"{raw.name}: key '{key}' must have {num} numbers, one per action; got {got}.")
    return values


def _end(raw: RawEpisode, key: str, num: int) -> bool:
    """Whether the last step has a flag; no other step may have it."""
    flags = check_flags(raw.name, key, _rows(raw, key, num))
    if flags[:-1].any():
        raise DatasetError(
            f"{raw.name}: key '{key}' may be set on the last step only; it is set on step "
            f"{int(np.argmax(flags))} of {num}."
        )
    return bool(flags[-1])


def _numbers(raw: RawEpisode) -> dict[str, np.ndarray]:
    """Return the numbers under `infos` that have a row per step, T, or one more for the reset, T+1."""
    num = len(raw.tree["actions"])
    found = {f"infos/{key}": value for key, value in _leaves(raw.tree.get("infos")).items()}
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, np.ndarray) and is_numeric(value) and len(value) in (num, num + 1)
    }


def _infos(raw: RawEpisode, own: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the numbers under `infos`, a row per step; `own` keys get their original names.

    Of T+1 rows the last is dropped: a step has the values known when its action was chosen. Success is a
    result of the action, so there the first is dropped, unless it is one of the `own` keys.
    """
    num = len(raw.tree["actions"])
    return {
        key.removeprefix("infos/") if key in own else key: (
            value[-num:] if key == SUCCESS and key not in own else value[:num]
        )
        for key, value in _numbers(raw).items()
    }


def _episode_extras(raw: RawEpisode) -> dict[str, Any]:
    """Return the recorded values of an episode: success, seed, and those of own files."""
    found: dict[str, Any] = {}
    values, seed = _numbers(raw).get(SUCCESS), raw.attributes.get("seed")
    if values is not None:
        found["success"] = bool((values > 0).any())
    if isinstance(seed, (int, np.integer)) and -(2**63) <= seed < 2**63:
        found["seed"] = np.int64(seed)
    own = {key: value for key, value in raw.attributes.items() if key.startswith(OWN_ATTRIBUTE)}
    return found | {key.removeprefix(OWN_ATTRIBUTE): np.asarray(value) for key, value in own.items()}


def _store(
    camera: str, episodes: Sequence[RawImages], file: Path, start: np.ndarray, storage: ArrayStorage
) -> Store:
    """Return the storage of a camera's images, one frame per action; all must be stored in the same way."""
    kinds = {(one.shape[1:], one.encoded, one.key is None) for one in episodes}
    if len(kinds) > 1:
        raise DatasetError(
            f"{file.parent}: images of camera '{camera}' must be stored in one shape and one way; got "
            f"{sorted({one.shape[1:] for one in episodes})}."
        )
    first = episodes[0]
    image = (first.shape[1], first.shape[2], first.shape[3])
    if first.key is not None:
        kind = EncodedInHdf5 if first.encoded else InHdf5
        return kind(file.absolute(), tuple(str(one.key) for one in episodes), start, image)
    values = BlobColumn(storage) if first.encoded else Column(storage, int(start[-1]))
    for one in episodes:
        values.add(one.values[:-1])
    if isinstance(values, BlobColumn):
        return Compressed(values.joined(), image, f"{file.parent}: camera '{camera}'")
    return InMemory(values.joined())
