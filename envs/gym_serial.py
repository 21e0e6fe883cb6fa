"""Any gymnasium environment with flat observations and box actions, stepped one by one.

The plain way: slower than our own engines, and what they are measured and checked against. It is not
registered, because its description needs the environment itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from envs.spec import EnvSpec
from envs.vector import SerialVector
from policies.errors import ConfigError

_NO_LIMIT = 2**31 - 1
_DEFAULT_HZ = 1.0  # where an environment has no clock


@dataclass(frozen=True)
class GymSerial:
    """A configuration for `gymnasium.make(env_id)`.

    Raises:
        ConfigError: If the observation is not a flat box or the action is not a bounded flat box.
    """

    env_id: str
    max_episode_steps: int | None = None  # None: the environment's own

    @cached_property
    def spec(self) -> EnvSpec:
        """Describe the task; makes the environment once."""
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
        """Make N environments; the vector applies the time limit."""
        import gymnasium

        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1; got {num_envs}.")
        limit = self.spec.max_episode_steps
        envs = [gymnasium.make(self.env_id, max_episode_steps=limit + 1) for _ in range(num_envs)]
        return SerialVector(self.spec, envs, obs_steps=obs_steps)


def _widths(
    observation: object, action: object, env_id: str
) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Return Do and the action box, or refuse."""
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
