"""Normal distributions squashed into a box by tanh: the actor of soft actor-critic methods.

Legend: B batch, C condition width, L numbers of a latent, eps standard normals::

    g = mu(s) + sigma(s) eps,   u = tanh(g),   log pi(u | s) = sum log N(g; mu, sigma) - sum log(1 - u^2)

log(1 - tanh(g)^2) = 2 (log 2 - g - softplus(-2 g)) is exact for large |g|; released programs add 1e-6 inside
the logarithm (`form="floored"`), which bounds the density near the edge of the box.

Source: SAC, arXiv 1812.05905, appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.errors import ConfigError
from policies.networks.mlp_blocks import PlainTrunk, TrunkConfig

FORMS = ("exact", "floored")
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0
FLATTEST_LOG_STD = math.log(0.8741)  # at mean 0, where u has the most entropy
_FLOOR = 1e-6
LOG_2PI = math.log(2.0 * math.pi)


@dataclass(frozen=True)
class TanhGaussianConfig:
    """Shape of the network from conditions to means and standard deviations."""

    hidden_dims: tuple[int, ...] = (256, 256, 256)
    activation: str = "tanh"
    layer_norm: bool = True  # normalise before each activation
    zero_init: bool = False  # initialise to mean 0 and standard deviation 1

    def build(self, cond_dim: int, latent_dim: int) -> TanhGaussian:
        dims = tuple(self.hidden_dims)
        trunk = TrunkConfig(
            activation=self.activation, layer_norm=self.layer_norm, residual=False, hidden_dims=dims
        )
        net = TanhGaussian(trunk, cond_dim, latent_dim)
        if self.zero_init:
            net.start_at(1.0)
        return net


class Drawn(NamedTuple):
    """Latents (B, L) and their log-densities (B,).

    Without a graph, with the function from gradients of both to those of weights.
    """

    latent: Tensor
    log_prob: Tensor
    gradients: Callable[[Tensor, Tensor], Sequence[Tensor | None]] | None


class TanhGaussian(nn.Module):
    """One network with 2 L outputs: means and logarithms of deviations, within limits."""

    def __init__(
        self,
        trunk: TrunkConfig,
        cond_dim: int,
        latent_dim: int,
        *,
        min_log_std: float = MIN_LOG_STD,
        max_log_std: float = MAX_LOG_STD,
    ) -> None:
        super().__init__()
        self.trunk = trunk.build_trunk(cond_dim, 2 * latent_dim)
        self._limits = (min_log_std, max_log_std)

    @torch.no_grad()
    def start_at(self, std: float) -> None:
        """Set the last layer to means of 0 and deviations `std` at every condition."""
        *_, outlet = (part for part in self.trunk.modules() if isinstance(part, nn.Linear))
        outlet.weight.zero_()
        outlet.bias.zero_()
        outlet.bias.chunk(2)[1].fill_(math.log(std))

    def forward(self, cond: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and logarithms of deviations (B, L) of conditions (B, C)."""
        mean, log_std = self.trunk(cond).chunk(2, dim=1)
        return mean, log_std.clamp(*self._limits)

    @torch.no_grad()
    def draw_without_graph(
        self,
        cond: Tensor,
        eps: Tensor,
        weights: Sequence[Tensor],
        *,
        form: str = "exact",
        entries: slice = slice(None),
    ) -> Drawn | None:
        """Return `tanh_draw` of the entries at conditions (B, C), whose gradients by weights need no graph.

        None: only a graph gives them.
        """
        trunk = self.trunk
        found = trunk.evaluate_without_graph(cond, weights) if isinstance(trunk, PlainTrunk) else None
        if found is None:
            return None
        mean, free = (part[:, entries] for part in found.values.chunk(2, dim=1))
        log_std = free.clamp(*self._limits)
        u, log_prob = tanh_draw(mean, log_std, eps, form=form)

        @torch.no_grad()
        def gradients(of_u: Tensor, of_log_prob: Tensor) -> Sequence[Tensor | None]:
            of_log_prob, of_g = of_log_prob.unsqueeze(1), torch.ops.aten.tanh_backward(of_u, u)
            slope = 2 * u if form == "exact" else 2 * u * (square := 1 - u.square()) / (square + _FLOOR)
            of_g = torch.addcmul(of_g, of_log_prob, slope)  # d log pi / dg = - d log(1 - u^2) / dg
            of_log_std = of_g * eps * log_std.exp() - of_log_prob
            of_outputs = torch.zeros_like(found.values)
            of_mean, of_free = (part[:, entries] for part in of_outputs.chunk(2, dim=1))
            of_mean.copy_(of_g)
            of_free.copy_(of_log_std.where(free == log_std, 0.0))  # none beyond the limits
            return found.gradients(of_outputs)

        return Drawn(u, log_prob, gradients)


def gaussian_draw(mean: Tensor, log_std: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Return g = mean + std eps (B, L) and its log-density (B,), summed over L."""
    g = mean + log_std.exp() * eps
    log_prob = -0.5 * eps.square() - log_std - 0.5 * LOG_2PI
    return g, log_prob.sum(dim=1)


def tanh_draw(mean: Tensor, log_std: Tensor, eps: Tensor, *, form: str = "exact") -> tuple[Tensor, Tensor]:
    """Return u = tanh(mean + std eps) (B, L) and its log-density (B,), summed over L."""
    g, log_prob = gaussian_draw(mean, log_std, eps)
    u = torch.tanh(g)
    return u, log_prob - log_slope(g, u, form).sum(dim=1)


def log_slope(g: Tensor, u: Tensor, form: str) -> Tensor:
    """Return log(1 - u^2) of u = tanh(g), entry by entry."""
    if form == "exact":
        return 2 * (math.log(2) - g - F.softplus(-2 * g))
    if form == "floored":
        return torch.log(1 - u.square() + _FLOOR)
    raise ConfigError(f"the form of a squashed density must be one of {', '.join(FORMS)}; got '{form}'.")


def highest_entropy(max_log_std: float = MAX_LOG_STD) -> float:
    """Return the largest entropy [nats] of one entry of u, that of mean 0.

    Unless deviations are limited it is 0.6836, below the log 2 = 0.6931 of the uniform distribution.
    """
    eps = torch.linspace(-12, 12, 4001, dtype=torch.float64)[:, None]
    log_std = torch.full_like(eps, min(max_log_std, FLATTEST_LOG_STD))
    log_prob = tanh_draw(torch.zeros_like(eps), log_std, eps)[1]
    weight = torch.exp(-0.5 * eps.square()).squeeze(1)
    return -float((weight * log_prob).sum() / weight.sum())


def highest_gaussian_entropy() -> float:
    """Return the largest entropy [nats] of one entry of g."""
    return MAX_LOG_STD + 0.5 * math.log(2 * math.pi * math.e)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log density of each element of x under Normal(mean, std), unreduced."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * LOG_2PI


def correlated(noise: Tensor, correlation: float) -> Tensor:
    """Return noise (..., Th, Da) whose rows have a correlation c^|i-j|, from independent standard normals.

    e_0 = z_0,   e_t = c e_(t-1) + sqrt(1 - c^2) z_t; every entry keeps its deviation of 1.
    """
    if not correlation:
        return noise
    rows, rest = list(noise.unbind(-2)), math.sqrt(1.0 - correlation**2)
    for t in range(1, len(rows)):
        rows[t] = correlation * rows[t - 1] + rest * rows[t]
    return torch.stack(rows, dim=-2)


def correlated_log_prob(x: Tensor, mean: Tensor, std: Tensor, correlation: float) -> Tensor:
    """Return the log-densities of entries of x (..., Th, Da) given the row before; their sum is the joint's.

    x = mean + std e with the noise e of `correlated`; without correlation as `gaussian_log_prob`.
    """
    if not correlation:
        return gaussian_log_prob(x, mean, std)
    noise, rest = (x - mean) / std, math.sqrt(1.0 - correlation**2)
    fresh = torch.cat(
        [noise[..., :1, :], (noise[..., 1:, :] - correlation * noise[..., :-1, :]) / rest], dim=-2
    )
    scale = torch.full((x.shape[-2], 1), math.log(rest), dtype=x.dtype, device=x.device)
    scale[0] = 0.0
    return -0.5 * fresh.square() - scale - std.log() - 0.5 * LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return the entropy of each element of a normal distribution, unreduced."""
    return std.log() + 0.5 * (1.0 + LOG_2PI)
