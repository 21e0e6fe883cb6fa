"""Stepping gymnasium environments one after the other, with checks of what they return."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from envs.engine.serial import SerialStepper
from envs.engine.vector import named_errors
from envs.spec import Array
from policies.errors import EnvironmentFailure

SUCCESS_KEYS = ("is_success", "success")

_log = logging.getLogger(__name__)


class CheckedEnv:
    """An environment that takes flat actions and is refused where it returns another form than gymnasium's.

    The last observation is kept for its images.

    It warns of an episode that ends without `key`, the one of success in `info`; where it is empty, of one
    that has success there. None: it does not look.
    """

    def __init__(self, env: Any, title: str, key: str | None = None) -> None:
        self._env, self._title, self._key, self.last = env, title, key, None
        self._seen: set[Any] | None = None  # keys of `info`, once there was a step
        self.observation_space, self._space = env.observation_space, env.action_space

    def reset(self, **options: Any) -> tuple[Any, Mapping[str, Any]]:
        if self._key and self._seen is not None and self._key not in self._seen:
            found = ", ".join(sorted(map(str, self._seen))[:8]) or "no keys"
            warn_once(
                f"env.success={self._key}: an episode of {self._title} ended without it in its info, which "
                f"has {found}. Episodes without it are no success."
            )
        self.last, info = self._checked("reset", self._env.reset(**options), 2)
        return self.last, info

    def step(self, action: Array) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
        given = self._env.step(action.reshape(self._space.shape))
        self.last, reward, terminated, truncated, info = self._checked("step", given, 5)
        if self._key:
            self._seen = {*(self._seen or ()), *info}
        elif self._key == "" and (late := next((key for key in SUCCESS_KEYS if key in info), "")):
            warn_once(
                f"{self._title} has '{late}' in its info only after the first step, so that policies are "
                f"judged by their return; env.success={late} judges them by it."
            )
        return self.last, reward, terminated, truncated, info

    def _checked(self, method: str, given: Any, count: int) -> Any:
        """Return what a method returned; refuses another form than gymnasium's with EnvironmentFailure."""
        if isinstance(given, tuple) and len(given) == count and isinstance(given[-1], Mapping):
            return given
        form = "observation, info" if count == 2 else "observation, reward, terminated, truncated, info"
        is_tuple = isinstance(given, tuple)
        got = f"({', '.join(type(one).__name__ for one in given)})" if is_tuple else type(given).__name__
        raise EnvironmentFailure(
            f"{method} of environment '{self._title}' must return ({form}), the last a dict; got {got}."
        )

    def render(self) -> Any:
        return self._env.render()

    @property
    def unwrapped(self) -> Any:
        return self._env.unwrapped

    def close(self) -> None:
        self._env.close()


class GymStepper(SerialStepper):
    """Steps gymnasium environments; they have no state to save."""

    @property
    def can_save(self) -> bool:
        return False

    @property
    def model(self) -> Any:
        """MuJoCo's model of an environment that MuJoCo simulates; else an AttributeError."""
        return self.envs[0].unwrapped.model

    @property
    def datas(self) -> list[Any]:
        """MuJoCo's data of every environment."""
        return [env.unwrapped.data for env in self.envs]


@lru_cache
def warn_once(text: str) -> None:
    """Log a warning the first time that it is given."""
    _log.warning("%s", text)


def holds(info: Mapping[str, Any], key: str, title: str) -> bool:
    """Return whether an `info` reports success under a key; false without it.

    Raises:
        EnvironmentFailure: If the value is no bool and no number.
    """
    value = np.asarray(info.get(key, False))
    if value.dtype.kind not in "biuf" or value.size != 1 or np.isnan(value).any():
        raise EnvironmentFailure(
            f"info['{key}'] of environment '{title}' must be a bool or a number; got {info[key]!r:.100}."
        )
    return bool(value.item())


def reported_key(made: Any, title: str) -> str:
    """Return the key of success in `info` after a reset and a step with the mean action; empty without."""
    env, space = CheckedEnv(made, title), made.action_space
    with named_errors(title, "reset"):
        first = env.reset(seed=0)[1]
    with named_errors(title, "step"):
        *_, info = env.step(((space.low + space.high) / 2).astype(space.dtype))
    return next((key for key in SUCCESS_KEYS if key in first or key in info), "")


def time_limit(made: Any) -> int | None:
    """Return the limit of an environment's wrappers, else of its gymnasium entry; None without."""
    import gymnasium

    limits, layer = [], made
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, gymnasium.wrappers.TimeLimit):
            limits.append(int(layer._max_episode_steps))
        layer = layer.env
    return min(limits, default=getattr(getattr(made, "spec", None), "max_episode_steps", None))
