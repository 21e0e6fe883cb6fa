"""Closed-form policy improvement: critics of the data's own actions, one step of a clone when it acts.

Legend: as in `algos.critics.learner`; a' the recorded next chunk, or the policy's where none was recorded::

    y_i = r + discount Q_i_bar(s', a')            each critic towards its own target copy

Nothing of the policy is trained but, with `refit`, by cloning: the exported policy chooses the best action
within a bound of its density (`policies.wrappers.closed_form`).

Source: CFPI, arXiv 2211.15956. Deviation: critics are expectations, where the release has quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from algos.base import Draws
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner
from algos.onpolicy.requirements import require
from algos.transitions import Batch
from policies.bounds import bounded
from policies.policy import Policy
from policies.registry import register
from policies.wrappers.candidates import AGGREGATES
from policies.wrappers.closed_form import ClosedForm, has_modes


class CfpiLearner(ChunkCriticLearner):
    """SARSA critics beside a policy that they do not train."""

    config: CfpiConfig

    def __init__(self, base: Policy, config: CfpiConfig) -> None:
        improvement = config.improvement().wrap(base)
        super().__init__(base, improvement.critic, config)
        improvement.critic = self.target_critic
        self.policy = improvement

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"next": self.base.sample_noise(n, generator=generator)}

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        """Return y (E, B)."""
        own = self.chunk(self.base, batch.next_cond, draws["next"])
        action = torch.where(batch.has_next[:, None] > 0, batch.next_action, own)
        return batch.reward + batch.discount * self.target_critic(batch.next_cond, action)


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
    refit: bool = False  # clone the recorded chunks too; false: the policy stays as it is
    radii: tuple[float, ...] = bounded((0.0, 0.5), ge=0)  # delta, of which the best acts; 0: the mean

    def improvement(self) -> ClosedForm:
        """Return the wrapper of the exported policy."""
        shared = {f.name for f in fields(ClosedForm)} & {f.name for f in fields(self)}
        return ClosedForm(members=self.critics, **{name: getattr(self, name) for name in shared})

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        require(policy, algo, has_modes, "improves the density of a Gaussian or a mixture in closed form")

    def learner_of(self, policy: Policy, seed: int) -> CfpiLearner:
        return CfpiLearner(policy, self)
