"""TD3 on a fixed dataset with a regularised actor: one update, several regularisers.

Legend: Q1, Q2 critics, bar target copy, pi actor, a data action, L bound of learner actions (1: normalised),
eps standard normal, B rows of a batch::

    a'    = clip(pi_bar(s') + clip(sigma L eps, +-c L), +-L)
    y     = r + discount min(Q1_bar, Q2_bar)(s', a')            discount = gamma^l, 0 where the task ended
    critic loss = mean (Q1 - y)^2 + mean (Q2 - y)^2
    actor loss  = -lambda mean Q1(s, pi(s)) + penalty,          lambda = alpha / mean |Q1(s, pi(s))|, constant

Actor and targets are updated every `policy_delay` steps; a trained `init` is frozen for `warmup_steps`, until
the critics have been fitted. The penalty comes from a `Regulariser`: distance to the data action (TD3+BC), to
the nearest dataset row (PRDC) or to a generative guide (A2PR), or penalties on actor and target (ReBRAC). The
actor may be any policy: for a sampling policy the penalty applies to sampled chunks, and gradients pass
through all denoising steps.

Source: TD3+BC, arXiv 2106.06860; PRDC, arXiv 2306.06569; released code of PRDC and A2PR.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from algos.base import AT_BOUND, Draws, Quantities, Setup
from algos.offline.config import OfflineConfig, warn_of_clipped_actions
from algos.offline.loop import precision
from algos.optim import adam, descend, descend_along, load_parts, regress, save_parts, weights_of
from algos.training.ranks import current
from algos.transitions import Batch, TransitionTable
from policies.bounds import bounded
from policies.networks.critics import Ensemble, EnsembleConfig, aggregate, aggregate_with_slopes, polyak
from policies.networks.heads import GaussianHead
from policies.networks.mlp_blocks import PlainTrunk
from policies.networks.native import Evaluation
from policies.policy import Policy
from policies.processes.deterministic import DeterministicPolicy
from policies.processes.gaussian import GaussianPolicy
from policies.registry import name_of

_log = logging.getLogger(__name__)
FEW_ROWS = 300_000
"""Transitions below which the log names settings other than the published ones."""


@dataclass(frozen=True)
class Backup:
    """Critic regression: next actions (B, A) and targets (B,)."""

    next_action: Tensor
    target: Tensor


def mean_square(action: Tensor, other: Tensor) -> Tensor:
    """Return mean (a - b)^2 of actions (B, A) over rows and entries."""
    return (action - other).square().mean(dim=(-2, -1))


class Penalty(NamedTuple):
    """A penalty on actions (B, A), its gradient with respect to them, and metrics.

    `slope` (B, A) None: only the graph of `value` gives it.
    """

    value: Tensor
    slope: Tensor | None = None
    metrics: Mapping[str, Tensor] = MappingProxyType({})


def towards(action: Tensor, other: Tensor, weight: float = 1.0) -> Penalty:
    """Return the penalty weight * mean (a - b)^2 of actions (B, A) over rows and entries."""
    apart = action - other
    slope = apart.detach() * (2 * weight / (apart.shape[-2] * apart.shape[-1]))
    value = apart.square().mean(dim=(-2, -1))
    return Penalty(value if weight == 1.0 else weight * value, slope)


class Regulariser(ABC):
    """Penalty that keeps the actor near the data."""

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of one step for n rows."""
        return {}

    def learn(self, batch: Batch, backup: Backup, critic: Ensemble, draws: Draws) -> Quantities:
        """Update the regulariser's networks after a critic update; return metrics."""
        return {}

    @abstractmethod
    def penalty(self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws) -> Penalty:
        """Return the penalty on actor actions (B, A).

        Its gradient reaches the weights of a deterministic actor through these actions alone.
        """

    def next_penalty(self, batch: Batch, action: Tensor) -> Tensor | None:
        """Return the target penalty of next actions, (B,); None: no penalty."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict`."""


class ActorNetwork(nn.Module):
    """Network of a `plain_actor` policy, whose parameters it shares; `head` is None if deterministic."""

    def __init__(self, trunk: PlainTrunk, head: GaussianHead | None = None) -> None:
        super().__init__()
        self.trunk, self.limits = trunk, None if head is None else head.config
        self.log_var = None if head is None else head.log_var

    def forward(self, cond: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return means (B, A) and, for a Gaussian, standard deviations (1, A) for conditions (B, C)."""
        return self.density(self.trunk(cond))

    def density(self, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `forward` from the outputs (B, A) of the trunk."""
        mean = torch.tanh(out)
        if self.limits is None or self.log_var is None:
            return mean, None
        return mean, self.limits.std_of(self.log_var).unsqueeze(-2)


def actor_network(policy: Policy) -> ActorNetwork | None:
    """Return the network of a `plain_actor` policy; None for other policies."""
    head = policy.head if isinstance(policy, GaussianPolicy) else None
    if policy.chunk.horizon != 1 or not isinstance(policy, DeterministicPolicy | GaussianPolicy):
        return None
    if head is not None and not head.config.squash:
        return None
    trunk = policy.trunk if head is None else head.trunk
    network = ActorNetwork(trunk, head) if isinstance(trunk, PlainTrunk) else None
    return None if network is None or _trainable(network) != _trainable(policy) else network


def _trainable(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


class Actor:
    """Actor interface of any policy: encoded observation to flat executed chunk, times L (`limit`)."""

    def __init__(self, policy: Policy, limit: float = 1.0) -> None:
        self.policy, self.limit = policy, limit
        self.width = policy.chunk.width  # A
        self.device, self._noise_shape = policy.device, policy.noise_shape
        # A `plain_actor` network is evaluated directly; other policies decode noise.
        self._network = actor_network(policy) if isinstance(policy, DeterministicPolicy) else None

    @property
    def network(self) -> nn.Module:
        return self.policy

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return start noise for n actions; zeros for a deterministic policy."""
        if self._network is not None or not self.policy.noise_sensitive:
            return torch.zeros(n, *self._noise_shape, device=self.device)
        return self.policy.sample_noise(n, generator=generator)

    def evaluate(self, cond: Tensor, weights: Sequence[Tensor]) -> Evaluation | None:
        """Return actions (B, A), and the function from their gradient to those of weights, without a graph.

        None: only a graph gives it.
        """
        found = None if self._network is None else self._network.trunk.evaluate_without_graph(cond, weights)
        if found is None:
            return None
        unit = torch.tanh(found.values)
        return Evaluation(
            unit * self.limit, lambda slope: found.gradients(slope * (self.limit * (1 - unit.square())))
        )

    def __call__(self, cond: Tensor, noise: Tensor, *, grad: bool = True) -> Tensor:
        """Return actions (B, A) in [-L, L] for conditions (B, C)."""
        if self._network is not None:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                action = self._network(cond)[0]
        else:
            chunk = self.policy.decode(self.policy.condition(cond), noise, grad=grad)
            action = chunk[:, self.policy.chunk.executed].flatten(1)
        return action if self.limit == 1.0 else action * self.limit


class Td3Learner:
    """Actor, critics, their target copies and optimisers."""

    def __init__(
        self, actor: Actor, critic: Ensemble, regulariser: Regulariser, config: ConstrainedTd3Config
    ) -> None:
        self.actor, self.critic, self.regulariser, self.config = actor, critic, regulariser, config
        self.target_actor, self.target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
        for target in (self.target_actor.network, self.target_critic):
            target.requires_grad_(False)
        self.actor_optimizer = adam(actor.network.parameters(), config.actor_lr)
        self.critic_optimizer = adam(critic.parameters(), config.critic_lr)
        self.steps = 0

    @property
    def policy(self) -> Policy:
        return self.actor.policy

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of the next step for n rows."""
        eps = torch.randn(n, self.actor.width, generator=generator, device=generator.device)
        draws = {"target": eps.to(self.actor.device), "next_start": self.actor.draw(n, generator)}
        if self._updates_actor(self.steps + 1):
            draws["start"] = self.actor.draw(n, generator)
        return draws | self.regulariser.draw(n, generator)

    @property
    def decisions(self) -> tuple[bool, bool]:
        return self._updates_targets(self.steps + 1), self._updates_actor(self.steps + 1)

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        """Update the critics and, every `policy_delay` steps, the actor and the targets; return metrics."""
        self.steps += 1
        backup = self.backup(batch, draws)
        out = self._update_critic(batch, backup)
        out |= self.regulariser.learn(batch, backup, self.critic, draws)
        if self._updates_actor(self.steps):
            out |= self._update_actor(batch, draws)
        if self._updates_targets(self.steps):
            polyak(self.target_critic, self.critic, self.config.tau)
            polyak(self.target_actor.network, self.actor.network, self.config.tau)
        return out

    def _updates_targets(self, step: int) -> bool:
        return step % self.config.policy_delay == 0

    def _updates_actor(self, step: int) -> bool:
        return self._updates_targets(step) and step > self.config.warmup_steps

    def _precision(self, batch: Batch) -> AbstractContextManager[Any]:
        return precision(self.config.autocast, batch.cond.device)

    @torch.no_grad()
    def backup(self, batch: Batch, draws: Draws) -> Backup:
        """Return a' and y; see the module docstring."""
        config, limit = self.config, self.actor.limit
        bound = config.noise_clip * limit
        noise = (draws["target"] * (config.policy_noise * limit)).clamp_(-bound, bound)
        with self._precision(batch):
            action = self.target_actor(batch.next_cond, draws["next_start"], grad=False)
            action = (action + noise).clamp_(-limit, limit)
            value = aggregate(self.target_critic(batch.next_cond, action), "min")
        cost = self.regulariser.next_penalty(batch, action)
        if cost is not None:
            value = value - cost
        return Backup(action, torch.addcmul(batch.reward, batch.discount, value))

    def _update_critic(self, batch: Batch, backup: Backup) -> Quantities:
        with self._precision(batch):
            found = self.critic.evaluate(batch.cond, batch.action, weights_of(self.critic_optimizer))
        loss = regress(self.critic_optimizer, found, backup.target)
        value, target = found.values.mean(dim=(0, -1)), backup.target.mean(dim=-1)
        return {"critic/loss": loss, "critic/value": value, "critic/target": target}

    def _update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        found = self._evaluate_without_graphs(batch)
        if found is not None:
            actor, (values, along) = found
            action = actor.values.requires_grad_()
            value, slopes = aggregate_with_slopes(values, "mean" if self._leading == 1 else "min")
        else:
            with self._precision(batch):
                action = self.actor(batch.cond, draws["start"]).to(batch.action)
                values = self.critic(batch.cond, action, members=self._leading, frozen=True)
            value = values[0] if self._leading == 1 else aggregate(values, "min")
        scale = self.config.alpha / current().mean(value.detach().abs().mean(dim=-1))  # lambda
        value_loss = -scale * value.mean(dim=-1)
        penalty, of_action, told = self.regulariser.penalty(batch, action, self.critic, draws)
        if found is not None:
            if of_action is None:
                (of_action,) = torch.autograd.grad(penalty, action)
            of_action = of_action + along(slopes * (-scale / value.shape[-1]))
            descend_along(self.actor_optimizer, actor.gradients(of_action))
        else:
            descend(self.actor_optimizer, value_loss + penalty)
        with torch.no_grad():
            saturated = action.abs() > AT_BOUND * self.actor.limit
            out = {
                **told,
                "actor/value": value.mean(dim=-1),
                "actor/value_loss": value_loss,
                "actor/constraint": penalty,
                "actor/data_distance": mean_square(action, batch.action).sqrt(),
                "actor/saturated_fraction": saturated.float().mean(dim=(-2, -1)),
            }
        return {name: value.detach() for name, value in out.items()}

    def _evaluate_without_graphs(
        self, batch: Batch
    ) -> tuple[Evaluation, tuple[Tensor, Callable[[Tensor], Tensor]]] | None:
        """Return actions, their values and the functions of their gradients; None: graphs give them."""
        if self.config.autocast is not None:
            return None
        actor = self.actor.evaluate(batch.cond, weights_of(self.actor_optimizer))
        critic = (
            None if actor is None else self.critic.evaluate_along(batch.cond, actor.values, self._leading)
        )
        return None if actor is None or critic is None else (actor, critic)

    @property
    def _leading(self) -> int | None:
        """How many leading critics judge the actor's actions; None: all, of which the least."""
        return 1 if self.config.actor_value == "first" else None

    @property
    def target_policy(self) -> Policy:
        return self.target_actor.policy

    _parts: ClassVar[tuple[str, ...]] = (
        *("policy", "critic", "target_policy", "target_critic"),
        *("actor_optimizer", "critic_optimizer", "regulariser"),
    )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps} | save_parts(self, self._parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_parts(self, self._parts, state)
        self.steps = int(state["steps"])


@dataclass
class ConstrainedTd3Config(OfflineConfig):
    """Settings shared by the algorithms on this update."""

    actor_value: ClassVar[str] = "first"  # critic in the actor loss: `first`, or `min` over both
    closer: ClassVar[str] = "Lower algo.alpha or algo.gamma, or set algo.critic_layer_norm=true."

    alpha: float = bounded(2.5, ge=0)  # weight of the value term of the actor loss
    policy_noise: float = bounded(0.2, ge=0)  # std of the target policy noise, normalised action units
    noise_clip: float = bounded(0.5, ge=0)  # clip of the target policy noise
    policy_delay: int = bounded(2, ge=1, was="policy_every")  # critic updates per actor and target update
    warmup_steps: int = bounded(0, ge=0)  # critic updates before the first actor update; for use with `init`
    critic_layer_norm: bool = False  # layer normalisation before each activation

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("warmup_steps", self.warmup_steps < self.steps, "0 or more and below algo.steps")

    def unused(self) -> dict[str, str]:
        noise = {} if self.policy_noise else {"noise_clip": "with algo.policy_noise=0"}
        return super().unused() | noise

    def critic_config(self) -> EnsembleConfig:
        return EnsembleConfig(hidden_dims=self.critic_dims, layer_norm=self.critic_layer_norm)

    @abstractmethod
    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> Regulariser: ...

    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> Td3Learner:
        warn_of_clipped_actions(table, setup, name_of("algo", self))
        is_plain = not (self.critic_layer_norm or type(self).critic_layer_norm)  # no *_few_rows of ReBRAC
        if setup.init is None and is_plain and len(table) < FEW_ROWS:
            _log.info(
                "%s transitions: published settings are for a million; on few rows actors swing, and may end "
                "at a clone of the data or below it. experiment=%s_few_rows swings less.",
                f"{len(table):,}", name_of("algo", self),
            )  # fmt: skip
        if setup.init is not None and not self.warmup_steps:
            _log.warning(
                "algo.warmup_steps=0: critics that know nothing move the policy of init from the first step. "
                "Give them some thousand steps, or take algo=iql, which is gentler."
            )
        actor, like = Actor(policy), table.cond
        critic = self.critic_config().build(like.shape[1], table.action.shape[1]).to(like.device, like.dtype)
        return Td3Learner(actor, critic, self.regulariser(actor, table, setup), self)
