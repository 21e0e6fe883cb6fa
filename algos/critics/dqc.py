"""Decoupled Q-chunking: a critic of long chunks, distilled into one of the short chunks that are executed.

Legend: as in `algos.critics.learner`; h steps of a long chunk, l <= h until the task ends, A the executed
numbers of it, P_i critic of executed chunks (logits), Q_i critic of long ones (logits), V value (logit),
[m, M] the range of values (`value_min`, `value_max`), sigma the sigmoid, kappa in (0, 1)::

    y       = clip((sum over j < l of gamma^j r_j + gamma^l (m + (M - m) sigma V(s')) - m) / (M - m), 0, 1)
    chunk   = mean -(y log sigma Q_i(s, a_{0:h}) + (1 - y) log(1 - sigma Q_i))
    distill = mean implicit(P_i(s, a_A) towards sigma Q_i(s, a_{0:h}), kappa_d)      member by member
    value   = mean implicit(V(s) towards C_i sigma P_i_bar(s, a_A), kappa_b)
    acting  = argmax over n of C_i P_i(s, a_n)

gamma^l is 0 after the task; `implicit` is `algos.critics.losses.implicit_loss`. Values carry rewards over h
steps, choices are made every `act_steps`. With kappa_d above a half P values an executed chunk by the better
of its continuations in the data. All losses use the networks of before the step.

Source: decoupled Q-chunking, released code; its settings, with m = 0 and M = 1. Deviations: tasks with
rewards, where the release relabels goals; a policy with goals sees them; one optimiser per network; chunks
that leave an episode are not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algos.base import Draws, Quantities
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner, choosing
from algos.critics.losses import bce, implicit_loss
from algos.optim import adam, descend
from algos.transitions import Batch
from policies.bounds import bounded
from policies.networks.critics import Ensemble, polyak
from policies.policy import Policy
from policies.registry import register

IMPLICIT = ("expectile", "quantile")


class DqcLearner(ChunkCriticLearner):
    """Critics of long and of executed chunks, V, and a policy that the latter choose from."""

    config: DqcConfig
    own_parts = ("chunk_critic", "value", "chunk_optimizer", "value_optimizer")

    def __init__(self, base: Policy, config: DqcConfig) -> None:
        super().__init__(base, config)
        cond_dim, width = base.encoder.cond_dim, config.critic_horizon * base.chunk.action_dim
        self.chunk_critic = self._placed(config.critic_config().build(cond_dim, width))
        self.value = self._placed(config.critic_config(members=1).build(cond_dim, 0))
        self.chunk_optimizer = adam(self.chunk_critic.parameters(), config.critic_lr)
        self.value_optimizer = adam(self.value.parameters(), config.critic_lr)
        wrapper = config.wrapper(num_candidates=config.num_candidates)
        self.policy = choosing(base, wrapper, self.critic)

    def _placed(self, net: Ensemble) -> Ensemble:
        return net.to(self.base.device, self.base.dtype)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def value_logit(self, cond: Tensor) -> Tensor:
        """Return V (B,) of conditions (B, C)."""
        return self.value(cond)[0]

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        """Return y (B,), a share of the range; beyond 0 and 1 it is yet to be clipped."""
        low, span = self.config.value_min, self.config.value_span
        following = low + span * self.value_logit(batch.next_cond).sigmoid()
        return (torch.addcmul(batch.reward, batch.discount, following) - low) / span

    def losses(self, batch: Batch, draws: Draws, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of critics of long and executed chunks and of V: chunks (B, h Da), y (B,)."""
        config, executed = self.config, batch.action[:, : self.base.chunk.width]
        with torch.no_grad():
            worth = self.aggregated(self.target_critic(batch.cond, executed).sigmoid(), draws["subset"])
        logit = self.chunk_critic(batch.cond, batch.action)
        partial, taught = self.critic(batch.cond, executed), logit.detach().sigmoid()
        distill = implicit_loss(partial, taught, config.distill_loss, config.distill_expectile)
        value = implicit_loss(self.value_logit(batch.cond), worth, config.value_loss, config.value_expectile)
        return {"chunk": bce(logit, y.clamp(0, 1)).mean(), "distill": distill.mean(), "value": value.mean()}

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        updates_actor = self.updates_actor
        self.steps += 1
        with torch.no_grad():
            y = self.target(batch, draws)
        losses = self.losses(batch, draws, y)
        polyak(self.target_critic, self.critic, self.config.tau)
        optimizers = (self.chunk_optimizer, self.critic_optimizer, self.value_optimizer)
        pairs = zip(optimizers, losses.values(), strict=True)
        chunk, distill, value = (descend(optimizer, loss) for optimizer, loss in pairs)
        found = {"critic/loss": chunk, "critic/distillation": distill, "value/loss": value}
        found["critic/clipped_fraction"] = ((y < 0) | (y > 1)).float().mean()
        return found | (self.update_base(batch, draws) if updates_actor else {})

    def probed(self, cond: Tensor, action: Tensor) -> Tensor:
        """Return values (E, B) of long chunks (B, h Da), in units of rewards."""
        return self.config.value_min + self.config.value_span * self.chunk_critic(cond, action).sigmoid()


@register("algo", "dqc")
@dataclass
class DqcConfig(ChunkCriticConfig):
    """Decoupled Q-chunking: long backups, short choices.

    Published expectiles, of values and distillation: 0.93 and 0.8 for cubes, 0.7 to 0.9 and 0.5 for puzzles,
    0.5 and 0.8 for humanoid mazes; chunks of 25 steps, of which 5 or 1 are executed; critics of 1024.

    Source:
        Decoupled Q-chunking, settings of its released code.
    """

    gamma: float = bounded(0.999, ge=0, le=1)  # discount per environment step
    critic_horizon: int = bounded(25, ge=1)  # h, steps of the long chunks
    distill_loss: str = bounded("expectile", choices=IMPLICIT)  # of the critic of executed chunks
    distill_expectile: float = bounded(0.8, gt=0, lt=1)  # kappa_d, of its loss
    value_loss: str = bounded("quantile", choices=IMPLICIT)  # of V
    value_expectile: float = bounded(0.9, gt=0, lt=1)  # kappa_b, of the loss of V
    num_candidates: int = bounded(32, ge=1)  # N, chunks to choose from

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("critic_bins", not self.critic_bins, "0: these critics are a logit in their range")

    def unused(self) -> dict[str, str]:
        bounds = ("value_min", "value_max")  # of the logit
        return {name: why for name, why in super().unused().items() if name not in bounds}

    @property
    def value_span(self) -> float:
        return self.value_max - self.value_min

    def backup_steps(self, policy: Policy) -> int:
        return self.critic_horizon

    def resume_invariants(self) -> dict[str, Any]:
        names = ("critic_horizon", "value_min", "value_max")
        return super().resume_invariants() | {f"algo.{name}": getattr(self, name) for name in names}

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        steps = policy.chunk.act_steps
        self.require("critic_horizon", self.critic_horizon >= steps, f"at least policy.act_steps={steps}")
        is_whole = not self.online_steps or self.critic_horizon % steps == 0
        rule = f"a multiple of policy.act_steps={steps} with algo.online_steps"
        self.require("critic_horizon", is_whole, rule)

    def learner_of(self, policy: Policy, seed: int) -> DqcLearner:
        return DqcLearner(policy, self)
