"""Any environment with gymnasium's interface, by id or by a function that makes one.

Box observations are the state, in row order. Of Dict observations the vectors are the state, joined by sorted
name or in the order of `obs_keys`; parts that are images (H, W, 3) uint8 can be observed as `cameras`, and so
can the picture of `render()`. Success is `info["is_success"]` or `info["success"]`, or the key `success`.
Environments are stepped one after the other and cannot be saved: a resumed run starts new episodes.

Legend: N environments, To observation history, Do and Da observation and action widths.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from envs.engine.pixels import HasCameras, check_camera_names
from envs.engine.vector import ChunkVector, named_errors
from envs.spec import Array, EnvSpec
from envs.tasks.gym.factories import HERE, factory_at, without_number
from envs.tasks.gym.pictures import RENDER, PictureHistory, picture
from envs.tasks.gym.spaces import (
    action_limits,
    flattened,
    is_image,
    never_seen,
    parts_of,
    state_names,
    vector_names,
)
from envs.tasks.gym.stepper import (
    SUCCESS_KEYS,
    CheckedEnv,
    GymStepper,
    holds,
    reported_key,
    time_limit,
    warn_once,
)
from policies.bounds import bounded
from policies.errors import ConfigError, reason_of
from policies.registry import register

_DEFAULT_LIMIT = 1000  # control steps, for environments without a limit
_DEFAULT_HZ = 1.0  # for environments without a control rate


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
        return replace(self, factory=without_number(str(self.factory))) if self.is_local else self

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
        envs = [CheckedEnv(self._made(limit=limit, **mode), self.title, key) for _ in range(num_envs)]
        keys = self.obs_keys or vector_names(envs[0].observation_space)
        stepper = GymStepper(
            envs,
            observe=lambda obs: flattened(obs, keys),
            succeeded=lambda info: any([holds(info, key, self.title) for key in self._success_keys()]),
        )
        history = PictureHistory(stepper, self.images, obs_steps) if self.cameras else None
        return ChunkVector(self.spec, stepper, obs_steps=obs_steps, image_history=history)

    def render_frames(self, seed: int, actions: Array, *, every: int = 10, **_: Any) -> Array:
        """Replay an episode and return the pictures (F, height, width, 3) of its `render()`."""
        limit = self.spec.max_episode_steps + 1  # as in `make_vector`
        made = CheckedEnv(self._made(limit=limit, render_mode="rgb_array"), self.title)
        try:
            with named_errors(self.title, "a replay"):
                made.reset(seed=seed)
                frames = [picture(made)]
                low, high = (
                    np.asarray(side, np.float32) for side in (self.spec.action_low, self.spec.action_high)
                )  # as in `ChunkVector`: other bounds would change the type of the actions
                for i, action in enumerate(actions, start=1):
                    _obs, _reward, terminated, truncated, _info = made.step(np.clip(action, low, high))
                    if i % every == 0 or i == len(actions) or terminated or truncated:
                        frames.append(picture(made))
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
                made = factory_at(self.factory)(**self.kwargs)
            else:
                limited = {} if limit is None else {"max_episode_steps": limit}
                options = {**limited, **self.kwargs, **options}
                made = gymnasium.make(self.id, disable_env_checker=True, **options)
        except ConfigError:
            raise
        except Exception as error:  # packages raise their own classes
            raise ConfigError(f"{where} cannot be made: {reason_of(error)}") from error
        needed = ("reset", "step", "observation_space", "action_space")
        if missing := [name for name in needed if not hasattr(made, name)]:
            raise ConfigError(
                f"{where} must make an environment with gymnasium's interface; got {type(made).__name__} "
                f"without {', '.join(missing)}."
            )
        return made

    def _described(self, made: Any) -> EnvSpec:
        low, high = action_limits(made.action_space, self.title)
        names = state_names(made.observation_space, self.obs_keys, self.title)
        if not self.obs_keys and (unseen := never_seen(made.observation_space)):
            listed = ", ".join(f"{name} ({kind})" for name, kind in unseen.items())
            warn_once(
                f"{self.title}: not observed: {listed}. Only vectors and images are; a wrapper can make "
                "vectors of them, and env.obs_keys says what is observed on purpose."
            )
        parts = parts_of(made.observation_space)
        check_camera_names(self.cameras, [*(name for name, one in parts.items() if is_image(one)), RENDER])
        limit = self.max_episode_steps or time_limit(made)
        if limit is None:
            limit = _DEFAULT_LIMIT
            warn_once(f"{self.title} has no time limit; env.max_episode_steps={limit} is used.")
        dt = getattr(getattr(made, "unwrapped", made), "dt", None)
        fps = (getattr(made, "metadata", None) or {}).get("render_fps")
        rate = 1.0 / dt if isinstance(dt, (int, float)) and dt > 0 else float(fps or _DEFAULT_HZ)
        key = self.success or reported_key(made, self.title)
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
