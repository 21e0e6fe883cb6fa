"""Closed-form policy improvement: critics of the data's own actions, one step of a clone when it acts.

Legend: as in `algos.critics.learner`; a' the recorded next chunk, or the policy's where none was recorded::

    y_i = r + discount Q_i_bar(s', a')            each critic towards its own target copy
    y_ij = r + discount Z_i_bar(s', a')(tau_j)    with `critic_cosines`: quantiles Z at random fractions tau

Nothing of the policy is trained but, with `refit`, by cloning: the exported policy chooses the best action
within a bound of its density (`policies.wrappers.closed_form`).

Source: CFPI, arXiv 2211.15956, released code. Deviations: without `critic_cosines` critics are expectations,
where the release has quantiles; target copies begin as copies, where those of the release are drawn apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner
from algos.critics.losses import fractions, quantile_loss
from algos.onpolicy.requirements import require
from algos.optim import descend
from algos.transitions import Batch
from policies.bounds import bounded
from policies.networks.critics import QuantileEnsemble
from policies.policy import Policy
from policies.registry import register
from policies.wrappers.candidates import AGGREGATES
from policies.wrappers.closed_form import ClosedForm, has_modes


class CfpiLearner(ChunkCriticLearner):
    """SARSA critics beside a policy that they do not train."""

    config: CfpiConfig
    moves_first = False
    row_axes: ClassVar[Mapping[str, int | None]] = {**ChunkCriticLearner.row_axes, "fractions": 1}

    def __init__(self, base: Policy, config: CfpiConfig) -> None:
        improvement = config.improvement().wrap(base)
        super().__init__(base, config, improvement.critic)
        improvement.critic = self.target_critic
        self.policy = improvement

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = {"next": self.base.sample_noise(n, generator=generator)}
        if self.config.critic_cosines:  # of the critics, and of their target
            shape, device = (2, n, self.config.quantiles), generator.device
            drawn = torch.rand(shape, generator=generator, device=device)
            draws["fractions"] = drawn.to(self.base.device, self.base.dtype)
        return draws

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        """Return y (E, B), or of quantiles (E, B, n)."""
        own = self.chunk(self.base, batch.next_cond, draws["next"])
        action = torch.where(batch.has_next[:, None] > 0, batch.next_action, own)
        if not isinstance(self.target_critic, QuantileEnsemble):
            return batch.reward + batch.discount * self.target_critic(batch.next_cond, action)
        tau, _ = fractions(draws["fractions"][1])
        values = self.target_critic.quantiles(batch.next_cond, action, tau)
        return batch.reward[:, None] + batch.discount[:, None] * values

    def update_critic(self, batch: Batch, target: Tensor, draws: Draws | None = None) -> Quantities:
        if draws is None or not isinstance(self.critic, QuantileEnsemble):
            return super().update_critic(batch, target)
        (tau, _), (_, weight) = (fractions(u) for u in draws["fractions"])
        z = self.critic.quantiles(batch.cond, batch.action, tau)
        loss = descend(self.critic_optimizer, quantile_loss(z, target, tau, weight))
        return {"critic/loss": loss, "critic/value": z.detach().mean(), "critic/target": target.mean()}


@register("algo", "cfpi")
@dataclass
class CfpiConfig(ChunkCriticConfig):
    """One closed-form step on a cloned Gaussian or mixture.

    Published: radius 0.5 for mixtures of 4 modes, 0.2 to 2 for a Gaussian.

    Source:
        arXiv 2211.15956.
    """

    needs_noise: ClassVar[bool] = False

    aggregate: str = bounded("mean_std", choices=AGGREGATES)  # reduction over critics that the step climbs
    pessimism: float = bounded(1.414, ge=0)  # uncorrected deviations: of two critics 1 corrected one
    critic_cosines: int = bounded(0, ge=0)  # M, for critics of quantiles, published 64; 0: expectations
    quantiles: int = bounded(8, ge=1)  # fractions in an update of critics of quantiles
    refit: bool = False  # clone the recorded chunks too; false: the policy stays as it is
    radii: tuple[float, ...] = bounded((0.0, 0.5), ge=0, some=True)  # delta, the best acts; 0: the mean

    def __post_init__(self) -> None:
        super().__post_init__()
        self.improvement().critic_config()  # refuses what critics of quantiles cannot have

    def unused(self) -> dict[str, str]:
        quantiles = {} if self.critic_cosines else {"quantiles": "without algo.critic_cosines"}
        return super().unused() | quantiles

    def resume_invariants(self) -> dict[str, Any]:
        return super().resume_invariants() | {"algo.critic_cosines": self.critic_cosines}

    def improvement(self) -> ClosedForm:
        """Return the wrapper of the exported policy."""
        shared = {f.name for f in fields(ClosedForm)} & {f.name for f in fields(self)}
        return ClosedForm(members=self.critics, **{name: getattr(self, name) for name in shared})

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        require(policy, algo, has_modes, "improves the density of a Gaussian or a mixture in closed form")

    def learner_of(self, policy: Policy, seed: int) -> CfpiLearner:
        return CfpiLearner(policy, self)
