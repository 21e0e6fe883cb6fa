"""Write episodes as robomimic HDF5 files; `envs.datasets.formats.robomimic` has their layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset, split_episodes
from envs.datasets.files.hdf5 import write_hdf5
from envs.datasets.recorded_task import meta_to_write
from envs.spec import options_of, task_name
from policies.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from envs.spec import EnvConfig

_FLAT = "flat"
_OWN_META = ("source", "format", "env_args", "obs_layout", "not_read")  # of the file, not of the data
_GYM_TYPE = 2  # robomimic's number for gym-like environments


def write_robomimic(
    path: str | Path,
    dataset: EpisodeDataset,
    env: EnvConfig | None = None,
    *,
    layout: Mapping[str, int] | None = None,
    valid_fraction: float = 0.0,
    seed: int = 0,
) -> None:
    """Write a dataset, all or nothing.

    Args:
        path: Target; an existing file is replaced when the new one is complete.
        dataset: Episodes on any device.
        env: Task of the episodes, recorded as `env_args`.
        layout: Widths of the observation's parts by key, in order; None: one key `flat`.
        valid_fraction: Share of episodes listed under mask/valid, in [0, 1), the others under mask/train; at
            least one episode is listed under each. 0: no masks.
        seed: Seed of the masks.
    """
    if not 0 <= valid_fraction < 1 or (valid_fraction and dataset.num_episodes < 2):
        raise ConfigError(
            f"valid_fraction={valid_fraction} must lie in [0, 1) and needs at least 2 episodes; got "
            f"{dataset.num_episodes}."
        )
    dataset = dataset.to("cpu")
    parts = dict(layout or {_FLAT: dataset.obs_dim})
    if sum(parts.values()) != dataset.obs_dim:
        raise DatasetError(
            f"{path}: the layout must add up to the {dataset.obs_dim} observation entries; got {parts}."
        )
    with write_hdf5(path) as file:
        data = file.create_group("data")
        data.attrs["total"] = dataset.num_frames
        data.attrs["env_args"] = json.dumps(_env_args(dataset, env))
        data.attrs["obs_layout"] = json.dumps(list(parts.items()))
        data.attrs["successors_recorded"] = dataset.next_observations is not None
        data.attrs["meta"] = json.dumps(meta_to_write(dataset.meta, None, _OWN_META))
        for number in range(dataset.num_episodes):
            _write_demo(data.create_group(f"demo_{number}"), dataset, number, parts)
        if valid_fraction:
            for name, chosen in zip(
                ("train", "valid"), split_episodes(dataset.num_episodes, valid_fraction, seed), strict=True
            ):
                demos = [f"demo_{number}".encode() for number in chosen.tolist()]
                file.create_dataset(f"mask/{name}", data=np.array(demos, dtype="S"))


def _write_demo(group: h5py.Group, dataset: EpisodeDataset, number: int, parts: Mapping[str, int]) -> None:
    first, end = dataset.episode_start[number : number + 2].tolist()
    rows = slice(first, end)
    terminated, truncated = bool(dataset.terminated[end - 1]), bool(dataset.truncated[end - 1])
    dones = np.zeros(end - first, dtype=np.int64)
    dones[-1] = 1
    obs, following = dataset.observations[rows], dataset.next_observations
    successor = torch.cat([obs[1:], obs[-1:]]) if following is None else following[rows]
    group.attrs["num_samples"] = end - first
    group.attrs["terminated"], group.attrs["truncated"] = terminated, truncated
    arrays: dict[str, Any] = {
        "actions": dataset.actions[rows],
        "rewards": dataset.rewards[rows],
        "dones": dones,
    }
    for name, value in (("obs", obs), ("next_obs", successor)):
        pieces = value.split(list(parts.values()), dim=1)
        arrays |= {f"{name}/{key}": piece for key, piece in zip(parts, pieces, strict=True)}
    for key, value in dataset.extras.items():
        arrays[key if key == "states" else f"extras/{key}"] = value[rows]
    for key, value in dataset.episode_extras.items():
        arrays[f"episode_extras/{key}"] = value[number]
    for key, value in arrays.items():
        group.create_dataset(key, data=value.numpy() if isinstance(value, Tensor) else value)
    for camera, images in dataset.images.items():
        pixels = images[torch.arange(first, end)].numpy()
        options = {"chunks": (1, *pixels.shape[1:]), "compression": "gzip", "shuffle": True}
        group.create_dataset(f"obs/{camera}_image", data=pixels, **options)
    for key in ("success", "seed"):
        if key in dataset.episode_extras:
            group.attrs[key] = dataset.episode_extras[key][number].item()


def _env_args(dataset: EpisodeDataset, env: EnvConfig | None) -> dict[str, Any]:
    """Describe the task as robomimic does; without a task, keep the recorded one."""
    if env is None:
        known = dataset.meta.get("env_args")
        return dict(known) if known else {"env_name": "unknown", "type": _GYM_TYPE, "env_kwargs": {}}
    name = {"env_name": task_name(env), "env_version": "1", "type": _GYM_TYPE}
    return name | {"env_kwargs": options_of(env)}
