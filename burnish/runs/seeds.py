"""Runs of several seeds trained at once: folders and required common settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algos.training.resume_checks import settings_of
from burnish.config.saved import describe
from burnish.runs.locate import RUN_CONFIG, check_folder_to_write, folder_of, seed_folders
from envs.evaluation.settings import check_seeds
from policies import registry
from policies.errors import CheckpointError, ConfigError
from policies.storage.atomic_write import write_text

if TYPE_CHECKING:
    from burnish.config.train import TrainConfig

_log = logging.getLogger(__name__)
_SEEDS_FILE = "seeds.txt"
_MAY_DIFFER = ("seed", "name", "progress", "num_workers", "fleet")


def require_distinct(seeds: Sequence[int]) -> None:
    """Refuse, with ConfigError, seeds that are empty, not integers, duplicates, or out of range."""
    if not seeds or any(type(seed) is not int for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must be one or more different seeds, such as [0,1,2]; got {list(seeds)}.")
    for seed in seeds:
        check_seeds("seeds", seed)


def require_new_folders(place: Path, seeds: Sequence[int]) -> None:
    """Refuse, with ConfigError, a folder that holds runs, or where runs cannot be created."""
    for folder in (place, *(folder_of(place, seed) for seed in seeds)):
        check_folder_to_write(folder, "hydra.run.dir")
    if (place / RUN_CONFIG).is_file() or seed_folders(place):
        raise ConfigError(
            f"hydra.run.dir={place} holds runs already. Give resume={place}, or another folder."
        )


def write_seeds(place: Path, seeds: Sequence[int]) -> None:
    """Write the seeds of a folder."""
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / _SEEDS_FILE, "".join(f"{seed}\n" for seed in seeds))


def remove_seeds(place: Path) -> None:
    """Remove the file of `write_seeds`, and the folder if empty."""
    (place / _SEEDS_FILE).unlink(missing_ok=True)
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()


def require_complete(place: str | Path, key: str = "resume") -> None:
    """Refuse, with CheckpointError, a folder without the run of one of its seeds."""
    note = Path(place) / _SEEDS_FILE
    seeds = [int(line) for line in note.read_text().split()] if note.is_file() else []
    runs = seed_folders(place)
    if missing := [seed for seed in seeds if folder_of(Path(place), seed) not in runs]:
        raise CheckpointError(
            f"{key}={place} is for the seeds {seeds}; seed-{missing[0]} is missing or has no {RUN_CONFIG}. "
            f"Restore it, or take the others one by one, such as {runs[0]}."
        )


def require_alike(configs: Sequence[TrainConfig]) -> None:
    """Refuse, with ConfigError, runs that differ in more than their seeds and display settings."""
    first, *others = (_settings_of(config) for config in configs)
    for config, other in zip(configs[1:], others, strict=True):
        for key in sorted(key for key in {*first, *other} if first.get(key) != other.get(key)):
            raise ConfigError(
                f"{key} must be equal in runs that are continued together; of seed {configs[0].seed} it is "
                f"{first.get(key)}, of seed {config.seed} {other.get(key)}. Give {key}=<value>, or continue "
                f"them one by one: resume=<folder>/seed-<n>."
            )


def _settings_of(config: TrainConfig) -> dict[str, Any]:
    settings = settings_of("", describe(config))
    return {key.removeprefix("."): value for key, value in settings.items() if key[1:] not in _MAY_DIFFER}


def require_together(config: TrainConfig) -> None:
    """Refuse, with ConfigError, `init` and algorithms that train one seed at a time."""
    from algos.offline.batched_seeds import ONE_BY_ONE  # not needed for a single run
    from algos.offline.config import OfflineConfig

    name, autocast = registry.name_of("algo", config.algo), getattr(config.algo, "autocast", None)
    if not isinstance(config.algo, OfflineConfig):
        able = [algo for algo, part in registry.parts("algo").items() if issubclass(part, OfflineConfig)]
        raise ConfigError(
            f"seeds=[…] is for the algorithms {', '.join(able)}; algo={name} trains one seed at a time. "
            f"{ONE_BY_ONE}"
        )
    if config.init is not None:
        raise ConfigError(
            f"seeds=[…] is for actors that algo={name} makes itself; got init={config.init}. {ONE_BY_ONE}"
        )
    if config.device == "cpu" and autocast is None:
        _log.info(
            "on a CPU in float32, seeds together take about as long as one after the other; on one with AMX "
            "or AVX512_BF16 they take less with algo.autocast=bfloat16."
        )
