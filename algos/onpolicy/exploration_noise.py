"""Learned exploration noise on the steps of a deterministic sampler.

Legend: B conditions, K denoising steps, T and C' widths of embedded times and conditions, Th horizon, Da
action width. The std of every entry and step lies between two bounds, on a logarithmic scale::
    log std^2 = lo + (hi - lo) (tanh(net(time, condition)) + 1) / 2,    lo = log min^2,  hi = log max^2

The upper bound may decay over a run. The network's inputs are the time and condition embeddings of the
policy's network; gradients to the time embedding are stopped. The noise is used in training only and is not
exported.

Source: ReinFlow, arXiv 2505.22094, section 4 and released code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.networks.embeddings import TimeEmbedding

INPUTS = ("state_time", "state")
LEVELS = ("learned", "constant")
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "mish": nn.Mish, "elu": nn.ELU, "silu": nn.SiLU}


@dataclass(frozen=True)
class NoiseConfig(Checked):
    """Exploration noise of a flow policy."""

    key: ClassVar[str] = "algo.noise"

    level: str = bounded("learned", choices=LEVELS)  # learned, or constant: always max_std
    input: str = bounded("state_time", choices=INPUTS)  # inputs of the noise network
    min_std: float = bounded(0.10, gt=0)  # smallest std, normalised action units
    max_std: float = bounded(0.24, gt=0)  # largest std, normalised action units
    hold: float = bounded(0.35, ge=0, le=1)  # fraction of the run before max_std decays; 1: no decay
    final_share: float = bounded(0.7, ge=0, le=1)  # ends at final_share max_std + (1 - final_share) min_std
    hidden_dims: tuple[int, ...] = bounded((64, 64), ge=1)  # hidden widths
    activation: str = bounded("tanh", choices=tuple(ACTIVATIONS))  # hidden activation
    own_time_dim: int = bounded(0, ge=0)  # width of a separate time embedding; 0: use the policy's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("max_std", self.min_std <= self.max_std, f"at least algo.noise.min_std={self.min_std:g}")
        width = self.own_time_dim
        self.require(
            "own_time_dim", not width or (width >= 4 and width % 2 == 0), "even and at least 4, or 0"
        )

    def max_std_at(self, progress: float) -> float:
        """Return the largest std at a fraction of the run (0 to 1): constant, then cosine decay."""
        if self.hold >= 1:
            return self.max_std
        share = min(1.0, max(0.0, (progress - self.hold) / (1 - self.hold)))
        last = self.final_share * self.max_std + (1 - self.final_share) * self.min_std
        return last + (self.max_std - last) * (1 + math.cos(math.pi * share)) / 2

    def build(self, chunk_shape: tuple[int, int], time_dim: int, cond_dim: int) -> NoiseNet:
        """Build the network for time and condition features of width T and C'."""
        return NoiseNet(self, chunk_shape, time_dim, cond_dim)


class NoiseNet(nn.Module):
    """Exploration noise std; see the module docstring.

    Attributes:
        max_std: Present upper bound; derived from the progress of the run, so it is not saved.
    """

    def __init__(
        self, config: NoiseConfig, chunk_shape: tuple[int, int], time_dim: int, cond_dim: int
    ) -> None:
        super().__init__()
        self.config, self.chunk_shape = config, tuple(chunk_shape)
        self.own_time = TimeEmbedding(config.own_time_dim) if config.own_time_dim else None
        time_dim = (config.own_time_dim or time_dim) if config.input == "state_time" else 0
        sizes = (time_dim + cond_dim, *config.hidden_dims, math.prod(chunk_shape))
        is_learned = config.level == "learned"
        self.layers = nn.Sequential(*_stack(sizes, config.activation)) if is_learned else None
        self.max_std = config.max_std

    def set_progress(self, progress: float) -> None:
        """Set the upper bound for a fraction of the run (0 to 1)."""
        self.max_std = self.config.max_std_at(progress)

    def forward(self, times: Tensor, time_features: Tensor, cond_features: Tensor) -> Tensor:
        """Return standard deviations (B, K, Th, Da).

        Shapes:
            times: (K,), network times. time_features: (K, T). cond_features: (B, C').
        """
        batch, steps = len(cond_features), len(times)
        if self.layers is None:
            return cond_features.new_full((batch, steps, *self.chunk_shape), self.max_std)
        parts = [cond_features.unsqueeze(1).expand(-1, steps, -1)]
        if self.config.input == "state_time":
            known = time_features.detach() if self.own_time is None else self.own_time(times)
            parts.insert(0, known.unsqueeze(0).expand(batch, -1, -1))
        out = self.layers(torch.cat(parts, dim=-1))
        low, span = math.log(self.config.min_std), math.log(self.max_std / self.config.min_std)
        return torch.exp(low + span * (out.tanh() + 1) / 2).view(batch, steps, *self.chunk_shape)


def _stack(sizes: Sequence[int], activation: str) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return layers[:-1]
