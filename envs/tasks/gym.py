"""Any environment with gymnasium's interface, by id or by a function that makes one.

Box observations are the state, in row order. Of Dict observations the vectors are the state, joined by sorted
name or in the order of `obs_keys`; parts that are images (H, W, 3) uint8 can be observed as `cameras`, and so
can the picture of `render()`. Success is `info["is_success"]` or `info["success"]`, or the key `success`.
Environments are stepped one after the other and cannot be saved: a resumed run starts new episodes.

Legend: N environments, To observation history, Do and Da observation and action widths.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from envs.engine.pixels import HasCameras, check_camera_names
from envs.engine.serial import SerialStepper
from envs.engine.vector import ChunkVector, named_errors
from envs.spec import Array, EnvSpec
from policies.bounds import bounded
from policies.errors import BurnishError, ConfigError, EnvironmentFailure
from policies.registry import register

RENDER = "render"
"""Name of the camera that is the environment's `render()`."""
HERE = "<this process>"
"""Module name of factories that exist in this process only."""
SUCCESS_KEYS = ("is_success", "success")
_DEFAULT_LIMIT = 1000  # control steps, for environments without a limit
_DEFAULT_HZ = 1.0  # for environments without a control rate
_FACTORIES: dict[str, Callable[[], Any]] = {}

_log = logging.getLogger(__name__)


def local_factory(make: Callable[[], Any]) -> str:
    """Return the name of a factory for `Gym.factory`: its import path, or an entry for this process."""
    module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", "")
    if module and module != "__main__" and name.isidentifier():
        with contextlib.suppress(ImportError):
            if getattr(importlib.import_module(module), name, None) is make:
                return f"{module}:{name}"
    entry = next((key for key, known in _FACTORIES.items() if known is make), "")
    if not entry:
        entry = f"{_identity(make)}-{len(_FACTORIES)}"
        _FACTORIES[entry] = make
    return f"{HERE}:{entry}"


def _identity(make: Any) -> str:
    """Return what an object or function makes: gymnasium's id, else the class, and a digest of its spaces."""
    try:
        made = make() if callable(make) else make
    except Exception:  # it needs arguments, or its error is reported where the task is described
        return str(getattr(make, "__qualname__", type(make).__name__))
    try:
        id_ = getattr(getattr(made, "spec", None), "id", None)
        name = id_ or type(getattr(made, "unwrapped", made)).__name__
        spaces = [repr(getattr(made, space, None)) for space in ("observation_space", "action_space")]
    finally:
        if made is not make and hasattr(made, "close"):
            made.close()
    return f"{name}-{hashlib.sha256(''.join(spaces).encode()).hexdigest()[:6]}"


@register("env", "gym")
@dataclass(frozen=True)
class Gym(HasCameras):
    """Any gymnasium environment with flat actions, `env.id=Reacher-v5` for instance."""

    needs: ClassVar[str] = "id"  # the option without which there is no task
    runs_code: ClassVar[bool] = True  # options name code that is run

    id: str = ""  # gymnasium's id; `my_package:My-v0` imports the package first
    kwargs: dict[str, Any] = bounded({})  # arguments of gymnasium.make, or of the factory
    module: str | None = None  # module to import first, which registers the id
    factory: str | None = None  # `module:function` that returns an environment, instead of an id
    success: str | None = None  # key of `info` with success; null: is_success or success
    obs_keys: tuple[str, ...] = ()  # parts of a Dict observation in the state, in order; (): all vectors
    max_episode_steps: int | None = bounded(None, ge=1)  # control steps; null: the environment's, else 1000
    control_hz: float | None = bounded(None, gt=0)  # control rate [Hz]; null: 1/dt or render_fps, else 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.id and self.factory:
            raise ConfigError(f"env.id={self.id} and env.factory={self.factory} exclude each other.")

    @property
    def title(self) -> str:
        if self.is_local:
            return str(self.factory).rpartition(":")[2].rsplit("-", 2)[0]
        return self.id.rpartition(":")[2] or str(self.factory).rpartition(":")[2]

    @property
    def is_local(self) -> bool:
        """Whether its factory is an object of this process."""
        return str(self.factory).startswith(f"{HERE}:")

    def compared(self) -> Gym:
        """Return the task as it is compared with others: without the number of an object of this process."""
        return replace(self, factory=_without_number(str(self.factory))) if self.is_local else self

    @cached_property
    def spec(self) -> EnvSpec:
        made = self._made()
        try:
            return self._described(made)
        finally:
            made.close()

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """Build N environments, each stepped on its own."""
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        mode = {"render_mode": "rgb_array"} if RENDER in self.cameras else {}
        limit = self.spec.max_episode_steps + 1  # the vector's own limit comes first
        key = self.success or (None if self.spec.success_rule else "")
        envs = [_Flat(self._made(limit=limit, **mode), self.title, key) for _ in range(num_envs)]
        keys = self.obs_keys or _vector_names(envs[0].observation_space)
        stepper = _GymStepper(
            envs,
            observe=lambda obs: _flattened(obs, keys),
            succeeded=lambda info: any([_holds(info, key, self.title) for key in self._success_keys()]),
        )
        history = _Images(stepper, self.images, obs_steps) if self.cameras else None
        return ChunkVector(self.spec, stepper, obs_steps=obs_steps, image_history=history)

    def render_frames(self, seed: int, actions: Array, *, every: int = 10, **_: Any) -> Array:
        """Replay an episode and return the pictures (F, height, width, 3) of its `render()`."""
        made = _Flat(self._made(limit=self.spec.max_episode_steps + 1, render_mode="rgb_array"), self.title)
        try:
            with named_errors(self.title, "a replay"):
                made.reset(seed=seed)
                frames = [_picture(made)]
                for i, action in enumerate(actions, start=1):
                    low, high = np.asarray(self.spec.action_low), np.asarray(self.spec.action_high)
                    _obs, _reward, terminated, truncated, _info = made.step(np.clip(action, low, high))
                    if i % every == 0 or i == len(actions) or terminated or truncated:
                        frames.append(_picture(made))
                    if terminated or truncated:
                        break
                return np.stack(frames)
        finally:
            made.close()

    def _success_keys(self) -> tuple[str, ...]:
        return SUCCESS_KEYS if self.success is None else (self.success,)

    def _made(self, *, limit: int | None = None, **options: Any) -> Any:
        """Make one environment.

        Raises:
            ConfigError: If none is named, or it cannot be made; names the reason.
        """
        import gymnasium

        if not (self.id or self.factory):
            raise ConfigError("env=gym needs env.id=<gymnasium's id> or env.factory=<module:function>.")
        where = f"env.id={self.id}" if self.id else f"env.factory={self.factory}"
        if (self.module or self.factory or ":" in self.id) and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # as `python -m burnish` has it; installed packages come first
        try:
            if self.module:
                importlib.import_module(self.module)
            if self.factory:
                made = _factory(self.factory)(**self.kwargs)
            else:
                limited = {} if limit is None else {"max_episode_steps": limit}
                options = {**limited, **self.kwargs, **options}
                made = gymnasium.make(self.id, disable_env_checker=True, **options)
        except ConfigError:
            raise
        except Exception as error:  # packages raise their own classes
            raise ConfigError(f"{where} cannot be made: {_reason(error)}") from error
        needed = ("reset", "step", "observation_space", "action_space")
        if missing := [name for name in needed if not hasattr(made, name)]:
            raise ConfigError(
                f"{where} must make an environment with gymnasium's interface; got {type(made).__name__} "
                f"without {', '.join(missing)}."
            )
        return made

    def _described(self, made: Any) -> EnvSpec:
        low, high = _limits(made.action_space, self.title)
        names = _state_names(made.observation_space, self.obs_keys, self.title)
        parts = _parts(made.observation_space)
        check_camera_names(self.cameras, [*(name for name, one in parts.items() if _is_image(one)), RENDER])
        limit = self.max_episode_steps or _time_limit(made)
        if limit is None:
            limit = _DEFAULT_LIMIT
            _warn_once(f"{self.title} has no time limit; env.max_episode_steps={limit} is used.")
        dt = getattr(getattr(made, "unwrapped", made), "dt", None)
        fps = (getattr(made, "metadata", None) or {}).get("render_fps")
        rate = 1.0 / dt if isinstance(dt, (int, float)) and dt > 0 else float(fps or _DEFAULT_HZ)
        key = self.success or _reported_key(made, self.title)
        return EnvSpec(
            name=self.title,
            family="gymnasium",
            obs_dim=len(names),
            action_dim=len(low),
            action_low=low,
            action_high=high,
            max_episode_steps=int(limit),
            control_hz=self.control_hz or rate,
            obs_names=names,
            action_names=tuple(f"action {i}" for i in range(len(low))),
            success_rule=f"info['{key}'] of the environment" if key else "",
            packages=("gymnasium",),
        )


class _Flat:
    """An environment whose actions are flat; the last observation is kept for its images.

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
            _warn_once(
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
            _warn_once(
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


class _GymStepper(SerialStepper):
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


class _Images:
    """The last To images of every environment; see `envs.spec.ImageHistory`."""

    def __init__(self, stepper: SerialStepper, images: Mapping[str, tuple[int, ...]], obs_steps: int) -> None:
        self._stepper, self._sizes = stepper, {name: shape[:2] for name, shape in images.items()}
        self._rows: list[deque[dict[str, Array]]] = [deque(maxlen=obs_steps) for _ in range(stepper.num_envs)]

    def begin(self, row: int) -> None:
        """Start an episode in a row; its first images fill the history."""
        history = self._rows[row]
        assert history.maxlen is not None
        history.extend([self._seen(row)] * history.maxlen)

    def add(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows[row].append(self._seen(row))

    def renew(self, row: int) -> None:
        self._rows[row][-1] = self._seen(row)

    def images(self, rows: Iterable[int]) -> dict[str, Array]:
        """Return the histories of some rows, oldest first, (M, To, H, W, 3) uint8 by camera."""
        chosen = [self._rows[row] for row in rows]
        return {
            name: np.stack([np.stack([seen[name] for seen in history]) for history in chosen])
            for name in self._sizes
        }

    def get_state(self) -> Any:
        return [list(history) for history in self._rows]

    def set_state(self, state: Any) -> None:
        for history, saved in zip(self._rows, state, strict=True):
            history.clear()
            history.extend(saved)

    def close(self) -> None:
        """Hold nothing open."""

    def _seen(self, row: int) -> dict[str, Array]:
        env = self._stepper.envs[row]
        return {
            name: _resized(_picture(env) if name == RENDER else _part(env.last, name), size)
            for name, size in self._sizes.items()
        }


def _factory(path: str) -> Callable[..., Any]:
    """Return a factory by its path; an environment object is copied for every call.

    For an object of another process, the last one that was passed for the same task is taken.

    Raises:
        ConfigError: If there is none.
    """
    module, _, name = path.rpartition(":")
    if module == HERE:
        alike = [key for key in _FACTORIES if _without_number(key) == _without_number(name)]
        if not alike:
            raise ConfigError(
                f"env.factory={path} was an object of another Python process. Pass it again, as "
                "env=<environment or function>, or use a function of a module that can be imported."
            )
        made = _FACTORIES[name if name in alike else alike[-1]]
        return made if callable(made) else lambda **_: copy.deepcopy(made)
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _without_number(entry: str) -> str:
    return entry.rpartition("-")[0]


def _picture(env: Any) -> Array:
    """Return the picture (H, W, 3) of an environment.

    Raises:
        ConfigError: If `render()` gives none.
    """
    from envs.engine.rendering import gl_for_others

    needed = "this environment draws no picture: its render() must return (H, W, 3) in render_mode=rgb_array"
    try:
        with gl_for_others():
            frame = env.render()
    except BurnishError:
        raise
    except Exception as error:  # of the environment
        raise ConfigError(f"{needed}; it raised {_reason(error)}.") from error
    frame = frame[-1] if isinstance(frame, list) and frame else frame
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
        raise ConfigError(f"{needed}.")
    return frame.astype(np.uint8)


def _resized(image: Array, size: tuple[int, ...]) -> Array:
    """Return an image (H, W, 3) in another size, by averaging."""
    if image.shape[:2] == tuple(size):
        return np.array(image)
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BOX))


def _parts(space: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a space of observations by name; a Box has the name ''."""
    if not hasattr(space, "spaces") or not isinstance(space.spaces, Mapping):
        return {prefix: space}
    found: dict[str, Any] = {}
    for key in sorted(space.spaces):
        found |= _parts(space.spaces[key], f"{prefix}/{key}" if prefix else key)
    return found


def _is_image(space: Any) -> bool:
    return space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _is_vector(space: Any) -> bool:
    from gymnasium.spaces import Box, MultiBinary

    return isinstance(space, Box | MultiBinary) and not _is_image(space)


def _vector_names(space: Any) -> tuple[str, ...]:
    return tuple(name for name, one in _parts(space).items() if _is_vector(one))


def _state_names(space: Any, keys: tuple[str, ...], title: str) -> tuple[str, ...]:
    """Return a name for every entry of the state.

    Raises:
        ConfigError: If a part is missing or no vector, or there is none.
    """
    parts = _parts(space)
    wanted = keys or _vector_names(space)
    unusable = [key for key in wanted if key not in parts or not _is_vector(parts[key])]
    if unusable or not wanted:
        raise ConfigError(
            f"{title} needs an observation with vectors of numbers{f' {unusable}' if unusable else ''}; it "
            f"has {space}. Name some of {list(_vector_names(space))} by env.obs_keys, or wrap it."
        )
    sizes = {key: int(np.prod(parts[key].shape)) for key in wanted}
    return tuple(f"{key or 'observation'} {i}" for key in wanted for i in range(sizes[key]))


def _part(obs: Any, name: str) -> Array:
    for key in name.split("/") if name else ():
        obs = obs[key]
    return np.asarray(obs)


def _flattened(obs: Any, keys: tuple[str, ...]) -> Array:
    return np.concatenate([_part(obs, key).astype(np.float64).reshape(-1) for key in keys])


def _limits(space: Any, title: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the action box, flat.

    Raises:
        ConfigError: If actions are no bounded box.
    """
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or not np.isfinite([space.low, space.high]).all():
        raise ConfigError(
            f"{title} needs a bounded Box as action space; it has {space}. Give it one, for example by "
            "gymnasium.wrappers.TransformAction(env, lambda action: action, Box(low, high))."
        )
    low, high = (tuple(float(x) for x in bound.reshape(-1)) for bound in (space.low, space.high))
    return low, high


def _time_limit(made: Any) -> int | None:
    """Return the limit of an environment's wrappers, else of its gymnasium entry; None without."""
    import gymnasium

    limits, layer = [], made
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, gymnasium.wrappers.TimeLimit):
            limits.append(int(layer._max_episode_steps))
        layer = layer.env
    return min(limits, default=getattr(getattr(made, "spec", None), "max_episode_steps", None))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@lru_cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _holds(info: Mapping[str, Any], key: str, title: str) -> bool:
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


def _reported_key(made: Any, title: str) -> str:
    """Return the key of success in `info` after a reset and a step with the mean action; empty without."""
    env, space = _Flat(made, title), made.action_space
    with named_errors(title, "reset"):
        first = env.reset(seed=0)[1]
    with named_errors(title, "step"):
        *_, info = env.step(((space.low + space.high) / 2).astype(space.dtype))
    return next((key for key in SUCCESS_KEYS if key in first or key in info), "")
