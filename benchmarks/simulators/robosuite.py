"""Rows of `benchmarks.simulators`: our engine of robosuite's tasks, against robosuite's own `step`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.simulators.case import Array, Case, Side
from benchmarks.simulators.sides import Ours, Physics
from envs.tasks.robosuite.reference_stepper import begin, make_robosuite
from envs.tasks.robosuite.tasks import Can, Lift, Square, Transport

Config = Lift | Can | Square | Transport


class _Positions(Ours):
    """Ours, compared by positions: robosuite rounds observations."""

    def state(self) -> Array:
        """Return all positions."""
        return np.array(self.vector.stepper.datas[0].qpos)


class _Robosuite(Side):
    """robosuite's environment, as it comes."""

    def __init__(self, config: Config) -> None:
        self._env = make_robosuite(config.task, num_arms=config.num_arms)

    def begin(self, seed: int, actions: Array) -> None:
        begin(self._env, seed)

    def run(self, actions: Array) -> int:
        for action in actions:
            self._env.step(action)
        return len(actions)

    def state(self) -> Array:
        return np.array(self._env.sim.data.qpos)


def _sides(config: Config) -> Mapping[str, Side]:
    """Build both engines of a task, and the physics of ours."""
    ours = _Positions(config)
    return {"ours": ours, "peer": _Robosuite(config), "physics": Physics(ours)}


def _case(config: Config, steps: int) -> Case:
    return Case(
        env=config.name,
        backend="fast",
        peer="robosuite",
        build=partial(_sides, config),
        action_dim=config.spec.action_dim,
        tolerance=1e-9,
        steps=steps,
    )


CASES = (
    *(_case(config, 50) for config in (Lift(), Can(), Square())),
    _case(Transport(), 20),  # its many loose parts amplify rounding soon
)
