"""Variance-preserving diffusion with discrete noise levels (DDPM).

Legend: K levels, tau integer level (K-1 noisiest, -1 clean), t sampling time, phi angle of the path.
The path is a rotation, alpha = cos phi, sigma = sin phi with phi = 0 at t = 1. Between the K trained
levels phi is interpolated linearly in t, so that alpha and sigma are exact at the levels, finite and
monotone between them, and the velocity is `dx/dt = phi' v`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.processes.base import GaussianPath
from policies.processes.schedules import (
    SCHEDULES,
    cumulative_alphas,
    level_of_time,
    make_betas,
    spaced_levels,
    time_of_level,
    wide_dtype,
)
from policies.protocols import Device, Kind, Rng
from policies.registry import register

PREDICTIONS: tuple[Kind, ...] = ("eps", "x0", "v")
_ANGLES: dict[tuple[int | float | str, ...], Tensor] = {}


@register("process", "diffusion")
@dataclass(frozen=True)
class VPDiffusion(Checked, GaussianPath):
    """Denoising diffusion on K levels; the network's time input is the integer level as a float.

    Args:
        schedule: `cosine`, `linear` or `scaled_linear`. The linear schedules end far from pure noise unless
            num_levels is near 1000 or beta_end is raised.

    Source: arXiv 2006.11239 (process), 2102.09672 (cosine schedule), 2202.00512 (v prediction).
    """

    num_levels: int = bounded(20, ge=2)  # K
    schedule: str = bounded("cosine", choices=SCHEDULES)
    prediction: str = bounded("x0", choices=PREDICTIONS)  # eps is published and needs longer training
    beta_start: float = bounded(1e-4, gt=0)  # first beta of the linear schedules
    beta_end: float = bounded(0.02, lt=1)  # last beta of the linear schedules

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta_end", self.beta_start <= self.beta_end, f"at least beta_start={self.beta_start}")

    @property
    def kind(self) -> Kind:
        return cast(Kind, self.prediction)

    def betas(self) -> Tensor:
        """Return the betas (K,) in float32, cleanest level first."""
        return make_betas(self.num_levels, self.schedule, beta_start=self.beta_start, beta_end=self.beta_end)

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        phi, _ = self._angle(t)
        return phi.cos().to(t.dtype), phi.sin().to(t.dtype)

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return (d alpha / dt, d sigma / dt); at a level, the slope towards the next cleaner one."""
        phi, slope = self._angle(t)
        return (-slope * phi.sin()).to(t.dtype), (slope * phi.cos()).to(t.dtype)

    def net_time(self, t: Tensor) -> Tensor:
        return level_of_time(t, self.num_levels).to(t.dtype)

    def time_of_lambda(self, log_ratio: Tensor) -> Tensor:
        phi = torch.atan(torch.exp(-log_ratio.to(wide_dtype(log_ratio.device))))
        table = _angles(self, phi.device)
        high = torch.searchsorted(table, phi).clamp(1, self.num_levels)
        share = ((phi - table[high - 1]) / (table[high] - table[high - 1])).clamp(0.0, 1.0)
        return (1.0 - (high - 1 + share) / self.num_levels).to(log_ratio.dtype)

    def grid(self, steps: int) -> list[float]:
        """Return the times of evenly spaced levels (`leading`), then 1."""
        visited = spaced_levels(self.num_levels, steps, instead="sampler.grid=uniform")
        levels = torch.tensor([*visited, -1], dtype=torch.float64)
        return time_of_level(levels, self.num_levels).tolist()

    def start_std(self, t: float) -> float:
        return 1.0  # published samplers start from unit noise at every level

    def levels(self, *, device: Device = None, dtype: torch.dtype = torch.float32) -> Tensor:
        return time_of_level(torch.arange(self.num_levels, device=device, dtype=dtype), self.num_levels)

    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        source = device if generator is None else generator.device
        tau = torch.randint(0, self.num_levels, (n,), generator=generator, device=source)
        return self.levels(device=device, dtype=dtype)[tau.to(device)]

    def nearest_time(self, t: Tensor) -> Tensor:
        level = level_of_time(t, self.num_levels).round().clamp(min=0.0)
        return time_of_level(level, self.num_levels).to(t.dtype)

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "ddpm"}

    def stochastic_sampler(self) -> dict[str, Any]:
        return {"name": "ddpm"}

    def deterministic_sampler(self) -> dict[str, Any]:
        return {"name": "ddim", "eta": 0.0}

    def _angle(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi and d phi / dt at times t, in the widest float dtype of the device."""
        table = _angles(self, t.device)
        position = level_of_time(t, self.num_levels) + 1.0  # 0 clean … K noise
        low = (position.ceil() - 1.0).clamp(min=0.0)
        index = low.long()
        start, end = table[index], table[index + 1]
        return torch.lerp(start, end, position - low), (start - end) * self.num_levels


def _angles(process: VPDiffusion, device: torch.device) -> Tensor:
    """Return phi (K+1,) from clean to noise, from float32 products; cached per device."""
    key = (process.num_levels, process.schedule, process.beta_start, process.beta_end, str(device))
    phi = _ANGLES.get(key)
    if phi is None:
        with torch.inference_mode(False):  # created while sampling, the table is also used in training
            bar = cumulative_alphas(process.betas()).to(wide_dtype(device))
            phi = torch.atan2((1.0 - bar).sqrt(), bar.sqrt())
            phi = torch.cat([torch.zeros(1, dtype=phi.dtype), phi]).to(device)
        if not torch.compiler.is_compiling():  # traced tensors must not enter the cache
            _ANGLES[key] = phi
    return phi
