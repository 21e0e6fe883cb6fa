"""Settings shared by the on-policy algorithms: budgets, advantages, updates, optimisers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from algos.base import Setup
from algos.onpolicy.advantages import CRITIC_INPUTS
from algos.onpolicy.losses import SURROGATES, TRUST_REGIONS
from algos.onpolicy.polychromic import Sets
from algos.onpolicy.requirements import require
from algos.optim import check_schedule
from algos.training.observations import ENCODERS
from policies.bounds import Checked, bounded
from policies.networks.heads import CriticConfig
from policies.policy import Policy
from policies.registry import name_of

ACTOR_STEPS = (
    *("actor_lr", "actor_min_lr", "actor_lr_warmup", "actor_lr_cycle"),
    *("actor_weight_decay", "max_grad_norm"),
)
"""Settings of the actor's optimiser."""


@dataclass
class OnPolicyConfig(Checked):
    """Settings shared by the on-policy algorithms.

    Rates, discounts and clip ranges are dimensionless; a step is a chunk step (Ta environment steps).
    """

    splits_batches: ClassVar[bool] = True  # over the processes of a run
    requires: ClassVar[str]  # of a policy, quoted in errors

    # budget
    num_envs: int = bounded(40, ge=1)  # parallel environments
    steps_per_iteration: int = bounded(500, ge=1)  # chunk steps of every environment per iteration
    iterations: int = bounded(1000, ge=1)  # iterations of rollout and update
    env_steps: int | None = bounded(None, gt=0)  # control steps, by whole iterations; replaces `iterations`
    reset_each_iteration: bool = False  # start every iteration from fresh episodes
    # advantages
    gamma: float = bounded(0.99, ge=0, le=1)  # discount per chunk step
    gae_lambda: float = bounded(0.95, ge=0, le=1)  # lambda of generalised advantage estimation
    reward_scaling: bool = True  # divide rewards by the running std of the discounted return
    reward_scale_gamma: float = bounded(0.99, ge=0, le=1)  # discount of that return; independent of `gamma`
    reward_scale_clip: float = bounded(10.0, gt=0, le=math.inf)  # largest absolute scaled reward
    reward_scale_const: float = bounded(1.0, gt=0)  # factor after scaling
    normalize_advantage: bool = True  # over the minibatch
    advantage_quantiles: tuple[float, float] = (0.0, 1.0)  # clip normalised advantages to these quantiles
    set_size: int = bounded(0, ge=0, le=6)  # rollouts of a set that is judged with its variety; 0: steps
    # update
    batch_size: int = bounded(5000, ge=1)  # rows of a minibatch; a row is one (environment step, inner step)
    update_epochs: int = bounded(5, ge=1)  # passes over the rows of an iteration
    surrogate: str = bounded("ppo", choices=tuple(SURROGATES))  # surrogate objective
    clip_range: float = bounded(0.01, gt=0)  # clip range of the ratio, at the last inner step
    target_kl: float | None = bounded(1.0, gt=0, le=math.inf)  # KL that stops updates; bound of fixpo, trpo
    value_clip: float | None = bounded(None, gt=0, le=math.inf)  # largest change of a value per iteration
    vf_coef: float = bounded(0.5, ge=0)  # weight of the value loss (itself half the squared error)
    entropy_coef: float = bounded(0.0, ge=-math.inf)  # weight of the entropy bonus, Gaussian policies only
    critic_warmup_iterations: int = bounded(0, ge=0)  # iterations that train the critic only
    max_grad_norm: float | None = bounded(None, gt=0, le=math.inf)  # gradient clipping of the actor
    bc_weight: float = bounded(0.0, ge=0)  # weight of the behaviour-cloning term towards the initial policy
    demo_weight: float = bounded(0.0, ge=0)  # weight of the matching loss of demonstrations: dataset=<file>
    demo_value_weight: float = bounded(0.0, ge=0)  # weight of the critic's loss on demonstrations
    bc_rows: int | None = bounded(None, gt=0)  # rows of a minibatch for that term; null: all
    # optimisers
    actor_lr: float = bounded(1e-4, gt=0)  # AdamW, peak
    actor_min_lr: float | None = bounded(None, ge=0)  # learning rate at the ends of a cycle; null: constant
    actor_lr_warmup: int = 10  # iterations of linear warm-up
    actor_lr_cycle: int = 1000  # iterations of a cosine cycle
    actor_weight_decay: float = bounded(0.0, ge=0)  # AdamW
    critic_lr: float = bounded(1e-3, gt=0)  # AdamW, peak
    critic_min_lr: float | None = bounded(None, ge=0)  # learning rate at the ends of a cycle; null: constant
    critic_lr_warmup: int = 10  # iterations of linear warm-up
    critic_lr_cycle: int = 1000  # iterations of a cosine cycle
    critic_weight_decay: float = bounded(0.0, ge=0)  # AdamW
    critic: CriticConfig = field(default_factory=CriticConfig)
    # images
    encoder: str = bounded("frozen", choices=ENCODERS)  # trained: the policy's encoder learns with it
    encoder_lr: float | None = bounded(None, gt=0)  # peak learning rate of a trained encoder; null: actor_lr
    image_shift: int = bounded(4, ge=0)  # random shift [pixels] per iteration, with a trained encoder
    critic_input: str = bounded(
        "policy", choices=CRITIC_INPUTS
    )  # features of policy or own encoder | simulator
    # execution
    microbatch_size: int = bounded(2048, ge=1, was="chunk_rows")  # rows per gradient task; CPU speed only
    paper_compat: bool = False  # ignore truncation in advantages, allow min_lr > lr, as in the reference

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "batch_size",
            self.batch_size > 1 or not self.normalize_advantage,
            "at least 2 with algo.normalize_advantage=true, for one advantage normalises to 0",
        )
        self.require(
            "steps_per_iteration",
            self.num_envs * self.steps_per_iteration > 1 or not self.normalize_advantage,
            "at least 2 with algo.num_envs=1 and algo.normalize_advantage=true: one advantage becomes 0",
        )
        shares = self.advantage_quantiles
        are_shares = rising(shares) and shares[0] >= 0 and shares[1] <= 1
        self.require("advantage_quantiles", are_shares, "two rising numbers in [0, 1]")
        if self.surrogate in TRUST_REGIONS:
            what = f"for algo.surrogate={self.surrogate}"
            self.require("target_kl", math.isfinite(self.target_kl or math.inf), f"finite {what}: the bound")
            self.require("encoder", self.encoder == "frozen", f"frozen {what}")
        if self.set_size:
            group = Sets(self.set_size).group
            self.require("set_size", self.set_size > 1, "at least 2: one rollout has no variety")
            self.require("num_envs", self.num_envs % group == 0, f"a multiple of {group}=2 algo.set_size")
            self.require("reset_each_iteration", self.reset_each_iteration, "true with algo.set_size")
        if self.demo_value_weight:
            what = "with algo.demo_value_weight"
            self.require("critic_input", self.critic_input == "policy", f"policy {what}")
            self.require("encoder", self.encoder == "frozen", f"frozen {what}")
        for network in ("actor", "critic"):
            check_schedule(network, **self.schedule(network), may_rise=self.paper_compat)

    def unused(self) -> dict[str, str]:
        found = super().unused() | {f"critic.{name}": why for name, why in self.critic.unused().items()}
        if self.encoder == "frozen":
            found |= dict.fromkeys(("encoder_lr", "image_shift"), "without algo.encoder=trained")
        if self.surrogate in TRUST_REGIONS:
            found["clip_range"] = f"with algo.surrogate={self.surrogate}, which algo.target_kl bounds"
        if self.surrogate == "trpo":
            found |= dict.fromkeys(ACTOR_STEPS, "with algo.surrogate=trpo, whose step algo.target_kl bounds")
            if getattr(self, "props_every", 0):
                del found["actor_lr"]  # the rate of the collecting policy
        if not self.bc_weight:
            found["bc_rows"] = "without algo.bc_weight"
        if not self.reward_scaling:
            found |= dict.fromkeys(("reward_scale_gamma", "reward_scale_clip"), "without algo.reward_scaling")
        if self.env_steps is not None:
            found["iterations"] = f"beside algo.env_steps={self.env_steps}, which replaces it"
        for network in ("actor", "critic"):
            if getattr(self, f"{network}_min_lr") is None:
                names = (f"{network}_lr_warmup", f"{network}_lr_cycle")
                found |= dict.fromkeys(names, f"without algo.{network}_min_lr")
        return found

    @property
    def takes_dataset(self) -> bool:
        """Whether demonstrations are learned from; experience comes from the environment."""
        return self.demo_weight > 0 or self.demo_value_weight > 0

    def schedule(self, network: str) -> dict[str, Any]:
        """Return the learning-rate schedule of `actor` or `critic`, as arguments of `warmup_cosine`."""
        lr, low = getattr(self, f"{network}_lr"), getattr(self, f"{network}_min_lr")
        warmup, cycle = getattr(self, f"{network}_lr_warmup"), getattr(self, f"{network}_lr_cycle")
        return {"lr": lr, "min_lr": lr if low is None else low, "warmup": warmup, "cycle": cycle}

    @property
    def encoder_share(self) -> float:
        """Learning rate of a trained encoder, relative to the actor's."""
        return 1.0 if self.encoder_lr is None else self.encoder_lr / self.actor_lr

    def clip_range_of(self, inner_steps: int) -> Tensor:
        """Return the clip range of each inner step, (S,)."""
        return torch.full((inner_steps,), self.clip_range)

    def discount_of(self, inner_steps: int) -> Tensor:
        """Return the advantage factor of each inner step, (S,)."""
        return torch.ones(inner_steps)

    @staticmethod
    @abstractmethod
    def fits(policy: Any) -> bool:
        """Whether a policy has what the algorithm requires."""

    def check_policy(self, policy: Policy) -> Any:
        """Return the policy if it has what the algorithm requires (else CapabilityError)."""
        return require(policy, name_of("algo", self), type(self).fits, self.requires)

    def frozen(self, setup: Setup, init: Policy) -> Any:
        """Return the reference of the behaviour-cloning term, if any."""
        return init.clone().to(setup.device).eval().requires_grad_(False) if self.bc_weight else None


def rising(values: Sequence[float]) -> bool:
    """Return whether these are two ascending numbers."""
    return len(values) == 2 and values[0] < values[1]
