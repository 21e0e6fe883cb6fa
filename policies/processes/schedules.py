"""Noise schedules of variance-preserving diffusion, and the two clocks they connect.

Legend: K number of noise levels; `tau` integer level, 0 the cleanest noisy one and K-1 pure noise, -1 clean
data; `t` sampling time, 0 noise and 1 data. Only this file converts between the clocks:

    t = 1 - (tau + 1) / K        tau = K (1 - t) - 1

Equations: cosine betas (arXiv 2102.09672, eq. 17), linear betas (arXiv 2006.11239, §4), scaled linear betas
(latent diffusion, released code). Precision follows diffusers and DPPO, so that tables agree bit for bit:
cosine betas in float64 rounded to float32, the other two in float32, products in float32.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from policies.errors import ConfigError

_log = logging.getLogger(__name__)

SCHEDULES = ("cosine", "linear", "scaled_linear")
SPACINGS = ("leading", "trailing", "linspace")

COSINE_OFFSET = 0.008
MAX_BETA = 0.999
LOWEST_START = 0.75  # a first level below this share of K is far from pure noise
SNAP = 1e-3  # levels this close to an integer are that integer: float32 times are off by about 1e-7 K


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float type that a device computes in."""
    return torch.float32 if device.type == "mps" else torch.float64


def cosine_betas(num_levels: int) -> Tensor:
    """Return the squared-cosine betas (K,) in float64: arXiv 2102.09672, eq. 17, limited to 0.999."""
    grid = [(i / num_levels + COSINE_OFFSET) / (1 + COSINE_OFFSET) for i in range(num_levels + 1)]
    bar = [math.cos(u * math.pi / 2) ** 2 for u in grid]
    betas = [min(MAX_BETA, max(0.0, 1 - b / a)) for a, b in pairwise(bar)]
    return torch.tensor(betas, dtype=torch.float64)


def make_betas(
    num_levels: int, schedule: str = "cosine", *, beta_start: float = 1e-4, beta_end: float = 0.02
) -> Tensor:
    """Return the float32 betas (K,) of one of `SCHEDULES`, cleanest level first."""
    if schedule == "cosine":
        return cosine_betas(num_levels).to(torch.float32)
    if schedule == "linear":
        return torch.linspace(beta_start, beta_end, num_levels, dtype=torch.float32)
    if schedule == "scaled_linear":
        return torch.linspace(beta_start**0.5, beta_end**0.5, num_levels, dtype=torch.float32) ** 2
    raise ConfigError(f"process.schedule must be one of {', '.join(SCHEDULES)}; got '{schedule}'.")


def cumulative_alphas(betas: Tensor) -> Tensor:
    """Return the running products of 1 - beta (K,), in the precision of the betas."""
    return torch.cumprod(1.0 - betas, dim=0)


def time_of_level(tau: Tensor, num_levels: int) -> Tensor:
    """Convert levels `tau` (any shape; -1 is clean) to sampling times, keeping a floating type."""
    return 1.0 - (tau + 1.0) / num_levels


def level_of_time(t: Tensor, num_levels: int) -> Tensor:
    """Convert sampling times (any shape) to levels in [-1, K-1], exact near integers."""
    tau = (1.0 - t.to(wide_dtype(t.device))) * num_levels - 1.0
    nearest = tau.round()
    return torch.where((tau - nearest).abs() < SNAP, nearest, tau).clamp(-1.0, num_levels - 1.0)


@cache
def _warn_of_start(num_levels: int, steps: int, first: int, instead: str) -> None:
    _log.warning(
        "sampler.steps=%d with leading levels begins at level %d of %d, but from pure noise: samples are "
        "spread wrongly. Use %s, or fewer steps.",
        steps, first, num_levels - 1, instead,
    )  # fmt: skip


def spaced_levels(
    num_levels: int, steps: int, spacing: str = "leading", *, instead: str = "sampler.spacing=trailing"
) -> list[int]:
    """Choose the levels that a sampler visits, noisiest first.

    Args:
        num_levels: K.
        steps: How many levels to visit, 1 to K; a single one must be the noisiest (`trailing`).
        spacing: `leading` takes multiples of K // steps and ends at 0; `trailing` starts at K-1; `linspace`
            includes both ends. A `leading` start far below K-1 logs a warning.
        instead: Advice in messages.

    Source: the timestep spacings of diffusers (arXiv 2305.08891, table 2).
    """
    if not 1 <= steps <= num_levels:
        raise ConfigError(
            f"sampler.steps must be between 1 and process.num_levels={num_levels}; got {steps}. "
            "Lower sampler.steps or train with more levels."
        )
    if steps == 1 < num_levels and spacing in ("leading", "linspace"):
        raise ConfigError(
            f"sampler.steps=1 with {spacing} levels visits level 0 only, which returns the noise. Use "
            f"{instead}, or 2 steps or more."
        )
    if spacing == "leading":
        stride = num_levels // steps
        if stride * (steps - 1) < LOWEST_START * (num_levels - 1):
            _warn_of_start(num_levels, steps, stride * (steps - 1), instead)
        return [i * stride for i in reversed(range(steps))]
    if spacing == "trailing":
        return [round(num_levels - i * num_levels / steps) - 1 for i in range(steps)]
    if spacing == "linspace":
        return [round(i * (num_levels - 1) / max(steps - 1, 1)) for i in reversed(range(steps))]
    raise ConfigError(f"sampler.spacing must be one of {', '.join(SPACINGS)}; got '{spacing}'.")


GRIDS = ("auto", "uniform", "karras", "exponential", "linear")


def noise_grid(kind: str, steps: int, first: float, last: float, rho: float = 7.0) -> Tensor:
    """Return falling noise levels sigma / alpha (steps,), float64; `rho` is the exponent of `karras`.

    Source: arXiv 2206.00364, eq. 5; BESO (arXiv 2304.02532) for `exponential` and `linear`.
    """
    share = torch.linspace(0, 1, steps, dtype=torch.float64)
    if kind == "karras":
        top, bottom = first ** (1 / rho), last ** (1 / rho)
        return (top + share * (bottom - top)) ** rho
    if kind == "exponential":
        return torch.exp(math.log(first) + share * (math.log(last) - math.log(first)))
    if kind == "linear":
        return first + share * (last - first)
    raise ConfigError(f"noise grid must be one of {', '.join(GRIDS[2:])}; got '{kind}'.")
