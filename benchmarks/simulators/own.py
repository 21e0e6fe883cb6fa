"""Rows of `benchmarks.simulators` for `avoid`, whose model is ours, and for vectors in worker processes.

The peer of `avoid` is the plainest loop over its MuJoCo model: motors, physics steps until something touches,
positions and velocities. That of worker processes is the same vector in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import mujoco
import numpy as np

from benchmarks.simulators.case import Array, Case, Side
from benchmarks.simulators.sides import Ours, Processes
from benchmarks.studies.offline import STEPS
from envs.make import env
from envs.tasks.avoid.scene import load_model
from envs.tasks.avoid.task import CONTROL_HZ, MAX_SPEED, start_position

WIDTH, WORKERS = 8, 2
SLOW = 0.2  # of full speed: nobody reaches a pillar
EXPENSIVE = "cube-double"


class _PlainLoop(Side):
    """MuJoCo and nothing else."""

    def __init__(self) -> None:
        self._model = load_model()
        self._datas = [mujoco.MjData(self._model) for _ in range(WIDTH)]
        self._num_substeps = round(1.0 / CONTROL_HZ / self._model.opt.timestep)
        self._seen = np.zeros((WIDTH, 4))

    def begin(self, seed: int, actions: Array) -> None:
        for row, data in enumerate(self._datas):
            mujoco.mj_resetData(self._model, data)
            data.qpos[:] = start_position(seed * WIDTH + row)
            mujoco.mj_forward(self._model, data)

    def run(self, actions: Array) -> int:
        for row, own in enumerate((SLOW * actions).reshape(WIDTH, STEPS, 2)):
            data = self._datas[row]
            for action in own:
                data.ctrl[:] = MAX_SPEED * action
                for _ in range(self._num_substeps):
                    mujoco.mj_step(self._model, data)
                    if data.ncon:
                        break
                self._seen[row] = np.concatenate([data.qpos, data.qvel])
        return len(actions)

    def state(self) -> Array:
        return self._seen.reshape(-1)


def _avoid() -> Mapping[str, Side]:
    return {"ours": Ours(env("avoid"), WIDTH, scale=SLOW), "peer": _PlainLoop()}


def _processes(name: str) -> Mapping[str, Side]:
    return {"ours": Processes(env(name), WIDTH, WORKERS), "peer": Ours(env(name), WIDTH)}


CASES = (
    Case("avoid", "exact", "mujoco", _avoid, 2, 0.0, WIDTH * STEPS, num_envs=WIDTH),
    Case(
        env=EXPENSIVE,
        backend=f"{WORKERS} processes",
        peer="one process",
        build=partial(_processes, EXPENSIVE),
        action_dim=env(EXPENSIVE).spec.action_dim,
        tolerance=0.0,
        steps=WIDTH * STEPS,
        num_envs=WIDTH,
    ),
)
