"""One worker's share of a collection: its environments, their running episodes, and what they recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from envs.rollouts.episodes import EpisodeRow, EpisodeTracker
from envs.rollouts.observations import observe
from envs.rollouts.starts import Leader, Starts
from envs.spec import Array, ChunkStep, EnvConfig, VectorEnv
from policies.seeds import derive_seed, seeded_generator

_SINCE_RESET = 1_000_000  # more episodes than an environment begins between two resets
_REPORTS = 20  # reports of progress per collection, about


def exploration_generator(seed: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of the noise of one actor, that of worker `index`."""
    return seeded_generator(seed, "exploration", index, device=device)


class Actor(Protocol):
    """Policy for collection; picklable, on the CPU if workers are processes."""

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Map observations (see `policies.protocols.Observation`) of N rows to chunks and recorded tensors.

        Returns:
            Physical actions (N, Ta, Da), and tensors (N, ...) by name.
        """
        ...


class Collector:
    """One worker's share: a vector of environments and their running episodes.

    `rows` are the global indices of its environments, which determine the seeds; `index` is the worker's.
    """

    def __init__(
        self,
        env: EnvConfig,
        rows: list[int],
        index: int,
        obs_steps: int,
        seed: int,
        records_simulator: bool = False,
        records_path: bool = False,
        starts: Starts | None = None,
        same_starts: int = 1,
    ) -> None:
        self._records_path = records_path
        self._rows, self._same_starts = rows, same_starts
        self._seed, self._records_simulator = seed, records_simulator
        self._vector: VectorEnv = env.make_vector(len(rows), obs_steps=obs_steps)
        self._generator = exploration_generator(seed, index)
        self._next_episode = np.zeros(len(rows), np.int64)
        self._tracker = EpisodeTracker(len(rows))
        self._leader = None if starts is None else Leader(starts, self._vector)
        self._obs: Array | None = None  # (n, To, Do); None before the first reset
        self._episodes: list[EpisodeRow] = []  # ended in the present collection
        self.notify: Callable[[int], None] = lambda chunks: None  # set by the workers

    def collect(self, actor: Actor, num_steps: int, reset: bool) -> dict[str, Any]:
        """Act for `num_steps` chunks; see `RolloutPool.collect`."""
        obs = self.begin(num_steps, reset)
        every, reported = max(num_steps // _REPORTS, 1), 0
        for t in range(num_steps):
            with torch.no_grad():
                actions, record = actor.act(map_leaves(obs, torch.from_numpy), self._generator)
            obs = self.execute(actions.detach().cpu().numpy(), record)
            if (t + 1) % every == 0 and t + 1 < num_steps:
                self.notify((t + 1 - reported) * len(self._rows))
                reported = t + 1
        return self.read()

    def begin(self, num_steps: int, reset: bool, keeps_obs: bool = True) -> dict[str, Array]:
        """Begin a collection of `num_steps` chunks and return the observations, (n, ...).

        Without `keeps_obs` the caller keeps them, and `read` returns no observations of before the chunks.
        """
        if reset or self._obs is None:
            self._restart()
        assert self._obs is not None
        self._buffer, self._episodes, self._keeps_obs = _RolloutBuffer(num_steps), [], keeps_obs
        self._latest = self._observation(self._obs)
        return self._latest

    def execute(self, actions: Array, record: Mapping[str, Tensor] | None = None) -> dict[str, Array]:
        """Execute chunks (n, Ta, Da) and return the observations after them; none after the last ones.

        `record` is what the actor recorded with them, (n, ...) by name.
        """
        buffer, t = self._buffer, self._buffer.written
        step = self._vector.step_chunk(actions)
        first = self._tracker.length == 0
        self._tracker.add(step)
        buffer.write(self._latest if self._keeps_obs else {}, first, step, record or {})
        if self._records_path:
            buffer.write_path(t, step.path)
        if len(rows := np.flatnonzero(step.truncated)):
            buffer.write_final(t, rows, self._observation(step.obs[rows], rows))
        if is_last := t == buffer.num_steps - 1:
            buffer.last = self._observation(step.obs)
        self._episodes += self._finish(step)
        assert self._obs is not None
        self._latest = {} if is_last else self._observation(self._obs)
        return self._latest

    def read(self) -> dict[str, Any]:
        """Return what was collected since `begin`."""
        return {**self._buffer.read(), "episodes": self._episodes}

    def _observation(self, state: Array, rows: Array | None = None) -> dict[str, Array]:
        """Return the present observations of rows (default: all) with state histories (n, To, Do)."""
        obs = observe(self._vector, state, rows)
        if self._records_simulator:
            obs |= self._vector.simulator(rows)
        return {name: _float32(value) for name, value in obs.items()}

    def state(self) -> dict[str, Any]:
        can_save = self._vector.can_save and self._obs is not None
        return {
            "generator": self._generator.get_state(),
            "next_episode": self._next_episode.copy(),
            "vector": self._vector.state_dict() if can_save else None,
            "obs": None if self._obs is None else self._obs.copy(),
            "tally": self._tracker.state_dict(),
            **({} if self._leader is None else {"leader": self._leader.state_dict()}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; starts new episodes if the simulator could not save."""
        if state["generator"] is not None:
            self._generator.set_state(torch.as_tensor(state["generator"], dtype=torch.uint8))
        self._next_episode = np.array(state["next_episode"], np.int64)
        self._obs = None
        if self._leader is not None and "leader" in state:  # else `start` is new to the run
            self._leader.load_state_dict(state["leader"])
        if state["vector"] is not None:
            self._vector.load_state_dict(state["vector"])
            self._tracker.load_state_dict(state["tally"])
            self._obs = np.array(state["obs"])

    def close(self) -> None:
        self._vector.close()

    def _restart(self) -> None:
        rows = np.arange(len(self._rows))
        self._tracker.reset(rows)
        if self._same_starts > 1:
            # Environments of a group count from the same number again, whose seeds are new.
            self._next_episode[:] = (self._next_episode.max() // _SINCE_RESET + 1) * _SINCE_RESET
        self._obs = self._begin(rows)

    def _begin(self, rows: Array) -> Array:
        """Start the next episodes of these rows; returns (n, To, Do)."""
        seeds = self._take_seeds(rows)
        return self._vector.reset(seeds, rows) if self._leader is None else self._leader.lead(rows, seeds)

    def _take_seeds(self, rows: Array) -> list[int]:
        """Return and count the seeds of the next episodes of these rows."""
        seeds = [
            derive_seed(self._seed, "episode", self._rows[i] // self._same_starts, int(self._next_episode[i]))
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
        if self._leader is not None:
            rows = self._leader.finished(done, rows)
        self._tracker.reset(done)
        self._obs = step.obs.copy()
        self._obs[done] = self._begin(done)
        return rows


class _RolloutBuffer:
    """Preallocated arrays for T chunks of one worker; `last` are the observations after the last one."""

    last: dict[str, Array]

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.written = num_steps, 0
        self._groups: dict[str, dict[str, Array]] = {
            name: {} for name in ("obs", "step", "record", "metrics")
        }
        self._final: list[tuple[Array, dict[str, Array]]] = []

    def write(
        self, obs: Mapping[str, Array], first: Array, step: ChunkStep, record: Mapping[str, Tensor]
    ) -> None:
        t = self.written
        self.written += 1
        self._write(t, "obs", obs)
        of_step = {name: getattr(step, name) for name in ("length", "terminated", "truncated")}
        self._write(t, "step", {"rewards": step.rewards.astype(np.float32), "first": first, **of_step})
        self._write(t, "metrics", step.metrics)
        self._write(t, "record", {name: tensor.detach().numpy() for name, tensor in record.items()})

    def _write(self, t: int, group: str, values: Mapping[str, Array]) -> None:
        arrays = self._groups[group]
        for name, value in values.items():
            if t == 0:
                arrays[name] = np.empty((self.num_steps, *value.shape), value.dtype)
            arrays[name][t] = value

    def write_path(self, t: int, path: Array) -> None:
        self._write(t, "step", {"path": path.astype(np.float32)})

    def write_final(self, t: int, rows: Array, obs: dict[str, Array]) -> None:
        """Add the true final observations of truncated rows (m,)."""
        self._final.append((np.stack([np.full_like(rows, t), rows], axis=1), obs))

    def read(self) -> dict[str, Any]:
        index = [np.empty((0, 2), np.int64), *(index for index, _ in self._final)]
        final = [{name: value[:0] for name, value in self.last.items()}, *(obs for _, obs in self._final)]
        return {
            **self._groups,
            "next_obs_last": self.last,
            "final_index": np.concatenate(index),
            "final_obs": {name: np.concatenate([obs[name] for obs in final]) for name in self.last},
        }


def _float32(values: Array) -> Array:
    """Return floating-point values as float32; images are unchanged."""
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree of mappings, lists and tuples with every leaf changed."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(value, change) for value in tree)
    return change(tree)
