"""Embeddings of the network time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from policies.activations import mish


def sinusoid(time: Tensor, dim: int) -> Tensor:
    """Embed times in sines and cosines of geometrically spaced frequencies, sines first.

    Shapes:
        time: (...,) floating point, in raw network units (the integer timestep for diffusion).

    Args:
        time: Network times.
        dim: Width, even and at least 4; frequency j of dim/2 is 10000^(-j / (dim/2 - 1)).

    Returns:
        (..., dim)
    Source:
        Diffusion Policy (arXiv 2303.04137) and DPPO (arXiv 2409.00588), released code.
    """
    half = dim // 2
    index = torch.arange(half, device=time.device, dtype=time.dtype)
    angle = time.unsqueeze(-1) * torch.exp(index * -(math.log(10000.0) / (half - 1)))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class TimeEmbedding(nn.Module):
    """Sinusoid, then Linear dim -> expansion dim, Mish, Linear back to dim."""

    def __init__(self, dim: int, *, expansion: int = 2) -> None:
        super().__init__()
        self.dim = dim
        self.linear1 = nn.Linear(dim, expansion * dim)
        self.linear2 = nn.Linear(expansion * dim, dim)

    def forward(self, time: Tensor) -> Tensor:
        """Embed network times (...,) of any real dtype; (..., dim) in the dtype of the weights."""
        waves = sinusoid(time.to(self.linear1.weight.dtype), self.dim)
        return self.linear2(mish(self.linear1(waves)))
