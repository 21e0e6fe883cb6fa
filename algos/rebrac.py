"""ReBRAC: TD3+BC with separate penalties on actor and target action, and layer-normalised critics.

    actor loss = beta1 sum (pi - a)^2 - mean min(Q1, Q2)(s, pi) / mean |min(Q1, Q2)|
    y          = r + discount (min(Q1_bar, Q2_bar)(s', a') - beta2 sum (a' - a'_data)^2)

Sums run over the entries of an action. A row without a recorded next action has no target penalty.

A hidden layer of a critic is linear, ReLU, LayerNorm (eps 1e-6); the actor has no LayerNorm and ends in tanh.
Initial weights: hidden weights uniform within 1 / sqrt(fan in), hidden biases 0.1, last layer uniform within
0.001 (actor) or 0.003 (critics). States are not normalised.

Source: ReBRAC, arXiv 2305.09836, and its released code.

Deviations from the released code:
    * the target actor tracks the weights after the step; in the released code, those before it;
    * actor and targets are updated at the second of two steps, as in `Td3Learner`; there at the first;
    * a truncated episode keeps its last transition, without target penalty; there it is dropped;
    * actions are normalised to [-1, 1] before distances are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from algos.base import Draws, Setup
from algos.offline.td3_update import Actor, ConstrainedTd3Config, Penalty, Regulariser, Td3Learner, towards
from algos.transitions import Batch, TransitionTable
from policies.bounds import bounded
from policies.networks.critics import Ensemble, EnsembleConfig
from policies.policy import Policy, PolicyConfig
from policies.registry import register

_HIDDEN_BIAS = 0.1
_LAST_OF_ACTOR, _LAST_OF_CRITICS = 1e-3, 3e-3
_NORM_EPS = 1e-6


class BothActions(Regulariser):
    """Squared-distance penalties towards the recorded action (beta1) and next action (beta2)."""

    def __init__(self, actor_weight: float, critic_weight: float) -> None:
        self.actor_weight, self.critic_weight = actor_weight, critic_weight

    def penalty(self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws) -> Penalty:
        return towards(action, batch.action, self.actor_weight * action.shape[-1])  # the sum over entries

    def next_penalty(self, batch: Batch, action: Tensor) -> Tensor:
        distance = (action - batch.next_action).square().sum(dim=-1)
        return self.critic_weight * batch.has_next * distance


@torch.no_grad()
def begin_actor(policy: Policy) -> None:
    """Initialise a new actor as published, with torch's global CPU generator, as all initial weights."""
    *hidden, last = (layer for layer in policy.modules() if isinstance(layer, nn.Linear))
    for layer in hidden:  # PyTorch's default weights are the published ones
        layer.bias.fill_(_HIDDEN_BIAS)
    for part in (last.weight, last.bias):
        part.copy_(torch.empty(part.shape).uniform_(-_LAST_OF_ACTOR, _LAST_OF_ACTOR))


@register("algo", "rebrac")
@dataclass
class RebracConfig(ConstrainedTd3Config):
    """ReBRAC with the published settings of hopper-medium.

    Published (beta1, beta2) for medium, medium-replay and medium-expert data: (0.001, 0.01), (0.01, 0.001),
    (0.01, 0.1) in halfcheetah; (0.01, 0.01), (0.05, 0.5), (0.1, 0.01) in hopper; (0.05, 0.1), (0.05, 0.01),
    (0.01, 0.01) in walker2d.

    Source:
        arXiv 2305.09836 and its released code.
    """

    actor_value: ClassVar[str] = "min"
    closer: ClassVar[str] = "Raise algo.actor_weight, or lower algo.gamma."

    alpha: float = bounded(1.0, ge=0)
    batch_size: int = bounded(1024, ge=1)
    actor_lr: float = bounded(1e-3, gt=0)
    critic_lr: float = bounded(1e-3, gt=0)
    hidden_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)
    critic_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)
    actor_weight: float = bounded(0.01, ge=0)  # beta1, weight of the actor penalty
    critic_weight: float = bounded(0.01, ge=0)  # beta2, weight of the target penalty
    critic_layer_norm: bool = True  # normalise after each activation
    normalize_states: bool = False  # a new actor and its critics use states of mean 0 and std 1

    def actor_config(self) -> PolicyConfig:
        config = super().actor_config()
        modes = config.normalizer | ({} if self.normalize_states else {"state": "identity"})
        return replace(config, normalizer=modes)

    def critic_config(self) -> EnsembleConfig:
        return EnsembleConfig(
            hidden_dims=self.critic_dims,
            layer_norm=self.critic_layer_norm,
            norm_after=self.critic_layer_norm,
            norm_eps=_NORM_EPS,
            hidden_bias=_HIDDEN_BIAS,
            last_bound=_LAST_OF_CRITICS,
        )

    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> Td3Learner:
        if setup.init is None:
            begin_actor(policy)
        return super().learner(policy, table, setup)

    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> BothActions:
        return BothActions(self.actor_weight, self.critic_weight)
