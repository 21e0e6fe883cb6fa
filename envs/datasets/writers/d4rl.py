"""Write datasets in D4RL's layout, which `d4rl.qlearning_dataset` and many offline programs read.

    observations actions rewards terminals timeouts   next_observations   infos/<extra key>

Every episode ends with a terminal or a time-out. Names that D4RL does not have are stored in the attribute
`burnish` of the file, so that reading here gives the same dataset.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from envs.datasets.checks import refuse_images
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.files.hdf5 import write_hdf5
from envs.datasets.formats.d4rl import OWN_ATTRIBUTE
from envs.datasets.recorded_task import meta_to_write

if TYPE_CHECKING:
    from envs.spec import EnvConfig

_INFOS = "infos/"
_OWN_META = ("source", "format", "not_read")


def write_d4rl(path: str | Path, dataset: EpisodeDataset, env: EnvConfig | None = None) -> None:
    """Write a dataset without images, all or nothing; `env` is recorded in the attribute."""
    refuse_images(dataset, "d4rl")
    dataset = dataset.to("cpu")
    arrays = {
        "observations": dataset.observations,
        "actions": dataset.actions,
        "rewards": dataset.rewards,
        "terminals": dataset.terminated,
        "timeouts": dataset.truncated | (dataset.is_last & ~dataset.terminated),
    }
    if dataset.next_observations is not None:
        arrays["next_observations"] = dataset.next_observations
    names = _key_paths(dataset)
    arrays |= {names["extras"][key]: value for key, value in dataset.extras.items()}
    arrays |= {names["episode_extras"][key]: value for key, value in dataset.episode_extras.items()}
    with write_hdf5(path) as file:
        for key, value in arrays.items():
            file.create_dataset(key, data=value.numpy(), compression="gzip", compression_opts=4)
        meta = meta_to_write(dataset.meta, env, _OWN_META)
        file.attrs[OWN_ATTRIBUTE] = json.dumps(names | {"meta": meta})


def _key_paths(dataset: EpisodeDataset) -> dict[str, dict[str, str]]:
    """Return where extra values are stored, each in a place of its own; what has one already keeps it."""
    places: dict[str, dict[str, str]] = {"extras": {}, "episode_extras": {}}
    taken: list[str] = []
    for key in sorted(dataset.extras, key=lambda key: not key.startswith(_INFOS)):
        wanted = key if key.startswith(_INFOS) else f"{_INFOS}{key}"
        places["extras"][key] = _unused(wanted, taken)
    for key in dataset.episode_extras:
        places["episode_extras"][key] = _unused(f"{_INFOS}episodes/{key}", taken)
    return places


def _unused(place: str, taken: list[str]) -> str:
    """Take a place, or one called nearly so where it is taken or lies within another."""
    while any(f"{place}/".startswith(f"{one}/") or one.startswith(f"{place}/") for one in taken):
        place += "_"
    taken.append(place)
    return place
