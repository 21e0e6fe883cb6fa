"""Implicit Q-learning with a generative policy: values of recorded chunks alone, best of N when acting.

Legend: as in `algos.critics.learner`; V value of a state, u = min_i Q_i_bar(s, a) - V(s), kappa in (0, 1)::

    policy = mean w(u) times the matching loss      w of `weighting`
    V loss = mean |kappa - 1[u < 0]| u^2            or another of `algos.critics.losses.value_loss`
    y      = r + discount V(s')                     V of after its step
    acting = argmax over n of min_i Q_i_bar(s, a_n)

in this order. `weighting`: clone 1, soft |kappa - 1[u < 0]|, hard 1[u >= -0.01], exponential
min(exp(3 u), 100). The weights use V of before its step. No target needs a chunk of the policy, so learning
does not decode.

Source: IDQL, arXiv 2304.10573, released code. Deviations: those of `algos.critics.qc`; a policy of any
process, where the release trains a diffusion of 5 steps by the summed error (there weights have the same
effect), two steps per step of the critics at a falling rate; it learns in the task too, unless `refit` is
false, and acts as it is, not by an average of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner, choosing
from algos.critics.losses import VALUE_LOSSES, value_loss
from algos.optim import adam, descend
from algos.transitions import Batch
from policies.bounds import bounded
from policies.networks.critics import Ensemble, aggregate
from policies.policy import Policy
from policies.registry import register

WEIGHTS = ("clone", "soft", "hard", "exponential")
_HARD_MARGIN, _TEMPERATURE, _MOST = 0.01, 3.0, 100.0


def exponential_weight(u: Tensor, temperature: float | Tensor) -> Tensor:
    """Return min(exp(temperature u), 100)."""
    return (temperature * u).exp().clamp(max=_MOST)


class ValueLearner(ChunkCriticLearner):
    """Q, V, and a policy; V follows recorded chunks, Q follows V, target copies move after the step."""

    moves_first = False
    own_parts: ClassVar[tuple[str, ...]] = ("value", "value_optimizer")

    def __init__(self, base: Policy, config: ChunkCriticConfig) -> None:
        super().__init__(base, config)
        value = config.critic_config(members=1).build(base.encoder.cond_dim, 0)
        self.value: Ensemble = value.to(base.device, base.dtype)
        self.value_optimizer = adam(self.value.parameters(), config.critic_lr)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def value_of(self, cond: Tensor) -> Tensor:
        """Return V (B,) of conditions (B, C)."""
        return self.value(cond)[0]

    def worth(self, cond: Tensor, action: Tensor) -> Tensor:
        """Return the least value (B,) by the target critics."""
        return aggregate(self.target_critic(cond, action), "min")

    def advantage(self, batch: Batch) -> Tensor:
        """Return u (B,); the gradient reaches V."""
        with torch.no_grad():
            best = self.worth(batch.cond, batch.action)
        return best - self.value_of(batch.cond)

    def update_base(self, batch: Batch, draws: Draws, weight: Tensor | None = None) -> Quantities:
        """Take one step of the policy; none without weights, after that of the critics."""
        if weight is None or self.base_optimizer is None:
            return {}
        loss = descend(self.base_optimizer, self.matching(batch, draws, weight))
        return {"policy/loss": loss, "actor/weight": weight.mean()}

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        return torch.addcmul(batch.reward, batch.discount, self.value_of(batch.next_cond))


class IdqlLearner(ValueLearner):
    """Q, V, and a policy that Q's target copy chooses from."""

    config: IdqlConfig

    def __init__(self, base: Policy, config: IdqlConfig) -> None:
        super().__init__(base, config)
        wrapper = config.wrapper(num_candidates=config.num_candidates, aggregate="min")
        self.policy = choosing(base, wrapper, self.target_critic)

    def weight(self, u: Tensor) -> Tensor:
        """Return the weights (B,) of rows in the policy's loss."""
        match self.config.weighting:
            case "soft":
                return torch.where(u > 0, self.config.expectile, 1 - self.config.expectile)
            case "hard":
                return (u >= -_HARD_MARGIN).to(u)
            case "exponential":
                return exponential_weight(u, _TEMPERATURE)
        return torch.ones_like(u)

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        updates_actor = self.updates_actor
        u = self.advantage(batch)
        out = self.update_base(batch, draws, self.weight(u.detach())) if updates_actor else {}
        loss = descend(self.value_optimizer, value_loss(u, self.config.value_loss, self.config.expectile))
        found = out | {"value/loss": loss, "actor/advantage": u.detach().mean()}
        return found | super().step(batch, draws)


@register("algo", "idql")
@dataclass
class IdqlConfig(ChunkCriticConfig):
    """Implicit diffusion Q-learning: expectile values, best of N.

    Published expectile: 0.7 for locomotion, 0.9 for antmaze; candidates: 16 to 256.

    Source:
        arXiv 2304.10573.
    """

    reduces: ClassVar[bool] = False

    expectile: float = bounded(0.7, gt=0, lt=1)  # kappa
    value_loss: str = bounded("expectile", choices=VALUE_LOSSES)
    weighting: str = bounded("clone", choices=WEIGHTS)  # of rows in the policy's loss; clone: all 1
    num_candidates: int = bounded(64, ge=1)  # N, chunks to choose from

    def unused(self) -> dict[str, str]:
        return super().unused() | ({} if self.refit else {"weighting": "without algo.refit"})

    def learner_of(self, policy: Policy, seed: int) -> IdqlLearner:
        return IdqlLearner(policy, self)
