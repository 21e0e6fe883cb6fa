"""Any gymnasium-API environment, stepped serially; also the reference of faster engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvSpec, StepResult
from policies.errors import ConfigError

_NO_LIMIT = 2**31 - 1
_DEFAULT_HZ = 1.0  # for environments without a control rate


def _flat_observation(obs: Any) -> Array:
    return np.asarray(obs, np.float64).reshape(-1)


def _reported_success(info: Mapping[str, Any]) -> bool:
    return bool(info.get("success", info.get("is_success", False)))


class SerialStepper:
    """Step gymnasium-API environments serially.

    Args:
        envs: Objects with `reset(seed=, options=)` and `step(action)` as in gymnasium.
        observe: Maps an observation to a flat array (Do,).
        succeeded: Maps the info of a step to success.
        options: Maps a seed to the `options` of its reset.
        metric_names: Keys of `info` that become per-episode metrics (NaN if absent).

    The state can be saved if every environment has `get_state()` and `set_state(state)`.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        observe: Callable[[Any], Array] = _flat_observation,
        succeeded: Callable[[Mapping[str, Any]], bool] = _reported_success,
        options: Callable[[int], dict[str, Any] | None] | None = None,
        metric_names: Sequence[str] = (),
    ) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self._observe = observe
        self._succeeded = succeeded
        self._options = options
        self._metrics = {name: np.full(self.num_envs, np.nan) for name in metric_names}

    @property
    def can_save(self) -> bool:
        return all(hasattr(env, "get_state") and hasattr(env, "set_state") for env in self.envs)

    def reset(self, row: int, seed: int) -> Array:
        if self._options is None:
            obs, info = self.envs[row].reset(seed=seed)
        else:
            obs, info = self.envs[row].reset(seed=seed, options=self._options(seed))
        for values in self._metrics.values():
            values[row] = np.nan
        self._note(row, info)
        return self._observe(obs)

    def step(self, rows: Array, actions: Array) -> StepResult:
        obs, reward, terminated, truncated, success = [], [], [], [], []
        for row, action in zip(rows.tolist(), actions, strict=True):
            o, r, end, cut, info = self.envs[row].step(action)
            obs.append(self._observe(o))
            reward.append(float(r))
            terminated.append(bool(end))
            truncated.append(bool(cut))
            success.append(self._succeeded(info))
            self._note(row, info)
        flags = (np.array(flag, bool) for flag in (terminated, truncated, success))
        return StepResult(np.stack(obs), np.array(reward), *flags)

    def metrics(self) -> dict[str, Array]:
        return {name: values.copy() for name, values in self._metrics.items()}

    def get_state(self) -> dict[str, Any]:
        return {"envs": [env.get_state() for env in self.envs], "metrics": self.metrics()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.set_state(saved)
        self._metrics = {name: np.array(values) for name, values in state["metrics"].items()}

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _note(self, row: int, info: Mapping[str, Any]) -> None:
        for name, values in self._metrics.items():
            if name in info:
                values[row] = float(info[name])


class SerialVector(ChunkVector):
    """A vector over a list of gymnasium-API environments; keyword arguments as in `SerialStepper`."""

    def __init__(
        self,
        spec: EnvSpec,
        envs: Sequence[Any],
        *,
        obs_steps: int = 1,
        paper_compat: bool = False,
        **stepper_options: Any,
    ) -> None:
        stepper = SerialStepper(envs, metric_names=spec.episode_metrics, **stepper_options)
        super().__init__(spec, stepper, obs_steps=obs_steps, paper_compat=paper_compat)


@dataclass(frozen=True)
class GymSerial:
    """Configuration of `gymnasium.make(env_id)`; not registered, since its spec requires the environment.

    Raises:
        ConfigError: If the observation is not a flat box or the action is not a bounded flat box.
    """

    env_id: str
    max_episode_steps: int | None = None  # None: the environment's own limit

    @cached_property
    def spec(self) -> EnvSpec:
        import gymnasium

        made = gymnasium.make(self.env_id)
        try:
            obs_dim, low, high = _widths(made.observation_space, made.action_space, self.env_id)
            limit = self.max_episode_steps or (made.spec and made.spec.max_episode_steps) or _NO_LIMIT
            dt = getattr(made.unwrapped, "dt", None)
        finally:
            made.close()
        return EnvSpec(
            name=self.env_id,
            family="gymnasium",
            obs_dim=obs_dim,
            action_dim=len(low),
            action_low=low,
            action_high=high,
            max_episode_steps=int(limit),
            control_hz=1.0 / dt if dt else _DEFAULT_HZ,
            obs_names=tuple(f"observation {i}" for i in range(obs_dim)),
            action_names=tuple(f"action {i}" for i in range(len(low))),
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> SerialVector:
        import gymnasium

        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        limit = self.spec.max_episode_steps
        envs = [gymnasium.make(self.env_id, max_episode_steps=limit + 1) for _ in range(num_envs)]
        return SerialVector(self.spec, envs, obs_steps=obs_steps)


def _widths(
    observation: object, action: object, env_id: str
) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    from gymnasium.spaces import Box

    flat = isinstance(observation, Box) and len(observation.shape) == 1
    bounded = isinstance(action, Box) and len(action.shape) == 1 and bool(np.isfinite(action.high).all())
    if not (flat and bounded):
        raise ConfigError(
            f"{env_id} needs a flat observation and a bounded flat action; it has {observation} and {action}."
        )
    assert isinstance(observation, Box) and isinstance(action, Box)
    low, high = (tuple(float(x) for x in bound) for bound in (action.low, action.high))
    return observation.shape[0], low, high
