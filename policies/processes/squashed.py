"""Squashed Gaussian policy of soft actor-critic methods.

A chunk is tanh of a normal distribution (`policies.networks.distributions`), so it stays in the box of
normalised actions. The policy acts by tanh of the mean, or by a draw where the sampler has a temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.networks.distributions import LOG_2PI, MAX_LOG_STD, TanhGaussian
from policies.policy import PolicyConfig, reduce_elements
from policies.processes.gaussian import GaussianDensity
from policies.processes.one_step import ClosedFormPolicy, OneStepSampler, trunk_of
from policies.protocols import TE, Chain, Cond, Reduction, Rng
from policies.registry import register


@register("process", "tanh_gaussian")
@dataclass(frozen=True)
class TanhGaussianProcess(Checked):
    """tanh of one normal distribution per element, with deviations that depend on the observation.

    Source: the actor of SAC (arXiv 1812.05905).
    """

    policy_class: ClassVar[str] = "tanh_gaussian"

    min_log_std: float = -5.0  # lower limit of the logarithm of a deviation, before tanh
    max_log_std: float = MAX_LOG_STD  # upper limit of it
    edge: float = bounded(0.999, gt=0, lt=1)  # cloning clamps actions to ± this: the density ends at 1

    def __post_init__(self) -> None:
        super().__post_init__()
        high = self.max_log_std
        self.require("min_log_std", self.min_log_std < high, f"below process.max_log_std={high}")

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "squashed"}


@register("sampler", "squashed")
@dataclass(frozen=True)
class Squashed(OneStepSampler, Checked):
    """Act with tanh of the mean, or of a draw near it."""

    belongs_to: ClassVar[str] = "tanh_gaussian"

    temperature: float = bounded(0.0, ge=0, le=1, was="spread")  # factor of the deviation; 0: the mean


class DrawDensity(GaussianDensity):
    """Draws before tanh; the entropy after tanh is unknown."""

    def entropy(self) -> Tensor:
        return torch.zeros_like(self.mean)

    def rows(self, index: Tensor) -> DrawDensity:
        return DrawDensity(*super().rows(index))


class SquashedChain(Chain):
    """A chain whose action is tanh of its last state."""

    @property
    def action(self) -> Tensor:
        return torch.tanh(self.x[:, -1])


@register("policy_class", "tanh_gaussian")
class TanhGaussianPolicy(ClosedFormPolicy):
    """Acts in normalised units within [-1, 1]; explores with tanh of draws.

    Chains record and score draws before tanh. The slope of tanh cancels in ratios of densities.
    """

    has_entropy = False
    process: TanhGaussianProcess
    sampler: Squashed

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        rows, dims = self.chunk.shape
        self.head = TanhGaussian(
            trunk_of(config),
            self.encoder.cond_dim,
            rows * dims,
            min_log_std=self.process.min_log_std,
            max_log_std=self.process.max_log_std,
        )

    def _use_sampler(self, sampler: Any) -> None:
        super()._use_sampler(sampler)
        self.noise_sensitive = sampler.temperature > 0

    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor:
        mean, log_std = self.head(cond.vec)
        if self.sampler.temperature:
            mean = mean + self.sampler.temperature * log_std.exp() * noise.flatten(1)
        return torch.tanh(mean).view(-1, *self.chunk.shape)

    def density(self, cond: Cond) -> DrawDensity:
        mean, log_std = (part.view(-1, *self.chunk.shape) for part in self.head(cond.vec))
        return DrawDensity(mean, log_std.exp())

    def sample_chain(self, cond: Cond, *, noise: Tensor | None = None, generator: Rng = None) -> Chain:
        chain = super().sample_chain(cond, noise=noise, generator=generator)
        return SquashedChain(chain.x, chain.log_prob)

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        mean, log_std = self.head(cond.vec)
        return reduce_elements(squashed_nll(action, mean, log_std, self.process.edge), reduce)


def squashed_nll(action: Tensor, mean: Tensor, log_std: Tensor, edge: float) -> Tensor:
    """Return -log density (B, Th, Da) of actions clamped to ± edge under tanh of N(mean, std), (B, Th Da)."""
    inside = action.clamp(-edge, edge).flatten(1)
    z = (torch.atanh(inside) - mean) * (-log_std).exp()
    nll = 0.5 * z.square() + log_std + 0.5 * LOG_2PI + torch.log1p(-inside.square())
    return nll.view(action.shape)
