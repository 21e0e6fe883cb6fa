"""Encoders: from physical observations to the condition of the backbone, once per action."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from policies.errors import ConfigError
from policies.normalizer import Normalizer
from policies.protocols import Cond, Observation


class StateEncoder(nn.Module):
    """Normalised state history, flattened oldest first, followed by the normalised goal if there is one.

    It has no weights: a learned state encoder is part of the backbone (`backbone.cond_dims`), so that
    frozen and fine-tuned copies of a backbone carry their own.

    Args:
        obs_dim: Do, width of one observation.
        obs_steps: To, length of the history.
        goal_dim: Dg, width of the goal; 0 means that there is none.
    """

    def __init__(self, obs_dim: int, obs_steps: int, goal_dim: int = 0) -> None:
        super().__init__()
        self.obs_dim, self.obs_steps, self.goal_dim = obs_dim, obs_steps, goal_dim

    @property
    def cond_dim(self) -> int:
        """C, width of the condition vector."""
        return self.obs_dim * self.obs_steps + self.goal_dim

    def forward(self, obs: Observation, normalizer: Normalizer) -> Cond:
        """Encode `state` (B, To, Do) and `goal` (B, Dg), in physical units."""
        state = self._checked(obs, "state", (self.obs_steps, self.obs_dim))
        vec = normalizer.encode("state", state).reshape(-1, self.obs_steps * self.obs_dim)
        if self.goal_dim:
            goal = self._checked(obs, "goal", (self.goal_dim,))
            vec = torch.cat([vec, normalizer.encode("goal", goal)], dim=-1)
        return Cond(vec)

    def _checked(self, obs: Observation, key: str, shape: tuple[int, ...]) -> Tensor:
        if key not in obs:
            raise ConfigError(
                f"the policy needs the observation '{key}' {('B', *shape)}; got keys {sorted(obs)}."
            )
        value = obs[key]
        if tuple(value.shape[1:]) != shape:
            raise ConfigError(
                f"observation '{key}' must have shape {('B', *shape)}; got {tuple(value.shape)}."
            )
        return value
