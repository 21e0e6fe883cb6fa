"""Score models with EDM preconditioning, as in BESO.

Legend: s noise over signal (EDM's sigma), sd standard deviation of the data, t sampling time with
s = (1 - t) / t, the time at which a flow has the same ratio.

EDM adds noise to the data, y = x0 + s eps, and scales the network's input by c_in = 1 / sqrt(s^2 + sd^2).
The state here is the scaled one, x = sd c_in y; it equals the chunk at the clean end and stays bounded::

    alpha = sd c_in,  sigma = s sd c_in,        alpha^2 + (sigma / sd)^2 = 1
    x0 = alpha x + sigma F,                     c_skip y = alpha x,  c_out = sigma
    F = sigma / sd^2 x0 - alpha eps             regression target

Source: arXiv 2206.00364, table 1 and eq. 7; BESO, arXiv 2304.02532.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.processes.base import GaussianPath, over_rows
from policies.processes.schedules import noise_grid
from policies.protocols import Device, Kind, Rng
from policies.registry import register

NOISE_DENSITIES = ("log_logistic", "log_normal", "log_uniform")
_DISTRIBUTIONS = {
    "log_logistic": (torch.sigmoid, torch.logit),
    "log_normal": (torch.special.ndtr, torch.special.ndtri),
}  # of ln s: distribution function and its inverse


@register("process", "edm")
@dataclass(frozen=True)
class Edm(Checked, GaussianPath):
    """Denoising score matching with preconditioning, over a range of noise levels.

    The network input is sd c_in y instead of EDM's c_in y; its first layer absorbs the constant. The time
    input is time_scale ln(s) / 4 instead of ln(s) / 4, which low-frequency sinusoids resolve better.

    Source: arXiv 2206.00364; 2304.02532 for the log-logistic density. The loss weight is EDM's: one for F.
    """

    data_std: float = bounded(0.5, gt=0)  # sd, standard deviation of normalised actions
    noise_min: float = bounded(0.005, gt=0)  # smallest trained s
    noise_max: float = bounded(10.0, gt=0)  # largest trained s, start of sampling
    density: str = bounded("log_logistic", choices=NOISE_DENSITIES)  # density of ln s in training, truncated
    density_mean: float = -1.2  # mean of `log_normal`; that of `log_logistic` is ln data_std
    density_scale: float = bounded(0.5, gt=0)  # scale of `log_logistic` or `log_normal`
    rho: float = bounded(7.0, gt=0)  # exponent of the karras sampling grid
    time_scale: float = bounded(100.0, gt=0)  # factor of the network's time input

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("noise_max", self.noise_min < self.noise_max, f"above noise_min={self.noise_min}")

    def unused(self) -> dict[str, str]:
        without = {"log_logistic": ("density_mean",), "log_uniform": ("density_mean", "density_scale")}
        why = f"with process.density={self.density}"
        return super().unused() | dict.fromkeys(without.get(self.density, ()), why)

    @property
    def kind(self) -> Kind:
        return "edm"

    def norm(self, t: Tensor) -> Tensor:
        """Return t times the deviation of the data with their noise; ONNX has no `hypot`."""
        return ((1.0 - t).square() + (self.data_std * t).square()).sqrt()

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.data_std / self.norm(t)
        return scale * t, scale * (1.0 - t)

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.norm(t)
        norm_rate = (self.data_std**2 * t - (1.0 - t)) / norm
        cubic = self.data_std / norm.square()
        return cubic * (norm - t * norm_rate), -cubic * (norm + (1.0 - t) * norm_rate)

    def express(self, x0: Tensor, eps: Tensor, t: Tensor, kind: Kind) -> Tensor:
        if kind != "edm":
            return super().express(x0, eps, t, kind)
        alpha, sigma = (over_rows(value, x0) for value in self.alpha_sigma(t))
        return sigma / self.data_std**2 * x0 - alpha * eps

    def resolve(self, x: Tensor, t: Tensor, pred: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        if kind != "edm":
            return super().resolve(x, t, pred, kind)
        alpha, sigma = (over_rows(value, x) for value in self.alpha_sigma(t))
        return alpha * x + sigma * pred, sigma / self.data_std**2 * x - alpha * pred

    def net_time(self, t: Tensor) -> Tensor:
        noise = ((1.0 - t) / t).clamp(self.noise_min, self.noise_max)
        return self.time_scale * 0.25 * noise.log()

    def time_of_lambda(self, log_ratio: Tensor) -> Tensor:
        return log_ratio.sigmoid()

    def grid(self, steps: int) -> list[float]:
        """Return the times of the karras noise levels from noise_max to noise_min, then 1."""
        noise = noise_grid("karras", steps, self.noise_max, self.noise_min, self.rho)
        return [*(1.0 / (1.0 + noise)).tolist(), 1.0]

    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Draw training times (n,) by inverse transform of the truncated distribution of ln s."""
        source = device if generator is None else generator.device
        share = torch.rand(n, generator=generator, device=source, dtype=dtype)
        return 1.0 / (1.0 + self.noise_of_share(share)).to(device)

    def noise_of_share(self, share: Tensor) -> Tensor:
        """Return the quantiles s at probabilities in [0, 1], any shape."""
        low, high = math.log(self.noise_min), math.log(self.noise_max)
        if self.density == "log_uniform":
            return torch.exp(low + share * (high - low))
        centre = math.log(self.data_std) if self.density == "log_logistic" else self.density_mean
        ends = torch.tensor([low, high], dtype=torch.float64).sub(centre).div(self.density_scale)
        cdf, inverse = _DISTRIBUTIONS[self.density]
        bottom, top = cdf(ends).tolist()
        return torch.exp(centre + self.density_scale * inverse(bottom + share * (top - bottom)))

    def nearest_time(self, t: Tensor) -> Tensor:
        return t.clamp(1.0 / (1.0 + self.noise_max), 1.0 / (1.0 + self.noise_min))

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "euler"}
