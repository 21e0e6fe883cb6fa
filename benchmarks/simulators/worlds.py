"""Rows of `benchmarks.simulators` for mazes, Adroit's hand, the kitchen, Meta-World and OGBench.

Ours steps through the interface that everybody uses, in chunks of eight steps; the peer is the environment
that ours is made from, without its wrappers. Both compute observations and rewards; observations are compared
to the last bit. Light worlds are measured alone and eight side by side, where ours shares its bookkeeping.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from benchmarks.simulators.case import Array, Case, Side
from benchmarks.simulators.sides import STEPS, Ours, Physics, Several
from envs.make import env
from envs.spec import EnvConfig
from policies.extras import require

WIDTHS = (1, 8)  # environments of light worlds
KITCHEN = np.r_[
    0:9, 18:39
]  # positions of robot and objects in the official observation; ours begins with them


class _Peer(Side):
    """The environment that ours is made from."""

    _env: Any
    _obs: Any = None
    _full: Any = 1.0  # what an action of 1 stands for

    def begin(self, seed: int, actions: Array) -> None:
        self._obs = self._env.reset(seed=seed)[0]

    def run(self, actions: Array) -> int:
        for action in actions * self._full:
            self._obs = self._env.step(action)[0]
        return len(actions)

    def state(self) -> Array:
        return _flat(self._obs)


class _Official(_Peer):
    """An environment registered with gymnasium."""

    def __init__(self, task: str, package: str, extra: str, scale: Array, **options: Any) -> None:
        import gymnasium

        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # news about other versions
            gymnasium.register_envs(require(package, extra=extra))
            self._env = gymnasium.make(task, disable_env_checker=True, **options).unwrapped
        self._full = scale


class _MetaWorld(_Peer):
    """Meta-World's own environment, at the place that ours drew."""

    def __init__(self, task: str, ours: Any) -> None:
        module = require("metaworld", extra="metaworld")
        self._env = module.ALL_V3_ENVIRONMENTS[f"{task}-v3"]()
        self._env._partially_observable, self._env._freeze_rand_vec = False, True
        self._env._set_task_called, self._env.max_path_length = True, 10**9
        vars(self._env).pop("sawyer_observation_space", None)
        self._ours = ours

    def begin(self, seed: int, actions: Array) -> None:
        self._ours.reset([seed])
        self._env._last_rand_vec = np.array(self._ours.stepper._variables[0]["_last_rand_vec"])
        self._obs = self._env.reset()[0]


def _flat(obs: Any) -> Array:
    """Put the parts of a maze's observation in our order; others are flat."""
    if not isinstance(obs, Mapping):
        return np.asarray(obs)
    parts = [obs["observation"], obs["desired_goal"]]
    return np.concatenate(parts if len(obs["observation"]) == 4 else [obs["achieved_goal"], *parts])


class _Kitchen(_Official):
    """The positions alone: velocities are no part of our observation."""

    def state(self) -> Array:
        return np.asarray(self._obs["observation"])[KITCHEN]


class _KitchenPositions(Ours):
    def state(self) -> Array:
        return super().state()[: len(KITCHEN)]


class _Ogbench(_Peer):
    """OGBench's own environment; what settles a scene at a reset is drawn from the seed, as in ours."""

    def __init__(self, world: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing the viewer complains about a missing display
            ogbench = require("ogbench", extra="ogbench")
            task = f"{world}-play-singletask-task1-v0"
            made = ogbench.make_env_and_datasets(task, env_only=True).unwrapped
        self._box = Box(np.float32(-1), np.float32(1), (5,), np.float32)
        made.__class__ = type("Seeded", (type(made),), {"action_space": self._box})
        self._env = made

    def begin(self, seed: int, actions: Array) -> None:
        self._box.seed(seed)
        super().begin(seed, actions)


class _OgbenchMaze(_Official):
    """OGBench's own maze; what it draws from numpy's global generator follows from the seed, as in ours."""

    def begin(self, seed: int, actions: Array) -> None:
        before = np.random.get_state()
        np.random.seed(seed)
        super().begin(seed, actions)
        np.random.set_state(before)


def _sides(config: EnvConfig, peer: Callable[[], Side], num_envs: int) -> Mapping[str, Side]:
    """Build ours and as many of the others; physics beside one environment."""
    ours = Ours(config, num_envs)
    if num_envs > 1:
        return {"ours": ours, "peer": Several([peer() for _ in range(num_envs)])}
    return {"ours": ours, "peer": peer(), "physics": Physics(ours)}


def _official(name: str, task: str, extra: str, num_envs: int) -> Mapping[str, Side]:
    config = env(name)
    scale = np.asarray(config.spec.action_high)
    return _sides(config, partial(_Official, task, "gymnasium_robotics", extra, scale), num_envs)


def _kitchen(name: str) -> Mapping[str, Side]:
    config: Any = env(name)
    options = {"tasks_to_complete": list(config.tasks)}
    peer = _Kitchen("FrankaKitchen-v1", "gymnasium_robotics", "kitchen", np.ones(9), **options)
    ours = _KitchenPositions(config)
    return {"ours": ours, "peer": peer, "physics": Physics(ours)}


def _metaworld(task: str, num_envs: int) -> Mapping[str, Side]:
    config: Any = env("metaworld", task=task)
    return _sides(config, lambda: _MetaWorld(task, config.make_vector(1)), num_envs)


def _ogbench(world: str) -> Mapping[str, Side]:
    return _sides(env(world), partial(_Ogbench, world), 1)


def _ogbench_maze(world: str, num_envs: int) -> Mapping[str, Side]:
    config = env(f"og-{world}")
    scale = np.asarray(config.spec.action_high)
    peer = partial(_OgbenchMaze, f"{world}-singletask-task1-v0", "ogbench", "ogbench", scale)
    return _sides(config, peer, num_envs)


def _case(name: str, peer: str, build: Callable[[], Mapping[str, Side]], num_envs: int = 1) -> Case:
    dim = env(name).spec.action_dim
    return Case(name, "exact", peer, build, dim, 0.0, steps=num_envs * STEPS, num_envs=num_envs)


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
        _case(name, "gym-robotics", partial(_official, name, task, extra, width), width)
        for name, (task, extra) in _ROBOTICS.items()
        for width in WIDTHS
    ),
    *(_case("metaworld", "metaworld", partial(_metaworld, "reach", width), width) for width in WIDTHS),
    _case("kitchen-complete", "gym-robotics", partial(_kitchen, "kitchen-complete")),
    *(
        _case(world, "ogbench", partial(_ogbench, world))
        for world in ("cube-single", "cube-double", "cube-triple", "scene", "puzzle-3x3", "puzzle-4x4")
    ),
    *(
        _case(f"og-{world}", "ogbench", partial(_ogbench_maze, world, width), width)
        for world in ("pointmaze-large", "antmaze-large", "humanoidmaze-large")
        for width in WIDTHS
    ),
)
