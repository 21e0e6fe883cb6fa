"""Observations as algorithms remember them: one record of state, goal and images.

A record is a `policies.protocols.Observation` with leading axes: `state` (..., To, Do), `goal` (..., Dg),
images (..., To, H, W, 3) uint8 by camera. What networks read of it are its conditions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.encoders.images import random_shift
from policies.errors import ConfigError
from policies.policy import Policy
from policies.protocols import Cond, Observation

ENCODERS = ("frozen", "trained")
IMAGE_ROWS = 512  # rows with images encoded at once, so that activations fit into memory


def mapped(obs: Observation, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the record with every part changed, e.g. flattened or indexed."""
    return {name: change(part) for name, part in obs.items()}


@torch.no_grad()
def encode(policy: Policy, obs: Observation) -> Cond:
    """Return the conditions of physical observations, M rows; images are encoded in pieces."""
    rows = len(obs["state"])
    if not policy.images or rows <= IMAGE_ROWS:
        return policy.encode(policy.observation(obs))
    parts = [slice(i, i + IMAGE_ROWS) for i in range(0, rows, IMAGE_ROWS)]
    pieces = [{name: values[part] for name, values in obs.items()} for part in parts]
    return Cond.concatenated([policy.encode(policy.observation(piece)) for piece in pieces])


def encoder_module(policy: Policy) -> nn.Module:
    """Return the encoder of a policy as a module."""
    encoder: Any = policy.encoder
    assert isinstance(encoder, nn.Module)
    return encoder


def flat_state(obs: Observation) -> Tensor:
    """Return state history and goal of a record, physical, as one vector (..., To Do + Dg)."""
    parts = [obs["state"].flatten(-2)] + ([obs["goal"]] if "goal" in obs else [])
    return torch.cat(parts, dim=-1)


def from_flat_state(policy: Policy, flat: Tensor, images: Observation) -> dict[str, Tensor]:
    """Return the record of `flat_state` (B, To Do + Dg) with images by camera."""
    steps, width = policy.chunk.obs_steps, policy.obs_dim
    state, goal = flat.split([steps * width, policy.goal_dim], dim=-1)
    obs = {"state": state.unflatten(-1, (steps, width)), **images}
    return obs | ({"goal": goal} if policy.goal_dim else {})


def shifted(policy: Policy, obs: Observation, pad: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the record with the images of each row shifted by up to `pad` pixels in each direction."""
    images = {camera: random_shift(obs[camera], pad, generator) for camera in policy.images if pad}
    return {**obs, **images}


@dataclass(frozen=True)
class Record:
    """Remembered observations, M rows, on the device of a policy."""

    obs: Observation

    def __len__(self) -> int:
        return len(self.obs["state"])

    def rows(self, index: Tensor) -> Observation:
        return mapped(self.obs, lambda part: part.index_select(0, index.to(part.device)))


@dataclass(frozen=True)
class EncodedWhenRead:
    """Conditions of a record by a trained encoder: every read encodes, with gradients, each row once."""

    policy: Policy
    record: Record

    def __len__(self) -> int:
        return len(self.record)

    def rows(self, index: Tensor) -> Cond:
        row, place = torch.unique(index, return_inverse=True)
        return self.policy.encode(self.policy.observation(self.record.rows(row))).rows(place)


class EncodingCritic(nn.Module):
    """A critic with an encoder of its own, which starts as a copy of the policy's."""

    def __init__(self, policy: Policy, critic: nn.Module) -> None:
        super().__init__()
        self._policy = (policy,)  # a tuple keeps it out of the state dict
        self.encoder: Any = copy.deepcopy(encoder_module(policy)).requires_grad_(True)
        self.critic = critic

    def forward(self, obs: Observation) -> Tensor:
        """Return the values (B,) of physical observations."""
        (policy,) = self._policy
        return self.critic(self.encoder(policy.observation(obs), policy.normalizer))


def trained_encoder(policy: Policy) -> list[nn.Parameter]:
    """Return the weights of a policy's encoder, and let them have gradients.

    Raises:
        ConfigError: If it has none.
    """
    weights = list(encoder_module(policy).requires_grad_(True).parameters())
    if not weights:
        raise ConfigError(
            f"algo.encoder=trained needs an encoder with weights; {type(policy.encoder).__name__} has none. "
            "Use algo.encoder=frozen."
        )
    return weights
