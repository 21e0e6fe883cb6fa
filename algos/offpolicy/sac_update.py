"""Soft actor-critic as a pure learner: explicit batches, explicit draws, no environment.

Legend: B rows, C condition width, L numbers of a latent, A of a chunk, E critics, bar target copy, u what
the actor draws, x what the critic is asked about (a latent or a chunk), H target entropy, C_i aggregate over
critics::

    temperature loss = - mean log alpha (log pi(u | s) + H)
    y                = r + discount (C_i Q_i_bar(s', x') - alpha log pi(u' | s'))
    critic loss      = 1/2 sum_i mean (Q_i(s, x) - y)^2
    actor loss       = mean (alpha log pi(u | s) - C_i Q_i(s, u))

in this order, alpha being that before its step, and the actor's critic that after its step; then the target
copy follows.

Source: SAC, arXiv 1812.05905; order of the steps: released code of DSRL.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from algos.base import AT_BOUND, Draws, Quantities
from algos.offpolicy.replay_buffer import ChunkBatch, Mixture
from algos.optim import descend, restore_optimizer
from policies.networks.critics import Ensemble, aggregate, polyak
from policies.policy import Policy


class LatentActor(Protocol):
    """What is trained: draws latents whose log-density is known."""

    @property
    def policy(self) -> Policy:
        """The policy that acts by it."""
        ...

    @property
    def latent_dim(self) -> int:
        """L."""
        ...

    @property
    def highest_entropy(self) -> float:
        """The largest entropy of a latent [nats] that the actor can have."""
        ...

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return what learns."""
        ...

    def draw(self, cond: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents u (B, L) and their log-density (B,), for standard normals (B, L)."""
        ...

    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return what is executed, normalised and flat (B, A); no gradient."""
        ...

    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        """Return latents (B, L) to try before anything is learned, for standard normals (B, L)."""
        ...

    def on_cpu(self) -> LatentActor:
        """Return the actor as workers use it."""
        ...


@dataclass(frozen=True)
class SoftRules:
    """Constants of the learner."""

    tau: float = 0.005
    target_entropy: float = 0.0
    init_alpha: float = 1.0
    learn_alpha: bool = True
    entropy_in_target: bool = True
    aggregate: str = "min"  # of the target
    actor_aggregate: str = "min"  # of the actor's loss
    subset: int = 2  # critics of subset_min
    pessimism: float = 0.5  # of mean_std
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    alpha_lr: float = 3e-4


class Temperature:
    """alpha, kept as its logarithm and moved towards a target entropy.

    Args:
        rules: Its start, rate and target.
        device: Where it lives.
    """

    def __init__(self, rules: SoftRules, device: torch.device) -> None:
        self.rules = rules
        self.log = torch.tensor([rules.init_alpha], device=device).log().requires_grad_(rules.learn_alpha)
        self.optimizer = torch.optim.Adam([self.log], lr=rules.alpha_lr) if rules.learn_alpha else None

    @property
    def value(self) -> Tensor:
        """alpha, detached."""
        return self.log.detach().exp().squeeze(0)

    def move(self, log_prob: Tensor) -> Quantities:
        """Take a step on log-densities (B,), where alpha learns; return its loss."""
        if self.optimizer is None:
            return {}
        loss = -(self.log * (log_prob.detach() + self.rules.target_entropy)).mean()
        return {"actor/alpha_loss": descend(self.optimizer, loss)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a continuation needs."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return {"log": self.log.detach().clone(), "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        with torch.no_grad():
            self.log.copy_(state["log"])
        if self.optimizer is not None and state["optimizer"] is not None:
            restore_optimizer(self.optimizer, state["optimizer"])


class SacUpdate:
    """Actor, critics, temperature and their optimisers; takes one step on one batch.

    Args:
        actor: What is trained.
        critic: Values of latents, or of executed chunks with `of_chunks`.
        rules: Constants.
        of_chunks: Whether the critic is asked about recorded chunks instead of recorded latents.
    """

    def __init__(
        self, actor: LatentActor, critic: Ensemble, rules: SoftRules, *, of_chunks: bool = False
    ) -> None:
        self.actor, self.critic, self.rules, self._of_chunks = actor, critic, rules, of_chunks
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        self.temperature = Temperature(rules, critic.weight[0].device)
        self.actor_optimizer = torch.optim.Adam(actor.parameters(), lr=rules.actor_lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=rules.critic_lr, fused=True)

    @property
    def policy(self) -> Policy:
        """The policy in training."""
        return self.actor.policy

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of a step on n rows."""
        device = self.critic.weight[0].device
        eps = torch.randn(2, n, self.actor.latent_dim, generator=generator, device=generator.device)
        order = torch.randperm(self.critic.members, generator=generator, device=generator.device)
        return {
            "eps": eps[0].to(device),
            "next_eps": eps[1].to(device),
            "subset": order[: self.rules.subset].to(device),
        }

    def step(self, batch: ChunkBatch, draws: Draws, *, moves_actor: bool = True) -> Quantities:
        """Take one step of the critic and, unless told otherwise, of temperature and actor."""
        if not moves_actor:
            out = self._move_critic(batch, draws, self.temperature.value)
        else:
            latent, log_prob = self.actor.draw(batch.cond, draws["eps"])
            alpha = self.temperature.value
            out = self.temperature.move(log_prob)
            out |= self._move_critic(batch, draws, alpha)
            out |= self._move_actor(batch, latent, log_prob, alpha, draws)
        polyak(self.target_critic, self.critic, self.rules.tau)
        return out

    @torch.no_grad()
    def target(self, batch: ChunkBatch, draws: Draws, alpha: Tensor) -> Tensor:
        """Return y (B,)."""
        latent, log_prob = self.actor.draw(batch.next_cond, draws["next_eps"])
        value = self._aggregated(self.next_values(batch.next_cond, latent), self.rules.aggregate, draws)
        if self.rules.entropy_in_target:
            value = value - alpha * log_prob
        return torch.addcmul(batch.reward, batch.discount, value)

    def next_values(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return what the target critics say (E, B) of latents (B, L)."""
        return self.target_critic(cond, latent)

    def climbed_values(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return the values (E, B) that the actor climbs; no gradient reaches the critic."""
        return self.critic(cond, latent, frozen=True)

    def _aggregated(self, values: Tensor, how: str, draws: Draws) -> Tensor:
        return aggregate(values, how, subset=draws["subset"], pessimism=self.rules.pessimism)

    def _move_critic(self, batch: ChunkBatch, draws: Draws, alpha: Tensor) -> Quantities:
        target = self.target(batch, draws, alpha)
        values = self.critic(batch.cond, batch.action if self._of_chunks else batch.latent)
        loss = half_squared_error(values, target.expand_as(values))
        descend(self.critic_optimizer, loss)
        return {
            "critic/loss": loss.detach(),
            "critic/value": values.detach().mean(),
            "critic/target": target.mean(),
        }

    def _move_actor(
        self, batch: ChunkBatch, latent: Tensor, log_prob: Tensor, alpha: Tensor, draws: Draws
    ) -> Quantities:
        values = self.climbed_values(batch.cond, latent)
        loss = (alpha * log_prob - self._aggregated(values, self.rules.actor_aggregate, draws)).mean()
        descend(self.actor_optimizer, loss)
        with torch.no_grad():
            return {
                "actor/loss": loss.detach(),
                "actor/alpha": alpha,
                "actor/entropy": -log_prob.mean(),
                "actor/latent_size": latent.square().mean().sqrt(),
                "actor/saturated_fraction": (latent.abs() > AT_BOUND).float().mean(),
            }

    def finish_round(
        self, count: int, size: int, source: Mixture, generator: torch.Generator
    ) -> list[Quantities]:
        """Do what follows `count` steps: nothing more is to be learned."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bit-exact continuation needs."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "temperature": self.temperature.state_dict(),
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "critic_optimizer": self.critic_optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.target_critic.load_state_dict(state["target_critic"])
        self.temperature.load_state_dict(state["temperature"])
        restore_optimizer(self.actor_optimizer, state["actor_optimizer"])
        restore_optimizer(self.critic_optimizer, state["critic_optimizer"])


def half_squared_error(values: Tensor, target: Tensor) -> Tensor:
    """Return 1/2 sum_i mean (Q_i - y_i)^2 of values and targets (E, B)."""
    return 0.5 * (values - target).square().mean(dim=1).sum()
