"""A squashed Gaussian that edits the chunks of a policy, and its temperature; for EXPO, residuals, QAM-E.

Legend: as in `policies.wrappers.candidates` and `algos.critics.learner`; beta scale of edits, A = Ta Da,
alpha temperature, H target entropy, both of scaled edits beta u::

    log pi_beta(u) = log pi(u) - A log beta
    edit           = mean (alpha log pi_beta(u) - C_i Q_i(s, a + beta u)),       u ~ pi(. | s, a)
    temperature    = alpha mean (-log pi_beta(u) - H)

Entropy is that of numbers in the unit box shifted by A log beta, so H must lie below A (0.6836 + log beta):
higher targets are refused, because alpha would grow without end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import AT_BOUND, Draws, Quantities
from algos.critics.learner import ChunkCriticConfig, ChunkCriticLearner
from algos.onpolicy.requirements import algorithms_for
from algos.optim import adam, descend
from algos.transitions import Batch
from policies.bounds import bounded
from policies.errors import CapabilityError
from policies.networks.distributions import highest_entropy
from policies.policy import Policy
from policies.wrappers.candidates import CandidatePolicy, Candidates, ranked, select

EDITED = ("data", "policy")


@dataclass
class EditConfig(ChunkCriticConfig):
    """Settings shared by algorithms that edit actions."""

    has_actor: ClassVar[bool] = True

    edit_scale: float = bounded(0.1, ge=0)  # beta, in normalised action units
    edit_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)  # widths of the edits; ReLU
    edit_init_std: float | None = bounded(None, gt=0)  # initial std of unscaled edits, mean 0; null: about 1
    edit_bound: float | None = bounded(1.0, gt=0)  # edited actions stay within ± this; null: unbounded
    edits_at: str = bounded("policy", choices=EDITED)  # whose actions edits are trained at
    actor_aggregate: str = bounded("mean", choices=("mean", "min", "mean_std"))  # reduction in their loss
    stochastic: bool = True  # the exported policy samples its edits; false: it uses their means
    target_entropy: float | None = bounded(None, ge=-math.inf)  # H of scaled edits; null: of half the box
    init_alpha: float = bounded(1.0, gt=0)  # initial temperature
    learn_alpha: bool = True  # tune the temperature towards the target entropy
    alpha_lr: float = bounded(3e-4, gt=0)  # Adam, of the log temperature

    def unused(self) -> dict[str, str]:
        names = ("target_entropy", "alpha_lr")
        kept = {} if self.learn_alpha else dict.fromkeys(names, "without algo.learn_alpha")
        return super().unused() | kept

    def target_entropy_of(self, width: int) -> float:
        """Return H of edits of `width` numbers; ConfigError if no edit reaches it.

        The default, -width / 2 in the unit box, scales with the edits: -width / 2 + width log beta.
        """
        shift = math.log(self.edit_scale) if self.edit_scale else 0.0
        target = width * (shift - 0.5) if self.target_entropy is None else self.target_entropy
        highest = width * (highest_entropy() + shift)
        rule = f"below {highest:.4g}, the largest entropy of {width} edits of scale {self.edit_scale:g}"
        self.require("target_entropy", not self.learn_alpha or target < highest, rule)
        return target

    def wrapper(self, **values: Any) -> Candidates:
        edits = {name: getattr(self, name) for name in ("edit_scale", "edit_dims", "stochastic")}
        return super().wrapper(bound=self.edit_bound, **edits, **values)

    def require_policy(self, policy: Policy, algo: str) -> None:
        super().require_policy(policy, algo)
        width = policy.chunk.width
        if math.prod(policy.noise_shape) < width:
            raise CapabilityError(
                f"algo={algo} takes the noise of edits from that of the policy, {width} numbers; this one "
                f"has {math.prod(policy.noise_shape)}. Use {algorithms_for(policy)} for this policy."
            )


class Edits(ChunkCriticLearner):
    """The part of a learner that trains the edit actor inside its policy, from the policy's inner chunks."""

    config: EditConfig
    policy: CandidatePolicy
    edit_parts: ClassVar[tuple[str, ...]] = ("edit_optimizer", "alpha_optimizer")
    own_values = ("log_alpha",)

    def begin_edits(self, policy: CandidatePolicy) -> None:
        """Take the policy whose edits are trained."""
        config = self.config
        assert policy.editor is not None
        if config.edit_init_std is not None:
            policy.editor.start_at(config.edit_init_std)
        self.policy, self.acting = policy, policy.sampling_edits()
        self.target_entropy = config.target_entropy_of(policy.width)
        self.log_alpha = torch.tensor([config.init_alpha], device=policy.device).log().requires_grad_()
        self.edit_optimizer = adam(policy.editor.parameters(), config.actor_lr)
        self.alpha_optimizer = adam([self.log_alpha], config.alpha_lr)

    def edit_draws(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers of an update of the edits for n rows."""
        eps = torch.randn(n, self.policy.width, generator=generator, device=generator.device)
        draws = {"edit": eps.to(self.base.device)}
        if self.config.edits_at == "policy":
            draws["edit_start"] = self.policy.base.sample_noise(n, generator=generator)
        return draws

    def edit_loss(self, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of the edit actor, log pi_beta (B,), and the edits u (B, A)."""
        action = batch.action
        if self.config.edits_at == "policy":
            action = self.chunk(self.policy.base, batch.cond, draws["edit_start"]).detach()
        u, log_prob = self.policy.edits(batch.cond, action, draws["edit"])
        log_prob = log_prob - self.policy.width * self.log_scale
        values = self.critic(batch.cond, self.policy.edited(action, u), frozen=True)
        worth = self.aggregated(values, draws["subset"], self.config.actor_aggregate)
        return (self.alpha * log_prob - worth).mean(), log_prob, u

    @property
    def log_scale(self) -> float:
        return math.log(self.config.edit_scale) if self.config.edit_scale else 0.0

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha.detach().exp().squeeze(0)

    def temperature_loss(self, log_prob: Tensor) -> Tensor:
        """Return alpha mean (-log pi_beta - H) for log-densities (B,)."""
        return (self.log_alpha.exp() * (-log_prob.detach() - self.target_entropy)).mean()

    def update_edits(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of edits and temperature."""
        alpha = self.alpha
        loss, log_prob, u = self.edit_loss(batch, draws)
        descend(self.edit_optimizer, loss)
        if self.config.learn_alpha:
            descend(self.alpha_optimizer, self.temperature_loss(log_prob))
        with torch.no_grad():
            return {
                "actor/loss": loss.detach(),
                "actor/alpha": alpha,
                "actor/entropy": -log_prob.mean(),
                "actor/edit_size": (self.policy.scale * u).square().mean().sqrt(),
                "actor/saturated_fraction": (u.abs() > AT_BOUND).float().mean(),
            }


class EditLearner(Edits):
    """Critics, and an edit actor inside the policy that is otherwise cloned or stays."""

    moves_first = False
    own_parts = Edits.edit_parts

    def __init__(self, base: Policy, policy: CandidatePolicy, config: EditConfig) -> None:
        super().__init__(base, config)
        self.begin_edits(policy)
        if policy.critic is not None:
            policy.critic = self.acting.critic = self.target_critic

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        draws = super().draw_values(n, generator)
        draws["choosing"] = self.draw_subset(generator)
        return draws | (self.edit_draws(n, generator) if self.updates_actor else {})

    def target(self, batch: Batch, draws: Draws) -> Tensor:
        """Return y (B,): the best candidate by one subset of target critics, valued by another."""
        cond = self.base.condition(batch.next_cond)
        actions = self.acting.candidates(cond, draws["next"])[1]
        if actions.shape[1] == 1:
            return self.backup(batch, actions[:, 0], draws)
        worth = self.aggregated_of(
            partial(ranked, self.target_critic, batch.next_cond, actions), draws["choosing"]
        )
        return self.backup(batch, select(actions, worth), draws)

    def update_actor(self, batch: Batch, draws: Draws) -> Quantities:
        return self.update_edits(batch, draws)
