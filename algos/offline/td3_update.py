"""TD3 on a fixed dataset with an actor that is kept near the data: one core, several ways of keeping it.

Legend: Q1, Q2 critics, bar target copy, pi actor, a data action, L bound of learner actions (1: normalised),
eps standard normal, B rows of a batch::

    a'    = clip(pi_bar(s') + clip(sigma L eps, +-c L), +-L)
    y     = r + discount min(Q1_bar, Q2_bar)(s', a')            discount = gamma^l, 0 where the task ended
    critic loss = mean (Q1 - y)^2 + mean (Q2 - y)^2
    actor loss  = -lambda mean Q1(s, pi(s)) + constraint,       lambda = alpha / mean |Q1(s, pi(s))|, constant

The actor and all targets move every `policy_every`-th step; an actor that is already a good policy may wait
for `warmup_steps`, or critics that know nothing yet spoil it. What the constraint is says a `Regulariser`:
the data action (TD3+BC), the nearest row of the dataset (PRDC), a generative guide (A2PR), or penalties on
actor and target (ReBRAC). The actor may be any policy: for one that samples, the constraint acts on sampled
chunks and gradients pass through all of its denoising steps.

Batches may have a leading axis of seeds, (S, B, ...): losses are means over rows and sums over seeds, so one
learner takes the steps of several; see `Td3Learner.together`.

Source: TD3+BC, arXiv 2106.06860; PRDC, arXiv 2306.06569; released code of PRDC and A2PR.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algos.base import AT_BOUND, Draws, Quantities, Setup
from algos.offline.actor import Actor
from algos.offline.batched_seeds import ONE_BY_ONE, StackedActor, StackedEnsemble, joined
from algos.offline.config import OfflineConfig, warn_of_reach
from algos.offline.loop import OfflineRun, SeedBatch, precision
from algos.optim import descend, restore_optimizer
from algos.transitions import Batch, TransitionTable
from policies.errors import CapabilityError
from policies.networks.critics import Ensemble, EnsembleConfig, aggregate, polyak
from policies.policy import Policy
from policies.registry import name_of


@dataclass(frozen=True)
class Td3Rules:
    """Constants of the learner; noises are in units of L."""

    alpha: float = 2.5
    tau: float = 0.005
    policy_noise: float = 0.2
    noise_clip: float = 0.5
    policy_every: int = 2
    warmup_steps: int = 0
    actor_value: str = "first"  # the critic that the actor climbs: first | min
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    limit: float = 1.0
    autocast: str | None = None  # number type of products; None: that of the weights


@dataclass(frozen=True)
class Backup:
    """What the critic was moved towards: next actions (..., B, A) and targets (..., B)."""

    next_action: Tensor
    target: Tensor


def mean_square(action: Tensor, other: Tensor) -> Tensor:
    """Return mean (a - b)^2 of actions (..., B, A) over rows and entries, one for each seed."""
    return (action - other).square().mean(dim=(-2, -1))


class Regulariser(ABC):
    """Keeps an actor near the data. Batches and actions may have a leading axis of seeds."""

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return random numbers for one step of n rows."""
        return {}

    def learn(self, batch: Batch, backup: Backup, critic: Ensemble, draws: Draws) -> Quantities:
        """Learn what the constraint needs, after every step of the critic."""
        return {}

    @abstractmethod
    def penalty(
        self, batch: Batch, action: Tensor, critic: Ensemble, draws: Draws
    ) -> tuple[Tensor, Quantities]:
        """Return what is added to the actor's loss for its actions (..., B, A), and what to report.

        One number for each seed, (...).
        """

    def next_penalty(self, batch: Batch, action: Tensor) -> Tensor | None:
        """Return what next actions (..., B, A) cost in the target (..., B); None: nothing."""
        return None

    def together(self, others: Sequence[Any]) -> Regulariser:
        """Return one constraint in place of this one and those of further seeds, which are of its class.

        Raises:
            CapabilityError: If there is none.
        """
        raise CapabilityError(f"{type(self).__name__} constrains one seed at a time. {ONE_BY_ONE}")

    def state_dict(self) -> dict[str, Any]:
        """Return what a continuation needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from `state_dict`."""


class Td3Learner:
    """Actor, critics, their target copies and optimisers; takes one step on one batch.

    Args:
        actor: Whose policy is trained.
        critic: Action values.
        regulariser: Constraint.
        rules: Constants.
    """

    def __init__(self, actor: Actor, critic: Ensemble, regulariser: Regulariser, rules: Td3Rules) -> None:
        self.actor, self.critic, self.regulariser, self.rules = actor, critic, regulariser, rules
        self.target_actor, self.target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
        for target in (self.target_actor.network, self.target_critic):
            target.requires_grad_(False)
        trained = [p for p in actor.network.parameters() if p.requires_grad]
        self.actor_optimizer = torch.optim.Adam(trained, lr=rules.actor_lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=rules.critic_lr, fused=True)
        self.steps = 0

    @classmethod
    def together(cls, learners: Sequence[Td3Learner]) -> Td3Learner:
        """Return one learner that takes the steps of several, which differ by their seeds only.

        What the others hold becomes a view of what it holds: each can still be asked for its policy and its
        state, but must not step or load by itself any more. It has no policy of its own.

        Raises:
            CapabilityError: If their actors or constraints cannot be stacked.
        """
        first, *others = learners
        whole = copy.copy(first)
        for name in ("actor", "target_actor"):
            setattr(whole, name, StackedActor([getattr(one, name) for one in learners]))
        for name in ("critic", "target_critic"):
            setattr(whole, name, StackedEnsemble([getattr(one, name) for one in learners]))
        whole.regulariser = first.regulariser.together([other.regulariser for other in others])
        trained = {"actor_optimizer": whole.actor.network, "critic_optimizer": whole.critic}
        for name, network in trained.items():
            setattr(whole, name, joined(network.parameters(), [getattr(one, name) for one in learners]))
        return whole

    @property
    def policy(self) -> Policy:
        """The policy in training; see `StackedActor.policy`."""
        return self.actor.policy

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of the coming step on n rows."""
        policy, actor = self.policy, self.actor
        width, device = policy.chunk.act_steps * policy.chunk.action_dim, policy.device
        target = torch.randn(n, width, generator=generator, device=generator.device).to(device)
        draws = {"target": target, "next_start": actor.draw(n, generator)}
        if self._moves_actor(self.steps + 1):
            draws["start"] = actor.draw(n, generator)
        return draws | self.regulariser.draw(n, generator)

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of the critic and, where it is due, of the actor and of the targets."""
        self.steps += 1
        backup, out = self._move_critic(batch, draws)
        out |= self.regulariser.learn(batch, backup, self.critic, draws)
        if self._moves_actor(self.steps):
            out |= self._move_actor(batch, draws)
        if self._moves_targets(self.steps):
            polyak(self.target_critic, self.critic, self.rules.tau)
            polyak(self.target_actor.network, self.actor.network, self.rules.tau)
        return out

    def _moves_targets(self, step: int) -> bool:
        return step % self.rules.policy_every == 0

    def _moves_actor(self, step: int) -> bool:
        return self._moves_targets(step) and step > self.rules.warmup_steps

    def _precision(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return what the networks are evaluated in."""
        return precision(self.rules.autocast, batch.cond.device)

    @torch.no_grad()
    def backup(self, batch: Batch, draws: Draws) -> Backup:
        """Return next actions and targets; see the top of the file."""
        rules, limit = self.rules, self.rules.limit
        bound = rules.noise_clip * limit
        noise = (draws["target"] * (rules.policy_noise * limit)).clamp_(-bound, bound)
        with self._precision(batch):
            action = self.target_actor(batch.next_cond, draws["next_start"], grad=False)
            action = (action + noise).clamp_(-limit, limit)
            value = aggregate(self.target_critic(batch.next_cond, action), "min")
        cost = self.regulariser.next_penalty(batch, action)
        if cost is not None:
            value = value - cost
        return Backup(action, torch.addcmul(batch.reward, batch.discount, value))

    def _move_critic(self, batch: Batch, draws: Draws) -> tuple[Backup, Quantities]:
        backup = self.backup(batch, draws)
        with self._precision(batch):
            values = self.critic(batch.cond, batch.action)
        loss = (values - backup.target).square().mean(dim=-1).sum(dim=0)
        descend(self.critic_optimizer, loss.sum())
        value, target = values.detach().mean(dim=(0, -1)), backup.target.mean(dim=-1)
        return backup, {"critic/loss": loss.detach(), "critic/value": value, "critic/target": target}

    def _move_actor(self, batch: Batch, draws: Draws) -> Quantities:
        with self._precision(batch):
            action = self.actor(batch.cond, draws["start"]).to(batch.action)
            value = self.actor_value(batch, action)
        scale = self.rules.alpha / value.detach().abs().mean(dim=-1)
        climb = -scale * value.mean(dim=-1)
        penalty, out = self.regulariser.penalty(batch, action, self.critic, draws)
        descend(self.actor_optimizer, (climb + penalty).sum())
        with torch.no_grad():
            saturated = action.abs() > AT_BOUND * self.rules.limit
            out |= {
                "actor/value": value.mean(dim=-1),
                "actor/value_loss": climb,
                "actor/constraint": penalty,
                "actor/data_distance": mean_square(action, batch.action).sqrt(),
                "actor/saturated_fraction": saturated.float().mean(dim=(-2, -1)),
            }
        return {name: value.detach() for name, value in out.items()}

    def actor_value(self, batch: Batch, action: Tensor) -> Tensor:
        """Return the value (..., B) that the actor climbs; no gradient reaches the critic."""
        if self.rules.actor_value == "first":
            return self.critic(batch.cond, action, members=1, frozen=True)[0]
        return aggregate(self.critic(batch.cond, action, frozen=True), "min")

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bit-exact continuation needs."""
        return {
            "steps": self.steps,
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "target_policy": self.target_actor.policy.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
            "regulariser": self.regulariser.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.target_actor.policy.load_state_dict(state["target_policy"])
        self.target_critic.load_state_dict(state["target_critic"])
        restore_optimizer(self.actor_optimizer, state["actor_optimizer"])
        restore_optimizer(self.critic_optimizer, state["critic_optimizer"])
        self.regulariser.load_state_dict(state["regulariser"])
        self.steps = int(state["steps"])


@dataclass
class ConstrainedTd3Config(OfflineConfig):
    """Settings of every algorithm on this core."""

    alpha: float = 2.5  # weight of the value against the constraint
    policy_noise: float = 0.2  # deviation of the noise on next actions, normalised units
    noise_clip: float = 0.5  # largest magnitude of that noise
    policy_every: int = 2  # steps of the critic per step of the actor and the targets
    warmup_steps: int = 0  # steps of the critic before the actor moves for the first time; of use with `init`
    critic_layer_norm: bool = False  # normalise before each activation

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        for name in ("alpha", "policy_noise", "noise_clip"):
            self.require(name, 0 <= getattr(self, name) < math.inf, "0 or more and finite")
        self.require("policy_every", self.policy_every >= 1, "at least 1")
        self.require("warmup_steps", 0 <= self.warmup_steps < self.steps, "0 or more and below algo.steps")

    def rules(self) -> Td3Rules:
        """Return the constants of the learner."""
        return Td3Rules(
            alpha=self.alpha,
            tau=self.tau,
            policy_noise=self.policy_noise,
            noise_clip=self.noise_clip,
            policy_every=self.policy_every,
            warmup_steps=self.warmup_steps,
            actor_lr=self.actor_lr,
            critic_lr=self.critic_lr,
            autocast=self.autocast,
        )

    def critic_config(self) -> EnsembleConfig:
        """Return the shape of the critics."""
        return EnsembleConfig(hidden_dims=self.critic_dims, layer_norm=self.critic_layer_norm)

    @abstractmethod
    def regulariser(self, actor: Actor, table: TransitionTable, setup: Setup) -> Regulariser:
        """Return the constraint."""

    def together(self, runs: Sequence[OfflineRun]) -> SeedBatch:
        """Return what takes the steps of runs of several seeds, made by `build_seeds`, at once."""
        return SeedBatch(runs, Td3Learner.together)

    def learner(self, policy: Policy, table: TransitionTable, setup: Setup) -> Td3Learner:
        """Return the learner; see `OfflineConfig.learner`."""
        warn_of_reach(table, setup, name_of("algo", self))
        actor, like = Actor(policy), table.cond
        critic = self.critic_config().build(like.shape[1], table.action.shape[1]).to(like.device, like.dtype)
        return Td3Learner(actor, critic, self.regulariser(actor, table, setup), self.rules())
