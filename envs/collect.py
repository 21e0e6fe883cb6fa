"""Recording demonstrations of a task's scripted expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from envs.datasets.episodes import Episode, EpisodeDataset
from policies.errors import CapabilityError, ConfigError, DatasetError

if TYPE_CHECKING:
    from envs.spec import EnvSpec

MAX_ATTEMPTS = 10
"""Attempts per wanted demonstration before an expert counts as unable."""


class Demonstrable(Protocol):
    """An environment configuration with a scripted expert."""

    @property
    def spec(self) -> EnvSpec:
        """Describe the task."""
        ...

    def demonstrate(self, seed: int) -> Episode:
        """Do the episode of a seed; the same seed gives the same episode."""
        ...


def collect(
    env: Demonstrable,
    *,
    episodes: int,
    first_seed: int = 0,
    noise: float | None = None,
    keep_failures: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> EpisodeDataset:
    """Record an expert on the episodes of consecutive seeds.

    The result depends on the arguments alone. `success` and `seed` are kept per episode, and `meta` tells
    the task, the first seed and the number of attempts.

    Args:
        env: Configuration of a task with an expert.
        episodes: Number of episodes to keep.
        first_seed: Seed of the first attempt; attempt i has seed first_seed + i.
        noise: Noise of the expert, in its own units; None: as configured in `env.demonstrator`.
        keep_failures: Also keep episodes without success.
        progress: Called after every attempt with the numbers of episodes kept and of attempts.

    Raises:
        CapabilityError: If the task has no expert.
        ConfigError: If `episodes` is below 1 or the expert has no noise to set.
        DatasetError: If fewer than one attempt in ten succeeds.
    """
    if not hasattr(env, "demonstrate"):
        raise CapabilityError(f"env={env.spec.name} has no expert to record; choose a task that has one.")
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1; got {episodes}.")
    if noise is not None:
        env = _with_noise(env, noise)
    kept: list[Episode] = []
    for attempts in range(1, MAX_ATTEMPTS * episodes + 1):
        episode = env.demonstrate(first_seed + attempts - 1)
        if episode.success or keep_failures:
            kept.append(episode)
        if progress is not None:
            progress(len(kept), attempts)
        if len(kept) == episodes:
            meta = _origin(env) | {"first_seed": first_seed, "attempts": attempts}
            return EpisodeDataset.from_episodes(kept, meta=meta)
    raise DatasetError(
        f"the expert of {env.spec.name} succeeded in {len(kept)} of {MAX_ATTEMPTS * episodes} attempts; "
        f"expected {episodes}. Lower its noise, or keep failures."
    )


def _with_noise(env: Any, noise: float) -> Any:
    """Return the configuration with another noise of its demonstrator."""
    if not hasattr(getattr(env, "demonstrator", None), "noise"):
        raise ConfigError(f"the expert of {env.spec.name} has no noise to set; got noise={noise}.")
    return replace(env, demonstrator=replace(env.demonstrator, noise=noise))


def _origin(env: Any) -> dict[str, Any]:
    """Describe where the episodes come from, in plain values."""
    options = asdict(env) if is_dataclass(env) and not isinstance(env, type) else {}
    name = env.spec.name
    return {"source": f"demonstrations of {name}", "env": {"name": name, **options}}
