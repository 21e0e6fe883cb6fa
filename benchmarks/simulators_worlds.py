"""Rows of `benchmarks.simulators` for mazes, Adroit's hand and Meta-World, and for envpool's robots.

Ours steps through the interface that everybody uses, one environment in chunks of eight; the peer is the
environment that ours is made from. Both compute observations and rewards, which are compared to the last bit.
envpool is our engine for collecting on the one side, the exact engine on the other, eight robots each; its
starts do not follow from a seed, so that states are not compared here (a test of its own does).
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.simulators import Array, Case, Side
from envs.envpool import vector_on
from envs.make import env, require

CHUNK, STEPS, ROBOTS = 8, 48, 8


class _Vector:
    """A vector of ours; all its environments execute the same actions."""

    def __init__(self, vector: Any) -> None:
        self._vector, self._full = vector, vector.spec.action_high
        self._last: Array = np.zeros(0)

    def begin(self, seed: int, actions: Array) -> None:
        first = seed * self._vector.num_envs
        self._vector.reset(list(range(first, first + self._vector.num_envs)))

    def run(self, actions: Array) -> None:
        each = (actions * self._full).reshape(self._vector.num_envs, -1, actions.shape[1])
        for i in range(0, each.shape[1], CHUNK):
            step = self._vector.step_chunk(each[:, i : i + CHUNK])
        self._last = step.path[:, -1]

    def state(self) -> Array:
        return self._last[0]


class _Official:
    """The environment that ours is made from."""

    def __init__(self, task: str, package: str, extra: str, scale: Array) -> None:
        import gymnasium

        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # news about other versions
            gymnasium.register_envs(require(package, extra=extra))
            self._env: Any = gymnasium.make(task, disable_env_checker=True).unwrapped
        self._full, self._obs = scale, None

    def begin(self, seed: int, actions: Array) -> None:
        self._obs = self._env.reset(seed=seed)[0]

    def run(self, actions: Array) -> None:
        for action in actions * self._full:
            self._obs = self._env.step(action)[0]

    def state(self) -> Array:
        return _flat(self._obs)


class _MetaWorld:
    """Meta-World's own environment, at the place that ours drew."""

    def __init__(self, task: str, ours: Any) -> None:
        module = require("metaworld", extra="metaworld")
        self._env = module.ALL_V3_ENVIRONMENTS[f"{task}-v3"]()
        self._env._partially_observable, self._env._freeze_rand_vec = False, True
        self._env._set_task_called, self._env.max_path_length = True, 10**9
        vars(self._env).pop("sawyer_observation_space", None)
        self._ours, self._obs = ours, np.zeros(0)

    def begin(self, seed: int, actions: Array) -> None:
        self._ours.reset([seed])
        self._env._last_rand_vec = np.array(self._ours.stepper._memory[0]["_last_rand_vec"])
        self._obs = self._env.reset()[0]

    def run(self, actions: Array) -> None:
        for action in actions:
            self._obs = self._env.step(action)[0]

    def state(self) -> Array:
        return self._obs


def _flat(obs: Any) -> Array:
    """Put the parts of a maze's observation in our order; others are flat."""
    if not isinstance(obs, Mapping):
        return np.asarray(obs)
    parts = [obs["observation"], obs["desired_goal"]]
    return np.concatenate(parts if len(obs["observation"]) == 4 else [obs["achieved_goal"], *parts])


def _official(name: str, task: str, extra: str) -> Mapping[str, Side]:
    config: Any = env(name)
    ours = config.make_vector(1)
    return {
        "ours": _Vector(ours),
        "peer": _Official(task, "gymnasium_robotics", extra, config.spec.action_high),
    }


def _metaworld(task: str) -> Mapping[str, Side]:
    config: Any = env("metaworld", task=task)
    return {"ours": _Vector(config.make_vector(1)), "peer": _MetaWorld(task, config.make_vector(1))}


def _envpool(name: str) -> Mapping[str, Side]:
    sides = {"ours": "envpool", "peer": "exact"}
    return {side: _Vector(vector_on(engine, env(name), ROBOTS)) for side, engine in sides.items()}


def _case(
    name: str, backend: str, peer: str, build: Callable[[], Mapping[str, Side]], **changes: Any
) -> Case:
    spec = env(name).spec
    values = {"tolerance": 0.0, "steps": STEPS} | changes
    return Case(env=name, backend=backend, peer=peer, build=build, action_dim=spec.action_dim, **values)


_ROBOTICS = {
    **{f"pointmaze-{size.lower()}": (f"PointMaze_{size}-v3", "mazes") for size in ("UMaze", "Large")},
    **{f"antmaze-{size.lower()}": (f"AntMaze_{size}-v4", "mazes") for size in ("UMaze", "Large")},
    **{
        f"adroit-{task}": (f"AdroitHand{task.capitalize()}-v1", "adroit")
        for task in ("door", "hammer", "pen", "relocate")
    },
}
CASES = (
    *(
        _case(name, "exact", "gym-robotics", partial(_official, name, task, extra))
        for name, (task, extra) in _ROBOTICS.items()
    ),
    _case("metaworld", "exact", "metaworld", partial(_metaworld, "reach")),
    *(
        _case(name, "envpool", "exact", partial(_envpool, name), tolerance=None, steps=ROBOTS * STEPS)
        for name in ("halfcheetah", "swimmer")  # nothing ends their episodes
    ),
)
