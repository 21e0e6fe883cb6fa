"""Encoders: map physical observations to the backbone's condition, once per action.

One file per encoder registers its configuration in the group `encoder`. Frozen and fine-tuned copies of a
backbone share the policy's encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from policies.errors import ConfigError
from policies.normalizer import Normalizer
from policies.protocols import Cond, Observation, Rng

ImageShape = tuple[int, int, int]
"""(H, W, 3), the shape of one image of a camera."""


@dataclass(frozen=True)
class ObservationSizes:
    """Sizes of an observation."""

    obs_dim: int  # Do, width of `state`
    obs_steps: int = 1  # To, length of the history
    goal_dim: int = 0  # Dg, width of `goal`; 0: no goal
    images: Mapping[str, ImageShape] = field(default_factory=dict)  # image shapes by camera


@runtime_checkable
class Encoder(Protocol):
    """Interface of an encoder (an `nn.Module`)."""

    sizes: ObservationSizes  # its inputs; only the cameras it uses
    token_dim: int  # Ct, width of `Cond.tokens`; 0: no tokens

    @property
    def cond_dim(self) -> int:
        """C, width of `Cond.vec`."""

    def __call__(self, obs: Observation, normalizer: Normalizer, generator: Rng = None) -> Cond:
        """Encode physical observations; only the last entries of `Cond.vec` depend on the goal.

        Args:
            obs: `state` (B, To, Do), `goal` (B, Dg) and images (B, To, H, W, 3) by camera.
            normalizer: Normaliser of `state` and `goal`.
            generator: Generator of image augmentation, in training only; None: no augmentation.
        """


def read(obs: Observation, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return an observation (B, *shape)."""
    if name not in obs:
        raise ConfigError(
            f"the policy needs the observation '{name}' {('B', *shape)}; got keys {sorted(obs)}."
        )
    value = obs[name]
    if tuple(value.shape[1:]) != shape:
        raise ConfigError(f"observation '{name}' must have shape {('B', *shape)}; got {tuple(value.shape)}.")
    return value
