"""Minari datasets: folders with HDF5 (or Arrow) files and metadata; neither Minari nor jax is needed.

The flat state concatenates the environment's observation in the order of its space. For observations with
`desired_goal` (mazes, the kitchen, Fetch) it is the part `observation`; `desired_goal` becomes the extra key
`goal` of every frame, and `achieved_goal` an extra key of that name. Images (T+1, H, W, 3) beside numbers
become camera images, as bytes or as the JPEG files that Minari uses from 32 pixels on; other images and texts
are skipped with a warning. Terminations and truncations are read from the file; an episode with neither was
cut and counts as truncated. An episode with `infos/success` in any row is a success. Of T+1 rows the first
belongs to the reset, and row t+1 is the result of step t.

Legend: T actions of an episode, and T+1 observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envs.datasets.array_storage import ArrayStorage, Column, Frames, choose_storage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
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
from envs.datasets.files.npz import check_flags, column
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
    raws = read_episodes(folder, metadata, image_shapes_of(space, ""))
    first = next(raws)
    layout = _layout(first, space, obs_keys)
    meta = {key: metadata[key] for key in _KEPT_META if metadata.get(key) is not None}
    meta |= {"source": str(path), "format": "minari", "not_read": log_skipped_fields(path, layout.unread)}
    collector = _EpisodeCollector(own, storage, {camera: [] for camera in layout.images})
    data = EpisodeDataset.from_episodes(
        (collector.convert(raw, layout, infos) for raw in chain([first], raws)),
        meta={**dict(own.get("meta", {})), **meta},
        frames=Frames(storage, num_frames(folder, metadata)),
        shared=True,
    )
    return collector.finish(data, folder / MAIN_FILE)


def _layout(raw: RawEpisode, space: Any, obs_keys: Sequence[str] | None) -> Layout:
    """Return the layout from the first episode, and from the recorded space if any."""
    parts = _leaves(raw.tree.get("observations"), "")
    if not parts:
        raise DatasetError(f"{raw.name}: expected the key 'observations'; found {sorted(raw.tree)}.")
    kinds = _kinds(space, "") or {}
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


def _leaves(tree: Any, prefix: str) -> dict[str, Any]:
    """Return the arrays of a tree by path; a bare array is the part `observation`."""
    if not isinstance(tree, Mapping):
        return {} if tree is None else {prefix or STATE: tree}
    found: dict[str, Any] = {}
    for key, item in tree.items():
        found |= _leaves(item, f"{prefix}/{key}" if prefix else str(key))
    return found


def _parts(space: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
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


def _kinds(space: Any, prefix: str) -> dict[str, str]:
    """Return the parts of a space by path, in order, with the reason if unread."""
    return {path: _kind(part) for path, part in _parts(space, prefix)}


def _kind(part: Mapping[str, Any]) -> str:
    if part.get("dtype") == "uint8" and len(part.get("shape", ())) == 3:
        return "pictures"
    return "texts" if part.get("type") == "Text" else ""


def image_shapes_of(space: Any, prefix: str) -> dict[str, ImageShape]:
    """Return the shapes (H, W, 3) of image parts of a space, by path."""
    found: dict[str, ImageShape] = {}
    for path, part in _parts(space, prefix):
        shape = tuple(part.get("shape") or ())
        if part.get("dtype") == "uint8" and len(shape) == 3 and shape[2] == 3:
            found[path] = (shape[0], shape[1], 3)
    return found


def _reason(values: Any) -> str:
    """Return why an array cannot be part of the state; empty if it can."""
    if isinstance(values, RawImages):
        return "pictures"
    kind = getattr(values, "dtype", np.dtype(object))
    if kind.kind not in "biuf":
        return "texts"
    return "pictures" if kind == np.uint8 and np.ndim(values) > 2 else ""


def _is_below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _episode(raw: RawEpisode, layout: Layout, infos: bool, own: Sequence[str]) -> Episode:
    actions = raw.tree.get("actions")
    if not isinstance(actions, np.ndarray) or actions.ndim < 2 or actions.dtype.kind not in "biuf":
        got = f"the keys {sorted(raw.tree)}"
        if isinstance(actions, np.ndarray):
            got = f"shape {actions.shape}, type {actions.dtype}"
        raise DatasetError(f"{raw.name}: key 'actions' must have shape (T, Da), continuous; got {got}.")
    num = len(actions)
    if num == 0:
        raise DatasetError(f"{raw.name}: key 'actions' must have at least one row; the episode is empty.")
    parts = _leaves(raw.tree.get("observations"), "")
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
        success=bool(_success(raw)),
        extras=extras,
    )


def _seen(raw: RawEpisode, name: str) -> RawImages:
    """Return the camera images before each action and after the last."""
    values, num = _leaves(raw.tree.get("observations"), "").get(name), len(raw.tree["actions"])
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
    if not isinstance(values, np.ndarray) or values.shape != (num,) or values.dtype.kind not in "biuf":
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
    found = {f"infos/{key}": value for key, value in _leaves(raw.tree.get("infos"), "").items()}
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and len(value) in (num, num + 1)
    }


def _success(raw: RawEpisode) -> bool | None:
    """Whether an episode succeeded in any row; None if not recorded."""
    values = _numbers(raw).get(SUCCESS)
    return None if values is None else bool((values > 0).any())


def _infos(raw: RawEpisode, own: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the numbers under `infos`, a row per step.

    Of T+1 rows the last is left out: a step has what was known when its action was chosen. Success is what
    the action led to, so there the first is left out, unless it is one of our `own` extra keys.
    """
    num = len(raw.tree["actions"])
    return {
        key: value[-num:] if key == SUCCESS and key not in own else value[:num]
        for key, value in _numbers(raw).items()
    }


@dataclass
class _EpisodeCollector:
    """Per-episode values, collected while episodes are read.

    Attributes:
        own: Metadata of own files.
        storage: Storage of images that are not read from their file.
        images: Images of every camera, by episode.
        attributes: Attributes of every episode.
        tells_success: Whether every episode has a success value.
    """

    own: Mapping[str, Any]
    storage: ArrayStorage
    images: dict[str, list[RawImages]]
    attributes: list[Mapping[str, Any]] = field(default_factory=list)
    tells_success: bool = True

    def convert(self, raw: RawEpisode, layout: Layout, infos: bool) -> Episode:
        """Convert an episode and collect its values."""
        episode = _episode(raw, layout, infos, self.own.get("extras", ()))
        self.tells_success = self.tells_success and _success(raw) is not None
        self.attributes.append(raw.attributes)
        for camera, name in layout.images.items():
            self.images[camera].append(_seen(raw, name))
        return episode

    def finish(self, data: EpisodeDataset, file: Path) -> EpisodeDataset:
        """Return the assembled dataset; unrecorded episode values are omitted."""
        own = self.own.get("extras", ())
        extras = {k.removeprefix("infos/") if k in own else k: value for k, value in data.extras.items()}
        successors = data.next_observations if self.own.get("successors_recorded", True) else None
        start = data.episode_start.numpy()
        images = {
            key: Images(_store(key, seen, file, start, self.storage)) for key, seen in self.images.items()
        }
        return replace(
            data,
            extras=extras,
            episode_extras=self._episode_extras(data),
            next_observations=successors,
            images=images,
        )

    def _episode_extras(self, data: EpisodeDataset) -> dict[str, torch.Tensor]:
        known = {"success": data.episode_extras["success"]} if self.tells_success else {}
        seeds = [one.get("seed") for one in self.attributes]
        if all(isinstance(seed, (int, np.integer)) and -(2**63) <= seed < 2**63 for seed in seeds):
            known["seed"] = torch.tensor([int(seed) for seed in seeds], dtype=torch.int64)  # type: ignore[arg-type]
        for name in (key for key in self.attributes[0] if key.startswith(OWN_ATTRIBUTE)):
            if all(name in one for one in self.attributes):
                values = np.stack([np.asarray(one[name]) for one in self.attributes])
                known[name.removeprefix(OWN_ATTRIBUTE)] = torch.from_numpy(values)
        return known


def _store(
    camera: str, seen: Sequence[RawImages], file: Path, start: np.ndarray, storage: ArrayStorage
) -> Store:
    """Return the storage of a camera's images, one frame per action.

    Raises:
        DatasetError: If the episodes' images differ in kind.
    """
    kinds = {(one.shape[1:], one.encoded, one.key is None) for one in seen}
    if len(kinds) > 1:
        raise DatasetError(
            f"{file.parent}: images of camera '{camera}' must be stored in one shape and one way; got "
            f"{sorted({one.shape[1:] for one in seen})}."
        )
    image, encoded = (seen[0].shape[1], seen[0].shape[2], seen[0].shape[3]), seen[0].encoded
    if seen[0].key is not None:
        kind = EncodedInHdf5 if encoded else InHdf5
        return kind(file.absolute(), tuple(str(one.key) for one in seen), start, image)
    if encoded:
        files = BlobColumn(storage)
        for part in seen:
            files.add(part.values[:-1])
        return Compressed(files.joined(), image, f"{file.parent}: camera '{camera}'")
    pixels = Column(storage, int(start[-1]))
    for part in seen:
        pixels.add(part.values[:-1])
    return InMemory(pixels.joined())
