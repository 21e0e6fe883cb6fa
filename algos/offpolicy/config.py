"""What all off-policy algorithms are told: budget, data, values, entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from algos.offpolicy.replay_buffer import Discounting
from algos.offpolicy.sac_update import SoftRules
from policies.bounds import Checked
from policies.networks.critics import AGGREGATES, EnsembleConfig


@dataclass
class OffPolicyConfig(Checked):
    """Settings of every algorithm that learns from a replay of its own experience.

    A step is a control step of one environment unless it says otherwise.
    """

    entropy_share: ClassVar[float] = -0.5  # target entropy per number of a latent, where none is given
    without_data: ClassVar[str] = "set algo.offline_ratio=0"  # what to do without a dataset

    # budget
    total_steps: int = 300_000  # executed control steps
    warmup_steps: int = 8_000  # of them, before anything is learned
    num_envs: int = 4  # environments side by side
    steps_per_iteration: int = 1  # chunk steps of every environment between two rounds of updates
    block_steps: int = 1000  # control steps between two reports; updates, where these are more
    # updates
    updates_per_step: float = 1.25  # steps of the critics per executed control step
    actor_every: int = 1  # steps of the critics per step of actor and temperature
    ema_decay: float = 0.0  # share of the old average of the actor's weights, which ships; 0: the weights do
    batch_size: int = 256  # transitions
    buffer_size: int = 1_000_000  # transitions that are kept
    offline_ratio: float = 0.0  # share of a batch that comes from the dataset
    # values
    gamma: float = 0.99  # discount per control step; per chunk with paper_compat
    reward_scale: float = 1.0  # rewards are scale r + shift
    reward_shift: float = 0.0  # see reward_scale
    value_offset: float = 0.0  # added to every value, by rewards that fit; see the page
    tau: float = 0.005  # share of the way that target weights go
    critics: int = 2  # E
    critic_dims: tuple[int, ...] = (256, 256, 256)  # hidden widths
    critic_activation: str = "tanh"  # relu, mish or tanh
    critic_layer_norm: bool = True  # normalise before each activation
    aggregate: str = "min"  # min | mean | subset_min | mean_std over the critics, in targets
    actor_aggregate: str = "min"  # the same in the actor's loss
    subset: int = 2  # critics of subset_min, drawn anew at every step
    pessimism: float = 0.5  # deviations that mean_std takes off
    # entropy
    target_entropy: float | None = None  # of a latent; None: minus half its width
    init_alpha: float = 1.0  # temperature at the start
    learn_alpha: bool = True  # move it towards the target entropy
    entropy_in_target: bool = True  # whether values count the entropy of later actions
    # optimisers
    actor_lr: float = 3e-4  # Adam
    critic_lr: float = 3e-4  # Adam
    alpha_lr: float = 3e-4  # Adam, of the logarithm of the temperature
    paper_compat: bool = (
        False  # sum of rewards, gamma per chunk, no value beyond a time limit; floored density
    )

    def __post_init__(self) -> None:
        """Check the ranges."""
        self.critic_dims = tuple(self.critic_dims)
        for name in ("total_steps", "num_envs", "steps_per_iteration", "block_steps", "actor_every",
                     "batch_size", "buffer_size", "critics"):  # fmt: skip
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("warmup_steps", self.warmup_steps >= 0, "0 or more")
        self.require("updates_per_step", 0 < self.updates_per_step < math.inf, "positive and finite")
        self.require("offline_ratio", 0 <= self.offline_ratio < 1, "in [0, 1)")
        rows, least = self.offline_ratio * self.batch_size, 0.5 / self.batch_size
        self.require(
            "offline_ratio", not rows or 0.5 < rows < self.batch_size - 0.5,
            f"0, or above {least:.3g} and below {1 - least:.3g} for batches of algo.batch_size="
            f"{self.batch_size} to hold rows of both dataset and experience (or raise algo.batch_size)",
        )  # fmt: skip
        self.require("gamma", 0 <= self.gamma <= 1, "in [0, 1]")
        self.require("tau", 0 < self.tau <= 1, "in (0, 1]")
        self.require("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)")
        for name in ("actor_lr", "critic_lr", "alpha_lr", "reward_scale", "init_alpha"):
            self.require(name, 0 < getattr(self, name) < math.inf, "positive and finite")
        for name in ("reward_shift", "value_offset"):
            self.require(name, math.isfinite(getattr(self, name)), "finite")
        target = self.target_entropy
        self.require("target_entropy", target is None or math.isfinite(target), "finite, or null")
        self.require("pessimism", 0 <= self.pessimism < math.inf, "0 or more and finite")
        for name in ("aggregate", "actor_aggregate"):
            self.require(name, getattr(self, name) in AGGREGATES, f"one of {', '.join(AGGREGATES)}")
        uses_subset = "subset_min" in (self.aggregate, self.actor_aggregate)
        self.require("subset", not uses_subset or 1 <= self.subset <= self.critics, "in 1 ... algo.critics")
        self.require(
            "offline_ratio", not (self.paper_compat and self.offline_ratio),
            "0 with algo.paper_compat=true: transitions of a dataset have the other conventions",
        )  # fmt: skip
        self.critic_config()

    def require_learning(self) -> None:
        """Refuse a run that ends before anything is learned.

        Raises:
            ConfigError: If the warm-up is longer than the run.
        """
        rule = f"at most algo.total_steps={self.total_steps}, or nothing is learned"
        self.require("warmup_steps", self.warmup_steps <= self.total_steps, rule)

    def critic_config(self) -> EnsembleConfig:
        """Return the shape of the critics."""
        return EnsembleConfig(self.critics, self.critic_dims, self.critic_activation, self.critic_layer_norm)

    @property
    def discounting(self) -> Discounting:
        """Return what is made of rewards."""
        return Discounting(self.gamma, self.reward_scale, self.reward_shift, self.paper_compat)

    def resume_invariants(self) -> dict[str, Any]:
        """Return what values mean, by key: it must stay when a run is continued."""
        names = ("gamma", "reward_scale", "reward_shift", "value_offset", "paper_compat")
        values = {f"algo.{name}": getattr(self, name) for name in names}
        return values | {"critic_activation": self.critic_activation}

    @property
    def density_form(self) -> str:
        """Return how the density of squashed actions is computed."""
        return "floored" if self.paper_compat else "exact"

    def rules(self, latent_dim: int, highest_entropy: float = math.inf) -> SoftRules:
        """Return the constants of the learner for latents of a width.

        Raises:
            ConfigError: If the temperature is moved towards an entropy that the actor cannot have.
        """
        target = self.entropy_share * latent_dim if self.target_entropy is None else self.target_entropy
        self.require(
            "target_entropy", not self.learn_alpha or target < highest_entropy,
            f"below {highest_entropy:.4g}, the largest entropy of {latent_dim} numbers of the actor, or the "
            "temperature grows without end",
        )  # fmt: skip
        return SoftRules(
            tau=self.tau,
            target_entropy=target,
            init_alpha=self.init_alpha,
            learn_alpha=self.learn_alpha,
            entropy_in_target=self.entropy_in_target,
            aggregate=self.aggregate,
            actor_aggregate=self.actor_aggregate,
            subset=self.subset,
            pessimism=self.pessimism,
            actor_lr=self.actor_lr,
            critic_lr=self.critic_lr,
            alpha_lr=self.alpha_lr,
        )
