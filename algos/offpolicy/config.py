"""Settings shared by the off-policy algorithms: budget, data, values, entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from algos.offpolicy.replay_buffer import Discounting
from algos.training.observations import ENCODERS
from policies.bounds import Checked, bounded
from policies.networks.critics import AGGREGATES, USED_BY, EnsembleConfig


@dataclass
class OffPolicyConfig(Checked):
    """Settings shared by algorithms that learn from a replay buffer.

    A step is a control step of one environment unless stated otherwise.
    """

    may_lag: ClassVar[bool] = True  # learns from workers with older weights
    entropy_share: ClassVar[float] = -0.5  # default target entropy per latent dimension
    without_data: ClassVar[str] = "set algo.offline_ratio=0"  # advice in errors about a missing dataset

    # budget
    total_steps: int = bounded(300_000, ge=1)  # executed control steps
    warmup_steps: int = bounded(8_000, ge=0)  # control steps before the first update
    num_envs: int = bounded(4, ge=1)  # parallel environments
    steps_per_iteration: int = bounded(1, ge=1)  # chunk steps of every environment between update rounds
    log_every: int = bounded(1000, ge=1, was="block_steps")  # control steps (or updates) between log rows
    # updates
    updates_per_step: float = bounded(1.25, gt=0)  # critic updates per executed control step
    actor_every: int = bounded(1, ge=1)  # critic updates per update of actor and temperature
    ema_decay: float = bounded(0.0, ge=0, lt=1)  # EMA decay of the exported actor weights; 0 disables EMA
    batch_size: int = bounded(256, ge=1)  # transitions
    buffer_size: int = bounded(1_000_000, ge=1)  # capacity of the replay buffer, transitions
    offline_ratio: float = bounded(0.0, ge=0, lt=1)  # fraction of a batch drawn from the dataset
    # values
    gamma: float = bounded(0.99, ge=0, le=1)  # discount per control step; per chunk with paper_compat
    reward_scale: float = bounded(1.0, gt=0)  # rewards become reward_scale r + reward_shift
    reward_shift: float = bounded(0.0, ge=-math.inf)  # see reward_scale
    value_offset: float = bounded(0.0, ge=-math.inf)  # added to all values through the rewards; see the page
    tau: float = bounded(0.005, gt=0, le=1)  # Polyak coefficient of the target networks
    critics: int = bounded(2, ge=1)  # E, size of the critic ensemble
    critic_dims: tuple[int, ...] = bounded((256, 256, 256), ge=1, some=True)  # hidden widths
    critic_activation: str = "tanh"  # relu, mish or tanh
    critic_layer_norm: bool = True  # layer normalisation before each activation
    aggregate: str = bounded("min", choices=AGGREGATES)  # reduction over critics in targets
    actor_aggregate: str = bounded("min", choices=AGGREGATES)  # reduction over critics in the actor loss
    subset: int = 2  # critics in subset_min, resampled at every step
    pessimism: float = bounded(0.5, ge=0)  # standard deviations subtracted by mean_std
    # entropy
    target_entropy: float | None = bounded(None, ge=-math.inf)  # of a latent; null: minus half its width
    init_alpha: float = bounded(1.0, gt=0)  # initial temperature
    learn_alpha: bool = True  # tune the temperature towards the target entropy
    entropy_in_target: bool = True  # include the entropy of later actions in target values
    # optimisers
    actor_lr: float = bounded(3e-4, gt=0)  # Adam
    critic_lr: float = bounded(3e-4, gt=0)  # Adam
    alpha_lr: float = bounded(3e-4, gt=0)  # Adam, of the log temperature
    hindsight: int = bounded(0, ge=0)  # relabelled copies of a transition, with goals reached later (HER)
    # images
    encoder: str = bounded("frozen", choices=ENCODERS)  # trained: the critics train the policy's encoder
    encoder_lr: float | None = bounded(None, gt=0)  # Adam, of a trained encoder; null: critic_lr
    image_shift: int = bounded(4, ge=0)  # random shift [pixels] of sampled images, with a trained encoder
    paper_compat: bool = False  # conventions of the released code: chunk rewards summed, ends at time limits

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, least = self.offline_ratio * self.batch_size, 0.5 / self.batch_size
        self.require(
            "offline_ratio", not rows or 0.5 < rows < self.batch_size - 0.5,
            f"0, or above {least:.3g} and below {1 - least:.3g} for batches of algo.batch_size="
            f"{self.batch_size} to hold rows of both dataset and experience (or raise algo.batch_size)",
        )  # fmt: skip
        uses_subset = "subset_min" in (self.aggregate, self.actor_aggregate)
        self.require("subset", not uses_subset or 1 <= self.subset <= self.critics, "in 1 ... algo.critics")
        self.require(
            "offline_ratio", not (self.paper_compat and self.offline_ratio),
            "0 with algo.paper_compat=true: transitions of a dataset have the other conventions",
        )  # fmt: skip
        self.critic_config()

    def unused(self) -> dict[str, str]:
        found, reductions = super().unused(), (self.aggregate, self.actor_aggregate)
        found |= {k: f"without algo.aggregate={how}" for k, how in USED_BY.items() if how not in reductions}
        if self.encoder == "frozen":
            found |= dict.fromkeys(("encoder_lr", "image_shift"), "without algo.encoder=trained")
        if not self.learn_alpha:
            found |= dict.fromkeys(("target_entropy", "alpha_lr"), "without algo.learn_alpha")
        return found

    def critic_config(self) -> EnsembleConfig:
        return EnsembleConfig(self.critics, self.critic_dims, self.critic_activation, self.critic_layer_norm)

    @property
    def discounting(self) -> Discounting:
        return Discounting(self.gamma, self.reward_scale, self.reward_shift, self.paper_compat)

    def resume_invariants(self) -> dict[str, Any]:
        """Return the settings, by key, that must stay equal when a run is resumed."""
        names = ("gamma", "reward_scale", "reward_shift", "value_offset", "paper_compat")
        values = {f"algo.{name}": getattr(self, name) for name in names}
        return values | {"critic_activation": self.critic_activation}

    @property
    def density_form(self) -> str:
        return "floored" if self.paper_compat else "exact"

    def target_entropy_of(self, latent_dim: int, highest_entropy: float = math.inf) -> float:
        """Return the target entropy H (nats) of latents; ConfigError above the actor's maximum, if tuned."""
        target = self.entropy_share * latent_dim if self.target_entropy is None else self.target_entropy
        self.require(
            "target_entropy", not self.learn_alpha or target < highest_entropy,
            f"below {highest_entropy:.4g}, the largest entropy of {latent_dim} numbers of the actor, or the "
            "temperature grows without end",
        )  # fmt: skip
        return target
