"""OGBench npz files, read with numpy.

    observations (N, Do)   actions (N, Da)   terminals (N,)   qpos  qvel  button_states

`terminals` marks the last row of every recording, a state without action and successor. By default it becomes
the successor of the previous row, as in OGBench's regular datasets; `compact=True` keeps it as a frame with
`valids` 0, as in OGBench's compact ones. `regular_dataset` and `compact_dataset` are the two official
conversions, bit for bit.

All episodes are truncated recordings. Published files have no rewards; naming a single task adds its rewards
and `masks`, which is 0 where the task is solved and values do not bootstrap, although the recording
continues. A file's own `rewards` and `masks` are kept. Files with `next_observations` (saved regular
datasets) hold no state-only rows.

Archives with the same keys that OGBench does not write are left to the reader of plain arrays: with keys that
divide episodes or mark time-outs, or with `rewards` but neither `masks` nor what a saved regular dataset has.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import MEMORY, ArrayStorage
from envs.datasets.checks import log_skipped_fields
from envs.datasets.convert import DIVIDERS, KEYS
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.arrays import Arrays, check_flags, check_rows, column
from envs.datasets.files.npz import peek_npz, read_npz_into
from policies.errors import DatasetError

_log = logging.getLogger(__name__)

_REQUIRED = ("observations", "actions", "terminals")
_INFOS = ("qpos", "qvel", "button_states")
_LABELS = ("rewards", "masks")
_OWN = (*_LABELS, "next_observations")  # not in published files
_SAVED = ("next_observations", "qpos", "qvel")  # in regular datasets that were saved
_FOREIGN = {name for key in ("truncated", *DIVIDERS) for name in KEYS[key]}


def matches(path: str | Path) -> bool:
    """Whether a file is an archive with OGBench's keys, and without those of plain arrays."""
    keys = set(peek_npz(path) or ())
    if not set(_REQUIRED) <= keys or keys & _FOREIGN:
        return False
    return "rewards" not in keys or "masks" in keys or set(_SAVED) <= keys


def _load(path: str | Path, cache: str | Path | None) -> tuple[Arrays, ArrayStorage]:
    arrays, storage = read_npz_into(path, _REQUIRED, (*_INFOS, *_OWN), cache=cache)
    check_rows(path, arrays, "observations")
    ends = arrays["terminals"] = check_flags(path, "terminals", arrays["terminals"])
    for key in ("observations", "actions"):
        if arrays[key].ndim != 2:
            hint = " Files with images are not read." if key == "observations" else ""
            raise DatasetError(f"{path}: key '{key}' must have shape (N, D); got {arrays[key].shape}.{hint}")
    if not ends[-1]:
        raise DatasetError(
            f"{path}: key 'terminals' must be 1 in the last row; got 0. The file is cut off: copy or "
            f"download it again."
        )
    return arrays, storage


def regular_dataset(arrays: Arrays, storage: ArrayStorage = MEMORY) -> Arrays:
    """Reproduce OGBench's regular dataset from the arrays of a file: rows with a successor.

    Returns:
        (M, ·) float32 arrays; `terminals` is 1 where the next row is the last of its recording.
    """
    ends = arrays["terminals"].astype(bool)
    kept, following = np.flatnonzero(~ends), np.flatnonzero(np.append(False, ~ends[:-1]))
    return {
        "observations": storage.take_array(arrays["observations"], kept, np.float32),
        "actions": storage.take_array(arrays["actions"], kept, np.float32),
        "terminals": np.append(ends[1:], True)[kept].astype(np.float32),
        "next_observations": storage.take_array(arrays["observations"], following, np.float32),
        **{key: storage.take_array(arrays[key], kept) for key in _INFOS if key in arrays},
    }


def compact_dataset(arrays: Arrays, storage: ArrayStorage = MEMORY) -> Arrays:
    """Reproduce OGBench's compact dataset from the arrays of a file: every row.

    Returns:
        (N, ·) float32 arrays; `valids` is 0 on the last row of every recording, and `terminals` is 1 on the
        last two.
    """
    ends = arrays["terminals"].astype(bool)
    return {
        "observations": storage.converted(arrays["observations"], np.float32),
        "actions": storage.converted(arrays["actions"], np.float32),
        "terminals": (ends | np.append(ends[1:], True)).astype(np.float32),
        "valids": 1 - ends.astype(np.float32),
        **{key: arrays[key] for key in _INFOS if key in arrays},
    }


def read(
    path: str | Path,
    *,
    task: str | None = None,
    compact: bool = False,
    cache: str | Path | None = None,
) -> EpisodeDataset:
    """Read an OGBench file: `observations`, `actions` and `terminals` in an npz archive.

    Args:
        path: npz file.
        task: Name of a single task, e.g. `cube-single-play-singletask-task2-v0`, whose rewards and `masks`
            replace those of the file; needs the extra `ogbench`. None: the file's rewards and masks, or
            rewards of 0.
        compact: Keep the last row of every recording as a frame (see the module).
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If the file does not hold a usable dataset; names file and key.
        MissingExtraError: If a task is named and OGBench is not installed.
    """
    arrays, storage = _load(path, cache)
    ends, saved = arrays["terminals"], "next_observations" in arrays
    _check_lengths(path, ends, compact, saved)
    rows = arrays if saved else (compact_dataset if compact else regular_dataset)(arrays, storage)
    last = ends if compact else rows["terminals"].astype(bool)
    extras: dict[str, Any] = {key: rows[key] for key in _INFOS if key in rows}
    labels = _own_rewards(path, arrays, ~ends | compact | saved)
    unread = {key: "not known here" for key in peek_npz(path) or () if key not in arrays}
    if compact:
        extras["valids"] = rows["valids"]
        _log.warning(
            "%s: reader.compact=true keeps %d rows that are states only; their actions were never executed, "
            "and cloning would learn them. Leave it out to train.", path, int(ends.sum()),
        )  # fmt: skip
    if task is not None:
        from envs.datasets.ogbench_rewards import rewards_of_task

        unread |= {key: "those of reader.task are taken" for key in labels}
        labels = dict(zip(_LABELS, rewards_of_task(task, rows, str(path)), strict=True))
    rewards = labels.pop("rewards", np.zeros(len(last), np.float32))
    meta = {"source": str(path), "format": "ogbench", "task": task, "compact": compact}
    return EpisodeDataset.from_arrays(
        rows["observations"],
        rows["actions"],
        rewards,
        np.zeros_like(last),
        last,
        np.concatenate([[0], np.flatnonzero(last) + 1]),
        next_observations=rows.get("next_observations"),
        extras=extras | labels,
        meta=meta | {"not_read": log_skipped_fields(path, unread)},
        storage=storage,
    )


def _own_rewards(path: str | Path, arrays: Arrays, kept: np.ndarray) -> Arrays:
    if "masks" in arrays:
        arrays["masks"] = check_flags(path, "masks", arrays["masks"]).astype(np.float32)
    return {key: column(arrays[key])[kept] for key in _LABELS if key in arrays}


def _check_lengths(path: str | Path, ends: np.ndarray, compact: bool, saved: bool) -> None:
    """Refuse recordings with a single state, and `compact` for files without state-only rows."""
    if compact and saved:
        raise DatasetError(
            f"{path}: reader.compact=true needs rows that are states only; a file with the key "
            f"'next_observations' has none. Leave reader.compact out."
        )
    lengths = np.diff(np.flatnonzero(ends), prepend=-1)
    if not (compact or saved) and (lengths < 2).any():
        raise DatasetError(
            f"{path}: key 'terminals' must leave at least two rows to every recording; recording "
            f"{int(np.argmax(lengths < 2))} has one. Remove it."
        )
