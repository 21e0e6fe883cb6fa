"""Writing datasets in D4RL's layout, which `d4rl.qlearning_dataset` and many offline programs read.

    observations actions rewards terminals timeouts   next_observations   infos/<extra key>

Every episode ends with a terminal or a time-out: one that was merely cut becomes a time-out. Names that D4RL
does not have stand in the attribute `burnish` of the file, so that reading here gives the same dataset.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from envs.datasets.d4rl import OWN_ATTRIBUTE
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.hdf5 import write_hdf5

if TYPE_CHECKING:
    from envs.spec import EnvConfig

_OWN_META = ("source", "format", "not_read")


def write_d4rl(path: str | Path, dataset: EpisodeDataset, env: EnvConfig | None = None) -> None:
    """Write a dataset, all or nothing.

    Args:
        path: Where to; an existing file is replaced when the new one is complete.
        dataset: Episodes on any device.
        env: The task they come from, recorded in the attribute.
    """
    dataset = dataset.to("cpu")
    last = torch.zeros_like(dataset.terminated)
    last[dataset.episode_start[1:] - 1] = True
    arrays = {
        "observations": dataset.observations,
        "actions": dataset.actions,
        "rewards": dataset.rewards,
        "terminals": dataset.terminated,
        "timeouts": dataset.truncated | (last & ~dataset.terminated),
    }
    if dataset.next_observations is not None:
        arrays["next_observations"] = dataset.next_observations
    names = {
        "extras": {key: key if key.startswith("infos/") else f"infos/{key}" for key in dataset.extras},
        "episode_extras": {key: f"infos/episodes/{key}" for key in dataset.episode_extras},
    }
    arrays |= {names["extras"][key]: value for key, value in dataset.extras.items()}
    arrays |= {names["episode_extras"][key]: value for key, value in dataset.episode_extras.items()}
    with write_hdf5(path) as file:
        for key, value in arrays.items():
            file.create_dataset(key, data=value.numpy(), compression="gzip", compression_opts=4)
        file.attrs[OWN_ATTRIBUTE] = json.dumps(names | {"meta": _meta(dataset, env)}, default=str)


def _meta(dataset: EpisodeDataset, env: EnvConfig | None) -> dict[str, Any]:
    meta = {key: value for key, value in dataset.meta.items() if key not in _OWN_META}
    if env is not None:
        options: dict[str, Any] = asdict(env) if is_dataclass(env) and not isinstance(env, type) else {}
        meta["env"] = {"name": env.spec.name, **options}
    return meta
