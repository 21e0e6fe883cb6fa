"""robosuite 1.5.1 itself, stepped one by one: the reference of the fast engine, and of its resets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from envs.engine.seeding import seeded_globally
from envs.spec import Array, StepResult
from policies.errors import CapabilityError, ConfigError
from policies.extras import require

_MODEL_SEED = 0  # of what robosuite draws while it compiles a model


class RobosuiteStepper:
    """Steps N environments of robosuite, each with its own compiled model; `keys` as in `FastStepper`."""

    can_save = False  # controllers and grippers keep a state of their own

    def __init__(self, task: str, num_arms: int, keys: Sequence[str], num_envs: int) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        self.num_envs = num_envs
        self._keys = [(key.removeprefix("-"), -1.0 if key.startswith("-") else 1.0) for key in keys]
        self.envs = [make_robosuite(task, num_arms) for _ in range(num_envs)]

    @property
    def model(self) -> Any:
        return self.envs[0].sim.model._model

    @property
    def datas(self) -> list[Any]:
        return [env.sim.data._data for env in self.envs]

    def reset(self, row: int, seed: int) -> Array:
        env = self.envs[row]
        begin(env, seed)
        return self._observe(env)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step (25 physics steps)."""
        obs, reward = [], np.empty(len(rows))
        for i, row in enumerate(rows.tolist()):
            env = self.envs[row]
            _, reward[i], _, _ = env.step(np.asarray(actions[i], np.float64))
            obs.append(self._observe(env))
        no = np.zeros(len(rows), bool)
        return StepResult(np.stack(obs), reward, no, no, reward > 0)

    def named_env(self, row: int) -> Any:
        """Return the environment of a row, for names."""
        return self.envs[row]

    def get_appearance(self, row: int) -> dict[str, Array]:
        return {}

    def set_appearance(self, model: Any, appearance: Mapping[str, Array]) -> None:
        hide_collisions(model)

    def metrics(self) -> dict[str, Array]:
        return {}

    def get_state(self) -> Any:
        raise CapabilityError("robosuite cannot save its state; use env.engine=fast, or begin new episodes.")

    def set_state(self, state: Mapping[str, Any]) -> None:
        raise CapabilityError("robosuite cannot restore a state; begin new episodes instead.")

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self.envs = []

    def _observe(self, env: Any) -> Array:
        """Return the observation (Do,) of the present state, as robomimic reads it from recorded states."""
        import mujoco

        # Poses only: cheaper than a full forward pass, and nothing that the next step starts from changes.
        mujoco.mj_kinematics(env.sim.model._model, env.sim.data._data)
        for _ in range(2):  # relative poses are computed from the object poses of the previous pass
            now = env._get_observations(force_update=True)
        return np.concatenate([sign * np.atleast_1d(now[key]) for key, sign in self._keys]).astype(np.float64)


def make_robosuite(task: str, num_arms: int) -> Any:
    """Build one environment as robomimic does, without cameras."""
    with _quiet(), seeded_globally(_MODEL_SEED):
        robosuite = require("robosuite", extra="robosuite")
        from robosuite.controllers import load_composite_controller_config

        controller = load_composite_controller_config(robot="Panda")
        controller["body_parts"]["right"]["input_ref_frame"] = "world"
        return robosuite.make(
            task,
            robots=["Panda"] * num_arms,
            controller_configs=[deepcopy(controller) for _ in range(num_arms)],
            **({"env_configuration": "opposed"} if num_arms == 2 else {}),
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            use_object_obs=True,
            reward_shaping=False,
            control_freq=20,
            ignore_done=True,
            hard_reset=False,
            lite_physics=False,
        )


def hide_collisions(model: Any) -> None:
    """Make collision shapes, which lie over the visible ones, invisible in a rendering model."""
    model.geom_rgba[model.geom_group == 0, 3] = 0.0


def begin(env: Any, seed: int) -> None:
    """Start an episode of robosuite that depends on its seed alone."""
    env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    with seeded_globally(seed), _quiet():  # robosuite draws from numpy's global generator
        env.reset()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence robosuite's log, which reports optional packages and every file it reads."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
