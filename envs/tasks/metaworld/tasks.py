"""Meta-World: a Sawyer arm performs one of fifty tasks, selected by an option (Meta-World v3).

Physics, observation, reward and success are Meta-World's own: its environment runs on one `MjData` per row;
the rest of its state is stored per row and restored before stepping. Goals are observed, as in its multi-task
benchmarks. Difference: object positions follow from the episode's seed alone; its benchmarks draw fifty in
advance and select one.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.engine.physics import MujocoStepper
from envs.engine.pixels import HasAppearance, HasCameras
from envs.engine.rendering import replay_frames
from envs.spec import Array, EnvSpec, StepResult, symmetric_spec
from envs.tasks.metaworld.expert import ScriptedExpert, demonstrate
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.extras import require
from policies.registry import register

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

TASKS = (
    *("assembly", "basketball", "bin-picking", "box-close", "button-press", "button-press-topdown"),
    *("button-press-topdown-wall", "button-press-wall", "coffee-button", "coffee-pull", "coffee-push"),
    *("dial-turn", "disassemble", "door-close", "door-lock", "door-open", "door-unlock", "drawer-close"),
    *("drawer-open", "faucet-close", "faucet-open", "hammer", "hand-insert", "handle-press"),
    *("handle-press-side", "handle-pull", "handle-pull-side", "lever-pull", "peg-insert-side"),
    *("peg-unplug-side", "pick-out-of-hole", "pick-place", "pick-place-wall", "plate-slide"),
    *("plate-slide-back", "plate-slide-back-side", "plate-slide-side", "push", "push-back", "push-wall"),
    *("reach", "reach-wall", "shelf-place", "soccer", "stick-pull", "stick-push", "sweep", "sweep-into"),
    *("window-close", "window-open"),
)
_IN_MODEL = ("body_pos", "body_quat", "geom_pos", "site_pos")  # fields of the model written by resets
_VIEWS = ("xpos", "xipos", "geom_xpos", "site_xpos", "qpos", "qvel", "mocap_pos")  # views of `MjData`
_NUMBERS = (bool, int, float, np.generic)
_NO_LIMIT = 2**31 - 1


def _frame_names(when: str) -> tuple[str, ...]:
    objects = (
        (
            *(f"object {i} {axis}{when} [m]" for axis in "xyz"),
            *(f"object {i} quaternion {p}{when} [1]" for p in "xyzw"),
        )
        for i in (1, 2)
    )
    hand = (*(f"hand {axis}{when} [m]" for axis in "xyz"), f"gripper opening{when} [of full]")
    return (*hand, *(name for names in objects for name in names))


_OBS_NAMES = (*_frame_names(""), *_frame_names(" before"), *(f"goal {axis} [m]" for axis in "xyz"))
_ACTION_NAMES = (*(f"hand {axis} change [1 cm]" for axis in "xyz"), "gripper closing [of full]")


class MetaworldStepper(MujocoStepper, HasAppearance):
    """Step N copies of one of `TASKS`."""

    def __init__(self, task: str, num_envs: int) -> None:
        self._env, self._fresh = load_metaworld(task)
        super().__init__(self._env.model, num_envs)
        self._variables = [deepcopy(self._fresh) for _ in range(num_envs)]

    def reset(self, row: int, seed: int) -> Array:
        env = self._begin(row)
        env.seed(seed)
        env.reset_model()  # redraws until objects do not overlap
        positions = env._last_rand_vec
        env = self._begin(row)
        env._last_rand_vec, env._freeze_rand_vec = positions, True
        obs, _ = env.reset()
        self._variables[row] = read_variables(env)
        return np.asarray(obs, np.float64)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, 4) for one control step (5 physics steps)."""
        obs, reward, success = [], np.empty(len(rows)), np.zeros(len(rows), bool)
        for i, row in enumerate(rows.tolist()):
            env = self._bind(row)
            seen, reward[i], _, _, info = env.step(actions[i])
            self._variables[row] = read_variables(env)
            obs.append(seen)
            success[i] = bool(info["success"])
        no = np.zeros(len(rows), bool)
        return StepResult(np.stack(obs), reward, no, no, success)

    def get_appearance(self, row: int) -> dict[str, Array]:
        return {name: self._variables[row][name].copy() for name in _IN_MODEL}

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "memory": deepcopy(self._variables)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        for row in range(self.num_envs):
            self._variables[row] = deepcopy(dict(state["memory"][row]))

    def _begin(self, row: int) -> Any:
        import mujoco

        self._variables[row] = deepcopy(self._fresh)
        env = self._bind(row)
        mujoco.mj_resetData(self.model, env.data)
        mujoco.mj_forward(self.model, env.data)
        return env

    def _bind(self, row: int) -> Any:
        data = self._env.data = self.datas[row]
        for name, value in self._variables[row].items():
            if name in _IN_MODEL:
                getattr(self.model, name)[:] = value
            elif isinstance(value, Mapping):
                field, start, size = value["window"]
                setattr(self._env, name, getattr(data, field).reshape(-1)[start : start + size])
            else:
                setattr(self._env, name, value)
        return self._env


def read_variables(env: Any) -> dict[str, Any]:
    """Return the non-physics state of Meta-World's environment: numbers and arrays.

    Some arrays are views into the simulator: in some tasks the initial object position thereby moves with the
    object, and rewards depend on it. Views are stored as a mapping `window` -> [field of the data, first
    entry, entries], which can be saved.
    """
    kept: dict[str, Any] = {name: getattr(env.model, name).copy() for name in _IN_MODEL}
    for name, value in vars(env).items():
        if isinstance(value, np.ndarray):
            kept[name] = _window(value, env.data) or value.copy()
        elif value is None or isinstance(value, _NUMBERS):
            kept[name] = value.item() if isinstance(value, np.generic) else value
    return kept


def _window(value: Array, data: Any) -> dict[str, list[Any]] | None:
    """Return the location of an array in the simulator's memory; None if it has its own memory."""
    for name in _VIEWS:
        owner = getattr(data, name)
        if np.may_share_memory(value, owner):
            start = (
                value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            ) // owner.itemsize
            return {"window": [name, int(start), int(value.size)]}
    return None


@lru_cache(maxsize=4)
def load_metaworld(task: str) -> tuple[Any, dict[str, Any]]:
    """Build Meta-World's environment of a task once per process; returns it with its initial variables."""
    module = require("metaworld", extra="metaworld")
    env = module.ALL_V3_ENVIRONMENTS[f"{task}-v3"]()
    env._partially_observable = False
    vars(env).pop("sawyer_observation_space", None)  # cached with the bounds of a hidden goal
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    env._set_task_called = True
    env.max_path_length = _NO_LIMIT
    return env, read_variables(env)


@register("env", "metaworld")
@dataclass(frozen=True)
class Metaworld(HasCameras):
    """One of fifty tasks of a Sawyer arm, `env.task=reach` for instance (Meta-World v3, goal observed)."""

    task: str = "reach"  # task name without its version, e.g. pick-place or drawer-open
    max_episode_steps: int = bounded(500, ge=1)  # time limit in control steps
    terminate_on_success: bool = False  # whether success terminates the episode
    expert: ScriptedExpert = bounded(ScriptedExpert(), was="demonstrator")  # options of the expert

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS:
            near = get_close_matches(self.task, TASKS, 5, 0.4)
            close = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(f"env.task must be one of Meta-World's {len(TASKS)}; got '{self.task}'{close}.")

    @property
    def spec(self) -> EnvSpec:
        return symmetric_spec(
            _OBS_NAMES,
            _ACTION_NAMES,
            name="metaworld",
            family="metaworld",
            max_episode_steps=self.max_episode_steps,
            control_hz=80.0,
            success_rule=f"Meta-World reports success of {self.task}",
            terminate_on_success=self.terminate_on_success,
            packages=("metaworld",),
            extra="metaworld",
        )

    def stepper(self, num_envs: int) -> MetaworldStepper:
        return MetaworldStepper(self.task, num_envs)

    def demonstrate(self, seed: int) -> Episode:
        return demonstrate(self.stepper(1), self.task, seed, self.expert, spec=self.spec)

    def render_frames(self, seed: int, actions: Array, **options: Any) -> Array:
        frames = replay_frames(self.make_vector(1), seed, actions, camera="corner2", **options)
        return frames[:, ::-1, ::-1].copy()  # the camera is mounted upside down
