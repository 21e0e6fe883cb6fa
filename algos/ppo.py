"""PPO from vectorised environments, for any policy with a ratio estimator.

One iteration: collect chunk steps, scale rewards, estimate advantages, run epochs of clipped updates. With a
Gaussian policy this is standard PPO on action chunks; `algos.dppo` applies the same code to denoising chains.

Source:
    PPO (arXiv 1707.06347), generalised advantages (arXiv 1506.02438), with the recipe of DPPO's Gaussian
    baseline (arXiv 2409.00588): mean-reduced log-probabilities, running reward scaling.

Deviations from that reference: values bootstrap through truncation from the final observation and advantages
stop at episode ends (`paper_compat` restores the reference); statistics include every episode that ends
during an iteration; resuming is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from algos.base import Setup
from algos.onpolicy.config import OnPolicyConfig, rising
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.props import sampling
from algos.onpolicy.ratios import REDUCTIONS, ChainRatio, CloningTerm
from algos.onpolicy.start import starting_policy
from policies.bounds import bounded
from policies.errors import ConfigError
from policies.processes.gaussian import GaussianPolicy
from policies.protocols import has_density
from policies.registry import register


@register("algo", "ppo")
@dataclass
class PpoConfig(OnPolicyConfig):
    """PPO on a density of chunks; also the shared settings of algorithms with log-densities."""

    requires = "needs a density of chunks in closed form (process=gaussian, mixture or tanh_gaussian)"
    fits = staticmethod(has_density)

    log_prob_range: tuple[float, float] | None = (-5.0, 2.0)  # clamp of each element's log-density
    log_prob_reduction: str = bounded("mean", choices=REDUCTIONS)  # over executed steps and dims
    noise_correlation: float = bounded(0.0, ge=0, lt=1)  # of exploration noise in consecutive chunk rows
    props_every: int = bounded(0, ge=0)  # chunk steps after which PROPS moves the collecting policy; 0: off
    props_kl: float = bounded(0.1, gt=0)  # KL divergence from the policy that ends such a move

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.log_prob_range
        self.require("log_prob_range", bounds is None or rising(bounds), "two rising numbers, or empty")

    def unused(self) -> dict[str, str]:
        moves = {} if self.props_every else {"props_kl": "without algo.props_every"}
        return super().unused() | moves

    def build(self, setup: Setup) -> OnPolicy:
        """Return PPO on a copy of the policy `setup.init`; without `init`, on a new policy.

        A new policy learns from the reward alone, and its normaliser is fitted during training.

        Raises:
            ConfigError: If the environment is missing, sizes disagree, a new policy lacks observation
                statistics or a reference for the behaviour-cloning term, or an unknown entropy has a weight.
            CapabilityError: If the density of the policy's chunks is not known.
        """
        init, moments = starting_policy(self, setup)
        if self.entropy_coef and not init.has_entropy:
            raise ConfigError(
                f"algo.entropy_coef must be 0 for a {type(init).__name__}, whose entropy has no closed form; "
                f"got {self.entropy_coef:g}."
            )
        if self.noise_correlation and not isinstance(init, GaussianPolicy):
            raise ConfigError(
                f"algo.noise_correlation must be 0 for a {type(init).__name__}: its noise is not that of "
                f"process=gaussian or of denoising steps; got {self.noise_correlation:g}."
            )
        policy = init.clone().to(setup.device)
        policy.noise_correlation = self.noise_correlation
        policy.requires_grad_(False).head.requires_grad_(True)
        ratio, frozen = self.ratio(policy), self.frozen(setup, init)
        if frozen is not None:
            frozen.noise_correlation = self.noise_correlation
        return OnPolicy(
            self,
            setup,
            ratio=ratio,
            trainable=policy.head,
            bc_term=None if frozen is None else CloningTerm(frozen, ratio),
            export_policy=policy.clone,
            moments=moments,
            sampling=sampling(self, ratio),
        )

    def ratio(self, policy: Any) -> ChainRatio:
        return ChainRatio(policy, log_prob_range=self.log_prob_range, reduction=self.log_prob_reduction)
