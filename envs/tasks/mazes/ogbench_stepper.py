"""OGBench's mazes, many in one process, bit for bit: one of its environments steps all rows in turn.

OGBench draws task, positions and teleport exits from NumPy's global generator. Here each episode has its own
generator, which draws as the global one does after `np.random.seed(seed)`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from envs.spec import Array, StepResult
from envs.tasks.mazes.layouts import Layout
from envs.tasks.mazes.stepper import MazeRows
from policies.extras import require

NUM_TASKS = 5
_UINT32 = 2**32
_TELEPORT_RADII = 1.5  # distance within which a teleport acts [its radii]


class OgbenchMazeStepper(MazeRows):
    """Steps N agents in one of OGBench's mazes.

    Args:
        world: OGBench's name, e.g. `antmaze-large`.
        maze: Its layout.
        num_envs: N.
        task: Start and goal, 1 to 5; 0: drawn per episode.
        single: Rules of OGBench's single tasks: the goal is the middle of its cell, success is evaluated
            before an action, rewards are -1 and 0. Otherwise goals are anywhere in the inner part of their
            cell, success is evaluated after an action, rewards are 0 and 1.
        observe_goal: Whether observations end with the goal.
    """

    target_kind = "geom"

    def __init__(
        self, world: str, maze: Layout, num_envs: int, *, task: int, single: bool, observe_goal: bool
    ) -> None:
        self._env = load_maze(world)
        super().__init__(self._env.model, maze, num_envs)
        self._agent: Any = super(type(self._env), self._env)  # the environment without its maze
        self._task, self._single, self._observe_goal = task, single, observe_goal
        self._rngs = [global_generator(0) for _ in range(num_envs)]  # each reset seeds its own

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode as OGBench does for this seed; returns the observation (Do,)."""
        env, rng = self._bind(row), global_generator(seed)
        task = env.task_infos[(self._task or rng.randint(1, NUM_TASKS + 1)) - 1]
        self._start[row] = self._with_noise(task["init_xy"], rng)
        self._goal[row] = task["goal_xy"] if self._single else self._with_noise(task["goal_xy"], rng)
        self._rngs[row] = rng
        self._agent.reset(seed=seed)
        env.set_xy(self._start[row])
        return self._with_goal(row, env.get_ob())

    def step(self, rows: Array, actions: Array) -> StepResult:
        obs, success = [], np.empty(len(rows), bool)
        for i, row in enumerate(rows.tolist()):
            env = self._bind(row)
            if self._single:
                success[i] = env.compute_success()
            obs.append(self._with_goal(row, self._agent.step(actions[i])[0]))
            if not self._single:
                success[i] = env.compute_success()
            self._teleport(row)
        reward = success - 1.0 if self._single else success.astype(np.float64)
        return StepResult(np.stack(obs), reward, success.copy(), np.zeros_like(success), success)

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"generators": [rng.get_state(legacy=False) for rng in self._rngs]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `get_state`; forces of the next step follow from positions and velocities."""
        import mujoco

        super().set_state(state)
        for rng, saved in zip(self._rngs, state["generators"], strict=True):
            rng.set_state(saved)
        for data in self.datas:
            mujoco.mj_step1(self.model, data)  # the humanoid's step begins in the middle of MuJoCo's

    def _bind(self, row: int) -> Any:
        env = self._env
        env.model, env.data, env.cur_goal_xy = self.model, self.datas[row], self._goal[row]
        return env

    def _with_goal(self, row: int, obs: Array) -> Array:
        return np.concatenate([obs, self._goal[row]]) if self._observe_goal else obs

    def _with_noise(self, position: tuple[float, float], rng: np.random.RandomState) -> Array:
        """Return a position (2,) in the inner part of a cell, with OGBench's draws."""
        env = self._env
        shift = [rng.uniform(low=-env._noise, high=env._noise) * env._maze_unit / 4 for _ in position]
        return np.add(position, shift)

    def _teleport(self, row: int) -> None:
        """Move an agent near a teleport's entry to an exit; as in OGBench, observed a step later."""
        env, holes = self._env, self._env._teleport_info
        if holes is None:
            return
        reach, position = _TELEPORT_RADII * holes["teleport_radius"], env.get_xy()
        if any(np.linalg.norm(position - np.array(hole)) <= reach for hole in holes["teleport_in_xys"]):
            exits = holes["teleport_out_xys"]
            env.set_xy(np.array(exits[self._rngs[row].randint(len(exits))]))


def global_generator(seed: int) -> np.random.RandomState:
    """Return a generator that draws as numpy's global one after `np.random.seed(seed)`; any seed >= 0."""
    words = [seed // _UINT32**i % _UINT32 for i in range(seed.bit_length() // 32 + 1)]
    return np.random.RandomState(seed if seed < _UINT32 else words)


@cache
def load_maze(world: str) -> Any:
    """Build OGBench's environment of a maze once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the viewer complains about a missing display
        require("ogbench", extra="ogbench")
        import gymnasium

        env = gymnasium.make(f"{world}-v0", disable_env_checker=True).unwrapped
    os.unlink(env.fullpath)  # type: ignore[attr-defined]  # its model, which OGBench leaves among temporary files
    return env
