"""Validation of datasets before training; every failure is a `DatasetError`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from envs.datasets.array_storage import pieces
from envs.datasets.episode import Episode, EpisodeColumns
from policies.errors import ConfigError, DatasetError

_log = logging.getLogger(__name__)
_AT_ONCE = 2**22  # bytes whose numbers are checked; a check makes copies


def check_dataset(dataset: EpisodeColumns) -> None:
    """Check index, shapes, values and end flags."""
    _check_index(dataset)
    _check_shapes(dataset)
    _check_rows(dataset)
    _check_images(dataset)
    _check_finite(dataset)
    _check_ends(dataset)


def check_episode(episode: Episode, first: Episode, source: str) -> None:
    """Check the rows of one episode, and its keys against the first of its collection."""
    for what, got, want in (
        ("the extra keys", sorted(episode.extras), sorted(first.extras)),
        ("images of the cameras", sorted(episode.images), sorted(first.images)),
    ):
        if got != want:
            raise DatasetError(f"{source}: expected {what} {want} of the first episode; got {got}.")
    num = len(episode.actions)
    rows = {"observations": (episode.observations, num + 1), "rewards": (episode.rewards, num)}
    for key, value in {**episode.extras, **episode.images}.items():
        rows[key] = (value, num)
    for key, (value, wanted) in rows.items():
        if np.shape(value)[:1] != (wanted,):
            raise DatasetError(f"{source}: key '{key}' must have {wanted} rows; got shape {np.shape(value)}.")
    for key, value in {
        "actions": episode.actions,
        **{key: value for key, (value, _) in rows.items()},
    }.items():
        numbers = np.asarray(value)
        if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
            raise DatasetError(f"{source}: key '{key}' must be finite; it holds NaN or infinity.")


def refuse_images(dataset: EpisodeColumns, form: str) -> None:
    """Refuse images for formats that cannot store them."""
    if dataset.images:
        raise ConfigError(
            f"images of the cameras {', '.join(dataset.images)} need format=robomimic or lerobot; got "
            f"format={form}. Leave them out with dataset.with_cameras(()), or write one of these."
        )


def _check_index(data: EpisodeColumns) -> None:
    start, frames = data.episode_start, len(data.observations)
    if frames == 0:
        raise DatasetError(f"{data.source}: key 'observations' is empty; expected at least one frame.")
    if start.ndim != 1 or len(start) < 2 or int(start[0]) != 0 or int(start[-1]) != frames:
        raise DatasetError(
            f"{data.source}: key 'episode_start' must run from 0 to the number of frames {frames}; got shape "
            f"{tuple(start.shape)}, from {start.flatten()[:1].tolist()} to {start.flatten()[-1:].tolist()}."
        )
    empty = (start.diff() < 1).nonzero()
    if len(empty):
        at = int(empty[0])
        raise DatasetError(
            f"{data.source}: key 'episode_start' must increase (no empty episodes); got "
            f"{int(start[at + 1])} after {int(start[at])} at position {at + 1}."
        )


def _check_shapes(data: EpisodeColumns) -> None:
    num, width = data.observations.shape[0], data.observations.shape[-1]
    expected: dict[str, tuple[Tensor | None, tuple[int | str, ...]]] = {
        "observations": (data.observations, (num, "Do")),
        "actions": (data.actions, (num, "Da")),
        "rewards": (data.rewards, (num,)),
        "terminated": (data.terminated, (num,)),
        "truncated": (data.truncated, (num,)),
        "next_observations": (data.next_observations, (num, width)),
    }
    for key, (value, shape) in expected.items():
        if value is None:
            continue
        fits = value.ndim == len(shape) and all(
            want == got or want in ("Do", "Da") for want, got in zip(shape, value.shape, strict=True)
        )
        if not fits or 0 in value.shape:
            raise DatasetError(
                f"{data.source}: key '{key}' must have shape ({', '.join(map(str, shape))}); "
                f"got {tuple(value.shape)}."
            )


def _check_rows(data: EpisodeColumns) -> None:
    for extras, size, what in (
        (data.extras, data.num_frames, "frames"),
        (data.episode_extras, data.num_episodes, "episodes"),
    ):
        for key, value in extras.items():
            if value.ndim < 1 or len(value) != size:
                raise DatasetError(
                    f"{data.source}: key '{key}' must have one row for each of the {size} {what}; "
                    f"got shape {tuple(value.shape)}."
                )


def _check_images(data: EpisodeColumns) -> None:
    for camera, images in data.images.items():
        shape = images.shape
        if len(shape) != 4 or len(images) != data.num_frames or shape[3] != 3 or 0 in shape:
            raise DatasetError(
                f"{data.source}: images of camera '{camera}' must have shape ({data.num_frames}, H, W, 3); "
                f"got {shape}."
            )


def _check_finite(data: EpisodeColumns) -> None:
    keys = {"observations": data.observations, "actions": data.actions, "rewards": data.rewards}
    if data.next_observations is not None:
        keys["next_observations"] = data.next_observations
    for key, value in {**keys, **data.extras, **data.episode_extras}.items():
        if value.is_floating_point():
            _check_numbers(data, key, value)


def _check_numbers(data: EpisodeColumns, key: str, value: Tensor) -> None:
    """Refuse NaN and infinity, in pieces: the array may exceed memory."""
    count, first = 0, None
    for part in pieces(value, _AT_ONCE):
        fine = torch.isfinite(value[part])
        if not bool(fine.all()):
            bad = (~fine).nonzero()
            count, first = count + len(bad), first or (part.start + int(bad[0, 0]), *bad[0, 1:].tolist())
    if first is not None:
        advice = "Remove or repair the affected episodes."
        if data.meta.get("format") == "d4rl" and key.startswith("infos/"):
            advice += " Or leave out what is under infos/, on which nothing is trained: reader.infos=false."
        raise DatasetError(
            f"{data.source}: key '{key}' must be finite; got {float(value[first])} at index {list(first)} "
            f"({count} such entries). {advice}"
        )


def _check_ends(data: EpisodeColumns) -> None:
    inside = ~data.is_last
    for key, flags in (("terminated", data.terminated), ("truncated", data.truncated)):
        early = (flags & inside).nonzero()
        if len(early):
            raise DatasetError(
                f"{data.source}: key '{key}' may be set on the last frame of an episode only; it is set "
                f"on frame {int(early[0])} inside one ({len(early)} such frames)."
            )


def log_skipped_fields(
    path: str | Path,
    left_out: Mapping[str, str],
    hint: str = "Only vectors of numbers and images are observed.",
) -> list[str]:
    """Log skipped keys with their reasons by key, and a hint; returns the keys, for `meta["not_read"]`."""
    if left_out:
        reasons = ", ".join(f"{key} ({reason})" for key, reason in left_out.items())
        _log.warning("%s: not read: %s. %s", path, reasons, hint)
    return list(left_out)
