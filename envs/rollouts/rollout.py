"""Collect experience: environments split over workers, each with its own copy of the actor.

Legend: T chunks per collection, N environments, M truncated chunks, To observation history,
Ta executed steps per chunk, Do, Da and Dg widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from envs.engine.workers import FreeWorkers
from envs.rollouts.collector import Actor, Collector, exploration_generator, map_leaves
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.fleet import LOCAL, Fleet
from envs.rollouts.starts import Starts
from envs.spec import Array, EnvConfig
from policies.errors import CheckpointError, ConfigError
from policies.networks.recorded import Recorded

_WORTH_RECORDING = 8  # decisions of a collection from which on it pays to record their kernels


class Movable(Protocol):
    """A policy or an actor in training."""

    def on_cpu(self) -> Self:
        """Return itself on the CPU, or a copy there, for workers."""
        ...


M = TypeVar("M", bound=Movable)


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

    With `acts_on`, the actor stays in this process and decides for all environments at once, on that device,
    where observations and records then are. Its noise is that of a single worker: on a CPU the numbers are
    those of `num_workers=0` for any number of workers.

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
        acts_on: torch.device | None = None,
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
        self._own_workers = slice(first, first + per_process)
        options = (obs_steps, seed, records_simulator, records_path, starts, same_starts)
        arguments = [(env, part.tolist(), i, *options) for i, part in enumerate(self._rows)][
            self._own_workers
        ]
        self._versions: dict[int, int] = {}  # of the actor, by worker
        self._workers = fleet.start(Collector, arguments, processes=num_workers > 0)
        self._device = acts_on
        self._generator = exploration_generator(seed, first, acts_on or "cpu")
        if acts_on is not None and fleet.is_free:
            raise ConfigError("rollout.device must be workers with fleet.mode=free; got learner.")

    def acting(self, actor: M) -> M:
        """Return what acts for a policy or actor in training: itself with `acts_on`, else one on the CPU."""
        return actor if self._device is not None else actor.on_cpu()

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

        if self._device is not None:
            return self._collect_centrally(actor, num_steps, reset, self._device, count)
        arguments = [(actor, num_steps, reset)] * len(self._workers)
        return _rollout_of(self._of_all_processes(self._workers.call("collect", arguments, on_message=count)))

    def _collect_centrally(
        self, actor: Actor, num_steps: int, reset: bool, device: torch.device, count: Callable[[int], None]
    ) -> Rollout:
        """Collect with one decision for all environments of this process, computed on a device."""
        workers, widths = self._workers, [len(rows) for rows in self._rows[self._own_workers]]
        ends = np.cumsum(widths)[:-1]  # of all workers but the last
        decisions: list[dict[str, dict[str, Tensor]]] = []
        act = Recorded(
            lambda obs: actor.act(obs, self._generator),
            is_on=num_steps >= _WORTH_RECORDING,
            generators=[self._generator],
        )
        parts = workers.call("begin", [(num_steps, reset, False)] * len(workers))
        for _ in range(num_steps):
            obs = {
                name: _tensor_of([part[name] for part in parts], axis=0).to(device, non_blocking=True)
                for name in parts[0]
            }
            with torch.no_grad():
                actions, record = act(obs)
            copies = {name: part.clone() for name, part in record.items()}  # a replay overwrites the record
            decisions.append({"obs": obs, "record": copies})
            chunks = np.split(actions.cpu().numpy(), ends)
            parts = workers.call("execute", [(part,) for part in chunks])
            count(sum(widths))
        results = workers.call("read", [()] * len(workers))
        columns = {
            group: {
                name: torch.stack([made[group][name] for made in decisions]) for name in decisions[0][group]
            }
            for group in ("obs", "record")
        }
        if self._processes.world == 1:
            return replace(_rollout_of(results), obs=columns["obs"], record=columns["record"])
        for part, start, stop in zip(results, [0, *ends], [*ends, sum(widths)], strict=True):
            part |= map_leaves(columns, lambda values: values[:, start:stop].cpu().numpy())  # noqa: B023
        return _rollout_of(self._of_all_processes(results))

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
        results = dict([workers.next()])  # by worker
        while len(workers.idle) < len(self._workers) and (more := workers.ready()) is not None:
            results |= dict([more])
        parts = [(index, results[index]) for index in sorted(results)]
        rollout = _rollout_of([part for _, part in parts])
        counts = torch.tensor([len(self._rows[self._own_workers][index]) for index, _ in parts])
        rollout.version = torch.tensor([self._versions[index] for index, _ in parts]).repeat_interleave(
            counts
        )
        return rollout

    @property
    def oldest_version(self) -> int | None:
        """The oldest version with which a worker acts at present; None without any."""
        workers = self._workers
        idle = workers.idle if isinstance(workers, FreeWorkers) else range(len(workers))
        return min((version for index, version in self._versions.items() if index not in idle), default=None)

    def _of_all_processes(self, own: list[Any]) -> list[Any]:
        """Return the results of the workers of all processes, given those of this one."""
        return [part for parts in self._processes.gather(own) for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next collection: tensors and plain values.

        Simulators that cannot save their state start new episodes on loading.
        """
        states = self._of_all_processes(self._workers.call("state", [()] * len(self._workers)))
        shared: dict[str, Any] = {}
        if self._processes.world > 1:
            shared["processes"] = self._processes.world
        if self._device is not None:
            generators = self._processes.gather([self._generator.get_state()])
            shared["generators"] = [generator for (generator,) in generators]
        return {"num_envs": self.num_envs, "workers": map_leaves(states, _to_tensor), **shared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        With another number of processes, and thereby of workers, new episodes start.

        Raises:
            CheckpointError: If the number of environments or, in as many processes, of workers differs.
        """
        workers = map_leaves(state["workers"], _to_array)
        saved, present = (state["num_envs"], len(workers)), (self.num_envs, len(self._rows))
        if saved != present:
            if saved[0] != present[0] or state.get("processes", 1) == self._processes.world:
                raise CheckpointError(
                    f"the saved rollout had (num_envs, workers) = {saved}; this one has {present}. Resume "
                    "with the saved numbers."
                )
            workers = _redistributed(workers, self._rows)
        self._workers.call("load", [(part,) for part in workers[self._own_workers]])
        generators = state.get("generators", [])
        if len(generators) == self._processes.world:
            generator = generators[self._processes.rank]
            if generator.shape == self._generator.get_state().shape:  # else of another device
                self._generator.set_state(generator)

    def close(self) -> None:
        self._workers.close()


def _rollout_of(parts: Sequence[dict[str, Any]]) -> Rollout:
    """Return the results of workers as one rollout, their environments side by side."""
    widths = [part["step"]["length"].shape[1] for part in parts]
    offsets = np.cumsum([0, *widths[:-1]])

    def beside(name_of_group: str, axis: int = 1) -> dict[str, Tensor]:
        groups = [part[name_of_group] for part in parts]
        return {name: _tensor_of([group[name] for group in groups], axis) for name in groups[0]}

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


def concatenated(parts: Sequence[Rollout]) -> Rollout:
    """Return consecutive rollouts of the same environments as one."""
    first, last = parts[0], parts[-1]
    begins = np.cumsum([0, *(len(part.length) for part in parts[:-1])])

    def joined(values: Callable[[Rollout], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([values(part)[name] for part in parts]) for name in values(first)}

    steps = ("rewards", "length", "terminated", "truncated", "first")
    index = [part.final_index + torch.tensor([begin, 0]) for part, begin in zip(parts, begins, strict=True)]
    return Rollout(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in steps},
        obs=joined(lambda part: part.obs),
        next_obs_last=last.next_obs_last,
        final_obs=joined(lambda part: part.final_obs),
        final_index=torch.cat(index),
        record=joined(lambda part: part.record),
        episodes=[row for part in parts for row in part.episodes],
        path=None
        if first.path is None
        else torch.cat([part.path for part in parts if part.path is not None]),
        metrics=joined(lambda part: part.metrics),
    )


def _redistributed(workers: Sequence[Mapping[str, Any]], rows: Sequence[Array]) -> list[dict[str, Any]]:
    """Return the states of workers for another number of them, each with the environments `rows`.

    Episodes start anew, with the seeds after those that were begun, and so do leaders. A generator None: a
    worker keeps its own.
    """
    next_episode = np.concatenate([worker["next_episode"] for worker in workers])
    generators = [worker["generator"] for worker in workers] + [None] * len(rows)
    fresh = {"vector": None, "obs": None, "tally": None}
    return [
        {"generator": generators[i], "next_episode": next_episode[part], **fresh}
        for i, part in enumerate(rows)
    ]


def _tensor_of(arrays: Sequence[Array], axis: int) -> Tensor:
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=axis))


def _to_tensor(leaf: Any) -> Any:
    return torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf


def _to_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, Tensor) else leaf
