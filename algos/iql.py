"""IQL: expectile regression of values on dataset actions, policy by advantage-weighted regression.

Legend: tau expectile, u advantage, bar target copy, beta temperature::

    u       = min(Q1_bar, Q2_bar)(s, a) - V(s)
    V loss  = mean |tau - 1[u < 0]| u^2
    Q loss  = mean over both critics of mean (Q - y)^2,   y = r + discount V(s'), V before its step
    policy  = mean min(exp(beta u), 100) * (- log pi(a | s)),   u before the step of V

For a deterministic policy the sum of squared errors, sum (pi(s) - a)^2, replaces - log pi. For a sampling
policy the matching loss takes the same weights (advantage-weighted regression).

Source: IQL, arXiv 2110.06169; step order, constants and the deterministic actor from CORL, a single-file
reproduction.

Deviations from that reproduction:
    * the Gaussian learns its log-variance (`policies.networks.heads`) instead of its log-std: an Adam step
      changes the log-std half as much; initial std (1) and std limits are the same;
    * `normalize_returns` uses returns of whole episodes; CORL drops the last row of an episode without an end
      and then cuts at every thousandth row, so cuts shift into neighbouring episodes;
    * no dropout: published for Adroit, where CORL passes it to a Gaussian actor that ignores it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup
from algos.offline.chunk_loss import ChunkLoss
from algos.offline.config import OfflineConfig, OfflineData, plain_actor
from algos.offline.loop import precision
from algos.offline.td3_update import ActorNetwork, actor_network
from algos.optim import adam, descend_along, load_parts, regress, save_parts, set_rate, weights_of
from algos.transitions import Batch, TransitionTable
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.networks.critics import Ensemble, EnsembleConfig, aggregate, polyak
from policies.networks.distributions import gaussian_log_prob
from policies.networks.native import Evaluation
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicPolicy
from policies.processes.gaussian import GaussianPolicy, GaussianProcess
from policies.registry import register

_MAX_WEIGHT = 100.0


def expectile_loss(u: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Return mean w u^2 of advantages u = q - V (B,), w = |tau - 1[u < 0]|, and its gradient along V (B,)."""
    pull = torch.where(u < 0, 1 - tau, tau) * u
    return (pull * u).mean(dim=-1), pull * (-2 / u.shape[-1])


class PolicyLoss:
    """Policy loss per row on recorded chunks.

    Negative log-likelihoods and squared errors of a deterministic policy are summed over the entries of a
    chunk; other matching losses are averaged.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self._cloning, self._network = policy, ChunkLoss(policy), actor_network(policy)

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return self._cloning.draw(n, generator)

    def __call__(self, batch: Batch, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of each row, (B,)."""
        loss = self._cloning(batch, draws).to(batch.real) * batch.real
        if isinstance(self.policy, (GaussianPolicy, DeterministicPolicy)):
            return self.policy.chunk.action_dim * loss.sum(dim=1)
        return loss.sum(dim=1) / batch.real.sum(dim=1)

    def evaluate(self, batch: Batch, draws: Mapping[str, Tensor], weights: Sequence[Tensor]) -> Evaluation:
        """Return losses (B,), and the function from their gradient to those of weights."""
        found = None if self._network is None else _plain_losses(self._network, batch, weights)
        if found is not None:
            return found
        loss = self(batch, draws)
        return Evaluation(
            loss.detach(), lambda slope: torch.autograd.grad(loss, weights, slope, allow_unused=True)
        )


@torch.no_grad()
def _plain_losses(network: ActorNetwork, batch: Batch, weights: Sequence[Tensor]) -> Evaluation | None:
    """Return losses of a plain actor and their gradients without a graph; None: only a graph gives them."""
    log_var, limits = network.log_var, network.limits
    found = network.trunk.evaluate_without_graph(batch.cond, [one for one in weights if one is not log_var])
    if found is None:
        return None
    mean, std = network.density(found.values)
    away = mean - batch.plan if std is None else (mean - batch.plan) / std
    loss = away.square() if std is None else -gaussian_log_prob(batch.plan, mean, std)

    @torch.no_grad()
    def gradients(slope: Tensor) -> Sequence[Tensor | None]:
        of_loss = slope.unsqueeze(-1)
        of_mean = of_loss * away * 2 if std is None else of_loss * away / std
        of_trunk = found.gradients(torch.ops.aten.tanh_backward(of_mean, mean))
        if limits is None or log_var is None:
            return of_trunk
        of_log_var = 0.5 * (of_loss * (1 - away.square())).sum(dim=0) * limits.is_free(log_var)
        rest = iter(of_trunk)
        return [of_log_var if one is log_var else next(rest) for one in weights]

    return Evaluation(loss.sum(dim=-1), gradients)


class IqlLearner:
    """Policy, Q ensemble, V (an ensemble of one member over states), and their optimisers."""

    def __init__(self, policy: Policy, critic: Ensemble, value: Ensemble, config: IqlConfig) -> None:
        self.policy, self.critic, self.value, self.config = policy, critic, value, config
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.policy_loss = PolicyLoss(policy)
        self.actor_optimizer = adam(policy.parameters(), config.actor_lr)
        self.critic_optimizer = adam(critic.parameters(), config.critic_lr)
        self.value_optimizer = adam(value.parameters(), config.critic_lr)
        self.steps = 0

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return self.policy_loss.draw(n, generator)

    def step(self, batch: Batch, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take one gradient step of value, critics and policy; return metrics."""
        self.prepare()
        self.steps += 1
        with torch.no_grad(), self._precision(batch):
            best = aggregate(self.target_critic(batch.cond, batch.action), "min")
            following = self.value(batch.next_cond)[0]
        target = torch.addcmul(batch.reward, batch.discount, following)
        with self._precision(batch):
            value = self.value.evaluate(batch.cond, None, weights_of(self.value_optimizer))
        u = best - value.values[0]
        value_loss, slope = expectile_loss(u, self.config.expectile)
        descend_along(self.value_optimizer, value.gradients(slope[None]))
        with self._precision(batch):
            found = self.critic.evaluate(batch.cond, batch.action, weights_of(self.critic_optimizer))
        critic_loss = regress(self.critic_optimizer, found, target, weight=1 / self.critic.members)
        polyak(self.target_critic, self.critic, self.config.tau)
        weight = (self.config.temperature * u).exp().clamp(max=_MAX_WEIGHT)
        with self._precision(batch):
            policy = self.policy_loss.evaluate(batch, draws, weights_of(self.actor_optimizer))
        actor_loss = (weight * policy.values).mean(dim=-1)
        descend_along(self.actor_optimizer, policy.gradients(weight / weight.shape[-1]))
        return {
            "value/loss": value_loss,
            "critic/loss": critic_loss,
            "actor/loss": actor_loss,
            "critic/value": found.values.mean(dim=(0, -1)),
            "critic/target": target.mean(dim=-1),
            "actor/advantage": u.mean(dim=-1),
            "actor/weight": weight.mean(dim=-1),
        }

    def _precision(self, batch: Batch) -> AbstractContextManager[Any]:
        return precision(self.config.autocast, batch.cond.device)

    decisions = ()  # of every step alike

    def prepare(self) -> None:
        """Set the policy's learning rate: cosine decay to zero over the run; constant with online steps."""
        share = 0.0 if self.config.online_steps else self.steps / self.config.steps
        set_rate(self.actor_optimizer, self.config.actor_lr * 0.5 * (1 + math.cos(math.pi * share)))

    _parts = (
        *("policy", "critic", "value", "target_critic"),
        *("actor_optimizer", "critic_optimizer", "value_optimizer"),
    )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps} | save_parts(self, self._parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_parts(self, self._parts, state)
        self.steps = int(state["steps"])


@register("algo", "iql")
@dataclass
class IqlConfig(OfflineConfig):
    """IQL with the published locomotion settings; a new policy is Gaussian or deterministic.

    Published elsewhere: expectile 0.9 and temperature 10 for antmaze (reward_shift -1); 0.8 and 3 for Adroit.
    CORL: deterministic policy and tau 0.001 for hopper-medium and hopper-medium-replay; expectile 0.5 and
    temperature 6 on unscaled rewards for hopper-medium-expert.

    Source:
        arXiv 2110.06169, section 5; module docstring.
    """

    fixed_length: ClassVar[bool] = True  # the actor's learning-rate schedule depends on `steps`

    expectile: float = bounded(0.7, gt=0, lt=1)  # tau, of the value loss
    temperature: float = bounded(3.0, ge=0)  # beta, inverse temperature of the advantage weights
    value_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of V; ReLU
    deterministic: bool = False  # true: deterministic actor trained by regression; false: Gaussian

    def prepare(self, setup: Setup) -> OfflineData:
        if self.deterministic and setup.init is not None:
            raise ConfigError("algo.deterministic must be false with init: it is for a new actor; got true.")
        return super().prepare(setup)

    def actor_config(self) -> PolicyConfig:
        if self.deterministic:
            return super().actor_config()
        process = GaussianProcess(init_std=1.0, min_std=math.exp(-20), max_std=math.exp(2))
        return plain_actor(process, self.hidden_dims)

    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> IqlLearner:
        like = table.cond
        critic = EnsembleConfig(hidden_dims=self.critic_dims).build(like.shape[1], table.action.shape[1])
        value = EnsembleConfig(members=1, hidden_dims=self.value_dims).build(like.shape[1], 0)
        critic, value = (net.to(like.device, like.dtype) for net in (critic, value))
        return IqlLearner(policy, critic, value, self)
