"""Encoder of state history and goal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.encoders import ObservationSizes, read
from policies.normalizer import Normalizer
from policies.protocols import Cond, Observation, Rng
from policies.registry import register


@register("encoder", "state")
@dataclass(frozen=True)
class StateEncoderConfig:
    """Encoder without weights of state history and goal; images are ignored."""

    def build(self, sizes: ObservationSizes) -> StateEncoder:
        return StateEncoder(sizes)


class StateEncoder(nn.Module):
    """Normalised state history, flattened oldest first, followed by the normalised goal if there is one.

    A learned state encoder is part of the backbone (`backbone.cond_dims`), so that frozen and fine-tuned
    copies of a backbone have their own.
    """

    token_dim = 0

    def __init__(self, sizes: ObservationSizes) -> None:
        super().__init__()
        self.sizes = ObservationSizes(sizes.obs_dim, sizes.obs_steps, sizes.goal_dim)

    @property
    def cond_dim(self) -> int:
        return self.sizes.obs_dim * self.sizes.obs_steps + self.sizes.goal_dim

    def forward(self, obs: Observation, normalizer: Normalizer, generator: Rng = None) -> Cond:
        state = encoded_state(obs, normalizer, self.sizes)
        vec = state.reshape(-1, self.sizes.obs_steps * self.sizes.obs_dim)
        return Cond(with_goal(vec, obs, normalizer, self.sizes))


def encoded_state(obs: Observation, normalizer: Normalizer, sizes: ObservationSizes) -> Tensor:
    """Return the normalised history (B, To, Do)."""
    return normalizer.encode("state", read(obs, "state", (sizes.obs_steps, sizes.obs_dim)))


def with_goal(vec: Tensor, obs: Observation, normalizer: Normalizer, sizes: ObservationSizes) -> Tensor:
    """Return features (B, C), followed by the normalised goal if there is one."""
    if not sizes.goal_dim:
        return vec
    goal = normalizer.encode("goal", read(obs, "goal", (sizes.goal_dim,)))
    return torch.cat([vec, goal], dim=-1)
