"""Gaussian policy, the baseline of denoising policies; its chain has one step, so PPO fine-tunes it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from policies.bounds import Checked, bounded
from policies.networks.distributions import (
    correlated,
    correlated_log_prob,
    gaussian_entropy,
    gaussian_log_prob,
)
from policies.networks.heads import GaussianHead, GaussianHeadConfig
from policies.policy import PolicyConfig, reduce_elements
from policies.processes.one_step import ClosedFormPolicy, OneStepSampler, trunk_of
from policies.protocols import TE, Cond, Reduction
from policies.registry import register


@register("process", "gaussian")
@dataclass(frozen=True)
class GaussianProcess:
    """One normal distribution per element of the chunk.

    Source: DPPO (arXiv 2409.00588), Gaussian baseline.
    """

    policy_class: ClassVar[str] = "gaussian"

    init_std: float = 0.1  # deviation at the start, normalised action units
    min_std: float = 0.01  # lower limit of the deviation
    max_std: float = 0.2  # upper limit of the deviation
    learn_std: bool = True  # one learned deviation per element of the chunk row
    squash: bool = True  # mean within [-1, 1] by tanh; false: the network's output

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "mean"}


@register("sampler", "mean")
@dataclass(frozen=True)
class Mean(OneStepSampler, Checked):
    """Act with the mean of the Gaussian; deterministic."""

    belongs_to: ClassVar[str] = "gaussian"

    clip_action: float | None = bounded(None, gt=0)  # bound on the chunk; null: no bound


class GaussianDensity(NamedTuple):
    """A normal distribution per element; see `policies.processes.one_step.ChunkDensity`."""

    mean: Tensor  # (B, Th, Da)
    std: Tensor  # (B, Th, Da)
    correlation: float = 0.0  # of the noise of consecutive rows

    def draw(self, noise: Tensor) -> Tensor:
        return self.mean + self.std * correlated(noise[:, 1], self.correlation)

    def log_prob(self, x: Tensor) -> Tensor:
        return correlated_log_prob(x, self.mean, self.std, self.correlation)

    def entropy(self) -> Tensor:
        return gaussian_entropy(self.std)

    def rows(self, index: Tensor) -> GaussianDensity:
        mean, std = self.mean.index_select(0, index), self.std.index_select(0, index)
        return GaussianDensity(mean, std, self.correlation)


@register("policy_class", "gaussian")
class GaussianPolicy(ClosedFormPolicy):
    """Acts with the mean; explores with the learned deviation.

    `noise_correlation` is that of the exploration noise of consecutive rows of a chunk.
    """

    noise_correlation = 0.0
    process: GaussianProcess
    sampler: Mean

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        head = GaussianHeadConfig.from_parts(trunk_of(config), config.process)
        self.head: GaussianHead = head.build(self.chunk.shape, self.encoder.cond_dim)

    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor:
        mean: Tensor = self.head(cond.vec)[0]
        clip = self.sampler.clip_action
        return mean if clip is None else mean.clamp(-clip, clip)

    def density(self, cond: Cond) -> GaussianDensity:
        mean, std = self.head(cond.vec)
        return GaussianDensity(mean, std, self.noise_correlation)

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        mean, std = self.head(cond.vec)
        return reduce_elements(-gaussian_log_prob(action, mean, std), reduce)
