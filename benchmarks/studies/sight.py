"""Does a policy see? Evaluate it with black frames, and with those of another episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policies.policy import Policy
from policies.protocols import Cond
from policies.wrappers.base import WrappedPolicy

FRAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "black": torch.zeros_like,
    "another": lambda frames: frames.roll(1, dims=0),
}
"""Replacements of the images (B, To, H, W, 3) of a batch; the rows of a batch are different episodes."""


class Blindfolded(WrappedPolicy):
    """A policy whose images are replaced before it encodes them."""

    def __init__(self, base: Policy, frames: str) -> None:
        super().__init__(base, None)
        self.replaced = FRAMES[frames]

    def encode(self, obs: Any, *, generator: torch.Generator | None = None) -> Cond:
        images = {camera: self.replaced(obs[camera]) for camera in self.base.images}
        return self.base.encode({**obs, **images}, generator=generator)

    def decode(self, cond: Cond, noise: Tensor, **options: Any) -> Tensor:
        return self.base.decode(cond, noise, **options)
