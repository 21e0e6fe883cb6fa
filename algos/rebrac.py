"""ReBRAC: TD3+BC with the penalty on the actor and on the next action apart, and normalised critics.

    actor loss = beta1 sum (pi - a)^2 - mean min(Q1, Q2)(s, pi) / mean |min(Q1, Q2)|
    y          = r + discount (min(Q1_bar, Q2_bar)(s', a') - beta2 sum (a' - a'_data)^2)

Sums run over the entries of an action. Where no next action was recorded, it costs nothing.

Source: ReBRAC, arXiv 2305.09836.

Deviations: layers are initialised as in the rest of the package; actor targets follow the weights after the
step, not before it; states are standardised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from algos.base import Setup
from algos.constrained_td3 import Actor, ConstrainedTd3Config, Draws, Quantities, Regulariser, Td3Rules
from algos.transitions import Batch, TransitionTable
from policies.ensembles import Ensemble, EnsembleConfig
from policies.registry import register


class BothActions(Regulariser):
    """Squared distances from the recorded action and from the recorded next one; see the top of the file."""

    def __init__(self, actor_weight: float, critic_weight: float) -> None:
        self.actor_weight, self.critic_weight = actor_weight, critic_weight

    def penalty(
        self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws
    ) -> tuple[Tensor, Quantities]:
        """See `Regulariser`."""
        return self.actor_weight * (action - batch.action).square().sum(dim=1).mean(), {}

    def next_penalty(self, batch: Batch, action: Tensor) -> Tensor:
        """See `Regulariser`."""
        distance = (action - batch.next_action).square().sum(dim=1)
        return self.critic_weight * batch.has_next * distance


@register("algo", "rebrac")
@dataclass
class RebracConfig(ConstrainedTd3Config):
    """ReBRAC with the published settings of hopper-medium.

    Source:
        arXiv 2305.09836 and its released code.
    """

    alpha: float = 1.0
    batch_size: int = 1024
    actor_lr: float = 1e-3
    critic_lr: float = 1e-3
    hidden_dims: tuple[int, ...] = (256, 256, 256)
    critic_dims: tuple[int, ...] = (256, 256, 256)
    actor_weight: float = 0.01  # beta1, of the distance of the actor from the data
    critic_weight: float = 0.01  # beta2, of the distance of next actions from the data

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        for name in ("actor_weight", "critic_weight"):
            self.require(name, 0 <= getattr(self, name) < math.inf, "0 or more and finite")

    def rules(self) -> Td3Rules:
        """Return the constants of the learner: the actor climbs the smaller value."""
        return replace(super().rules(), actor_value="min")

    def critic_config(self) -> EnsembleConfig:
        """Return critics with normalised layers."""
        return EnsembleConfig(hidden_dims=self.critic_dims, layer_norm=True)

    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> BothActions:
        """Return both penalties."""
        return BothActions(self.actor_weight, self.critic_weight)
