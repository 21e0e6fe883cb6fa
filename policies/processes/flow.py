"""Rectified flow: a straight line from noise to action.

Legend: t sampling time, 0 noise and 1 data; x = t x0 + (1 - t) eps; the network predicts the velocity
dx/dt = x0 - eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.processes.base import GaussianPath
from policies.protocols import Device, Kind, Rng
from policies.registry import register

BETA_SHAPE = 1.5
BETA_LIMIT = 0.999


class LinearPath(GaussianPath):
    """Straight path x = t x0 + (1 - t) eps; the network predicts velocities."""

    @property
    def kind(self) -> Kind:
        return "velocity"

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return t, 1.0 - t

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(t), -torch.ones_like(t)

    def target(self, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return x0 - eps

    def time_of_lambda(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.sigmoid()

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "euler"}


@register("process", "flow")
@dataclass(frozen=True)
class RectifiedFlow(Checked, LinearPath):
    """Flow matching on the linear path.

    Args:
        time_density: Density of training times: `uniform`; `logit_normal` (sigmoid of a standard
            normal); `beta` (0.999 (1 - Beta(1.5, 1)): more weight near the noise).
        time_scale: Factor of the network's time input t. Sinusoidal embeddings with frequencies 1 … 1e-4
            resolve a range of about a hundred; for t in [0, 1] most features are constant.

    Source: arXiv 2209.03003; time densities as in arXiv 2403.03206 (logit-normal) and 2410.24164 (beta).
    """

    time_density: str = bounded("uniform", choices=("uniform", "logit_normal", "beta"))
    time_scale: float = bounded(100.0, gt=0)

    def net_time(self, t: Tensor) -> Tensor:
        return self.time_scale * t

    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        source = device if generator is None else generator.device
        if self.time_density == "logit_normal":
            t = torch.randn(n, generator=generator, device=source, dtype=dtype).sigmoid()
        else:
            t = torch.rand(n, generator=generator, device=source, dtype=dtype)
        if self.time_density == "beta":
            t = BETA_LIMIT * (1.0 - t ** (1.0 / BETA_SHAPE))
        return t.to(device)
