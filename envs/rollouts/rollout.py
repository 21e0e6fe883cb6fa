"""Collect experience: environments split over workers, each with its own copy of the actor.

Legend: T chunks per collection, N environments, M truncated chunks, To observation history,
Ta executed steps per chunk, Do, Da and Dg widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from envs.engine.workers import FreeWorkers
from envs.rollouts.episodes import EpisodeRow, EpisodeTracker
from envs.rollouts.fleet import LOCAL, Fleet
from envs.rollouts.starts import Leader, Starts
from envs.spec import Array, ChunkStep, EnvConfig, VectorEnv
from policies.errors import CheckpointError, ConfigError
from policies.seeds import derive_seed, seeded_generator

_SINCE_RESET = 1_000_000  # more episodes than an environment begins between two resets
_REPORTS = 20  # reports of progress per collection, about


class Actor(Protocol):
    """Policy for collection; picklable, on the CPU if workers are processes."""

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Map observations (see `policies.protocols.Observation`) of N rows to chunks and recorded tensors.

        Returns:
            Physical actions (N, Ta, Da), and tensors (N, ...) by name.
        """
        ...


class Processes(Protocol):
    """The processes of a run, of which each collects a part; see `algos.training.ranks`."""

    rank: int
    world: int

    def gather(self, value: list[Any]) -> list[list[Any]]:
        """Return the values of all processes, in order."""
        ...


class _Single:
    rank, world = 0, 1

    def gather(self, value: list[Any]) -> list[list[Any]]:
        return [value]


@dataclass
class Rollout:
    """T chunks of N environments, and the episodes that ended in them.

    Shapes:
        obs: before each chunk: `state` (T, N, To, Do) and, with goals, `goal` (T, N, Dg), float32, and images
            (T, N, To, H, W, 3) uint8 by camera.
        rewards: (T, N, Ta) float32, per control step, zero past `length`.
        length: (T, N) int64 executed control steps.
        terminated, truncated: (T, N) bool; both may be true of one chunk.
        first: (T, N) bool, the chunk begins an episode.
        next_obs_last: as `obs`, (N, ...), after the last chunk; the true final one where that one ended.
        final_obs: as `obs`, (M, ...), true final observation of every truncated chunk.
        final_index: (M, 2) int64, its [t, n].
        record: tensors recorded by the actor, (T, N, ...) by name.
        path: (T, N, Ta, Do) float32, state after each executed step, zero past `length`; None: not recorded.
        metrics: of the running episodes after each chunk, (T, N) by name.
        version: (N,) int64, version of the actor in each environment; None: all have the newest.
    """

    obs: dict[str, Tensor]
    rewards: Tensor
    length: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor
    next_obs_last: dict[str, Tensor]
    final_obs: dict[str, Tensor]
    final_index: Tensor
    record: dict[str, Tensor]
    episodes: list[EpisodeRow]
    path: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    version: Tensor | None = None


class RolloutPool:
    """N environments over worker processes, each worker with its own copy of the actor and one thread.

    Episodes continue from one collection to the next. Environment n starts its e-th episode from a seed
    that depends on (seed, n, e) alone; the actor's noise comes from one generator per worker.
    `num_workers=0` runs in this process with the numbers of one worker. With `records_simulator`,
    observations have the part `simulator` (..., Ds), for critics; with `records_path`, rollouts have `path`.
    `starts` leads episodes before the actor acts; rollouts then begin where it ends. With `same_starts`, as
    many environments in a row have the seeds of their first, counted anew from every reset.

    Of a run of several processes (`shared_by`), each has `num_workers` workers with its part of the
    environments, and receives the rollouts of all: W processes with n workers collect what one with W n does.

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
        records_simulator: bool = False,
        records_path: bool = False,
        fleet: Fleet = LOCAL,
        shared_by: Processes | None = None,
        starts: Starts | None = None,
        same_starts: int = 1,
    ) -> None:
        self._processes = shared_by or _Single()
        per_process, world = max(1, num_workers), self._processes.world
        if num_workers < 0 or num_envs < per_process * world:
            several = "" if world == 1 else f" in each of {world} processes"
            raise ConfigError(
                f"num_envs must be at least num_workers, and both positive (num_workers=0: no processes); "
                f"got num_envs={num_envs}, num_workers={num_workers}{several}."
            )
        self.env = env
        self.num_envs = num_envs
        self._rows = np.array_split(np.arange(num_envs), per_process * world)
        first = self._processes.rank * per_process
        self._own = slice(first, first + per_process)
        options = (obs_steps, seed, records_simulator, records_path, starts, same_starts)
        arguments = [(env, part.tolist(), i, *options) for i, part in enumerate(self._rows)][self._own]
        self._versions: dict[int, int] = {}  # of the actor, by worker
        self._workers = fleet.start(Collector, arguments, processes=num_workers > 0)

    def collect(
        self,
        actor: Actor,
        num_steps: int,
        *,
        reset: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> Rollout:
        """Execute T = `num_steps` chunks in every environment; the actor is copied to the workers.

        With `reset`, new episodes start everywhere; running ones are dropped without an episode row.
        `on_progress` is called now and then with the number of chunks executed so far, over all environments.

        Raises:
            ConfigError: If `num_steps` is not positive.
            WorkerError: If a worker fails.
        """
        if num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {num_steps}.")
        done = 0

        def count(chunks: int) -> None:
            nonlocal done
            done += chunks
            if on_progress is not None:
                on_progress(done)

        arguments = [(actor, num_steps, reset)] * len(self._workers)
        return _join(self._gathered(self._workers.call("collect", arguments, on_message=count)))

    def collect_free(self, actor: Actor, num_steps: int, version: int) -> Rollout:
        """Return the chunks of those workers that are done, at least of one; see `RayFleet.mode`.

        Idle workers first get the actor, whose `version` comes back with their environments; others go on
        with the one that they have.
        """
        workers = self._workers
        assert isinstance(workers, FreeWorkers)
        if not self._versions:  # a state is saved without waiting: that of before the running call
            workers.call("state", [()] * len(workers))
        if idle := workers.idle:
            stored = workers.store((actor, num_steps, False))
            for index in idle:
                self._versions[index] = version
                workers.submit(index, "collect", stored)
        found = dict([workers.next()])
        while len(workers.idle) < len(self._workers) and (more := workers.ready()) is not None:
            found |= dict([more])
        parts = [(index, found[index]) for index in sorted(found)]
        rollout = _join([part for _, part in parts])
        counts = torch.tensor([len(self._rows[self._own][index]) for index, _ in parts])
        rollout.version = torch.tensor([self._versions[index] for index, _ in parts]).repeat_interleave(
            counts
        )
        return rollout

    @property
    def oldest_version(self) -> int | None:
        """The oldest version with which a worker acts at present; None without any."""
        workers = self._workers
        idle = workers.idle if isinstance(workers, FreeWorkers) else range(len(workers))
        return min((seen for index, seen in self._versions.items() if index not in idle), default=None)

    def _gathered(self, own: list[Any]) -> list[Any]:
        """Return the results of the workers of all processes."""
        return [part for parts in self._processes.gather(own) for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next collection: tensors and plain values.

        Simulators that cannot save their state start new episodes on loading.
        """
        states = self._gathered(self._workers.call("state", [()] * len(self._workers)))
        processes = {} if self._processes.world == 1 else {"processes": self._processes.world}
        return {"num_envs": self.num_envs, "workers": _map_leaves(states, _to_tensor), **processes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        With another number of processes, and thereby of workers, new episodes start.

        Raises:
            CheckpointError: If the number of environments or, in as many processes, of workers differs.
        """
        workers = _map_leaves(state["workers"], _to_array)
        saved, present = (state["num_envs"], len(workers)), (self.num_envs, len(self._rows))
        if saved != present:
            if saved[0] != present[0] or state.get("processes", 1) == self._processes.world:
                raise CheckpointError(
                    f"the saved rollout had (num_envs, workers) = {saved}; this one has {present}. Resume "
                    "with the saved numbers."
                )
            workers = _dealt_again(workers, self._rows)
        self._workers.call("load", [(part,) for part in workers[self._own]])

    def close(self) -> None:
        self._workers.close()


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
        self._generator = seeded_generator(seed, "exploration", index)
        self._next_episode = np.zeros(len(rows), np.int64)
        self._tracker = EpisodeTracker(len(rows))
        self._leader = None if starts is None else Leader(starts, self._vector)
        self._obs: Array | None = None  # (n, To, Do); None before the first reset
        self.notify: Callable[[int], None] = lambda chunks: None  # set by the workers

    def collect(self, actor: Actor, num_steps: int, reset: bool) -> dict[str, Any]:
        if reset or self._obs is None:
            self._restart()
        assert self._obs is not None
        buffer = _RolloutBuffer(num_steps)
        episodes: list[EpisodeRow] = []
        every, told = max(num_steps // _REPORTS, 1), 0
        for t in range(num_steps):
            obs = self._observation(self._obs)
            with torch.no_grad():
                actions, record = actor.act(_map_leaves(obs, torch.from_numpy), self._generator)
            step = self._vector.step_chunk(actions.detach().cpu().numpy())
            first = self._tracker.length == 0
            self._tracker.add(step)
            buffer.write(t, obs, first, step, record)
            if self._records_path:
                buffer.write_path(t, step.path)
            if len(rows := np.flatnonzero(step.truncated)):
                buffer.write_final(t, rows, self._observation(step.obs[rows], rows))
            if t == num_steps - 1:
                buffer.last = self._observation(step.obs)
            episodes += self._finish(step)
            if (t + 1) % every == 0 and t + 1 < num_steps:
                self.notify((t + 1 - told) * len(self._rows))
                told = t + 1
        return {**buffer.read(), "episodes": episodes}

    def _observation(self, state: Array, rows: Array | None = None) -> dict[str, Array]:
        """Return the present observations of rows (default: all) with state histories (n, To, Do)."""
        beside = self._vector.goals(rows) | self._vector.images(rows)
        if self._records_simulator:
            beside |= self._vector.simulator(rows)
        return {name: _single(value) for name, value in ({"state": state} | beside).items()}

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
        self._num_steps = num_steps
        self._groups: dict[str, dict[str, Array]] = {
            name: {} for name in ("obs", "step", "record", "metrics")
        }
        self._final: list[tuple[Array, dict[str, Array]]] = []

    def write(
        self, t: int, obs: Mapping[str, Array], first: Array, step: ChunkStep, record: Mapping[str, Tensor]
    ) -> None:
        self._write(t, "obs", obs)
        of_step = {name: getattr(step, name) for name in ("length", "terminated", "truncated")}
        self._write(t, "step", {"rewards": step.rewards.astype(np.float32), "first": first, **of_step})
        self._write(t, "metrics", step.metrics)
        self._write(t, "record", {name: tensor.detach().numpy() for name, tensor in record.items()})

    def _write(self, t: int, group: str, values: Mapping[str, Array]) -> None:
        arrays = self._groups[group]
        for name, value in values.items():
            if t == 0:
                arrays[name] = np.empty((self._num_steps, *value.shape), value.dtype)
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


def _single(values: Array) -> Array:
    """Return floating-point values as float32; images are unchanged."""
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def _join(parts: Sequence[dict[str, Any]]) -> Rollout:
    widths = [part["step"]["length"].shape[1] for part in parts]
    offsets = np.cumsum([0, *widths[:-1]])

    def beside(group: str, axis: int = 1) -> dict[str, Tensor]:
        groups = [part[group] for part in parts]
        return {name: _joined([one[name] for one in groups], axis) for name in groups[0]}

    index = [part["final_index"] + [0, offset] for part, offset in zip(parts, offsets, strict=True)]
    return Rollout(
        **beside("step"),
        obs=beside("obs"),
        next_obs_last=beside("next_obs_last", axis=0),
        final_obs=beside("final_obs", axis=0),
        final_index=torch.from_numpy(np.concatenate(index)),
        record=beside("record"),
        metrics=beside("metrics"),
        episodes=[row for part in parts for row in part["episodes"]],
    )


def _dealt_again(workers: Sequence[Mapping[str, Any]], rows: Sequence[Array]) -> list[dict[str, Any]]:
    """Return states of other workers: episodes are counted on, and start anew, as do leaders.

    None stands for the own generator.
    """
    counted = np.concatenate([worker["next_episode"] for worker in workers])
    known = [worker["generator"] for worker in workers] + [None] * len(rows)
    fresh = {"vector": None, "obs": None, "tally": None}
    return [{"generator": known[i], "next_episode": counted[part], **fresh} for i, part in enumerate(rows)]


def _joined(arrays: Sequence[Array], axis: int) -> Tensor:
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis))


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
