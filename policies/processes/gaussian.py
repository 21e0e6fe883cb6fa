"""Gaussian policy, the baseline of denoising policies; its chain has one step, so PPO fine-tunes it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
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

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "mean"}


@register("sampler", "mean")
@dataclass(frozen=True)
class Mean(OneStepSampler):
    """Act with the mean of the Gaussian; deterministic."""

    belongs_to: ClassVar[str] = "gaussian"


class GaussianDensity(NamedTuple):
    """A normal distribution per element; see `policies.processes.one_step.ChunkDensity`."""

    mean: Tensor  # (B, Th, Da)
    std: Tensor  # (B, Th, Da)

    def draw(self, noise: Tensor) -> Tensor:
        return self.mean + self.std * noise[:, 1]

    def log_prob(self, x: Tensor) -> Tensor:
        return gaussian_log_prob(x, self.mean, self.std)

    def entropy(self) -> Tensor:
        return gaussian_entropy(self.std)

    def rows(self, index: Tensor) -> GaussianDensity:
        return GaussianDensity(self.mean.index_select(0, index), self.std.index_select(0, index))


@register("policy_class", "gaussian")
class GaussianPolicy(ClosedFormPolicy):
    """Acts with the mean; explores with the learned deviation."""

    process: GaussianProcess

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        head = GaussianHeadConfig.from_parts(trunk_of(config), config.process)
        self.head: GaussianHead = head.build(self.chunk.shape, self.encoder.cond_dim)

    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor:
        mean: Tensor = self.head(cond.vec)[0]
        return mean

    def density(self, cond: Cond) -> GaussianDensity:
        return GaussianDensity(*self.head(cond.vec))

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        mean, std = self.head(cond.vec)
        return reduce_elements(-gaussian_log_prob(action, mean, std), reduce)
