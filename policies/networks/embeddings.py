"""Embeddings of the network time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.errors import CapabilityError
from policies.networks.activations import mish


def sinusoid(time: Tensor, dim: int) -> Tensor:
    """Embed times (...,) in sines, then cosines of dim / 2 frequencies 10000^(-j / (dim/2 - 1)); (..., dim).

    `dim` is even and at least 4. Source: Diffusion Policy (arXiv 2303.04137), DPPO (arXiv 2409.00588).
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


class OctaveEmbedding(nn.Module):
    """Cosines, then sines of t, 2 t, 4 t, …: for times in [0, 1], and without weights.

    Source: FPO (arXiv 2507.21053), released code.
    """

    frequency: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("frequency", 2.0 ** torch.arange(dim // 2), persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        angle = time.unsqueeze(-1).to(self.frequency.dtype) * self.frequency
        return torch.cat([angle.cos(), angle.sin()], dim=-1)


class UniformEmbedding(nn.Module):
    """Sines, then cosines of dim / 2 frequencies from 0 to 100: for times in [0, 1], and without weights.

    Source: MIP (arXiv 2512.01809), `MLP` of the released code.
    """

    frequency: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.linspace(0, 100, dim // 2), persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        angle = time.unsqueeze(-1).to(self.frequency.dtype) * self.frequency
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class PositionalEmbedding(nn.Module):
    """Cosines, then sines of dim / 4 frequencies 10000^(-4 j / dim); Linear, GELU, Linear to dim.

    Source: MIP (arXiv 2512.01809), `ChiUNet` of the released code. Deviation: one time instead of two equal
    ones.
    """

    def __init__(self, dim: int, *, expansion: int = 4) -> None:
        super().__init__()
        self.linear1 = nn.Linear(dim // 2, expansion * dim)
        self.linear2 = nn.Linear(expansion * dim, dim)

    def forward(self, time: Tensor) -> Tensor:
        weight = self.linear1.weight
        index = torch.arange(weight.shape[1] // 2, device=weight.device, dtype=weight.dtype)
        angle = time.unsqueeze(-1).to(weight.dtype) * 10000.0 ** (-2 * index / weight.shape[1])
        return self.linear2(F.gelu(self.linear1(torch.cat([angle.cos(), angle.sin()], dim=-1))))


class LinearEmbedding(nn.Linear):
    """The time itself, times a vector: for the logarithm of a noise level.

    Source: BESO (arXiv 2304.02532), released code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(1, dim)

    def forward(self, time: Tensor) -> Tensor:
        return super().forward(time.to(self.weight.dtype).unsqueeze(-1))


class JointEmbedding(nn.Module):
    """Sinusoids of both times of a step side by side, then Linear 2 dim -> dim, Mish, Linear dim -> dim.

    Source: ReinFlow (arXiv 2505.22094), `ShortCutFlowMLP` of the released code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear1 = nn.Linear(2 * dim, dim)
        self.linear2 = nn.Linear(dim, dim)

    def forward(self, time: Tensor, second_time: Tensor | None) -> Tensor:
        if second_time is None:
            raise CapabilityError("backbone.times=joint embeds two times and was called with one.")
        dtype = self.linear1.weight.dtype
        waves = [sinusoid(one.to(dtype), self.dim) for one in (time, second_time)]
        return self.linear2(mish(self.linear1(torch.cat(waves, dim=-1))))


def embed_times(
    first: Callable[..., Tensor],
    second: Callable[..., Tensor] | None,
    time: Tensor,
    second_time: Tensor | None,
) -> Tensor:
    """Embed one network time (...,), or the sum of two where the network was built with a second one."""
    if isinstance(first, JointEmbedding):
        return first(time, second_time)
    if second is None and second_time is None:
        return first(time)
    if second is None or second_time is None:
        built, called = ("without", "with") if second is None else ("with", "without")
        raise CapabilityError(f"the network was built {built} a second time and called {called} one.")
    return first(time) + second(second_time)
