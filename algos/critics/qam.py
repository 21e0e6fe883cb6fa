"""Adjoint matching with a critic: a flow follows action gradients of values without unrolling its sampler.

Legend: as in `algos.critics.learner`; K steps, h = 1 / K, t_k = k h, x_k a state (B, Th, Da), v velocity of
the tuned flow, v_b that of the base (a target copy of the cloned policy), eps standard normals, tau_Q the
inverse temperature, c = 1 the bound of actions, J_k the derivative of the drift by x::

    sigma_k^2 = 2 (1 - t_k + h) / (t_k + h)
    x_{k+1}   = x_k + h (2 v(s, x_k, t_k) - x_k / (t_k + h)) + sqrt(h) sigma_k eps_k     k < K - 1
    x_K       = x_{K-1} + h v_b(s, x_{K-1}, t_{K-1})
    b_K       = - tau_Q grad_x mean_i Q_i_bar(s, clip x_K)
    b_k       = b_{k+1} + h J_k^T b_{k+1},    drift 2 v_b(s, x, t_k + h) - x / (t_k + h) at x = x_k
    loss      = mean over rows of sum over k of | (2 / sigma_k) (v - v_b)(s, x_k, t_k) + sigma_k b_k |^2
    y         = r + discount C_i Q_i_bar(s', a'),     a' the best of N chunks by mean_i Q_i

The loss differentiates v alone, the adjoint b the base alone. Its fixed point samples in proportion to
p_b(a | s) exp(tau_Q Q(s, a)), up to the steps' size. Coordinates beyond c have no gradient of Q.

Source: Q-learning with adjoint matching (QAM), released code. Deviations: the tuned flow starts as the cloned
policy; start and steps have different noise; a network has an optimiser of its own, and `max_grad_norm`
bounds the gradient of the flow alone; the variant with edits is `algo=qam_edit`, that with a student
`algo=qam_fql`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from algos.base import Draws, Quantities
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner, choosing
from algos.onpolicy.requirements import algorithms_for, has_straight_paths
from algos.onpolicy.samplers import on_even_times
from algos.optim import adam, average_gradients, weights_of
from algos.transitions import Batch
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError
from policies.networks.critics import AGGREGATES, polyak
from policies.policy import Policy
from policies.protocols import Cond
from policies.registry import name_of, register


def has_even_steps(policy: Any) -> bool:
    """Whether the policy's sampler goes from noise to action in K equal steps."""
    steps = policy.table.num_steps
    return all(abs(t - k / steps) < 1e-6 for k, t in enumerate(policy.table.times))


class QamLearner(ChunkCriticLearner):
    """A cloned flow, its tuned copy, critics."""

    is_recordable: ClassVar[bool] = False  # its flow is stepped with gradients that are set by hand

    config: QamConfig
    critic_first = False
    own_parts: ClassVar[tuple[str, ...]] = ("base", "target_base", "actor_optimizer")
    row_axes: ClassVar[Mapping[str, int | None]] = {**ChunkCriticLearner.row_axes, "chain": 1}

    def __init__(self, base: DenoisingPolicy, config: QamConfig) -> None:
        super().__init__(base, config)
        self.target_base = copy.deepcopy(base).requires_grad_(False)
        self.tuned = base.with_sampler(on_even_times(base.sampler)).clone().requires_grad_(True)
        cast(nn.Module, self.tuned.encoder).requires_grad_(False)
        self.policy: Policy = self.around(self.tuned)
        self.actor_optimizer = adam(self.tuned.parameters(), config.actor_lr)
        steps = base.table.num_steps
        t = torch.arange(steps, dtype=torch.float64) / steps
        self.h = 1 / steps
        self.sigma = (2 * (1 - t + self.h) / (t + self.h)).sqrt().to(base._like)

    def around(self, tuned: DenoisingPolicy) -> Policy:
        """Return the policy that acts: the tuned flow, or the best of its chunks."""
        if self.config.num_candidates == 1:
            return tuned
        wrapper = self.config.wrapper(num_candidates=self.config.num_candidates, aggregate="mean")
        return choosing(tuned, wrapper, self.critic)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = super().draw_values(n, generator)
        if self.updates_actor:
            noise = self.tuned.sample_noise(n * len(self.sigma), generator=generator)
            draws["chain"] = noise.unflatten(0, (len(self.sigma), n))  # the start, then one draw per step
        return draws

    # -- adjoint matching -----------------------------------------------------------------------------

    @torch.no_grad()
    def chain(self, cond: Cond, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states (K, B, Th, Da) before each step and the chunk x_K, for noise (K, B, Th, Da)."""
        h, x, states = self.h, noise[0], [noise[0]]
        for k, eps in enumerate(noise[1:]):
            drift = 2 * self._velocity(self.tuned, x, k * h, cond) - x / ((k + 1) * h)
            x = x + h * drift + math.sqrt(h) * self.sigma[k] * eps
            states.append(x)
        return torch.stack(states), x + h * self._velocity(self.target_base, x, 1 - h, cond)

    def adjoints(self, cond: Cond, states: Tensor, chunk: Tensor) -> Tensor:
        """Return b_0 ... b_{K-1} (K, B, Th, Da) of states before each step and the chunk after the last.

        The derivative of the drift gives J_k^T b = 2 (dv_b / dx)^T b - b / (t_k + h).
        """
        tau = self.config.inverse_temperature
        adjoint, adjoints, h = -tau * self.value_gradient(cond, chunk), [], self.h
        for k in reversed(range(len(states))):
            x = states[k].detach().requires_grad_(True)
            velocity = self._velocity(self.target_base, x, (k + 1) * h, cond)
            vjp = torch.autograd.grad(velocity, x, adjoint)[0]
            adjoint = adjoint + h * (2 * vjp - adjoint / ((k + 1) * h))
            adjoints.append(adjoint)
        return torch.stack(adjoints[::-1])

    def value_gradient(self, cond: Cond, chunk: Tensor) -> Tensor:
        """Return the gradient (B, Th, Da) of the mean value by a chunk; 0 in rows that are not executed."""
        chunk = chunk.detach().requires_grad_(True)
        action = chunk[:, self.tuned.chunk.executed].flatten(1)
        action = action.clamp(-1, 1) if self.config.clip_gradient else action
        critic = self.target_critic if self.config.target_gradient else self.critic
        return torch.autograd.grad(critic(cond.vec, action, frozen=True).mean(dim=0).sum(), chunk)[0]

    def difference(self, cond: Cond, states: Tensor) -> Tensor:
        """Return v - v_b (K, B, Th, Da) at states before each step."""
        steps, rows = states.shape[:2]
        x, repeated = states.flatten(0, 1), Cond.concatenated([cond] * steps)
        t = (torch.arange(steps, device=x.device) * self.h).to(x).repeat_interleave(rows)
        base = self.target_base.predict(x, t, repeated, kind="velocity")  # frozen: no graph
        # computed alike, so that equal weights differ by 0 and not by rounding, which Adam would enlarge
        return (self.tuned.predict(x, t, repeated, kind="velocity") - base).unflatten(0, (steps, rows))

    def matching_sum(self, difference: Tensor, adjoint: Tensor) -> Tensor:
        """Return the loss of v - v_b and b, each (K, B, Th, Da)."""
        sigma = self.loss_sigma[:, None, None, None]
        return ((2 / sigma) * difference + sigma * adjoint).square().sum(dim=(0, 2, 3)).mean()

    @property
    def loss_sigma(self) -> Tensor:
        """The sigma (K,) of the loss."""
        return self.sigma

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        cond = self.base.condition(batch.cond)
        states, chunk = self.chain(cond, draws["chain"])
        adjoint, difference = self.adjoints(cond, states, chunk), self.difference(cond, states)
        loss = self.matching_sum(difference, adjoint)
        self.actor_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average_gradients(self.actor_optimizer)
        metrics = {"actor/loss": loss.detach(), "actor/adjoint": adjoint[-1].abs().mean()}
        if self.config.max_grad_norm is not None:
            trained, limit = weights_of(self.actor_optimizer), self.config.max_grad_norm
            metrics["actor/grad_norm"] = nn.utils.clip_grad_norm_(trained, limit, foreach=True)
        self.actor_optimizer.step()
        outside = chunk[:, self.tuned.chunk.executed].abs() > 1
        metrics |= {"actor/clipped_fraction": outside.float().mean()}
        return metrics | self.measured(difference.detach())

    def measured(self, difference: Tensor) -> Quantities:
        """Return metrics of v - v_b (K, B, Th, Da)."""
        weight = (2 * self.h / self.sigma.square())[:, None, None, None]
        return {"actor/path_kl": (weight * difference.square()).sum(dim=(0, 2, 3)).mean()}

    def update_base(self, batch: Batch, draws: Draws) -> Quantities:
        polyak(self.target_base, self.base, self.config.tau)
        return super().update_base(batch, draws)

    def _velocity(self, policy: DenoisingPolicy, x: Tensor, t: float, cond: Cond) -> Tensor:
        return policy.predict(x, x.new_full((len(x),), t), cond, kind="velocity")


@register("algo", "qam")
@dataclass
class QamConfig(ChunkCriticConfig):
    """Adjoint matching with the action gradient of critics.

    Published inverse temperatures: 0.1 to 30, by task; critics' deviations subtracted: 0.5, humanoid 0.

    Source:
        QAM, released code.
    """

    has_actor: ClassVar[bool] = True
    may_keep: ClassVar[bool] = False  # what has no matching loss has no velocity either

    critics: int = bounded(10, ge=1)  # E, size of the critic ensemble
    aggregate: str = bounded("mean_std", choices=AGGREGATES)  # reduction over critics in targets
    num_candidates: int = bounded(1, ge=1)  # N, chunks to choose from
    inverse_temperature: float = bounded(1.0, ge=0)  # tau_Q, weight of values against the cloned policy
    clip_gradient: bool = True  # no value gradient in coordinates beyond the action bounds
    target_gradient: bool = True  # value gradients of the target critics; false: of the critics
    max_grad_norm: float | None = bounded(1.0, gt=0)  # gradient clipping of the flow; null: off

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        is_flow = isinstance(policy, DenoisingPolicy) and has_straight_paths(policy)
        if not (is_flow and has_even_steps(policy)):
            process = name_of("process", policy.config.process)
            raise CapabilityError(
                f"algo={algo} matches velocities along straight paths at even steps, and this "
                f"{type(policy).__name__} (process={process}, sampler="
                f"{type(getattr(policy, 'sampler', None)).__name__}) has none. Use process=flow with "
                f"sampler=euler, or "
                f"{algorithms_for(policy)}."
            )

    def learner_of(self, policy: Policy, seed: int) -> QamLearner:
        assert isinstance(policy, DenoisingPolicy)
        return QamLearner(policy, self)
