"""Runs of several seeds that are trained at once: where they are, and what they must have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from algos.offline_run import TrainsSeeds
from algos.stacking import ONE_BY_ONE
from burnish.locate import seed_folders
from burnish.without_effect import keys_of
from envs.evaluation_protocol import check_seeds
from policies import registry
from policies.errors import ConfigError

if TYPE_CHECKING:
    from burnish.commands.train import TrainConfig

_log = logging.getLogger(__name__)


def has_seeds(config: TrainConfig) -> bool:
    """Tell whether several runs are started or continued."""
    return config.seeds is not None or bool(seed_folders(config.resume))


def require_distinct(seeds: Sequence[int]) -> list[int]:
    """Return seeds in order, as runs are continued; refuse such that are none, the same, or out of range.

    Raises:
        ConfigError: If they are.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must be one or more different seeds, such as [0,1,2]; got {list(seeds)}.")
    for seed in seeds:
        check_seeds("seeds", seed)
    return sorted(seeds)


def of_one_seed(config: TrainConfig, typed: Sequence[str], seed: int) -> tuple[TrainConfig, list[str]]:
    """Return the configuration of the run of a seed, and its overrides: those of a run that is alone."""
    others = [text for text, key in zip(typed, keys_of(typed), strict=True) if key != "seeds"]
    return replace(config, seed=seed, seeds=None), [*others, f"seed={seed}"]


def require_alike(configs: Sequence[TrainConfig]) -> None:
    """Refuse runs that differ in more than their seeds.

    Raises:
        ConfigError: If they do.
    """
    first = replace(configs[0], seed=0)
    if others := [config.seed for config in configs if replace(config, seed=0) != first]:
        raise ConfigError(
            f"runs that are continued together must differ in their seeds only; other settings than that of "
            f"seed {configs[0].seed} have those of {', '.join(map(str, others))}. Continue them one by one: "
            f"resume=<folder>/seed-<n>."
        )


def require_together(config: TrainConfig) -> None:
    """Refuse algorithms that train one seed at a time; say where it gains nothing.

    Raises:
        ConfigError: If this is one, or there is a policy to start from.
    """
    name = registry.name_of("algo", config.algo)
    able = [algo for algo, part in registry.parts("algo").items() if issubclass(part, TrainsSeeds)]
    if name not in able:
        raise ConfigError(
            f"seeds=[…] is for the algorithms {', '.join(able)}; algo={name} trains one seed at a time. "
            f"{ONE_BY_ONE}"
        )
    if config.init is not None:
        raise ConfigError(
            f"seeds=[…] is for actors that algo={name} makes itself; got init={config.init}. {ONE_BY_ONE}"
        )
    if config.device == "cpu" and config.algo.autocast is None:
        _log.info(
            "on a CPU in float32, seeds together take about as long as one after the other; with "
            "algo.autocast=bfloat16 they take less."
        )
