"""Rows of `benchmarks/simulators.py`: our engine of robosuite's tasks, against robosuite's own `step`."""

from __future__ import annotations

from functools import partial

import mujoco
import numpy as np

from benchmarks.simulators import Case, Side
from envs.robosuite import Can, Lift, Square
from envs.robosuite_fast import FastStepper
from envs.robosuite_reference import begin, make_robosuite

Array = np.ndarray

INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


class Ours:
    """The fast engine through the interface that everybody uses, chunks of any length."""

    def __init__(self, config: Lift | Can | Square) -> None:
        vector = config.make_vector(1)
        assert isinstance(vector.stepper, FastStepper)
        self.vector, self.stepper = vector, vector.stepper

    def begin(self, seed: int, actions: Array) -> None:
        """Start an episode."""
        self.vector.reset([seed])

    def run(self, actions: Array) -> None:
        """Execute actions (T, Da)."""
        self.vector.step_chunk(actions[None])

    def state(self) -> Array:
        """Return all positions."""
        return np.array(self.stepper.datas[0].qpos)


class Robosuite:
    """robosuite's environment, as it comes."""

    def __init__(self, task: str) -> None:
        self.env = make_robosuite(task, num_arms=1)

    def begin(self, seed: int, actions: Array) -> None:
        """Start an episode."""
        begin(self.env, seed)

    def run(self, actions: Array) -> None:
        """Execute actions (T, Da)."""
        for action in actions:
            self.env.step(action)

    def state(self) -> Array:
        """Return all positions."""
        return np.array(self.env.sim.data.qpos)


class Physics:
    """`mj_step` from every state of an episode of ours, with the motors as they are."""

    def __init__(self, ours: Ours) -> None:
        self._ours, self._model = ours, ours.stepper.model
        self._data = mujoco.MjData(self._model)
        self._states: list[Array] = []

    def begin(self, seed: int, actions: Array) -> None:
        """Walk through the episode on our engine and keep its states."""
        self._ours.begin(seed, actions)
        self._states = []
        for action in actions:
            state = np.empty(mujoco.mj_stateSize(self._model, INTEGRATION))
            mujoco.mj_getState(self._model, self._ours.stepper.datas[0], state, INTEGRATION)
            self._states.append(state)
            self._ours.run(action[None])

    def run(self, actions: Array) -> None:
        """Advance every state by the physics of one control step."""
        for state in self._states:
            mujoco.mj_setState(self._model, self._data, state, INTEGRATION)
            mujoco.mj_step(self._model, self._data, nstep=self._ours.stepper.scene.num_substeps)

    def state(self) -> Array:
        """Return all positions."""
        return np.array(self._data.qpos)


def sides(config: Lift | Can | Square) -> dict[str, Side]:
    """Build both engines of a task, and the physics of ours."""
    ours = Ours(config)
    return {"ours": ours, "peer": Robosuite(config.task), "physics": Physics(ours)}


CASES = tuple(
    Case(
        env=config.name,
        backend="fast",
        peer="robosuite",
        build=partial(sides, config),
        action_dim=7,
        tolerance=1e-9,
    )
    for config in (Lift(), Can(), Square())
)
