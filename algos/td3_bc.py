"""TD3+BC: TD3 with a behaviour-cloning penalty towards the recorded action.

Source: arXiv 2106.06860. For a sampling policy the penalty is its matching loss, as in Diffusion-QL
(arXiv 2208.06193): sampled and recorded chunks may be different modes of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.base import Draws, Setup
from algos.cloning.validation import masked_mean
from algos.offline.chunk_loss import ChunkLoss
from algos.offline.loop import precision
from algos.offline.td3_update import Actor, ConstrainedTd3Config, Penalty, Regulariser, towards
from algos.transitions import Batch, TransitionTable
from policies.networks.critics import Ensemble
from policies.policy import Policy
from policies.registry import register


class OwnAction(Regulariser):
    """Penalty mean (pi - a)^2 over rows and entries, for a deterministic policy."""

    def penalty(self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws) -> Penalty:
        return towards(action, batch.action)


class OwnLikelihood(Regulariser):
    """Penalty of a sampling policy: its matching loss at the recorded chunks."""

    def __init__(self, policy: Policy, autocast: str | None = None) -> None:
        self._cloning, self._autocast = ChunkLoss(policy), autocast

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return self._cloning.draw(n, generator)

    def penalty(self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws) -> Penalty:
        with precision(self._autocast, batch.plan.device):
            loss = self._cloning(batch, draws)
        return Penalty(masked_mean(loss.to(batch.real), batch.real))


@register("algo", "td3_bc")
@dataclass
class Td3BcConfig(ConstrainedTd3Config):
    """TD3+BC with the published settings.

    Source:
        arXiv 2106.06860, section 5.
    """

    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> Regulariser:
        return OwnLikelihood(actor.policy, self.autocast) if actor.policy.noise_sensitive else OwnAction()
