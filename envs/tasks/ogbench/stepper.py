"""OGBench's manipulation worlds, many in one process: a UR5e arm with cubes, buttons, a drawer and a window.

Every number equals OGBench stepped one by one; work without effect on them is skipped between steps (cube
colours, repeated bookkeeping). Reward and termination are evaluated on the state *before* an action, as in
OGBench: minus the number of unsolved parts; the step after all are solved has reward 0, is a success and
terminates. A reset depends on its seed alone: OGBench settles the goal scene under actions drawn from fresh
entropy, here from the seed.

Non-physics state (button states, targets) and state in the model (locks of drawer and window, target markers)
is stored per row and restored before stepping.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.spec import Array, StepResult
from policies.extras import require

NUM_TASKS = 5


class OgbenchStepper(MujocoStepper):
    """Step N copies of one of OGBench's single tasks (1 to 5), or of a data-collection world (task 0)."""

    def __init__(self, world: str, task: int, num_envs: int) -> None:
        self._env, self._fresh = load_world(world, play=task == 0)
        super().__init__(self._env.model, num_envs)
        self._task = task
        self._solved = np.zeros(num_envs, bool)  # whether all parts are solved
        self._variables = [deepcopy(self._fresh) for _ in range(num_envs)]
        self._rngs = [np.random.default_rng(0) for _ in range(num_envs)]  # reseeded by each reset
        self._pinch = self._env._pinch_site_id

    def reset(self, row: int, seed: int) -> Array:
        self._variables[row] = deepcopy(self._fresh)
        env = self.bind(row)
        obs: Array = env.reset(seed=seed)[0]
        self._rngs[row] = env.np_random
        self._variables[row] = env.get_variables()
        self._solved[row] = False
        return obs

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, 5) for one control step (25 physics steps)."""
        obs, reward, ended = [], np.empty(len(rows)), self._solved[rows]
        for i, row in enumerate(rows.tolist()):
            env = self.bind(row)
            reward[i] = env.compute_reward()
            env.advance(actions[i])
            obs.append(env.compute_observation())
            self._solved[row] = env.is_solved()
            self._variables[row] = env.get_variables()
        return StepResult(np.stack(obs), reward, ended, np.zeros(len(rows), bool), ended)

    def draw_target(self, row: int, p_stack: float) -> tuple[Array, dict[str, Any]]:
        """Draw the next target in a world without a task; returns observation and named state.

        `p_stack` is the probability of a target on top of another cube.
        """
        env = self.bind(row)
        obs, info = env.set_new_target(p_stack=p_stack)
        self._variables[row] = env.get_variables()
        return obs, info

    def button_states(self, row: int) -> Array | None:
        """Return the button states of one row; None without buttons."""
        states = self._variables[row].get("_cur_button_states")
        return None if states is None else np.array(states)

    def get_appearance(self, row: int) -> dict[str, Array]:
        """Return button states and targets."""
        return {name: value.copy() for name, value in self._variables[row].items()}

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        """Colour a rendering model as in OGBench's visual worlds: transparent arm, no targets."""
        self._env.paint(model, appearance)

    def get_state(self) -> dict[str, Any]:
        """Return physics, variables and the gripper pose, which the controller reads from the last step."""
        return {
            **super().get_state(),
            "gripper_pos": np.stack([data.site_xpos[self._pinch] for data in self.datas]),
            "gripper_mat": np.stack([data.site_xmat[self._pinch] for data in self.datas]),
            "solved": self._solved.copy(),
            "memory": {key: np.stack([row[key] for row in self._variables]) for key in self._fresh},
            "generators": [rng.bit_generator.state for rng in self._rngs],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._solved = np.array(state["solved"], bool)
        super().set_state(state)
        for row, data in enumerate(self.datas):
            data.site_xpos[self._pinch] = state["gripper_pos"][row]
            data.site_xmat[self._pinch] = state["gripper_mat"][row]
            for key in self._fresh:
                self._variables[row][key] = np.array(state["memory"][key][row])
            if "generators" in state:  # states of cube-single were saved without them; nothing draws there
                self._rngs[row].bit_generator.state = state["generators"][row]

    def bind(self, row: int) -> Any:
        env = self._env
        env._data, env._reward_task_id, env._np_random = self.datas[row], self._task or None, self._rngs[row]
        env.set_variables(self._variables[row])
        return env


@cache
def load_world(world: str, play: bool = False) -> tuple[Any, dict[str, Array]]:
    """Build OGBench's environment once per process; compiling its model takes over a second.

    The tasks of a world differ only in resets and targets. With `play` it is in data-collection mode.

    Returns:
        The environment, and its initial non-physics state.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the viewer warns about a missing display on import
        require("ogbench", extra="ogbench")
        require("dm_control", extra="ogbench")  # OGBench imports it only when it builds a world
        import gymnasium

        from envs.tasks.ogbench.world import share

        # As OGBench registers them.
        spec = gymnasium.spec(f"{world}-v0" if play else f"{world}-singletask-task1-v0")
        assert isinstance(spec.entry_point, str)
        module, _, name = spec.entry_point.partition(":")
        made = share(getattr(importlib.import_module(module), name))
        mode = {"mode": "data_collection", "terminate_at_goal": False} if play else {}
        env = made(**spec.kwargs, **mode)
    env.compile()
    fresh = env.get_variables()
    env.reset(seed=0)
    return env, fresh
