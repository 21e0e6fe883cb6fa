"""Mixture policy: the baseline that has several modes without denoising.

A chunk a (Th, Da) is drawn as a whole from one of M diagonal Gaussians::

    p(a | s) = sum_m w_m(s) prod_rd N(a_rd; mean_mrd(s), std_md)

With the responsibilities q_m of the modes its logarithm becomes a sum over elements::

    -log p(a | s) = sum_rd sum_m q_m (-log N_mrd) + sum_m q_m log(q_m / w_m)

With q held constant both sides have the same gradient, as in expectation-maximisation. The loss of an element
is its term of the first sum plus an equal part of the second, so that padded rows can be left out of an
average. Padded rows still count in q: they repeat a recorded action.

Legend: B batch, M modes, Th horizon (r rows), Da action width (d dimensions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from einops import einsum
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.networks.distributions import gaussian_log_prob
from policies.networks.heads import Mixture, MixtureHead, MixtureHeadConfig
from policies.policy import PolicyConfig, reduce_elements
from policies.processes.one_step import ClosedFormPolicy, OneStepSampler, trunk_of
from policies.protocols import TE, Cond, Reduction
from policies.registry import register


@register("process", "mixture")
@dataclass(frozen=True)
class MixtureProcess(Checked):
    """A mixture of normal distributions over whole chunks.

    Source: DPPO (arXiv 2409.00588), mixture baseline. Densities are those of the whole chunk; see the module.
    """

    policy_class: ClassVar[str] = "mixture"

    num_modes: int = 5  # M, normal distributions
    init_std: float = 0.1  # deviation at the start, normalised action units
    min_std: float = 0.01  # lower limit of the deviation
    max_std: float = 0.2  # upper limit of the deviation
    learn_std: bool = True  # one learned deviation per mode and action dimension
    state_std: bool = False  # deviations from the observation instead, above min_std (robomimic)

    def unused(self) -> dict[str, str]:
        fixed = ("init_std", "max_std", "learn_std") if self.state_std else ()
        return super().unused() | dict.fromkeys(fixed, "with process.state_std=true")

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "mode_mean"}


@register("sampler", "mode_mean")
@dataclass(frozen=True)
class ModeMean(OneStepSampler, Checked):
    """Draw a mode of a mixture and act with its mean, or near it.

    Source: robomimic (arXiv 2108.03298), which evaluates its mixtures with almost no deviation.
    """

    belongs_to: ClassVar[str] = "mixture"

    likeliest: bool = False  # take the mode of the largest share instead of drawing one
    temperature: float = bounded(0.0, ge=0, le=1, was="spread")  # factor of the mode's deviation; 0: mean


@register("policy_class", "mixture")
class MixturePolicy(ClosedFormPolicy):
    """Acts with the mean of one of its modes; explores with draws from the mixture."""

    has_entropy = False
    process: MixtureProcess
    sampler: ModeMean

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        head = MixtureHeadConfig.from_parts(trunk_of(config), config.process)
        self.head: MixtureHead = head.build(self.chunk.shape, self.encoder.cond_dim)

    def _use_sampler(self, sampler: Any) -> None:
        super()._use_sampler(sampler)
        self.noise_sensitive = not (sampler.likeliest and self.is_deterministic)

    @property
    def is_deterministic(self) -> bool:
        return self.sampler.temperature == 0

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(Th, Da), whose first number draws the mode; with a temperature (2, Th, Da)."""
        return self.chunk.shape if self.is_deterministic else (2, *self.chunk.shape)

    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor:
        mixture = self.head(cond.vec)
        share = self._choice(mixture, noise if self.is_deterministic else noise[:, 0])
        mean = einsum(share, mixture.mean, "B M, B M Th Da -> B Th Da")
        if self.is_deterministic:
            return mean
        std = einsum(share, mixture.std.expand_as(mixture.mean), "B M, B M Th Da -> B Th Da")
        return mean + self.sampler.temperature * std * noise[:, 1]

    def density(self, cond: Cond) -> MixtureDensity:
        return MixtureDensity(self.head(cond.vec), self.chunk.executed)

    def _choice(self, mixture: Mixture, noise: Tensor) -> Tensor:
        """Return the one-hot choice of modes (B, M), given noise (B, Th, Da)."""
        if self.sampler.likeliest:
            return as_share(mixture.log_weight.argmax(dim=1), mixture.log_weight)
        return as_share(drawn_mode(mixture.log_weight, noise[:, 0, 0]), mixture.log_weight)

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        return reduce_elements(elementwise_nll(self.head(cond.vec), action), reduce)


class MixtureDensity(NamedTuple):
    """The executed rows of a mixture; see `policies.processes.one_step.ChunkDensity`.

    Every element has an equal share of the log-density of the executed rows, which is no sum over elements.
    """

    mixture: Mixture
    executed: slice

    def draw(self, noise: Tensor) -> Tensor:
        log_weight = self.mixture.log_weight
        share = as_share(drawn_mode(log_weight, noise[:, 0, 0, 0]), log_weight)
        mean = einsum(share, self.mixture.mean, "B M, B M Th Da -> B Th Da")
        std = einsum(share, self.mixture.std.expand_as(self.mixture.mean), "B M, B M Th Da -> B Th Da")
        return mean + std * noise[:, 1]

    def log_prob(self, x: Tensor) -> Tensor:
        rows, mean = x[:, None, self.executed], self.mixture.mean[:, :, self.executed]
        std = self.mixture.std.expand_as(self.mixture.mean)[:, :, self.executed]
        of_modes = gaussian_log_prob(rows, mean, std).sum(dim=(-2, -1))
        joint = (self.mixture.log_weight + of_modes).logsumexp(dim=1)
        return (joint / rows.shape[-2:].numel())[:, None, None].expand_as(x)

    def entropy(self) -> Tensor:
        return torch.zeros_like(self.mixture.mean[:, 0])

    def rows(self, index: Tensor) -> MixtureDensity:
        log_weight, mean, std = self.mixture
        parts = (part.index_select(0, index) for part in (log_weight, mean, std.expand_as(mean)))
        return MixtureDensity(Mixture(*parts), self.executed)


def as_share(mode: Tensor, log_weight: Tensor) -> Tensor:
    """Return 1 for the mode (B,) of each row and 0 for the others, shaped like log_weight (B, M)."""
    modes = torch.arange(log_weight.shape[1], device=mode.device)
    return (mode.unsqueeze(1) == modes).to(log_weight.dtype)


def drawn_mode(log_weight: Tensor, noise: Tensor) -> Tensor:
    """Draw modes (B,) by inverse transform of log weights (B, M), given standard normals (B,)."""
    quantile = 0.5 * (1.0 + torch.erf(noise * 0.5**0.5))
    edges = log_weight.softmax(dim=1).cumsum(dim=1)[:, :-1]
    return (quantile.unsqueeze(1) >= edges).sum(dim=1)


def elementwise_nll(mixture: Mixture, action: Tensor) -> Tensor:
    """Divide the negative log-likelihood of chunks (B, Th, Da) among their elements; see the module."""
    nll = -gaussian_log_prob(action.unsqueeze(1), mixture.mean, mixture.std)  # (B, M, Th, Da)
    with torch.no_grad():
        log_share = (mixture.log_weight - nll.sum(dim=(-2, -1))).log_softmax(dim=1)
        share = log_share.exp()
    of_choice = (share * (log_share - mixture.log_weight)).sum(dim=1) / action.shape[-2:].numel()
    return einsum(share, nll, "B M, B M Th Da -> B Th Da") + of_choice[:, None, None]
