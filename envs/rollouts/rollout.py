"""Collect experience: environments split over workers, each with its own copy of the actor.

Legend: T chunks per collection, N environments, M truncated chunks, To observation history,
Ta executed steps per chunk, Do and Da widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from envs.engine.workers import start_workers
from envs.rollouts.episodes import EpisodeRow, EpisodeTracker
from envs.spec import Array, ChunkStep, EnvConfig, VectorEnv
from policies.errors import CheckpointError, ConfigError
from policies.seeds import derive_seed, seeded_generator


class Actor(Protocol):
    """Policy for collection; picklable, on the CPU if workers are processes."""

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Map observations, `state` (N, To, Do), to chunks and recorded tensors.

        Returns:
            Physical actions (N, Ta, Da), and tensors (N, ...) by name.
        """
        ...


@dataclass
class Rollout:
    """T chunks of N environments, and the episodes that ended in them.

    Shapes:
        obs: (T, N, To, Do) float32, before each chunk.
        rewards: (T, N, Ta) float32, per control step, zero past `length`.
        length: (T, N) int64 executed control steps.
        terminated, truncated: (T, N) bool; both may be true of one chunk.
        first: (T, N) bool, the chunk begins an episode.
        next_obs_last: (N, To, Do) float32, after the last chunk; the true final one where that one ended.
        final_obs: (M, To, Do) float32, true final observation of every truncated chunk.
        final_index: (M, 2) int64, its [t, n].
        record: tensors recorded by the actor, (T, N, ...) by name.
    """

    obs: Tensor
    rewards: Tensor
    length: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor
    next_obs_last: Tensor
    final_obs: Tensor
    final_index: Tensor
    record: dict[str, Tensor]
    episodes: list[EpisodeRow]


class RolloutPool:
    """N environments over worker processes, each worker with its own copy of the actor and one thread.

    Episodes continue from one collection to the next. Environment n starts its e-th episode from a seed
    that depends on (seed, n, e) alone; the actor's noise comes from one generator per worker.
    `num_workers=0` runs in this process with the numbers of one worker.

    Raises:
        ConfigError: If there are fewer environments than workers.
        MissingExtraError, WorkerError: If the simulator cannot be built.
    """

    def __init__(
        self,
        env: EnvConfig,
        *,
        num_envs: int,
        num_workers: int,
        obs_steps: int = 1,
        seed: int = 0,
    ) -> None:
        if num_workers < 0 or num_envs < max(1, num_workers):
            raise ConfigError(
                f"num_envs must be at least num_workers, and both positive (num_workers=0: no processes); "
                f"got num_envs={num_envs}, num_workers={num_workers}."
            )
        self.env = env
        self.num_envs = num_envs
        rows = np.array_split(np.arange(num_envs), max(1, num_workers))
        arguments = [(env, part.tolist(), obs_steps, seed, i) for i, part in enumerate(rows)]
        self._workers = start_workers(Collector, arguments, processes=num_workers > 0)

    def collect(self, actor: Actor, num_steps: int, *, reset: bool = False) -> Rollout:
        """Execute T = `num_steps` chunks in every environment; the actor is copied to the workers.

        With `reset`, new episodes start everywhere; running ones are dropped without an episode row.

        Raises:
            ConfigError: If `num_steps` is not positive.
            WorkerError: If a worker fails.
        """
        if num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {num_steps}.")
        parts = self._workers.call("collect", [(actor, num_steps, reset)] * len(self._workers))
        return _join(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next collection: tensors and plain values.

        Simulators that cannot save their state start new episodes on loading.
        """
        states = self._workers.call("state", [()] * len(self._workers))
        return {"num_envs": self.num_envs, "workers": _map_leaves(states, _to_tensor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; numbers of environments and workers must agree (CheckpointError)."""
        saved = (state["num_envs"], len(state["workers"]))
        if saved != (self.num_envs, len(self._workers)):
            raise CheckpointError(
                f"the saved rollout had (num_envs, workers) = {saved}; this one has "
                f"{(self.num_envs, len(self._workers))}. Resume with the saved numbers."
            )
        arrays = _map_leaves(state["workers"], _to_array)
        self._workers.call("load", [(part,) for part in arrays])

    def close(self) -> None:
        self._workers.close()


class Collector:
    """One worker's share: a vector of environments and their running episodes.

    `rows` are the global indices of its environments, which determine the seeds; `index` is the worker's.
    """

    def __init__(self, env: EnvConfig, rows: list[int], obs_steps: int, seed: int, index: int) -> None:
        self._rows = rows
        self._seed = seed
        self._vector: VectorEnv = env.make_vector(len(rows), obs_steps=obs_steps)
        self._generator = seeded_generator(seed, "exploration", index)
        self._next_episode = np.zeros(len(rows), np.int64)
        self._tracker = EpisodeTracker(len(rows))
        self._obs: Array | None = None  # (n, To, Do); None before the first reset

    def collect(self, actor: Actor, num_steps: int, reset: bool) -> dict[str, Any]:
        if reset or self._obs is None:
            self._restart()
        buffer = _RolloutBuffer(num_steps)
        episodes: list[EpisodeRow] = []
        for t in range(num_steps):
            obs = torch.from_numpy(self._obs).float()
            with torch.no_grad():
                actions, record = actor.act({"state": obs}, self._generator)
            step = self._vector.step_chunk(actions.detach().cpu().numpy())
            first = self._tracker.length == 0
            self._tracker.add(step)
            buffer.write(t, obs, first, step, record)
            episodes += self._finish(step)
        return {**buffer.read(), "episodes": episodes}

    def state(self) -> dict[str, Any]:
        can_save = self._vector.can_save and self._obs is not None
        return {
            "generator": self._generator.get_state(),
            "next_episode": self._next_episode.copy(),
            "vector": self._vector.state_dict() if can_save else None,
            "obs": None if self._obs is None else self._obs.copy(),
            "tally": self._tracker.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; starts new episodes if the simulator could not save."""
        self._generator.set_state(torch.as_tensor(state["generator"], dtype=torch.uint8))
        self._next_episode = np.array(state["next_episode"], np.int64)
        self._obs = None
        if state["vector"] is not None:
            self._vector.load_state_dict(state["vector"])
            self._tracker.load_state_dict(state["tally"])
            self._obs = np.array(state["obs"])

    def close(self) -> None:
        self._vector.close()

    def _restart(self) -> None:
        rows = np.arange(len(self._rows))
        self._tracker.reset(rows)
        self._obs = self._vector.reset(self._take_seeds(rows))

    def _take_seeds(self, rows: Array) -> list[int]:
        """Return and count the seeds of the next episodes of these rows."""
        seeds = [
            derive_seed(self._seed, "episode", self._rows[i], int(self._next_episode[i]))
            for i in rows.tolist()
        ]
        self._tracker.begin(rows, seeds, self._next_episode[rows])
        self._next_episode[rows] += 1
        return seeds

    def _finish(self, step: ChunkStep) -> list[EpisodeRow]:
        """Return the ended episodes and start the next ones."""
        self._obs = step.obs
        done = np.flatnonzero(step.done)
        if done.size == 0:
            return []
        rows = self._tracker.rows(done, step)
        self._tracker.reset(done)
        self._obs = step.obs.copy()
        self._obs[done] = self._vector.reset(self._take_seeds(done), done)
        return rows


class _RolloutBuffer:
    """Preallocated arrays for T chunks of one worker."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._arrays: dict[str, Array] = {}
        self._record: dict[str, Tensor] = {}
        self._final: list[tuple[int, Array, Array]] = []
        self._last: Array | None = None

    def write(self, t: int, obs: Tensor, first: Array, step: ChunkStep, record: Mapping[str, Tensor]) -> None:
        values = {
            "obs": obs.numpy(),
            "rewards": step.rewards.astype(np.float32),
            "length": step.length,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "first": first,
        }
        for name, value in values.items():
            if t == 0:
                self._arrays[name] = np.empty((self._num_steps, *value.shape), value.dtype)
            self._arrays[name][t] = value
        for name, tensor in record.items():
            if t == 0:
                self._record[name] = torch.empty((self._num_steps, *tensor.shape), dtype=tensor.dtype)
            self._record[name][t] = tensor.detach()
        if step.truncated.any():
            rows = np.flatnonzero(step.truncated)
            self._final.append((t, rows, step.obs[rows]))
        self._last = step.obs

    def read(self) -> dict[str, Any]:
        """Return all arrays; float32 observations, final ones by [t, n]."""
        assert self._last is not None
        index = [np.stack([np.full_like(rows, t), rows], axis=1) for t, rows, _ in self._final]
        final = [obs for _, _, obs in self._final]
        return {
            **self._arrays,
            "next_obs_last": self._last.astype(np.float32),
            "final_index": np.concatenate([np.empty((0, 2), np.int64), *index]),
            "final_obs": np.concatenate([self._last[:0], *final]).astype(np.float32),
            "record": {name: tensor.numpy() for name, tensor in self._record.items()},
        }


def _join(parts: Sequence[dict[str, Any]]) -> Rollout:
    widths = [part["length"].shape[1] for part in parts]
    offsets = np.cumsum([0, *widths[:-1]])

    def beside(name: str, axis: int = 1) -> Tensor:
        arrays = [part[name] for part in parts]
        return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis))

    record = {
        name: torch.from_numpy(np.concatenate([part["record"][name] for part in parts], axis=1))
        for name in parts[0]["record"]
    }
    index = [part["final_index"] + [0, offset] for part, offset in zip(parts, offsets, strict=True)]
    names = ("obs", "rewards", "length", "terminated", "truncated", "first")
    return Rollout(
        **{name: beside(name) for name in names},
        next_obs_last=beside("next_obs_last", axis=0),
        final_obs=beside("final_obs", axis=0),
        final_index=torch.from_numpy(np.concatenate(index)),
        record=record,
        episodes=[row for part in parts for row in part["episodes"]],
    )


def _map_leaves(tree: Any, change: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_leaves(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_leaves(value, change) for value in tree)
    return change(tree)


def _to_tensor(leaf: Any) -> Any:
    return torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf


def _to_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, Tensor) else leaf
