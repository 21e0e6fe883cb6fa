"""Write a dataset in any writable format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.writers import lerobot, minari
from envs.datasets.writers.d4rl import write_d4rl
from envs.datasets.writers.lerobot import write_lerobot
from envs.datasets.writers.minari import write_minari
from envs.datasets.writers.robomimic import write_robomimic
from policies.errors import ConfigError

if TYPE_CHECKING:
    from envs.spec import EnvConfig

WRITERS: dict[str, Callable[..., None]] = {
    "robomimic": write_robomimic,
    "minari": write_minari,
    "d4rl": write_d4rl,
    "lerobot": write_lerobot,
}
FOLDERS = ("minari", "lerobot")
_OTHER_SUFFIXES = {
    *(".npz", ".npy", ".pkl", ".pickle", ".zarr", ".parquet", ".arrow", ".csv", ".json", ".jsonl", ".mat"),
    *(".pt", ".pth", ".safetensors", ".tfrecord", ".mcap", ".bag", ".zip", ".tar", ".gz", ".mp4"),
}
WITH_IMAGES = ("robomimic", "lerobot")


def format_to_write(path: str | Path, wanted: str | None = None) -> str:
    """Return the format to write: the wanted, else Minari for names in -v<number>, else robomimic.

    Raises:
        ConfigError: If there is no such format, or an HDF5 file would have the suffix of another format.
    """
    if wanted is not None and wanted not in WRITERS:
        raise ConfigError(f"format must be one of: {', '.join(WRITERS)}; got {wanted}.")
    form = wanted or ("minari" if re.search(r"-v\d+$", Path(path).name) else "robomimic")
    if form not in FOLDERS and (suffix := Path(path).suffix).lower() in _OTHER_SUFFIXES:
        better = Path(path).with_suffix(".hdf5")
        raise ConfigError(f"format={form} is an HDF5 file, not {suffix}; write {better}.")
    return form


def check_place(path: str | Path, format: str) -> None:
    """Refuse a folder that the format cannot replace, or a name that it cannot have."""
    if format in FOLDERS:
        {"minari": minari.check_place, "lerobot": lerobot.check_place}[format](path)


def write_dataset(
    path: str | Path,
    dataset: EpisodeDataset,
    env: EnvConfig | None = None,
    *,
    format: str | None = None,
    valid_fraction: float = 0.0,
    video: bool = False,
) -> None:
    """Write a dataset, all or nothing.

    Args:
        path: Target; an existing dataset is replaced when the new one is complete.
        dataset: Episodes on any device.
        env: Task of the episodes.
        format: See `format_to_write`.
        valid_fraction: Share of the episodes listed as validation set; robomimic's format only.
        video: Whether images become videos; LeRobot's format only.

    Raises:
        ConfigError: If there is no such format, or it has no validation list, no images, or no videos.
        DatasetError: If the format cannot hold the dataset.
    """
    chosen = format_to_write(path, format)
    if chosen == "lerobot" and not valid_fraction:
        write_lerobot(path, dataset, env, video=video)
        return
    if video:
        raise ConfigError(f"video=true needs format=lerobot; got format={chosen}, which has no videos.")
    if chosen == "robomimic":
        write_robomimic(path, dataset, env, valid_fraction=valid_fraction)
        return
    if valid_fraction:
        raise ConfigError(f"valid_fraction needs format=robomimic; got format={chosen}, which has no masks.")
    WRITERS[chosen](path, dataset, env)
