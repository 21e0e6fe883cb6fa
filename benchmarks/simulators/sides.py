"""Sides that families of `benchmarks.simulators` share: our vectors, here or in processes, and physics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from benchmarks.simulators.case import Array, Side
from envs.engine.workers import start_workers
from envs.spec import EnvConfig

CHUNK, STEPS = 8, 48  # control steps of a chunk, and of an episode of one environment
INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


class Ours(Side):
    """A vector of ours, through the interface that everybody uses; episodes that end begin anew.

    Args:
        config: The task.
        num_envs: N; actions (T, Da) of a case are N episodes, one after the other.
        scale: What an action of 1 stands for; None: the end of the box.
    """

    def __init__(self, config: EnvConfig, num_envs: int = 1, *, scale: float | None = None) -> None:
        self.vector: Any = config.make_vector(num_envs)
        self.num_envs = num_envs
        self._scale = np.asarray(config.spec.action_high) if scale is None else scale
        self._last: Array = np.zeros(0)

    def begin(self, seed: int, actions: Array) -> None:
        """Reset all environments, each with a seed of its own."""
        self.start(list(range(seed * self.num_envs, (seed + 1) * self.num_envs)))

    def start(self, seeds: list[int]) -> None:
        """Reset all environments."""
        self.vector.reset(seeds)

    def run(self, actions: Array) -> int:
        """Execute actions (T, Da) in chunks."""
        each, executed = (actions * self._scale).reshape(self.num_envs, -1, actions.shape[1]), 0
        for i in range(0, each.shape[1], CHUNK):
            step = self.vector.step_chunk(each[:, i : i + CHUNK])
            executed += int(step.length.sum())
            if step.done.any():
                self.vector.reset([i] * int(step.done.sum()), np.flatnonzero(step.done))
        self._last = step.path[:, -1]
        return executed

    def state(self) -> Array:
        """Return the last observations (N Do,)."""
        return self._last.reshape(-1)

    def seconds(self) -> float:
        """Return the processor time of this process."""
        return time.process_time()

    def close(self) -> None:
        """Release the simulators."""
        self.vector.close()


class Processes(Side):
    """Vectors of ours in worker processes; processor time is that of all of them.

    Args:
        config: The task.
        num_envs: Over all processes.
        num_workers: Processes.
    """

    def __init__(self, config: EnvConfig, num_envs: int, num_workers: int) -> None:
        self._rows = np.array_split(np.arange(num_envs), num_workers)
        arguments = [(config, len(rows)) for rows in self._rows]
        self._workers, self._num_envs = start_workers(Ours, arguments, processes=True), num_envs

    def begin(self, seed: int, actions: Array) -> None:
        """Reset all environments, each with a seed of its own."""
        self._call("start", [((seed * self._num_envs + rows).tolist(),) for rows in self._rows])

    def run(self, actions: Array) -> int:
        """Execute actions (T, Da) in chunks, one message to each process and back per chunk."""
        each, executed = actions.reshape(self._num_envs, -1, actions.shape[1]), 0
        for i in range(0, each.shape[1], CHUNK):
            parts = [(each[rows, i : i + CHUNK].reshape(-1, actions.shape[1]),) for rows in self._rows]
            executed += sum(self._call("run", parts))
        return executed

    def state(self) -> Array:
        """Return the last observations (N Do,)."""
        return np.concatenate(self._call("state", [()] * len(self._rows)))

    def clock(self) -> float:
        """Return the processor time of this process and the workers."""
        return time.process_time() + sum(self._call("seconds", [()] * len(self._rows)))

    def _call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return self._workers.call(method, arguments)


class Several(Side):
    """Sides of one environment each, one after the other; they begin where `Ours` does."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides

    def begin(self, seed: int, actions: Array) -> None:
        """Start an episode in each, with a seed of its own."""
        for row, side in enumerate(self._sides):
            side.begin(seed * len(self._sides) + row, actions)

    def run(self, actions: Array) -> int:
        """Execute actions (T, Da), an equal part in each."""
        parts = actions.reshape(len(self._sides), -1, actions.shape[1])
        return sum(side.run(part) for side, part in zip(self._sides, parts, strict=True))

    def state(self) -> Array:
        """Return what all are compared by, in a row."""
        return np.concatenate([side.state() for side in self._sides])


class Physics(Side):
    """`mj_step` from every state of an episode of ours, with the motors as they are.

    Args:
        ours: One environment.
    """

    def __init__(self, ours: Ours) -> None:
        stepper, spec = ours.vector.stepper, ours.vector.spec
        self._ours, self._stepper, self._model = ours, stepper, stepper.model
        self._nstep = round(1.0 / spec.control_hz / self._model.opt.timestep)
        self._data = mujoco.MjData(self._model)
        self._states: list[Array] = []

    def begin(self, seed: int, actions: Array) -> None:
        """Walk through the episode on our engine and keep its states."""
        self._ours.begin(seed, actions)
        self._states = []
        for action in actions:
            state = np.empty(mujoco.mj_stateSize(self._model, INTEGRATION))
            mujoco.mj_getState(self._model, self._stepper.datas[0], state, INTEGRATION)
            self._states.append(state)
            self._ours.run(action[None])

    def run(self, actions: Array) -> int:
        """Advance every state by the physics of one control step."""
        model, data, nstep = self._model, self._data, self._nstep
        for state in self._states:
            mujoco.mj_setState(model, data, state, INTEGRATION)
            mujoco.mj_step(model, data, nstep=nstep)
        return len(self._states)

    def state(self) -> Array:
        """Return all positions."""
        return np.array(self._data.qpos)
