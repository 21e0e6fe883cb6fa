"""FamO2O: a family of policies, one for every balance between value and data, and a model that chooses.

Legend: as in `algos.critics.learner` and `policies.wrappers.balance`; beta coefficient, kappa expectile, u
advantage, c the choice of the balance model pi_b, alpha its temperature, H = -1/2::

    V loss      = mean |kappa - 1[u < 0]| u^2,   u = min Q_bar(s, a) - V(s)
    balance     = mean (alpha log pi_b(c | s) - min Q_bar(s, pi(s, beta_c)))     the policy stays
    temperature = alpha mean (-log pi_b - H)
    policy      = mean min(exp(beta u), 100) matching loss at (s, beta)          u by the new V
    y           = r + discount V(s')

beta of the policy's loss is drawn uniformly from its range on data, and from the balance model of before its
step in the task. Order: V, balance, temperature, policy, Q, target copies.

Source: FamO2O, released code, its IQL form. Deviations: every row is weighted by its own coefficient, where
the release multiplies (B,) by (B, 1) and weighs each row by the mean over all coefficients of the batch, so
that the family is not conditioned; the draws of c and of actions are independent, where the release uses one
for both; the matching loss of any policy takes the place of the density of a normal distribution, which acts
by its mean here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from algos.base import Draws, Quantities, Setup, goal_dim_of
from algos.cloning.recap import with_goal
from algos.critics.idql import ValueLearner, exponential_weight
from algos.critics.learner import ChunkCriticConfig
from algos.critics.losses import value_loss
from algos.offline.config import Statistics
from algos.optim import adam, descend
from algos.training.observations import encoder_module
from algos.transitions import Batch
from envs.datasets.episodes import EpisodeDataset
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.policy import Policy
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_weights
from policies.wrappers.balance import EMBEDDED, Balance, BalancedPolicy

_TARGET_ENTROPY = -0.5


class Famo2oLearner(ValueLearner):
    """Q, V, a policy with a coefficient, and the model that chooses it."""

    config: Famo2oConfig
    own_parts = (*ValueLearner.own_parts, "balance_optimizer", "alpha_optimizer")
    own_values = ("log_alpha",)

    def __init__(self, policy: BalancedPolicy, config: Famo2oConfig) -> None:
        super().__init__(policy.base, config)
        self.policy: BalancedPolicy = policy
        self.log_alpha = torch.tensor([config.init_alpha], device=policy.device).log().requires_grad_()
        self.balance_optimizer = adam([*policy.chooser.parameters(), policy.log_std], config.actor_lr)
        self.alpha_optimizer = adam([self.log_alpha], config.actor_lr)

    def draw_values(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        if not self.updates_actor:
            return {}
        device, found = self.base.device, {"acting": self.base.sample_noise(n, generator=generator)}
        for name in ("choice", "coefficient"):
            found[name] = torch.randn(n, 1, generator=generator, device=generator.device).to(device)
        return found | {"uniform": torch.rand(n, generator=generator, device=generator.device).to(device)}

    def coefficients(self, batch: Batch, draws: Draws) -> Tensor:
        """Return the coefficients (B,) of the policy's loss."""
        with torch.no_grad():
            chosen = self.policy.drawn(batch.cond, draws["coefficient"])[0]
            uniform = self.policy.scaled(2 * draws["uniform"] - 1)
            return torch.where((batch.row < 0).any(), chosen, uniform)

    def balance_loss(self, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of the balance model, log pi_b (B,) and the coefficients (B,).

        The gradient passes through the decoded chunk to one number per row.
        """
        coefficient, log_prob = self.policy.drawn(batch.cond, draws["choice"])
        leaf = coefficient.detach().requires_grad_(True)
        action = self.chunk(self.base, self.policy.at(batch.cond, leaf), draws["acting"], grad=True)
        worth = self.worth(batch.cond, action)
        slope = torch.autograd.grad(worth.sum(), leaf)[0]
        value = worth.detach() + slope * (coefficient - leaf.detach())
        return (self.log_alpha.detach().exp() * log_prob - value).mean(), log_prob.detach(), leaf.detach()

    def temperature_loss(self, log_prob: Tensor) -> Tensor:
        """Return alpha mean (-log pi_b - H) for log-densities (B,)."""
        return (self.log_alpha.exp() * (-log_prob - _TARGET_ENTROPY)).mean()

    def step(self, batch: Batch, draws: Draws) -> Quantities:
        updates_actor, u = self.updates_actor, self.advantage(batch)
        out: Quantities = {"actor/advantage": u.detach().mean()}
        out["value/loss"] = descend(self.value_optimizer, value_loss(u, "expectile", self.config.expectile))
        if updates_actor:
            coefficient = self.coefficients(batch, draws)
            out |= self.update_balance(batch, draws)
            with torch.no_grad():
                weight = exponential_weight(self.advantage(batch), coefficient)
            at = replace(batch, cond=self.policy.at(batch.cond, coefficient))
            out |= self.update_base(at, draws, weight)
        return out | super().step(batch, draws)

    def update_balance(self, batch: Batch, draws: Draws) -> Quantities:
        """Take one step of the balance model and its temperature."""
        alpha = self.log_alpha.detach().exp().squeeze(0)
        loss, log_prob, coefficient = self.balance_loss(batch, draws)
        descend(self.balance_optimizer, loss)
        descend(self.alpha_optimizer, self.temperature_loss(log_prob))
        found = {"balance/loss": loss.detach(), "balance/entropy": -log_prob.mean(), "balance/alpha": alpha}
        return found | {"balance/coefficient": coefficient.mean()}


@register("algo", "famo2o")
@dataclass
class Famo2oConfig(ChunkCriticConfig):
    """FamO2O: policies for a range of advantage temperatures, chosen by state.

    Published ranges: 8 to 14 for antmaze, 1 to 5 elsewhere; one million gradient steps, then as many control
    steps.

    Source:
        FamO2O, released code, its IQL form.
    """

    needs_noise: ClassVar[bool] = False
    may_keep: ClassVar[bool] = False
    reduces: ClassVar[bool] = False

    critic_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # hidden widths of a critic
    critic_activation: str = "relu"
    critic_layer_norm: bool = False  # layer normalisation in the critics
    expectile: float = bounded(0.9, gt=0, lt=1)  # kappa
    min_coefficient: float = bounded(1.0, ge=0)  # smallest inverse temperature of the advantage weights
    max_coefficient: float = bounded(5.0, ge=0)  # largest of them
    balance_dims: tuple[int, ...] = bounded((256, 256), ge=1, some=True)  # widths of the balance model; ReLU
    init_alpha: float = bounded(1.0, gt=0)  # initial temperature of the balance model

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"at least algo.min_coefficient={self.min_coefficient}"
        self.require("max_coefficient", self.max_coefficient >= self.min_coefficient, rule)
        self.require("refit", self.refit, "true")

    def initial_policy(self, setup: Setup, dataset: EpisodeDataset, statistics: Statistics) -> Policy:
        """Return a copy of `init`, or a new policy, with a coefficient that has no effect yet."""
        if goal_dim_of(setup, dataset):
            raise ConfigError(
                f"algo={name_of('algo', self)} puts a coefficient where goals are; got a policy or task with "
                "a goal."
            )
        plain = super().initial_policy(setup, dataset, statistics)
        wrapper = Balance(self.min_coefficient, self.max_coefficient, self.balance_dims)
        with seeded_weights(derive_seed(setup.seed, "balance")):
            policy = wrapper.wrap(with_goal(plain, EMBEDDED)).to(setup.device).eval()
        encoder_module(policy).requires_grad_(False)
        return policy

    def learner_of(self, policy: Policy, seed: int) -> Famo2oLearner:
        assert isinstance(policy, BalancedPolicy)
        return Famo2oLearner(policy, self)
