"""Files of DPPO and ReinFlow: `train.npz` and `val.npz`, with `normalization.npz` beside them.

    states (N, Do)   actions (N, Da)   traj_lengths (E,)   rewards (N,)   terminals (N,)

States and actions are stored scaled to [-1, 1] by the limits in `normalization.npz`. Reading inverts the
scaling to physical units; the limits are stored in `meta` ("limits"). `scaled=True` keeps the scaled values.
Successors are not stored: the last frame of an episode is a transition only if it is a terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from envs.datasets.array_storage import ArrayStorage, pieces
from envs.datasets.checks import log_skipped_fields
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.arrays import Arrays, check_flags, check_rows, column
from envs.datasets.files.npz import peek_npz, read_npz, read_npz_into
from policies.errors import DatasetError

_REQUIRED = ("states", "actions", "traj_lengths")
_FRAMES = ("rewards", "terminals")
_LIMITS = ("obs_min", "obs_max", "action_min", "action_max")
_MARGIN = 1e-6  # the scaling divides by the range plus this
NORMALIZATION = "normalization.npz"


def matches(path: str | Path) -> bool:
    """Whether a file is an archive with DPPO's keys."""
    keys = peek_npz(path)
    return keys is not None and set(_REQUIRED) <= set(keys)


def read(
    path: str | Path,
    *,
    normalization: str | Path | None = None,
    scaled: bool = False,
    cache: str | Path | None = None,
) -> EpisodeDataset:
    """Read a file of DPPO or ReinFlow: `states`, `actions` and `traj_lengths` in an npz archive.

    Args:
        path: npz file.
        normalization: File with the scaling limits; None: normalization.npz in the same folder.
        scaled: Keep states and actions scaled.
        cache: Folder for arrays that do not fit in memory; None: that of temporary files.

    Raises:
        DatasetError: If the file or its limits do not hold a usable dataset; names file and key.
    """
    arrays, storage = read_npz_into(path, _REQUIRED, _FRAMES, cache=cache)
    start = _episode_start(path, arrays)
    num = check_rows(path, arrays, "states")
    images = {"images": "unsupported"} if "images" in (peek_npz(path) or ()) else {}
    meta: dict[str, Any] = {"source": str(path), "format": "dppo", "scaled": scaled}
    meta["not_read"] = log_skipped_fields(path, images)
    if not scaled:
        limits = read_limits(Path(path).parent / NORMALIZATION if normalization is None else normalization)
        _unscale(arrays, limits, path, storage)
        meta["limits"] = {key: value.tolist() for key, value in limits.items()}
    return EpisodeDataset.from_arrays(
        arrays["states"],
        arrays["actions"],
        column(arrays.get("rewards", np.zeros(num))),
        check_flags(path, "terminals", arrays.get("terminals", np.zeros(num))),
        None,
        start,
        meta=meta,
        storage=storage,
    )


def _episode_start(path: str | Path, arrays: Arrays) -> np.ndarray:
    """Remove the episode lengths from the arrays; returns first frames and, last, N."""
    lengths = arrays.pop("traj_lengths")
    if lengths.ndim != 1 or not (lengths == lengths.astype(np.int64)).all() or not (lengths > 0).all():
        raise DatasetError(
            f"{path}: key 'traj_lengths' must hold whole numbers above 0; got "
            f"{lengths.flatten()[:5].tolist()}."
        )
    total = len(arrays["states"]) if arrays["states"].ndim else 0
    if int(lengths.sum()) != total:
        raise DatasetError(
            f"{path}: key 'traj_lengths' must add up to the {total} rows of 'states'; got "
            f"{int(lengths.sum())}. The file is incomplete: copy or download it again."
        )
    return np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])


def read_limits(path: str | Path) -> Arrays:
    """Read the scaling limits of a file, each (D,) float64; no minimum may exceed its maximum."""
    if not Path(path).is_file():
        raise DatasetError(
            f"{path}: expected the scaling limits of states and actions; there is no such file. Give it as "
            f"reader.normalization=<file>, or leave the data scaled (reader.scaled=true)."
        )
    limits = {key: value.astype(np.float64) for key, value in read_npz(path, _LIMITS).items()}
    for what in ("obs", "action"):
        low, high = limits[f"{what}_min"], limits[f"{what}_max"]
        if low.ndim != 1 or low.shape != high.shape or not (low <= high).all():
            raise DatasetError(
                f"{path}: '{what}_min' must be a finite vector nowhere above '{what}_max'; got shapes "
                f"{low.shape} and {high.shape}."
            )
    return limits


def _unscale(arrays: Arrays, limits: Arrays, path: str | Path, storage: ArrayStorage) -> None:
    """Undo (x - min) / (max - min + 1e-6) * 2 - 1 in float64; the result is float32."""
    for key, what in (("states", "obs"), ("actions", "action")):
        low, high = limits[f"{what}_min"], limits[f"{what}_max"]
        if arrays[key].shape[1:] != low.shape:
            raise DatasetError(
                f"{path}: key '{key}' must be {len(low)} wide, as its limits are; got {arrays[key].shape}."
            )
        scaled, arrays[key] = arrays[key], storage.empty(arrays[key].shape, np.float32)
        for part in pieces(scaled):
            arrays[key][part] = (scaled[part].astype(np.float64) + 1) / 2 * (high - low + _MARGIN) + low
