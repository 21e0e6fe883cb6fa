"""Soft actor-critic update: explicit batches and random draws, no environment.

Legend: B rows, C condition width, L latent width, A chunk width, E critics, bar target copy, u sampled
latent, x critic input (a latent or a chunk), H target entropy, C_i aggregate over critics::

    temperature loss = - mean log alpha (log pi(u | s) + H)
    y                = r + discount (C_i Q_i_bar(s', x') - alpha log pi(u' | s'))
    critic loss      = 1/2 sum_i mean (Q_i(s, x) - y)^2
    actor loss       = mean (alpha log pi(u | s) - C_i Q_i(s, u))

in this order. alpha is the value before its step; the actor uses the critic after its step; the target copy
is updated last.

Source: SAC, arXiv 1812.05905; order of the steps: released code of DSRL; trained encoder: DrQ-v2 (arXiv
2107.09645), whose targets read the present encoder too.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from algos.base import AT_BOUND, Draws, Quantities
from algos.offpolicy.config import OffPolicyConfig
from algos.offpolicy.replay_buffer import ChunkBatch, Mixture
from algos.optim import (
    adam,
    descend,
    descend_along,
    load_parts,
    regress,
    restore_optimizer,
    save_parts,
    take_step,
    weights_of,
)
from algos.training.ranks import current
from policies.networks.critics import (
    Ensemble,
    Members,
    aggregate,
    aggregate_of,
    aggregate_with_slopes,
    polyak,
)
from policies.networks.distributions import Drawn
from policies.policy import Policy


class LatentActor(ABC):
    """Actor in training: samples latents of known log-density."""

    policy: Policy

    @property
    @abstractmethod
    def latent_dim(self) -> int: ...

    @property
    @abstractmethod
    def highest_entropy(self) -> float:
        """Maximum entropy [nats] of a latent that the actor can represent."""

    @abstractmethod
    def parameters(self) -> list[torch.nn.Parameter]: ...

    @abstractmethod
    def draw(self, cond: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents u (B, L) and their log-density (B,) from standard normals (B, L)."""

    def draw_without_graph(self, cond: Tensor, eps: Tensor, weights: Sequence[Tensor]) -> Drawn | None:
        """Return what `draw` does, with gradients that need no graph; None: only a graph gives them."""
        return None

    @abstractmethod
    def chunk(self, cond: Tensor, latent: Tensor) -> Tensor:
        """Return executed chunks, normalised and flat (B, A); no gradient."""

    @abstractmethod
    def warmup_latent(self, cond: Tensor, eps: Tensor) -> Tensor:
        """Return warm-up latents (B, L) from standard normals (B, L)."""

    def on_cpu(self) -> Self:
        """Return the actor on the CPU, for rollout workers."""
        actor = copy.copy(self)
        actor.policy = self.policy.on_cpu()
        return actor


class Temperature:
    """Entropy temperature alpha, stored as its logarithm and tuned towards the target entropy H."""

    def __init__(self, config: OffPolicyConfig, target_entropy: float, device: torch.device) -> None:
        self.target_entropy, learns = target_entropy, config.learn_alpha
        self.log = torch.tensor([config.init_alpha], device=device).log().requires_grad_(learns)
        self.optimizer = adam([self.log], config.alpha_lr) if learns else None

    @property
    def value(self) -> Tensor:
        """alpha, detached."""
        return self.log.detach().exp().squeeze(0)

    def update(self, log_prob: Tensor) -> Quantities:
        """Take a step on log-densities (B,), if alpha is learned; return log alpha times its slope."""
        if self.optimizer is None:
            return {}
        slope = -(log_prob.detach() + self.target_entropy).mean().to(self.log.dtype).reshape(1)
        loss = (self.log.detach() * slope).squeeze(0)
        current().mean_([slope])
        take_step(self.optimizer, [slope])
        return {"actor/alpha_loss": loss}

    def state_dict(self) -> dict[str, Any]:
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return {"log": self.log.detach().clone(), "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.log.copy_(state["log"])
        if self.optimizer is not None and state["optimizer"] is not None:
            restore_optimizer(self.optimizer, state["optimizer"])


class SacUpdate:
    """Actor, critics, temperature and their optimisers; takes one step on one batch.

    With `of_chunks`, the critic's input is the recorded chunk instead of the recorded latent. Weights of a
    trained `encoder` learn from the critic loss alone; the actor and the targets read its features.
    """

    def __init__(
        self,
        actor: LatentActor,
        critic: Ensemble,
        config: OffPolicyConfig,
        *,
        of_chunks: bool = False,
        encoder: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self.actor, self.critic, self.config, self._of_chunks = actor, critic, config, of_chunks
        self.policy: Policy = actor.policy
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)
        target = config.target_entropy_of(actor.latent_dim, actor.highest_entropy)
        self.temperature = Temperature(config, target, critic.weight[0].device)
        self.actor_optimizer = adam(actor.parameters(), config.actor_lr)
        self.encoder = list(encoder)
        groups: list[dict[str, Any]] = [{"params": list(critic.parameters())}]
        if encoder:
            rate = config.critic_lr if config.encoder_lr is None else config.encoder_lr
            groups.append({"params": self.encoder, "lr": rate})
        self.critic_optimizer = torch.optim.Adam(groups, lr=config.critic_lr, fused=True)

    def draw(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        device = self.critic.weight[0].device
        eps = torch.randn(2, n, self.actor.latent_dim, generator=generator, device=generator.device)
        order = torch.randperm(self.critic.members, generator=generator, device=generator.device)
        draws = {"eps": eps[0], "next_eps": eps[1], "subset": order[: self.config.subset]}
        return {name: drawn.to(device) for name, drawn in draws.items()}

    def step(self, batch: ChunkBatch, draws: Draws, *, updates_actor: bool = True) -> Quantities:
        """Update the critic and, with `updates_actor`, temperature and actor."""
        alpha = self.temperature.value  # of before its step
        if not updates_actor:
            metrics = self._update_critic(batch, draws, alpha)
        else:
            inputs, weights = (batch.cond.detach(), draws["eps"]), weights_of(self.actor_optimizer)
            drawn = self.actor.draw_without_graph(*inputs, weights) or Drawn(*self.actor.draw(*inputs), None)
            metrics = self.temperature.update(drawn.log_prob)
            metrics |= self._update_critic(batch, draws, alpha)
            metrics |= self._update_actor(batch, drawn, alpha, draws)
        polyak(self.target_critic, self.critic, self.config.tau)
        return metrics

    @torch.no_grad()
    def target(self, batch: ChunkBatch, draws: Draws, alpha: Tensor) -> Tensor:
        """Return y (B,) of the module docstring."""
        latent, log_prob = self.actor.draw(batch.next_cond, draws["next_eps"])
        values = partial(self.next_values, batch.next_cond, latent)
        value = aggregate_of(values, self.config.aggregate, **self._options(draws))
        if self.config.entropy_in_target:
            value = value - alpha * log_prob
        return torch.addcmul(batch.reward, batch.discount, value)

    def next_values(self, cond: Tensor, latent: Tensor, members: Members = None) -> Tensor:
        """Return the target critics' values (E, B) of latents (B, L)."""
        return self.target_critic(cond, latent, members=members)

    @property
    def climbed(self) -> Ensemble:
        """The critics, of latents, that the actor maximises."""
        return self.critic

    def climb(self, cond: Tensor, latent: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return C_i Q_i (B,) of latents (B, L), and its gradient (B, L), if possible without a graph."""
        evaluated = self.climbed.evaluate_along(cond, latent)
        if evaluated is not None:
            values, along = evaluated
            how, options = self.config.actor_aggregate, self._options(draws)
            value, slopes = aggregate_with_slopes(values, how, **options)
            return value, along(slopes)
        leaf = latent.detach().requires_grad_(True)
        values = self.climbed(cond, leaf, frozen=True)
        value = self._aggregated(values, self.config.actor_aggregate, draws)
        (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return value.detach(), slope

    def _aggregated(self, values: Tensor, how: str, draws: Draws) -> Tensor:
        return aggregate(values, how, **self._options(draws))

    def _options(self, draws: Draws) -> dict[str, Any]:
        return {"subset": draws["subset"], "pessimism": self.config.pessimism}

    def _update_critic(self, batch: ChunkBatch, draws: Draws, alpha: Tensor) -> Quantities:
        target = self.target(batch, draws, alpha)
        x = batch.action if self._of_chunks else batch.latent
        evaluation = self.critic.evaluate(batch.cond, x, weights_of(self.critic_optimizer))
        loss = regress(self.critic_optimizer, evaluation, target, weight=0.5)
        value = evaluation.values.mean()
        return {"critic/loss": loss, "critic/value": value, "critic/target": target.mean()}

    def _update_actor(self, batch: ChunkBatch, drawn: Drawn, alpha: Tensor, draws: Draws) -> Quantities:
        cond, (latent, log_prob, gradients) = batch.cond.detach(), drawn
        if gradients is None:
            values = self.climbed(cond, latent, frozen=True)
            value = self._aggregated(values, self.config.actor_aggregate, draws)
            loss = descend(self.actor_optimizer, (alpha * log_prob - value).mean())
        else:
            value, slope = self.climb(cond, latent, draws)
            loss, share = (alpha * log_prob - value).mean(), 1 / len(value)
            descend_along(self.actor_optimizer, gradients(-share * slope, (share * alpha).expand_as(value)))
        with torch.no_grad():
            return {
                "actor/loss": loss,
                "actor/alpha": alpha,
                "actor/entropy": -log_prob.mean(),
                "actor/latent_size": latent.square().mean().sqrt(),
                "actor/saturated_fraction": (latent.abs() > AT_BOUND).float().mean(),
            }

    def finish_round(
        self, count: int, size: int, source: Mixture, generator: torch.Generator
    ) -> list[Quantities]:
        """Run updates after a round of `count` steps, on `size` rows of `source` each; none by default."""
        return []

    _parts = ("policy", "critic", "target_critic", "temperature", "actor_optimizer", "critic_optimizer")

    def state_dict(self) -> dict[str, Any]:
        return save_parts(self, self._parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_parts(self, self._parts, state)
