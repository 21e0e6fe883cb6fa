"""TD3+BC: the actor stays near the action that was recorded.

Source: arXiv 2106.06860. For a policy that samples, the distance is its own matching loss instead, as in
Diffusion-QL (arXiv 2208.06193): a sampled chunk and a recorded one may be two good answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from algos.base import Setup
from algos.constrained_td3 import (
    Actor,
    ConstrainedTd3Config,
    Draws,
    Quantities,
    Regulariser,
)
from algos.transitions import Batch, TransitionTable
from algos.validation import matching_of
from policies.ensembles import Ensemble
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.protocols import TE, Cond
from policies.registry import register


class OwnAction(Regulariser):
    """mean (pi - a)^2 over rows and entries."""

    def penalty(
        self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws
    ) -> tuple[Tensor, Quantities]:
        """See `Regulariser`."""
        return F.mse_loss(action, batch.action), {}


class OwnLikelihood(Regulariser):
    """The matching loss of a policy that samples, at the recorded chunks.

    Raises:
        CapabilityError: If the policy has no matching loss, or predicts more rows than it executes.
    """

    def __init__(self, policy: Policy) -> None:
        chunk = policy.chunk
        if chunk.act_steps != chunk.horizon:
            raise CapabilityError(
                f"algo=td3_bc clones whole chunks and needs a policy that executes all it predicts; got "
                f"horizon {chunk.horizon} and act_steps {chunk.act_steps}. Use algo=prdc, or "
                "clone another policy."
            )
        self._policy, self._matching = policy, matching_of(policy)

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw times and noise."""
        te = self._matching.sample_te(n, generator=generator)
        if te.more:
            raise CapabilityError("algo=td3_bc needs a process without further draws: diffusion or flow.")
        level = {} if te.level is None else {"matching_level": te.level}
        return {"matching_t": te.t, "matching_eps": te.eps, **level}

    def penalty(
        self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws
    ) -> tuple[Tensor, Quantities]:
        """See `Regulariser`."""
        te = TE(draws["matching_t"], draws["matching_eps"], draws.get("matching_level"))
        chunk = batch.action.view(-1, *self._policy.chunk.shape)
        return self._matching.matching_loss(Cond(batch.cond), chunk, te, reduce="mean"), {}


@register("algo", "td3_bc")
@dataclass
class Td3BcConfig(ConstrainedTd3Config):
    """TD3+BC with the published settings.

    Source:
        arXiv 2106.06860, section 5.
    """

    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> Regulariser:
        """Return the distance from recorded actions, or from recorded chunks by their matching loss."""
        return OwnLikelihood(actor.policy) if actor.policy.noise_sensitive else OwnAction()
