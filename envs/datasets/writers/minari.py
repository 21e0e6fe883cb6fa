"""Write datasets as Minari stores them (HDF5), so that `minari.load_dataset` reads them.

    <out>/data/metadata.json   <out>/data/main_data.hdf5

With the extra key `goal`, observations have the parts `observation`, `achieved_goal` (if recorded) and
`desired_goal`. Minari keeps one observation more than actions: an unknown last successor is written as a
repeated observation, and reading it back here leaves the successors unknown again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch
from torch import Tensor

from envs.datasets.checks import refuse_images
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.hdf5 import write_hdf5
from envs.datasets.files.minari import MAIN_FILE, METADATA, find_data
from envs.datasets.formats.minari import ACHIEVED, GOAL, OWN_ATTRIBUTE, STATE
from envs.datasets.recorded_task import meta_to_write
from policies.errors import DatasetError
from policies.storage.atomic_write import draft_folder, replace_folder, sync_tree

if TYPE_CHECKING:
    from envs.spec import EnvConfig

MINARI_VERSION = "0.5.4"
"""The release whose layout is written."""

_NAME = re.compile(r"[\w-]*\w-v\d+")
_OWN_META = ("source", "format", "not_read", "dataset_id", "minari_version", "env_spec", "algorithm_name")


def write_minari(
    path: str | Path,
    dataset: EpisodeDataset,
    env: EnvConfig | None = None,
    *,
    dataset_id: str | None = None,
) -> None:
    """Write a dataset without images as a folder, all or nothing.

    Args:
        path: The dataset's folder, `<root>/<dataset_id>`; an existing Minari dataset is replaced when the
            new one is complete.
        dataset: Episodes on any device.
        env: Task of the episodes: its limits become the action space.
        dataset_id: Minari's name for it; None: the name of the folder.

    Raises:
        DatasetError: If the name is not one of Minari's, the folder holds something else, or the successors
            are not the next observations (as after `d4rl_compat`), which Minari cannot store.
    """
    refuse_images(dataset, "minari")
    check_place(path, dataset_id)
    target, dataset = Path(path), dataset.to("cpu")
    name = dataset_id or target.name
    _check_successors(dataset, path)
    with draft_folder(target) as draft:
        (draft / "data").mkdir()
        _write_episodes(draft / "data" / MAIN_FILE, dataset)
        size = (draft / "data" / MAIN_FILE).stat().st_size / 1e6
        metadata = _metadata(dataset, env, name) | {"dataset_size": round(size, 1)}
        (draft / "data" / METADATA).write_text(json.dumps(metadata), encoding="utf-8")
        sync_tree(draft)
        replace_folder(draft, target)


def check_place(path: str | Path, dataset_id: str | None = None) -> None:
    """Refuse a place that no Minari dataset can have: no version in the name, or other content."""
    target = Path(path)
    name = dataset_id or target.name
    if not _NAME.fullmatch(name.rsplit("/", 1)[-1]):
        example = f"{target.name.split('.')[0] or 'demos'}-v0"
        raise DatasetError(f"{path}: Minari's names end in a version, e.g. {example}; got '{name}'.")
    if target.exists() and find_data(target) is None:
        raise DatasetError(f"{path}: expected a free place or a Minari dataset to replace; found another.")


def _check_successors(dataset: EpisodeDataset, path: str | Path) -> None:
    """Refuse successors that are not the next frame's observation."""
    if dataset.next_observations is None:
        return
    here = (~dataset.is_last).nonzero().squeeze(1)
    wrong = (dataset.next_observations[here] != dataset.observations[here + 1]).any(dim=1).nonzero()
    if len(wrong):
        raise DatasetError(
            f"{path}: key 'next_observations' must be the next frame's observation within an episode; it is "
            f"not in frame {int(here[wrong[0]])} ({len(wrong)} such frames). Write robomimic or D4RL instead."
        )


def _write_episodes(path: Path, dataset: EpisodeDataset) -> None:
    with write_hdf5(path) as file:
        for number in range(dataset.num_episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"] = number
            for key, value in dataset.episode_extras.items():
                name = "seed" if key == "seed" else f"{OWN_ATTRIBUTE}{key}"
                group.attrs[name] = value[number].numpy()[()]
            _write_episode(group, dataset, number)


def _write_episode(group: h5py.Group, dataset: EpisodeDataset, number: int) -> None:
    first, end = dataset.episode_start[number : number + 2].tolist()
    rows, following = slice(first, end), dataset.next_observations
    last = dataset.observations[end - 1] if following is None else following[end - 1]
    state = torch.cat([dataset.observations[rows], last[None]])
    name = f"observations/{STATE}" if "goal" in dataset.extras else "observations"
    arrays: dict[str, Tensor] = {name: state}
    for key, value in dataset.extras.items():
        padded = torch.cat([value[rows], value[end - 1 : end]])
        part = _goal_part(dataset, key)
        arrays[f"observations/{part}" if part else f"infos/{key}"] = padded
    arrays |= {
        "actions": dataset.actions[rows],
        "rewards": dataset.rewards[rows],
        "terminations": dataset.terminated[rows],
        "truncations": dataset.truncated[rows],
    }
    for key, value in arrays.items():
        group.create_dataset(key, data=value.numpy())
    group.attrs["total_steps"] = end - first


def _goal_part(dataset: EpisodeDataset, key: str) -> str:
    """Return the part of the observation that an extra key is stored as; empty if it is none."""
    return {"goal": GOAL, ACHIEVED: ACHIEVED}.get(key, "") if "goal" in dataset.extras else ""


def _metadata(dataset: EpisodeDataset, env: EnvConfig | None, name: str) -> dict[str, Any]:
    """Describe the dataset as Minari does; what it does not know about stands under `burnish`."""
    low, high = (env.spec.action_low, env.spec.action_high) if env else (-np.inf, np.inf)
    return {
        "total_episodes": dataset.num_episodes,
        "total_steps": dataset.num_frames,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": json.dumps(_observation_space(dataset)),
        "action_space": json.dumps(_box(dataset.action_dim, low, high)),
        "dataset_id": name,
        "algorithm_name": "",
        "minari_version": MINARI_VERSION,
        "burnish": {
            "meta": meta_to_write(dataset.meta, env, _OWN_META),
            "extras": [f"infos/{key}" for key in dataset.extras if not _goal_part(dataset, key)],
            "successors_recorded": dataset.next_observations is not None,
        },
    }


def _observation_space(dataset: EpisodeDataset) -> Mapping[str, Any]:
    state = _box(dataset.obs_dim, -np.inf, np.inf)
    parts = {part: key for key in dataset.extras if (part := _goal_part(dataset, key))}
    if not parts:
        return state
    goals = {
        part: _box(dataset.extras[key].shape[1], -np.inf, np.inf, str(dataset.extras[key].numpy().dtype))
        for part, key in parts.items()
    }
    return {"type": "Dict", "subspaces": dict(sorted({STATE: state, **goals}.items()))}


def _box(width: int, low: Any, high: Any, dtype: str = "float32") -> dict[str, Any]:
    limits = {
        key: np.broadcast_to(np.float32(value), width).tolist()
        for key, value in (("low", low), ("high", high))
    }
    return {"type": "Box", "dtype": dtype, "shape": [width], **limits}
