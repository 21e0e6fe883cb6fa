"""Record demonstrations of a task's scripted expert, or episodes that a policy plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from envs.datasets.episode import Episode
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.interface import interface_of_task
from envs.rollouts.fleet import LOCAL, Fleet
from envs.rollouts.kept_episodes import KeptEpisodes
from envs.spec import named_options
from policies.errors import CapabilityError, ConfigError, DatasetError

if TYPE_CHECKING:
    from envs.engine.workers import Workers
    from envs.spec import EnvConfig, EnvSpec, VectorEnv

MAX_ATTEMPTS = 10
"""Attempts per wanted demonstration before an expert counts as unable."""


def with_images(env: Any, episode: Episode) -> Episode:
    """Return an episode with camera images before each action, replayed in the exact engine.

    Raises:
        CapabilityError: If the replay diverges: the episode does not belong to the task as configured.
        MissingExtraError: If rendering is unavailable.
    """
    if not getattr(env, "cameras", ()):
        return episode
    vector = env.make_vector(1)
    try:
        return replace(episode, images=_replay_images(vector, episode))
    finally:
        vector.close()


def _replay_images(vector: VectorEnv, episode: Episode) -> dict[str, np.ndarray]:
    obs, frames = vector.reset([episode.seed])[0, -1], []
    for t, action in enumerate(episode.actions):
        if not np.array_equal(obs, episode.observations[t]):
            raise CapabilityError(
                f"images of an episode of {vector.spec.name} cannot be recorded: it differs from the task's "
                f"(seed {episode.seed}, step {t}). Leave env.cameras out, or let another expert play."
            )
        frames.append(vector.images())
        obs = vector.step_chunk(action[None, None]).obs[0, -1]
    return {camera: np.concatenate([images[camera][:, 0] for images in frames]) for camera in frames[0]}


class HasExpert(Protocol):
    """An environment configuration with a scripted expert."""

    @property
    def spec(self) -> EnvSpec: ...

    def demonstrate(self, seed: int) -> Episode:
        """Record the episode of a seed, deterministically."""
        ...


def collect(
    env: HasExpert | EnvConfig,
    *,
    episodes: int,
    first_seed: int = 0,
    noise: float | None = None,
    expert: str | None = None,
    keep_failures: bool = False,
    played: Callable[[int], Iterable[Episode]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    num_workers: int = 0,
    fleet: Fleet = LOCAL,
    store: KeptEpisodes | None = None,
) -> EpisodeDataset:
    """Record an expert, or what else plays, on episodes of consecutive seeds.

    The result depends only on the arguments, not on the workers. `success` and `seed` are stored per
    episode; `meta` holds the task with its names, rate and limits, the first seed and the number of attempts.

    Args:
        env: Configuration of a task; it has an expert unless `played` is given.
        episodes: Number of episodes to keep.
        first_seed: Seed of the first attempt; attempt i has seed first_seed + i.
        noise: Noise of the expert, in its own units; None: as configured in `env.expert`.
        expert: Name of the expert for tasks with several; None: as in `env.expert`.
        keep_failures: Also keep episodes without success. Tasks without success rule keep all.
        played: Returns the attempts in the order of their seeds without the first few, whose number it is
            given; such as `envs.evaluation.policy_episodes.policy_episodes`. None: those of the expert.
        progress: Called after every attempt with the numbers of kept episodes and of attempts.
        num_workers: Processes in which the expert plays, an episode each at a time; 0: this one.
        fleet: Where they run.
        store: Where kept episodes are written as they end; recording goes on after those that are there.

    Raises:
        CapabilityError: If the task has no expert, or the images of its expert cannot be recorded.
        ConfigError: If `episodes` is below 1, the expert has no noise option, or there is only one expert.
        DatasetError: If fewer than one attempt in ten succeeds, or the last episode in `store` is not what is
            played now.
    """
    if played is None and not hasattr(env, "demonstrate"):
        raise CapabilityError(f"env={env.spec.name} has no expert to record; choose a task that has one.")
    if episodes < 1:
        raise ConfigError(f"episodes must be at least 1; got {episodes}.")
    keeps_all = keep_failures or not env.spec.success_rule
    if played is None:
        expert_env: Any = _with_expert(env, noise=noise, expert=expert)
        env = expert_env
        played = partial(_demonstrations, env, first_seed, keeps_all, num_workers, fleet)
        remedy = "Lower noise=… (env.expert.noise), or keep_failures=true"
        player, what = f"the expert of {env.spec.name}", "demonstrations"
    else:
        player, what, remedy = "the policy", "episodes", "Record all with keep_failures=true"
    attempts = _Attempts(env, played, episodes, keeps_all, player, remedy, progress, store)
    meta = _metadata(env, what) | {"first_seed": first_seed}
    dataset = EpisodeDataset.from_episodes(attempts, meta=meta)
    dataset.meta["attempts"] = attempts.done
    return dataset


class _Expert:
    """An expert in a worker."""

    def __init__(self, env: Any, keeps_all: bool) -> None:
        self._env, self._keeps_all = env, keeps_all

    def attempt(self, seed: int) -> Episode:
        episode: Episode = self._env.demonstrate(seed)
        return with_images(self._env, episode) if episode.success or self._keeps_all else episode

    def close(self) -> None:
        """Nothing stays open between episodes."""


def _demonstrations(
    env: Any, first_seed: int, keeps_all: bool, num_workers: int, fleet: Fleet, skip: int
) -> Iterator[Episode]:
    """Play the expert without end, one episode per seed after the first `skip`; kept ones have images."""
    parts = max(1, num_workers)
    workers: Workers = fleet.start(_Expert, [(env, keeps_all)] * parts, processes=num_workers > 0)
    try:
        for seed in count(first_seed + skip, parts):
            yield from workers.call("attempt", [(seed + i,) for i in range(parts)])
    finally:
        workers.close()


@dataclass
class _Attempts:
    """Attempts in order; iteration plays them and yields the kept episodes."""

    env: Any
    played: Callable[[int], Iterable[Episode]]
    wanted: int
    keep_failures: bool
    player: str  # who attempts, for the error of too few successes, which ends with `remedy`
    remedy: str
    progress: Callable[[int, int], None] | None
    store: KeptEpisodes | None
    done: int = 0
    kept: int = 0

    def __iter__(self) -> Iterator[Episode]:
        before = self.store.attempts[: self.wanted] if self.store is not None else []
        for attempt in before:
            assert self.store is not None
            self._count(attempt + 1, is_kept=True)
            yield self.store.read(attempt)
        if self.kept < self.wanted:
            yield from self._play()

    def _play(self) -> Iterator[Episode]:
        for episode in islice(self._next(), max(MAX_ATTEMPTS * self.wanted - self.done, 0)):
            is_kept = episode.success or self.keep_failures
            if is_kept and not episode.images:
                episode = with_images(self.env, episode)
            if is_kept:
                yield episode  # is checked
                if self.store is not None:
                    self.store.add(self.done, episode)
            self._count(self.done + 1, is_kept)
            if self.kept == self.wanted:
                return
        raise DatasetError(
            f"{self.player} succeeded in {self.kept} of {self.done} attempts; expected {self.wanted}. "
            f"{self.remedy}."
        )

    def _next(self) -> Iterator[Episode]:
        """Return the attempts from `done` on; with some before, the last of them must be as it was."""
        played = iter(self.played(max(self.done - 1, 0)))
        if self.done and self.store is not None:
            again, known = next(played), self.store.read(self.done - 1)
            if not all(np.array_equal(getattr(again, key), getattr(known, key)) for key in _COMPARED):
                raise DatasetError(
                    f"{self.store.folder}: attempt {self.done - 1} differs when it is played again: task, "
                    f"player or program have changed. episodes={self.kept} writes what is there; to begin "
                    f"again, remove the folder."
                )
        return played

    def _count(self, done: int, is_kept: bool) -> None:
        self.done, self.kept = done, self.kept + is_kept
        if self.progress is not None:
            self.progress(self.kept, self.done)


_COMPARED = ("seed", "observations", "actions", "rewards", "success")


_FIELDS = {"noise": ("noise", "has no noise to set"), "expert": ("tier", "is the only one of its task")}
"""Argument of `collect` -> field of the options of experts, and what it means that they lack it."""


def _with_expert(env: Any, **options: Any) -> Any:
    """Return the configuration with other expert options; None keeps an option."""
    changes = {}
    for name, value in options.items():
        field, missing = _FIELDS[name]
        if value is None:
            continue
        if not hasattr(getattr(env, "expert", None), field):
            raise ConfigError(f"the expert of {env.spec.name} {missing}; got {name}={value}.")
        changes[field] = value
    return replace(env, expert=replace(env.expert, **changes)) if changes else env


def _metadata(env: Any, what: str) -> dict[str, Any]:
    known = {"env": named_options(env), "interface": interface_of_task(env.spec)}
    return {"source": f"{what} of {env.spec.name}", **known}
