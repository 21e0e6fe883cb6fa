"""DPPO: policy-gradient fine-tuning of a diffusion policy through its denoising chain.

Two nested decision processes: every environment step contains the last S denoising steps, which are actions
with Gaussian densities. Each takes the environment's advantage, discounted towards noisier steps. A copy of
the network is tuned for the last S steps; noisier steps use the frozen initial network.

Legend: K denoising steps, S tuned ones (`tuned_steps`), inner step s = 0 (noisiest) … S-1, tau level.

Source:
    Ren et al., Diffusion Policy Policy Optimization, arXiv 2409.00588, section 4, and its reference
    implementation for what the paper leaves open (mean-reduced clamped log-densities, clip range growing
    over s, noise floors, running reward scaling).

Deviations from the reference:
    * Values bootstrap through truncation from the final observation; advantages stop at episode ends.
      `paper_compat` restores the reference, where a time limit is terminal.
    * S = 1 is allowed (its clip range is `clip_range`).
    * A learning rate that rises over training (min_lr > lr) requires `paper_compat`.
    * Evaluation runs in addition to training iterations, and every finished episode counts.
    * Old log-densities come from the sampler's scoring; the frozen network runs only for its own steps.
    * When all steps are tuned, the frozen network is dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from algos.base import Setup
from algos.onpolicy import samplers
from algos.onpolicy.frozen_copy import tunable_copy
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.losses import clip_ranges, denoising_discounts
from algos.onpolicy.props import sampling
from algos.onpolicy.ratios import CloningTerm
from algos.onpolicy.start import starting_policy
from algos.ppo import PpoConfig
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import ConfigError
from policies.protocols import has_steps
from policies.registry import name_of, register
from policies.samplers.ddpm import DDPM

SAMPLERS = ("auto", "ddpm", "ddim", "ancestral")
_MAX_CLIP_RATE = 100.0  # above this rate growth is a step function and overflows


@register("algo", "dppo")
@dataclass
class DppoConfig(PpoConfig):
    """DPPO with the published hyper-parameters of Hopper, Walker2d and HalfCheetah."""

    requires = "scores the states of a denoising chain, and needs a network that is evaluated step by step"
    fits = staticmethod(has_steps)

    batch_size: int = bounded(50_000, ge=1)  # rows of a minibatch: (environment step, denoising step) pairs
    tuned_steps: int = bounded(10, ge=1)  # S, fine-tuned denoising steps, counted from the last
    sampler: str = bounded("auto", choices=SAMPLERS)  # of exploration; auto: the process's stochastic one
    denoising_steps: int | None = bounded(None, ge=1)  # K; null: all levels (ddpm), else the policy's own
    eta: float = bounded(1.0, gt=0, le=1)  # eta of ddim and ancestral in exploration; 0 in evaluation
    gamma_denoising: float = bounded(0.99, ge=0, le=1)  # discount per denoising step, towards noisier ones
    clip_range_base: float = bounded(0.01, gt=0)  # clip range at s = 0; `clip_range` holds at s = S-1
    clip_range_rate: float = bounded(3.0, ge=-_MAX_CLIP_RATE, le=_MAX_CLIP_RATE)  # its exponential growth
    min_sampling_std: float = bounded(0.1, gt=0)  # exploration noise floor, normalised action units
    min_log_prob_std: float = bounded(0.1, gt=0)  # noise floor in densities, normalised action units
    noise_clip: float = bounded(3.0, gt=0, le=math.inf)  # clip of exploration noise, standard deviations

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("entropy_coef", self.entropy_coef == 0, "0: the noise of denoising steps is not learned")

    def unused(self) -> dict[str, str]:
        found = super().unused()
        names = ("clip_range_base", "clip_range_rate")
        return found | (dict.fromkeys(names, found["clip_range"]) if "clip_range" in found else {})

    def clip_range_of(self, inner_steps: int) -> Tensor:
        base, last, rate = self.clip_range_base, self.clip_range, self.clip_range_rate
        return clip_ranges(inner_steps, base=base, last=last, rate=rate)

    def discount_of(self, inner_steps: int) -> Tensor:
        return denoising_discounts(inner_steps, self.gamma_denoising)

    def build(self, setup: Setup) -> OnPolicy:
        """Return DPPO on a copy of the policy `setup.init`; without `init`, on a new policy.

        Raises:
            ConfigError: If the environment is missing, sizes disagree, the process lacks `sampler`, or there
                are fewer denoising steps than tuned ones.
            CapabilityError: If the policy has no denoising steps.
        """
        init, moments = starting_policy(self, setup)
        explore, evaluate = self.samplers(init)
        policy = self.exploring(tunable_copy(init, explore, self.tuned_steps).to(setup.device), explore)
        ratio, frozen = self.ratio(policy), self.frozen(setup, init)
        return OnPolicy(
            self,
            setup,
            ratio=ratio,
            trainable=policy.scored_net,
            bc_term=None if frozen is None else CloningTerm(self.exploring(frozen, explore), ratio),
            export_policy=lambda: policy.with_sampler(evaluate).clone(),
            moments=moments,
            sampling=sampling(self, ratio),
        )

    def exploring(self, policy: DenoisingPolicy, sampler: Any) -> DenoisingPolicy:
        """Return the policy with an exploration sampler that records the tuned steps."""
        floor = float(self.min_log_prob_std)
        view = policy.with_sampler(sampler, tuned_steps=self.tuned_steps, log_prob_min_std=floor)
        view.noise_correlation = self.noise_correlation
        return view

    def samplers(self, init: DenoisingPolicy) -> tuple[Any, Any]:
        """Return (exploration, evaluation) samplers; shared settings come from the initial policy.

        Exploration applies the noise floor at every step, including frozen steps and the last. Evaluation
        with ddpm has a floor of 1e-3 and a noise-free last step; with others it has no noise but that of a
        consistency model's steps.
        """
        explore = samplers.replaced(
            samplers.stochastic(init, self.sampler),
            eta=float(self.eta),
            eta_per_dim=(),
            clip_action=None,  # clipping the chunk would invalidate the density of the last step
            noise_clip=float(self.noise_clip),
            min_std=float(self.min_sampling_std),
            final_std=None,
        )
        if self.denoising_steps is not None:
            explore = samplers.with_steps(explore, init, self.denoising_steps)
        if self.eta != 1 and not hasattr(explore, "eta"):
            raise ConfigError(
                f"algo.eta={self.eta:g} has no effect on the chain of this policy, "
                f"sampler={name_of('sampler', explore)}. Leave it out."
            )
        noise = {"min_std": 1e-3, "final_std": 0.0} if isinstance(explore, DDPM) else {"min_std": 0.0}
        return explore, samplers.replaced(explore, eta=0.0, clip_action=init.sampler.clip_action, **noise)
