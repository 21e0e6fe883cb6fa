"""ReinFlow: policy-gradient fine-tuning of a flow policy through a sampler with learned noise.

Noise after every step turns the deterministic sampler of `init` into a Markov chain; a small network learns
its std together with the velocity. The joint density of a chain is exact, so PPO applies to whole chains.
Evaluation and export exclude the noise.

Legend: K denoising steps.

Source:
    ReinFlow, arXiv 2505.22094; the released code where the paper is silent.

Deviations from the released code:
    * Acting, scoring and evaluation share one time grid, t_k = k / K.
    * Log-densities and intermediate states are not clamped by default; `log_prob_range` and `clip_state`
      restore both. With std near 0.05 the published clamp at 1 has no gradient for a quarter of the samples.
    * Values bootstrap through truncation; KL stopping ends the whole update; passes over the data are
      `update_epochs`; evaluation does not replace training iterations.
    * The behaviour-cloning term draws its start noise.
    * Steps before the tuned ones use the frozen initial network without noise; the released code adds fixed
      noise there and trains their velocity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from algos.base import Setup
from algos.onpolicy import samplers
from algos.onpolicy.field_config import tuning_run
from algos.onpolicy.frozen_copy import tunable_copy
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.reinflow_ratio import REDUCTIONS, NoiseConfig, ReinflowRatio
from algos.onpolicy.start import starting_policy
from algos.ppo import PpoConfig
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.protocols import has_steps
from policies.registry import name_of, register
from policies.seeds import derive_seed, seeded_weights
from policies.threads import torch_threads

STEPS = 4  # denoising steps of a process that takes any number


@register("algo", "reinflow")
@dataclass
class ReinFlowConfig(PpoConfig):
    """ReinFlow with the published hyper-parameters of Hopper."""

    requires = "adds noise after every step, and needs a network that is evaluated step by step"
    fits = staticmethod(has_steps)

    batch_size: int = bounded(50_000, ge=1)  # rows of a minibatch; a row is one chain
    entropy_coef: float = bounded(0.03, ge=-math.inf)  # weight of the noise entropy, reduced like densities
    log_prob_range: tuple[float, float] | None = None  # clamp of the reduced log-density; published: [-1, 1]
    log_prob_reduction: str = bounded("mean", choices=REDUCTIONS)  # over steps, rows and dims
    bc_weight: float = bounded(0.0, ge=0)  # weight of the squared distance to the initial policy's chunks
    actor_lr: float = bounded(4.5e-5, gt=0)  # AdamW, peak
    actor_min_lr: float | None = bounded(2e-5, ge=0)  # learning rate at the ends of a cycle; null: constant
    actor_lr_cycle: int = 100  # iterations of a cosine cycle
    critic_lr: float = bounded(6.5e-4, gt=0)  # AdamW, peak
    critic_min_lr: float | None = bounded(3e-4, ge=0)  # learning rate at the ends of a cycle; null: constant
    critic_lr_cycle: int = 100  # iterations of a cosine cycle
    critic_weight_decay: float = bounded(1e-5, ge=0)  # AdamW
    denoising_steps: int | None = bounded(None, ge=1)  # K; null: 4, or what the process prescribes
    tuned_steps: int | None = bounded(None, ge=1)  # number of tuned last denoising steps; null: all
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    noise_clip: float | None = bounded(3.0, gt=0)  # clip of exploration noise, standard deviations; null: off
    clip_state: float | None = bounded(None, gt=0)  # clamp of every step's mean, normalised; published: 1
    count_start: bool = True  # count the start noise as a density factor in mean reductions

    def __post_init__(self) -> None:
        super().__post_init__()
        steps, tuned = self.denoising_steps or STEPS, self.tuned_steps
        self.require(
            "noise_correlation", not self.noise_correlation, "0: algo.noise learns every entry's own"
        )
        self.require("props_every", not self.props_every, "0: PROPS takes densities without learned noise")
        self.require("tuned_steps", tuned is None or tuned <= steps, f"in 1..{steps}, or empty")

    def unused(self) -> dict[str, str]:
        return super().unused() | {f"noise.{name}": why for name, why in self.noise.unused().items()}

    def build(self, setup: Setup) -> OnPolicy:
        """Return ReinFlow on a copy of the policy `setup.init`; without `init`, on a new policy.

        Raises:
            ConfigError: If the environment is missing, sizes disagree, or the process does not take this
                number of steps.
            CapabilityError: If the policy has no denoising steps.
        """
        init, moments = starting_policy(self, setup)
        explore, evaluate = self.samplers(init)
        policy = self.exploring(init, explore).to(setup.device)
        ratio, frozen = self.noisy_chain(policy, setup.seed), self.frozen(setup, init)
        return tuning_run(self, setup, ratio, frozen, explore, evaluate, moments)

    def exploring(self, init: DenoisingPolicy, sampler: Any) -> DenoisingPolicy:
        """Return a copy of the policy with a trainable network for its exploring last steps."""
        tuned = sampler.table(init.process).num_steps if self.tuned_steps is None else self.tuned_steps
        policy = tunable_copy(init, sampler, tuned)
        return policy.with_sampler(sampler, tuned_steps=tuned)

    def samplers(self, init: DenoisingPolicy) -> tuple[Any, Any]:
        """Return (exploration, evaluation) samplers: same steps, clipping as in the initial policy.

        Raises:
            ConfigError: If the process does not take this number of steps, or the sampler lacks `clip_state`.
        """
        explore = samplers.deterministic(init, self.denoising_steps, default=STEPS)
        if self.clip_state is not None and not hasattr(explore, "clip_state"):
            raise ConfigError(
                f"algo.clip_state bounds the states of sampler=euler; got sampler="
                f"{name_of('sampler', explore)}. Use algo.clip_state=null."
            )
        explore = samplers.replaced(explore, clip_state=self.clip_state)
        return explore, replace(explore)

    def noisy_chain(self, policy: DenoisingPolicy, seed: int) -> ReinflowRatio:
        """Return the ratio estimator of a policy, with untrained noise."""
        like = next(policy.field.parameters())
        with torch.no_grad(), torch_threads(1):
            times, cond = policy.scored_net.features(*self._probe(policy))
        with seeded_weights(derive_seed(seed, "noise")):
            noise = self.noise.build(policy.chunk.shape, times.shape[-1], cond.shape[-1])
        return ReinflowRatio(
            policy,
            noise.to(like.device, like.dtype),
            noise_clip=self.noise_clip,
            reduction=self.log_prob_reduction,
            count_start=self.count_start,
            log_prob_range=self.log_prob_range,
        )

    @staticmethod
    def _probe(policy: DenoisingPolicy) -> tuple[Any, ...]:
        """Return arguments of `Backbone.features`, for an observation of zeros; results have the sizes."""
        steps = policy.chunk.obs_steps
        obs = {"state": torch.zeros(1, steps, policy.obs_dim)}
        if policy.goal_dim:
            obs["goal"] = torch.zeros(1, policy.goal_dim)
        for camera, shape in policy.images.items():
            obs[camera] = torch.zeros(1, steps, *shape, dtype=torch.uint8)
        cond = policy.encode(policy.observation(obs))
        column = partial(policy.table.to_device, like=cond.vec)
        second = None if policy.table.second_time is None else column("second_time")
        return cond, column("net_time"), second
