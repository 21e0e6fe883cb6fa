"""Rows of `benchmarks.simulators` for gymnasium's robots: eight side by side, in chunks of four steps.

The peer is gymnasium without its wrappers, one environment after the other. Both sides compute observations,
rewards and ends, and walk on behind a fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.simulators.case import Array, Case, Side
from benchmarks.simulators.sides import STEPS
from envs.make import env
from envs.tasks.locomotion.stepper import RobotStepper, load_model

ROBOTS, CHUNK = 8, 4


def _seeds(seed: int) -> range:
    return range(ROBOTS * seed, ROBOTS * (seed + 1))


class _Exact(Side):
    """The exact engine."""

    def __init__(self, name: str) -> None:
        config: Any = env(name)
        self._stepper, self._full = RobotStepper(config, ROBOTS), config.spec.action_high

    def begin(self, seed: int, actions: Array) -> None:
        for row, own in enumerate(_seeds(seed)):
            self._stepper.reset(row, own)

    def run(self, actions: Array) -> int:
        rows = np.arange(ROBOTS)
        chunks = (actions * self._full).reshape(ROBOTS, -1, CHUNK, actions.shape[1])
        for i in range(chunks.shape[1]):
            self._stepper.step_through(rows, chunks[:, i])
        return len(actions)

    def state(self) -> Array:
        return np.stack([data.qpos for data in self._stepper.datas])


class _Gymnasium(Side):
    """The environments that ours are made from."""

    def __init__(self, name: str) -> None:
        import gymnasium

        config: Any = env(name)
        self._full = config.spec.action_high
        task = f"{config.gymnasium_name}-v5"
        self._envs: list[Any] = [gymnasium.make(task).unwrapped for _ in range(ROBOTS)]

    def begin(self, seed: int, actions: Array) -> None:
        for one, own in zip(self._envs, _seeds(seed), strict=True):
            one.reset(seed=own)

    def run(self, actions: Array) -> int:
        for one, own in zip(self._envs, (actions * self._full).reshape(ROBOTS, STEPS, -1), strict=True):
            for action in own:
                one.step(action)
        return len(actions)

    def state(self) -> Array:
        return np.stack([one.data.qpos for one in self._envs])


class _Physics(Side):
    """`mj_step` alone."""

    def __init__(self, name: str) -> None:
        import mujoco

        config: Any = env(name)
        self._model, self._skip, self._step = load_model(config.xml_file), config.frame_skip, mujoco.mj_step
        self._start, self._full = RobotStepper(config, ROBOTS), config.spec.action_high

    def begin(self, seed: int, actions: Array) -> None:
        for row, own in enumerate(_seeds(seed)):
            self._start.reset(row, own)

    def run(self, actions: Array) -> int:
        for data, own in zip(
            self._start.datas, (actions * self._full).reshape(ROBOTS, STEPS, -1), strict=True
        ):
            for action in own:
                data.ctrl[:] = action
                self._step(self._model, data, nstep=self._skip)
        return len(actions)

    def state(self) -> Array:
        return np.stack([data.qpos for data in self._start.datas])


def _sides(name: str) -> Mapping[str, Side]:
    return {"ours": _Exact(name), "peer": _Gymnasium(name), "physics": _Physics(name)}


def _case(name: str) -> Case:
    return Case(
        env=name,
        backend="exact",
        peer="gymnasium",
        build=partial(_sides, name),
        action_dim=env(name).spec.action_dim,
        tolerance=0.0,
        steps=ROBOTS * STEPS,
        num_envs=ROBOTS,
    )


NAMES = ("hopper", "walker2d", "halfcheetah", "swimmer", "ant", "humanoid")
CASES = tuple(map(_case, NAMES))
