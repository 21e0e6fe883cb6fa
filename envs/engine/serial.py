"""Environments with gymnasium's interface, stepped serially; also the reference of faster engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvSpec, StepResult


def _flat_observation(obs: Any) -> Array:
    return np.asarray(obs, np.float64).reshape(-1)


def _reported_success(info: Mapping[str, Any]) -> bool:
    return bool(info.get("success", info.get("is_success", False)))


class SerialStepper:
    """Step gymnasium-API environments serially.

    Args:
        envs: Objects with `reset(seed=)` and `step(action)` as in gymnasium.
        observe: Maps an observation to a flat array (Do,).
        succeeded: Maps the info of a step to success.
        metric_names: Keys of `info` that become per-episode metrics (NaN if absent).

    The state can be saved if every environment has `get_state()` and `set_state(state)`.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        observe: Callable[[Any], Array] = _flat_observation,
        succeeded: Callable[[Mapping[str, Any]], bool] = _reported_success,
        metric_names: Sequence[str] = (),
    ) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self._observe = observe
        self._succeeded = succeeded
        self._metrics = {name: np.full(self.num_envs, np.nan) for name in metric_names}

    @property
    def can_save(self) -> bool:
        return all(hasattr(env, "get_state") and hasattr(env, "set_state") for env in self.envs)

    def reset(self, row: int, seed: int) -> Array:
        obs, info = self.envs[row].reset(seed=seed)
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
