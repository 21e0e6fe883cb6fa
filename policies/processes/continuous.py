"""Variance-preserving diffusion in continuous time.

Legend: t sampling time, 0 noise and 1 data; u = 1 - t; phi angle of the path.

    cosine     alpha = cos phi, sigma = sin phi, phi = u 0.995 pi / 2       a little signal is left at u = 1
    linear     ln alpha = -(b1 - b0) u^2 / 4 - b0 u / 2, sigma^2 = 1 - alpha^2,  b0 = 0.1, b1 = 20

Source: arXiv 2102.09672 (cosine, without offset), 2011.13456, eq. 32 (linear).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from policies.bounds import Checked, bounded
from policies.processes.base import GaussianPath
from policies.processes.diffusion import PREDICTIONS
from policies.protocols import Device, Kind, Rng
from policies.registry import register

LAST_ANGLE = 0.995 * math.pi / 2
BETA_START, BETA_END = 0.1, 20.0


@register("process", "vp")
@dataclass(frozen=True)
class VPContinuous(Checked, GaussianPath):
    """Denoising diffusion with continuous training times.

    Source: arXiv 2011.13456 (variance-preserving SDE), 2202.00512 (v prediction).
    """

    schedule: str = bounded("cosine", choices=("cosine", "linear"))
    prediction: str = bounded("v", choices=PREDICTIONS)  # prediction kind
    time_scale: float = bounded(100.0, gt=0)  # factor of the network's time input u

    @property
    def kind(self) -> Kind:
        return cast(Kind, self.prediction)

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if self.schedule == "cosine":
            phi = LAST_ANGLE * (1.0 - t)
            return phi.cos(), phi.sin()
        u = 1.0 - t
        log_alpha = -(BETA_END - BETA_START) * u.square() / 4 - BETA_START * u / 2
        return log_alpha.exp(), (-torch.expm1(2.0 * log_alpha)).sqrt()

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of `alpha_sigma`; that of sigma is infinite at the end of `linear`."""
        alpha, sigma = self.alpha_sigma(t)
        if self.schedule == "cosine":
            return LAST_ANGLE * sigma, -LAST_ANGLE * alpha
        slope = ((BETA_END - BETA_START) * (1.0 - t) + BETA_START) / 2
        return slope * alpha, -slope * alpha.square() / sigma

    def time_of_lambda(self, log_ratio: Tensor) -> Tensor:
        if self.schedule == "cosine":
            u = torch.atan(torch.exp(-log_ratio)) / LAST_ANGLE
        else:
            loss = softplus(-2.0 * log_ratio) / 2.0  # -ln alpha
            half = BETA_START / 2.0
            u = 2.0 * loss / (half + torch.sqrt(half * half + (BETA_END - BETA_START) * loss))
        return (1.0 - u).clamp(0.0, 1.0)

    def net_time(self, t: Tensor) -> Tensor:
        return self.time_scale * (1.0 - t)

    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        source = device if generator is None else generator.device
        return torch.rand(n, generator=generator, device=source, dtype=dtype).to(device)

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "dpmpp_2m"}
