"""Datasets from Python objects: arrays, dicts of arrays, lists of episodes.

Legend: N frames of E episodes, Do and Da observation and action widths, T frames of one episode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from envs.datasets.array_storage import MEMORY, ArrayStorage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.interface import interface_of
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
    "goal": ("goal",),
}
"""Key -> names under which it is accepted; of several in the same data the first is read."""
DIVIDERS = ("episode_start", "episode_ends", "lengths", "episode")
"""Keys that divide the frames into episodes."""
HINT = "The accepted keys are listed in docs/own_data.md."
_KEPT = "Only what all have alike is kept."
_DONE = ("dones", "done")  # may mean terminated, truncated or both
_OF_FRAMES = ("rewards", "terminated", "truncated", "next_observations")
_LEAST_SIDE = 8  # of images; smaller matrices are vectors
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
            observations. Other names are not read, with a warning, and listed in `meta["not_read"]`.
        source: Name in error messages.
        storage: Where large tensors go.

    Raises:
        DatasetError: If it is something else, arrays disagree, or only `dones` or `done` marks ends of
            episodes; names keys and shapes, never values.
    """
    unread: dict[str, str] = {}
    dataset = _converted(data, source, storage, unread)
    if unread:
        dataset.meta["not_read"] = log_skipped_fields(source, unread, hint=HINT)
    return dataset


def names_to_read(names: Collection[Any], source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Choose the arrays that a dataset is made of.

    Returns:
        Key of `KEYS` -> its name among `names`, and every other name -> why it is not read.

    Raises:
        DatasetError: If only `dones` or `done` marks ends of episodes.
    """
    used = {key: name for key, known in KEYS.items() for name in reversed(known) if name in names}
    done = [name for name in _DONE if name in names]
    if done and not {"terminated", "truncated", *DIVIDERS} & set(used):
        raise DatasetError(
            f"{source}: key '{done[0]}' may mean that the task ended or that time ran out. Name it "
            f"'terminated' (the task ended) or 'truncated' (a time limit)."
        )
    unread = {str(name): _reason(name, used) for name in names if name not in used.values()}
    return used, unread


def _reason(name: Any, used: Mapping[str, Any]) -> str:
    """Return why a name is not read, with the key that was probably meant."""
    for key, known in KEYS.items():
        if name in known:
            return f"{used[key]} is read"
    if name in _DONE:
        return "it does not tell terminated from truncated"
    free = {known: key for key, names in KEYS.items() if key not in used for known in names}
    near = get_close_matches(str(name).lower(), free, n=1, cutoff=0.7)
    return f"did you mean {free[near[0]]}?" if near else "unknown key"


def _converted(data: Any, source: str, storage: ArrayStorage, unread: dict[str, str]) -> EpisodeDataset:
    """Return a dataset of Python objects; adds to `unread` the names that are not read."""
    if isinstance(data, EpisodeDataset):
        return data
    if isinstance(data, Mapping):
        return _of_arrays(data, source, storage, unread)
    if isinstance(data, tuple) and len(data) == 2:
        return _of_arrays({"observations": data[0], "actions": data[1]}, source, storage, unread)
    if isinstance(data, (list, tuple)) and not data:
        raise DatasetError(f"{source}: the list of episodes is empty.")
    if not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
        raise DatasetError(f"{source}: expected {_FORMS}; got {_kind(data)}.")
    if all(isinstance(one, Episode) for one in data):
        return EpisodeDataset.from_episodes(data, meta={"source": source})
    parts = [_converted(one, f"{source}[{at}]", MEMORY, unread) for at, one in enumerate(data)]
    arrays = [(one, part) for one, part in zip(data, parts, strict=True) if isinstance(one, Mapping | tuple)]
    rewarded = [isinstance(one, Mapping) and not set(KEYS["rewards"]).isdisjoint(one) for one, _ in arrays]
    _require_of_all("rewards", rewarded, source)
    named = [part.meta.get("interface", {}).get("obs_names") for _, part in arrays]
    if other := [names for names in named if names != named[0]]:
        raise DatasetError(
            f"{source}: all episodes must have the same observations; got {named[0]} and {other[0]}."
        )
    return _joined(parts, source)


def _require_of_all(key: str, has: Sequence[bool], source: str) -> None:
    """Refuse episodes of which only some have a key."""
    if any(has) and not all(has):
        raise DatasetError(
            f"{source}: {sum(has)} of {len(has)} episodes have the key '{key}'. Give it to all of them, or "
            "to none."
        )


def _of_arrays(
    data: Mapping[str, Any], source: str, storage: ArrayStorage, unread: dict[str, str]
) -> EpisodeDataset:
    used, others = names_to_read(data, source)
    unread |= others
    found = {key: data[name] for key, name in used.items()}
    missing = [key for key in ("observations", "actions") if key not in found]
    if missing:
        raise DatasetError(
            f"{source}: expected the keys observations and actions; missing {missing}, found "
            f"{sorted(map(str, data))[:20]}."
        )
    observations, names, images = _observations(found["observations"], source)
    images |= _cameras(found.get("images", {}), source)
    actions = _array(found["actions"], f"{source}: key 'actions'")
    count = len(actions)
    if not count:
        raise DatasetError(f"{source}: key 'actions' is empty; expected at least one frame.")
    is_whole = len(observations) == count + 1 and "next_observations" not in found
    if len(observations) == count + 1:  # one episode with its last observation
        found.setdefault("next_observations", observations[1:])
        observations = observations[:-1]
        images = {key: one[:-1] if len(one) == count + 1 else one for key, one in images.items()}
    _require_rows(observations, count, "observations", source)
    columns: dict[str, np.ndarray] = {}
    for key in (key for key in _OF_FRAMES if key in found):
        _require_rows(found[key], count, key, source)
        columns[key] = _array(found[key], f"{source}: key '{key}'").reshape(count, -1)
    no = np.zeros(count, bool)
    flags = {key: columns.get(key, no).reshape(-1).astype(bool) for key in ("terminated", "truncated")}
    start = _starts(found, flags["terminated"] | flags["truncated"], source)
    if is_whole and len(start) > 2:
        raise DatasetError(
            f"{source}: key 'observations' has {count + 1} rows for {count} actions, as one episode may; "
            f"there are {len(start) - 1}. Give a list of episodes, or {count} rows and 'next_observations'."
        )
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
        extras={key: _array(found[key], f"{source}: key '{key}'") for key in ("goal",) if key in found},
        meta=meta,
        storage=storage,
    )


def _cameras(given: Any, source: str) -> dict[str, np.ndarray]:
    if not isinstance(given, Mapping):
        raise DatasetError(
            f"{source}: key 'images' must hold arrays by camera name, for example {{'wrist': …}}, in a file "
            f"images/wrist; got {_kind(given)}."
        )
    return {str(name): np.asarray(one) for name, one in given.items()}


def _observations(given: Any, source: str) -> tuple[np.ndarray, tuple[str, ...], dict[str, np.ndarray]]:
    """Return the state (N, Do), names of its entries if there are some, and images by camera."""
    if not isinstance(given, Mapping):
        state = _array(given, f"{source}: key 'observations'")
        _refuse_other_images(state, "observations", source)
        return state, (), {}
    arrays = {str(key): np.asarray(value) for key, value in given.items()}
    images = {key: value for key, value in arrays.items() if value.dtype == np.uint8 and value.ndim == 4}
    for key in arrays.keys() - images.keys():
        _refuse_other_images(arrays[key], key, source)
    vectors = {key: arrays[key].reshape(len(arrays[key]), -1) for key in sorted(arrays) if key not in images}
    if not vectors:
        raise DatasetError(f"{source}: observations need a vector beside the images {sorted(images)}.")
    names = tuple(f"{key} {i}" for key, value in vectors.items() for i in range(value.shape[1]))
    return np.concatenate(list(vectors.values()), axis=1), names, images


def _refuse_other_images(array: np.ndarray, key: str, source: str) -> None:
    """Refuse as a vector what has height and width of an image."""
    sides = array.shape[1:]
    if len(sides) >= 2 and max(min(sides[:2]), min(sides[-2:])) >= _LEAST_SIDE:
        raise DatasetError(
            f"{source}: observation '{key}' looks like images; got {array.dtype} of shape {array.shape}. "
            "Images are uint8 (N, H, W, 3); flatten other arrays to (N, D)."
        )


def _starts(found: Mapping[str, Any], ends: np.ndarray, source: str) -> np.ndarray:
    """Return first frames and, last, N, (E+1,)."""
    count = len(ends)
    given = [key for key in DIVIDERS if key in found]
    if len(given) > 1:
        raise DatasetError(f"{source}: {' and '.join(given)} all divide the episodes; give one of them.")
    if not given:
        inside = np.flatnonzero(ends) + 1
        return np.unique(np.concatenate([[0], inside, [count]]))
    values = np.asarray(found[given[0]]).reshape(-1).astype(np.int64)
    if given == ["episode_start"]:
        return values if values[-1:].tolist() == [count] else np.append(values, count)
    if given == ["episode"]:
        _require_rows(values, count, "episode", source)
        return np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [count]])
    starts = np.concatenate([[0], values if given == ["episode_ends"] else np.cumsum(values)])
    if starts[-1] != count:
        raise DatasetError(
            f"{source}: key '{given[0]}' must divide all {count} rows; the last episode ends at {starts[-1]}."
        )
    return starts


def _require_rows(value: Any, count: int, key: str, source: str) -> None:
    shape = np.shape(value)
    if shape[:1] != (count,):
        raise DatasetError(f"{source}: key '{key}' must have {count} rows, as actions; got shape {shape}.")


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


def _common_extras(parts: Sequence[EpisodeDataset], source: str) -> list[str]:
    """Return the extra keys that all parts have alike, and `decision` where one has it; others decide always.

    Raises:
        DatasetError: If goals differ in width, or only some parts have them.
    """
    _require_of_all("goal", ["goal" in one.extras for one in parts], source)
    common = _alike([one.extras for one in parts])
    decided = any(DECISION in one.extras for one in parts)
    lost = sorted({key for one in parts for key in one.extras} - {*common, DECISION})
    if "goal" in lost:
        shapes = sorted({tuple(one.extras["goal"].shape[1:]) for one in parts})
        raise DatasetError(f"{source}: key 'goal' must have one shape per frame; got {shapes}.")
    log_skipped_fields(source, dict.fromkeys(lost, "not alike in all parts"), _KEPT)
    return [*(key for key in common if key != DECISION), *([DECISION] if decided else [])]


def _alike(tables: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
    """Return the keys that all tables have, with rows of one shape."""
    shapes = [{key: value.shape[1:] for key, value in one.items()} for one in tables]
    return [key for key, shape in shapes[0].items() if all(one.get(key) == shape for one in shapes)]


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
    extras = _common_extras(parts, source)
    facts = [interface_of(one.meta, one.obs_dim, one.action_dim) for one in parts]
    common = {key: value for key, value in facts[0].items() if all(one.get(key) == value for one in facts)}
    lost = sorted({key for one in facts for key in one} - set(common))
    log_skipped_fields(source, dict.fromkeys(lost, "not alike in all parts"), _KEPT)
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
        extras={key: np.concatenate([_extra(one, key) for one in parts]) for key in extras},
        episode_extras={
            key: np.concatenate([one.episode_extras[key].numpy() for one in parts])
            for key in _alike([one.episode_extras for one in parts])
        },
        images={
            camera: np.concatenate(
                [one.images[camera][torch.arange(one.num_frames)].numpy() for one in parts]
            )
            for camera in first.images
        },
        meta=first.meta | {"source": source} | ({"interface": common} if facts[0] else {}),
    )


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if shape is not None else ""
    length = f" of length {len(value)}" if shape is None and hasattr(value, "__len__") else ""
    return f"an object {type(value).__name__}{size}{length}"
