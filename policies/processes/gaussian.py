"""Gaussian policy, the baseline of denoising policies; its chain has one step, so PPO fine-tunes it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from policies.networks.distributions import gaussian_entropy, gaussian_log_prob
from policies.networks.heads import GaussianHead, GaussianHeadConfig
from policies.policy import PolicyConfig, reduce_elements
from policies.processes.one_step import OneStepPolicy, OneStepSampler, trunk_of
from policies.protocols import TE, Chain, Cond, Reduction, Rng
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


@register("policy_class", "gaussian")
class GaussianPolicy(OneStepPolicy):
    """Acts with the mean; explores with the learned deviation."""

    process: GaussianProcess
    tuned_steps = 1

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        head = GaussianHeadConfig.from_parts(trunk_of(config), config.process)
        self.head: GaussianHead = head.build(self.chunk.shape, self.encoder.cond_dim)

    def _chunk(self, cond: Cond, noise: Tensor) -> Tensor:
        mean: Tensor = self.head(cond.vec)[0]
        return mean

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        mean, std = self.head(cond.vec)
        return reduce_elements(-gaussian_log_prob(action, mean, std), reduce)

    def sample_chain(self, cond: Cond, *, noise: Tensor | None = None, generator: Rng = None) -> Chain:
        """Draw chunks; the chain starts at zero and has one transition. Noise is (B, 2, Th, Da)."""
        if noise is None:
            noise = self._randn((len(cond), 2, *self.chunk.shape), generator)
        mean, std = self.head(cond.vec)
        action = mean + std * noise[:, 1]
        x = torch.stack([torch.zeros_like(action), action], dim=1)
        return Chain(x, gaussian_log_prob(action, mean, std).unsqueeze(1))

    def chain_log_prob(self, cond: Cond, x: Tensor, *, steps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_prob, entropy = self.transition_log_prob(cond, x[:, 0], x[:, 1], torch.zeros(0))
        return log_prob.unsqueeze(1), entropy.unsqueeze(1)

    def transition_log_prob(
        self, cond: Cond, x: Tensor, x_next: Tensor, step: Tensor, cond_row: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mean, std = self.head(cond.vec)
        std = std.expand_as(mean)
        if cond_row is not None:
            mean, std = mean.index_select(0, cond_row), std.index_select(0, cond_row)
        return gaussian_log_prob(x_next, mean, std), gaussian_entropy(std)
