"""D4RL HDF5 files, read with h5py.

`read` returns correct episodes: time-outs are truncations and keep their transition if the file stores the
true successor, a terminal on a time-out step stays a terminal, and the unfinished end of the file is a
truncated episode. `d4rl_compat=True` returns exactly the transitions of
`d4rl.qlearning_dataset`, and `qlearning_dataset` and `sequence_dataset` reproduce the two official
conversions bit for bit, with these properties:

- the last row of the file never becomes a transition, and successors are `observations[i+1]` even across
  episodes;
- a step flagged as time-out is dropped, also when it is a terminal; with `terminate_on_end` it is kept
  with done = False although its successor belongs to the next episode;
- without `timeouts`, the step counter starts at 1 after a terminal (transitions) or after any end
  (episodes), so that limits are met one step early.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from envs.datasets.array_storage import MEMORY, ArrayStorage, choose_storage, pieces
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.arrays import check_flags, check_keys, check_rows, column, is_numeric
from envs.datasets.files.hdf5 import (
    datasets_of,
    json_attribute,
    peek_hdf5,
    read_hdf5,
    read_numbers,
    read_value,
)
from policies.errors import ConfigError, DatasetError

_log = logging.getLogger(__name__)

_REQUIRED = ("observations", "actions", "rewards", "terminals")
_FRAMES = (*_REQUIRED, "timeouts", "next_observations")
GOAL = "infos/goal"  # goal key of mazes
OWN_ATTRIBUTE = "burnish"  # attribute of own files: names and facts outside the D4RL layout
_JUMP = 1e-5  # relative tolerance for rounding between a successor and the next row

Arrays = dict[str, Any]
"""Slash-separated key -> array, or scalar for scalar datasets."""


class FrameKeyError(DatasetError, IndexError):
    """A key has no row for every step of the file."""


def matches(path: str | Path) -> bool:
    """Whether a file has the D4RL layout; a group of observations is of plain arrays."""
    with peek_hdf5(path) as file:
        if file is None or "data" in file or not set(_REQUIRED) <= set(file):
            return False
        return file.get("observations", getclass=True) is not h5py.Group


def load_d4rl(path: str | Path) -> Arrays:
    """Read every dataset of a file under its slash path; (N, 1) rewards and flags become (N,)."""
    return _load(path, infos=True, others=True, cache=None)[0]


def _load(
    path: str | Path, *, infos: bool, others: bool, cache: str | Path | None
) -> tuple[Arrays, dict[str, Any], ArrayStorage]:
    """Read arrays and own names, without `infos/` or unused arrays, such as policy weights, if so wished."""
    with read_hdf5(path) as file:
        own = _own_names(file, path)
        wanted = {
            key: item
            for key, item in datasets_of(file).items()
            if (infos if key.startswith("infos/") else others or key in _FRAMES or not item.shape)
        }
        advice = "Leave out what is under infos/ with reader.infos=false." if infos else ""
        storage = choose_storage(sum(map(_bytes_of, wanted.values())), path, cache=cache, advice=advice)
        arrays = {
            key: (read_numbers if key in _FRAMES else read_value)(item, str(path), key, storage)
            for key, item in wanted.items()
        }
    arrays = {key: value for key, value in arrays.items() if not isinstance(value, h5py.Empty)}
    check_keys(path, _REQUIRED, arrays)
    num = check_rows(path, {key: arrays[key] for key in _FRAMES if key in arrays}, "observations")
    for key in ("terminals", "timeouts"):
        if key in arrays:
            arrays[key] = column(arrays[key])
            check_flags(path, key, arrays[key])
    arrays["rewards"] = column(arrays["rewards"])
    for key, shape in (("rewards", (num,)), ("next_observations", arrays["observations"].shape)):
        if key in arrays and arrays[key].shape != shape:
            raise DatasetError(f"{path}: key '{key}' must have shape {shape}; got {arrays[key].shape}.")
    return arrays, own, storage


def _bytes_of(item: h5py.Dataset) -> int:
    """Return the bytes of an array as stored, plus those of a float32 copy if converted."""
    converted = item.dtype.kind == "f" and item.dtype.itemsize != 4 and not item.name.startswith("/infos/")
    return int(item.nbytes + (4 * item.size if converted and item.size else 0))


def qlearning_dataset(
    arrays: Mapping[str, Any],
    *,
    terminate_on_end: bool = False,
    max_episode_steps: int | None = None,
    storage: ArrayStorage = MEMORY,
) -> dict[str, np.ndarray]:
    """Reproduce `d4rl.qlearning_dataset`: (M, ·) float32 arrays and bool `terminals`.

    Args:
        arrays: From `load_d4rl`.
        terminate_on_end: Keep time-out steps (their successors are wrong; see the module).
        max_episode_steps: Needed for files without `timeouts`.
        storage: Where the result goes.
    """
    rows, _ = _official_rows(arrays, terminate_on_end, max_episode_steps)
    return {
        "observations": storage.take_array(arrays["observations"], rows, np.float32),
        "actions": storage.take_array(arrays["actions"], rows, np.float32),
        "next_observations": storage.take_array(arrays["observations"], rows + 1, np.float32),
        "rewards": arrays["rewards"][rows].astype(np.float32),
        "terminals": arrays["terminals"][rows].astype(bool),
    }


def sequence_dataset(
    arrays: Mapping[str, Any], *, max_episode_steps: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Reproduce `d4rl.sequence_dataset`: one dictionary of arrays per closed episode.

    Raises:
        FrameKeyError: If a key, such as policy weights under `metadata/`, has no row for every step.
    """
    num = len(arrays["rewards"])
    short = sorted(key for key, value in arrays.items() if np.ndim(value) == 0 or len(value) < num)
    if short:
        raise FrameKeyError(f"expected keys with {num} rows, one per step; remove {short} first.")
    final = _official_ends(arrays, max_episode_steps, after_limit=1)
    start = 0
    for end in (np.flatnonzero(final | arrays["terminals"].astype(bool)) + 1).tolist():
        yield {key: value[start:end] for key, value in arrays.items()}
        start = end


def read(
    path: str | Path,
    *,
    max_episode_steps: int | None = None,
    d4rl_compat: bool = False,
    infos: bool = True,
    cache: str | Path | None = None,
) -> EpisodeDataset:
    """Read a D4RL file as episodes: observations and actions at the top.

    Args:
        path: HDF5 file.
        max_episode_steps: Time limit in steps, for files without `timeouts` or with incomplete ones. Unused
            with `d4rl_compat` if there are `timeouts`.
        d4rl_compat: Reproduce the official transitions instead of correct ones (see the module).
        infos: Also keep keys under `infos/` with one row per frame or episode; the goals of mazes,
            `infos/goal`, become the extra key `goal`.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        ConfigError: If the time limit is below 1.
        DatasetError: If the file does not hold a usable dataset; names file and key.
    """
    if max_episode_steps is not None and max_episode_steps < 1:
        raise ConfigError(f"reader.max_episode_steps must be at least 1, or null; got {max_episode_steps}.")
    arrays, own, storage = _load(path, infos=infos, others=False, cache=cache)
    meta = own.get("meta", {}) | {"source": str(path), "format": "d4rl"}
    meta |= {key: _plain(value) for key, value in arrays.items() if np.ndim(value) == 0}
    if d4rl_compat:
        if "timeouts" not in arrays and max_episode_steps is None:
            raise DatasetError(
                f"{path}: reader.d4rl_compat needs the key 'timeouts' or a time limit; got neither. Give "
                f"reader.max_episode_steps=<steps>, or leave out reader.d4rl_compat."
            )
        return _official_episodes(arrays, max_episode_steps, meta | {"d4rl_compat": True}, storage)
    terminated = arrays["terminals"].astype(bool)
    # own files flag every end: a successor that is not the next row is data
    jumps = np.zeros_like(terminated) if own else _jumps(arrays)
    ends = _episode_ends(arrays, jumps, max_episode_steps)
    _warn_of_jumps(path, arrays, jumps)
    if "timeouts" not in arrays:
        _warn_of_missing_timeouts(path, ends, terminated, arrays, max_episode_steps)
    start = np.concatenate([[0], np.flatnonzero(ends) + 1])
    timeouts = arrays.get("timeouts", np.zeros_like(terminated)).astype(bool)
    extras, episode_extras = _split_infos(arrays, len(terminated), len(start) - 1) if infos else ({}, {})
    if infos and own:
        extras, episode_extras = (
            {key: arrays[place] for key, place in own.get(kind, {}).items() if place in arrays}
            for kind in ("extras", "episode_extras")
        )
    elif _is_goal(extras.get(GOAL)):
        extras["goal"] = extras.pop(GOAL)
    return EpisodeDataset.from_arrays(
        arrays["observations"],
        arrays["actions"],
        arrays["rewards"],
        terminated,
        ends & (timeouts | ~terminated),
        start,
        next_observations=arrays.get("next_observations"),
        extras=extras,
        episode_extras=episode_extras,
        meta=meta,
        storage=storage,
    )


def _is_goal(values: Any) -> bool:
    """Whether `infos/goal` is a vector per frame."""
    if values is None or values.ndim != 2:
        return False
    return all(bool(np.isfinite(values[part]).all()) for part in pieces(values))


def _warn_of_missing_timeouts(
    path: str | Path, ends: np.ndarray, terminated: np.ndarray, arrays: Arrays, limit: int | None
) -> None:
    signs = ["successors that are not the next row"] if "next_observations" in arrays else []
    signs += [] if limit is None else [f"reader.max_episode_steps={limit}"]
    if signs:
        _log.warning(
            "%s: there is no key 'timeouts'; of %d ends of episodes %d are terminals, and the others, "
            "time-outs, are found by %s and the end of the file.",
            path, int(ends.sum()), int((ends & terminated).sum()), " and ".join(signs),
        )  # fmt: skip
        return
    _log.warning(
        "%s: without 'timeouts' and 'next_observations' only the %d terminals of %d steps mark ends: "
        "episodes are cut there alone, and windows and transitions may reach into the next episode. Give "
        "reader.max_episode_steps=<steps>, or add the key 'timeouts'.",
        path, int(terminated.sum()), len(terminated),
    )  # fmt: skip


def _warn_of_jumps(path: str | Path, arrays: Arrays, jumps: np.ndarray) -> None:
    flagged = arrays["terminals"].astype(bool) | arrays.get("timeouts", np.zeros(len(jumps))).astype(bool)
    count = int((jumps & ~flagged).sum())
    if 2 * count > len(jumps):
        _log.warning(
            "%s: in %d of %d rows 'next_observations' is not the next row; episodes are cut there, so that "
            "most are single steps. Store both keys in the same units and precision; if rows are in order, "
            "remove 'next_observations'.",
            path, count, len(jumps),
        )  # fmt: skip
    elif count and "timeouts" in arrays:
        _log.warning(
            "%s: seams between episodes without a flag: %d, the first behind row %d. There "
            "'next_observations' is not the next row, and neither 'terminals' nor 'timeouts' is set; "
            "episodes are cut there, as by time-outs. Set the flags.",
            path, count, int(np.argmax(jumps & ~flagged)),
        )  # fmt: skip


def _jumps(arrays: Arrays) -> np.ndarray:
    """Return rows whose successor differs from the next row beyond rounding, (N,) bool."""
    seen = arrays["observations"]
    jumps = np.zeros(len(seen), dtype=bool)
    if "next_observations" not in arrays:
        return jumps
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is refused later, with its row
        largest = np.max([np.abs(seen[part].astype(np.float32)).max(axis=0) for part in pieces(seen)], axis=0)
        for part in pieces(seen[1:]):
            following, successor = seen[1:][part], arrays["next_observations"][part]
            gap = np.abs(successor.astype(np.float32) - following.astype(np.float32))
            jumps[part] = (gap > _JUMP * largest).reshape(len(gap), -1).any(axis=1)
    return jumps


def _episode_ends(arrays: Arrays, jumps: np.ndarray, limit: int | None) -> np.ndarray:
    """Return last rows: terminal, time-out, successor unlike the next row, limit, end of file."""
    ends = arrays["terminals"].astype(bool) | jumps
    if "timeouts" in arrays:
        ends = ends | arrays["timeouts"].astype(bool)
    ends[-1] = True
    if limit is not None:
        ends = ends | _limit_steps(ends, limit, after_end=0, after_limit=0)
    return ends


def _limit_steps(ends: np.ndarray, limit: int, *, after_end: int, after_limit: int) -> np.ndarray:
    """Return the rows at which a step counter reaches limit - 1.

    The counter starts at 0 and continues with `after_end` after rows in `ends`, with `after_limit` after rows
    that reach the limit.
    """
    marks = np.zeros(len(ends), dtype=bool)
    stops = np.append(np.flatnonzero(ends), len(ends))
    row, counter = 0, 0
    while row < len(ends):
        end, full = stops[np.searchsorted(stops, row)], row + limit - 1 - counter
        if full <= min(end, len(ends) - 1):
            marks[full] = True
            row, counter = full + 1, after_limit
        else:
            row, counter = end + 1, after_end
    return marks


def _official_ends(arrays: Mapping[str, Any], limit: int | None, after_limit: int) -> np.ndarray:
    """Return the rows that the official loops treat as last steps at the time limit."""
    if "timeouts" in arrays:
        return arrays["timeouts"].astype(bool)
    if limit is None:
        raise DatasetError("a D4RL file without the key 'timeouts' needs max_episode_steps; got None.")
    return _limit_steps(arrays["terminals"].astype(bool), limit, after_end=1, after_limit=after_limit)


def _official_rows(
    arrays: Mapping[str, Any], terminate_on_end: bool, limit: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept rows (M,) and, for every row of the file, whether an episode ends there (N,)."""
    final = _official_ends(arrays, limit, after_limit=int(terminate_on_end))
    keep = np.ones(len(final), dtype=bool) if terminate_on_end else ~final
    keep[-1] = False
    return np.flatnonzero(keep), final | arrays["terminals"].astype(bool)


def _official_episodes(
    arrays: Arrays, limit: int | None, meta: dict[str, Any], storage: ArrayStorage
) -> EpisodeDataset:
    """Cut the official transitions into episodes, so that `transitions()` returns exactly them."""
    rows, ends = _official_rows(arrays, False, limit)
    official = qlearning_dataset(arrays, max_episode_steps=limit, storage=storage)
    number = np.concatenate([[0], np.cumsum(ends)[:-1]])[rows]
    last = np.append(number[1:] != number[:-1], True)
    goals = {"goal": storage.take_array(arrays[GOAL], rows)} if _is_goal(arrays.get(GOAL)) else {}
    return EpisodeDataset.from_arrays(
        official["observations"],
        official["actions"],
        official["rewards"],
        official["terminals"],
        None,
        np.concatenate([[0], np.flatnonzero(last) + 1]),
        next_observations=official["next_observations"],
        extras=goals,
        meta=meta,
        storage=storage,
    )


def _split_infos(arrays: Arrays, num_frames: int, num_episodes: int) -> tuple[Arrays, Arrays]:
    """Split keys under `infos/` into per-frame and per-episode values."""
    numeric = {
        key: value
        for key, value in arrays.items()
        if key.startswith("infos/") and np.ndim(value) > 0 and is_numeric(value)
    }
    frames = {key: value for key, value in numeric.items() if len(value) == num_frames}
    episodes = {key: v for key, v in numeric.items() if len(v) == num_episodes and key not in frames}
    return frames, episodes


def _own_names(file: h5py.File, path: str | Path) -> dict[str, Any]:
    """Return the own attribute of a file; empty for other writers."""
    kinds = ("meta", "extras", "episode_extras")
    if OWN_ATTRIBUTE not in file.attrs:
        return {}
    own: dict[str, Any] = json_attribute(file, OWN_ATTRIBUTE, path)
    if not all(isinstance(own.get(kind, {}), dict) for kind in kinds):
        raise DatasetError(
            f"{path}: attribute '{OWN_ATTRIBUTE}' must be a JSON object of objects: {', '.join(kinds)}."
        )
    return own


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value
