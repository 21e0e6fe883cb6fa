"""What all on-policy algorithms are told: budgets, advantages, updates, optimisers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup
from algos.onpolicy.functional import SURROGATES
from algos.onpolicy.running_normalizer import fresh_policy
from algos.optim import check_schedule
from policies.bounds import Checked
from policies.errors import ConfigError
from policies.networks.heads import CriticConfig
from policies.policy import Policy


@dataclass
class OnPolicyConfig(Checked):
    """Settings of every algorithm that collects with the policy in training and takes clipped steps.

    Rates, discounts and clip ranges are dimensionless; a step is a chunk step (Ta environment steps).
    """

    takes_dataset: ClassVar[bool] = False  # experience comes from the environment

    # budget
    num_envs: int = 40  # environments side by side
    steps_per_iteration: int = 500  # chunk steps of every environment
    iterations: int = 1000  # of collecting and updating
    env_steps: int | None = None  # executed control steps, up to whole iterations; replaces `iterations`
    reset_each_iteration: bool = False  # start every iteration from fresh episodes
    # advantages
    gamma: float = 0.99  # discount per chunk step
    gae_lambda: float = 0.95  # weight of longer sums in advantages
    reward_scaling: bool = True  # divide rewards by the running deviation of the discounted return
    reward_scale_gamma: float = 0.99  # discount of that return, whatever `gamma` is
    reward_scale_clip: float = 10.0  # largest absolute scaled reward
    reward_scale_const: float = 1.0  # factor after scaling
    normalize_advantage: bool = True  # over the minibatch
    advantage_quantiles: tuple[float, float] = (0.0, 1.0)  # clip normalised advantages to these quantiles
    # update
    batch_size: int = 5000  # rows of a minibatch; a row is one (environment step, inner step)
    update_epochs: int = 5  # passes over the rows of an iteration
    surrogate: str = "ppo"  # ppo | spo | aspo: how a ratio is kept near 1
    clip_range: float = 0.01  # of the ratio, at the last inner step
    target_kl: float | None = 1.0  # stop the iteration's updates above this KL estimate
    value_clip: float | None = None  # largest change of a value per iteration
    vf_coef: float = 0.5  # weight of the value loss (itself half the squared error)
    entropy_coef: float = 0.0  # weight of the entropy, for a Gaussian only
    critic_warmup_iterations: int = 0  # iterations that train the critic only
    max_grad_norm: float | None = None  # of the actor
    bc_weight: float = 0.0  # weight of staying near the initial policy
    bc_rows: int | None = None  # rows of a minibatch used for that term; None: all
    # optimisers
    actor_lr: float = 1e-4  # AdamW, highest rate
    actor_min_lr: float | None = None  # rate at the ends of a cycle; None: constant
    actor_lr_warmup: int = 10  # iterations of linear rise
    actor_lr_cycle: int = 1000  # iterations of a cosine cycle
    actor_weight_decay: float = 0.0  # of AdamW
    critic_lr: float = 1e-3  # AdamW, highest rate
    critic_min_lr: float | None = None  # rate at the ends of a cycle; None: constant
    critic_lr_warmup: int = 10  # iterations of linear rise
    critic_lr_cycle: int = 1000  # iterations of a cosine cycle
    critic_weight_decay: float = 0.0  # of AdamW
    critic: CriticConfig = field(default_factory=CriticConfig)
    # execution
    chunk_rows: int = 2048  # rows per gradient task on a CPU; speed only
    paper_compat: bool = False  # ignore truncation in advantages, allow min_lr > lr, as the reference does

    def __post_init__(self) -> None:
        """Check the values."""
        for name in (
            "num_envs",
            "steps_per_iteration",
            "iterations",
            "batch_size",
            "update_epochs",
            "chunk_rows",
        ):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("gamma", "gae_lambda", "reward_scale_gamma"):
            self.require(name, 0.0 <= getattr(self, name) <= 1.0, "in [0, 1]")
        for name in ("env_steps", "target_kl", "value_clip", "max_grad_norm", "bc_rows"):
            self.require(name, getattr(self, name) is None or getattr(self, name) > 0, "positive, or empty")
        for name in (
            "vf_coef",
            "bc_weight",
            "critic_warmup_iterations",
            "actor_weight_decay",
            "critic_weight_decay",
        ):
            self.require(name, 0 <= getattr(self, name) < math.inf, "at least 0 and finite")
        for name in ("clip_range", "reward_scale_const", "actor_lr", "critic_lr"):
            self.require(name, 0 < getattr(self, name) < math.inf, "positive and finite")
        self.require("reward_scale_clip", self.reward_scale_clip > 0, "positive")
        self.require("entropy_coef", math.isfinite(self.entropy_coef), "finite")
        self.require("surrogate", self.surrogate in SURROGATES, f"one of {', '.join(SURROGATES)}")
        self.require(
            "batch_size",
            self.batch_size > 1 or not self.normalize_advantage,
            "at least 2 with algo.normalize_advantage=true, for one advantage normalises to 0",
        )
        self._check_ranges()
        for who in ("actor", "critic"):
            check_schedule(who, **self.schedule(who), may_rise=self.paper_compat)

    def _check_ranges(self) -> None:
        """Check the pairs of numbers, and the learning rates that may be empty."""
        quantiles = self.advantage_quantiles
        self.require(
            "advantage_quantiles",
            rising(quantiles) and quantiles[0] >= 0.0 and quantiles[1] <= 1.0,
            "two rising numbers in [0, 1]",
        )
        for name in ("actor_min_lr", "critic_min_lr"):
            low = getattr(self, name)
            self.require(name, low is None or 0 <= low < math.inf, "at least 0 and finite, or empty")

    def schedule(self, who: str) -> dict[str, Any]:
        """Return the learning-rate schedule of `actor` or `critic`, as arguments of `warmup_cosine`."""
        lr, low = getattr(self, f"{who}_lr"), getattr(self, f"{who}_min_lr")
        warmup, cycle = getattr(self, f"{who}_lr_warmup"), getattr(self, f"{who}_lr_cycle")
        return {"lr": lr, "min_lr": lr if low is None else low, "warmup": warmup, "cycle": cycle}

    def clip_range_of(self, inner_steps: int) -> Tensor:
        """Return the clip range of each inner step, (S,)."""
        return torch.full((inner_steps,), self.clip_range)

    def discount_of(self, inner_steps: int) -> Tensor:
        """Return the factor of the advantage at each inner step, (S,)."""
        return torch.ones(inner_steps)

    def frozen(self, setup: Setup, init: Policy) -> Any:
        """Return the policy to stay near, or None without that term."""
        return init.clone().to(setup.device).requires_grad_(False) if self.bc_weight else None

    def fresh(self, setup: Setup, algo: str) -> Policy:
        """Return the policy to start from where none is given."""
        if self.bc_weight:
            raise ConfigError(
                f"algo.bc_weight={self.bc_weight} keeps a policy near the one of init, and there is none. "
                "Give init=<policy directory>, or leave the term out."
            )
        return fresh_policy(setup, algo)


def rising(values: Sequence[float]) -> bool:
    """Whether these are two numbers, the second above the first."""
    return len(values) == 2 and values[0] < values[1]
