"""Adjoint matching in a trust region: the weight of values follows a budget of divergence.

Legend: as in `algos.critics.qam`; g_k its sigma_k, lambda the weight of the base, c its scale, D a running
path divergence per row of the chunk, epsilon the budget::

    b_K     = - grad_x mean_i Q_i_bar(s, clip x_K)
    sigma_k = g_k / sqrt(c lambda)                                   of the loss; the chain keeps g_k
    D_step  = mean over rows of sum over k of (2 h / g_k^2) |(v - v_b)(s, x_k, t_k)|^2 / Th
    D      <- (1 - rho) D + rho min(D_step, m epsilon)
    lambda <- clip(lambda + eta (D - epsilon), lambda_min, lambda_max)

after each step; the loss uses lambda of before it. A constant lambda is QAM with tau_Q = 1 / (c lambda), its
loss weighted by c lambda.

Source: TRQAM, arXiv 2605.27079, released code. Deviations: those of `algos.critics.qam`; cloning first is
`algo=bc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from algos.base import Quantities
from algos.critics.qam import QamConfig, QamLearner
from algos.training.ranks import current
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.policy import Policy
from policies.registry import register

_SMALLEST_WEIGHT = 1e-8


class TrqamLearner(QamLearner):
    """QAM whose base has the weight `weight`, adapted to the divergence `divergence`, both scalars."""

    config: TrqamConfig
    own_values = ("weight", "divergence")

    def __init__(self, base: DenoisingPolicy, config: TrqamConfig) -> None:
        super().__init__(base, config)
        self.weight, self.divergence = self.sigma.new_tensor(config.init_weight), self.sigma.new_zeros(())

    @property
    def loss_sigma(self) -> Tensor:
        return self.sigma / (self.config.weight_scale * self.weight).clamp(min=_SMALLEST_WEIGHT).sqrt()

    def measured(self, difference: Tensor) -> Quantities:
        found = super().measured(difference)
        self.adapt(current().mean(found["actor/path_kl"]) / difference.shape[2])
        return found | {"actor/weight": self.weight, "actor/divergence": self.divergence}

    def adapt(self, divergence: Tensor) -> None:
        """Move the running divergence and the weight by the divergence of a step."""
        c = self.config
        bounded_step = divergence.clamp(max=c.divergence_clip * c.divergence_budget)
        self.divergence = (1 - c.divergence_rate) * self.divergence + c.divergence_rate * bounded_step
        moved = self.weight + c.weight_lr * (self.divergence - c.divergence_budget)
        self.weight = moved.clamp(c.min_weight, c.max_weight)


@register("algo", "trqam")
@dataclass
class TrqamConfig(QamConfig):
    """Adjoint matching with a critic in a trust region.

    Published budgets: 0.5 and 1; discount: 0.995, humanoid 0.999.

    Source:
        arXiv 2605.27079 and its released code.
    """

    inverse_temperature: ClassVar[float] = 1.0  # type: ignore[misc]  # no key: the weight takes its place
    dropped: ClassVar[tuple[str, ...]] = ("inverse_temperature",)  # obsolete keys of saved runs, ignored

    divergence_budget: float = bounded(1.0, gt=0)  # epsilon, path divergence per row of the chunk
    divergence_rate: float = bounded(0.1, gt=0, le=1)  # rho, of the running divergence
    divergence_clip: float = bounded(2.0, gt=0)  # m, bound of a step's divergence in budgets
    init_weight: float = bounded(1.0, gt=0)  # lambda at the start
    weight_scale: float = bounded(3.0, gt=0)  # c
    weight_lr: float = bounded(0.01, ge=0)  # eta
    min_weight: float = bounded(0.01, ge=0)  # lambda_min
    max_weight: float = bounded(100.0, gt=0)  # lambda_max

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = self.min_weight <= self.init_weight <= self.max_weight
        self.require("init_weight", limits, f"in {self.min_weight:g}..{self.max_weight:g}")

    def learner_of(self, policy: Policy, seed: int) -> TrqamLearner:
        assert isinstance(policy, DenoisingPolicy)
        return TrqamLearner(policy, self)
