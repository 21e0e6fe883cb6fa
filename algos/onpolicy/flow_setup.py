"""Setup shared by the algorithms on rectified flows.

They sample deterministically and evaluate the network on the line between noise and action; they differ in
the likelihood ratio. Without `init` a new flow learns from the reward alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from algos.base import Setup
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.loop import OnPolicy, check_setup
from algos.onpolicy.ratios import FlowRatio
from algos.onpolicy.reinflow_ratio import PathTerm
from algos.onpolicy.running_normalizer import running_moments
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy
from policies.processes.flow import RectifiedFlow
from policies.registry import name_of
from policies.samplers.ode import Euler


@dataclass
class RectifiedConfig(OnPolicyConfig):
    """Settings shared by the algorithms on rectified flows."""

    needs: ClassVar[str]  # why a rectified flow is required, quoted in errors

    denoising_steps: int | None = bounded(None, ge=1)  # K; null: as in the policy's sampler

    @abstractmethod
    def estimator(self, policy: DenoisingPolicy) -> FlowRatio:
        """Return the ratio estimator of a policy."""

    def build(self, setup: Setup) -> OnPolicy:
        """Return the algorithm on a copy of `setup.init`, or on a new policy.

        Raises:
            ConfigError: If the environment is missing or sizes disagree.
            CapabilityError: If the policy is not a rectified flow with a deterministic sampler.
        """
        algo, is_fresh = name_of("algo", self), setup.init is None
        if is_fresh and not isinstance(setup.policy.process, RectifiedFlow):
            raise ConfigError(
                f"algo={algo} without init needs process=flow and policy.normalizer.state=gaussian; got "
                f"process '{type(setup.policy.process).__name__}'. Or give init=<policy directory>."
            )
        init = self.fresh(setup, algo) if is_fresh else check_setup(setup, algo)
        flow = require_rectified(init, algo, self.needs)
        steps = self.denoising_steps
        own = on_even_times(flow.sampler)
        evaluate = own if steps is None else replace(own, steps=steps)
        explore = replace(evaluate, clip_action=None)  # clipping would change recorded actions
        policy = flow.with_sampler(explore).clone().to(setup.device).requires_grad_(False)
        policy.field.requires_grad_(True)
        ratio, frozen = self.estimator(policy), self.frozen(setup, flow)
        fits_normalizer = is_fresh and policy.normalizer.modes["state"] == "gaussian"
        return OnPolicy(
            self,
            setup,
            ratio=ratio,
            trainable=ratio.trainable,
            bc_term=None if frozen is None else PathTerm(frozen.with_sampler(explore), policy),
            export_policy=lambda: policy.with_sampler(evaluate).clone(),
            moments=running_moments(policy) if fits_normalizer else None,
        )


def on_even_times(sampler: Any) -> Any:
    """Return the sampler with network times at the starts of its steps instead of the released times.

    Ratios use these times, so flows are explored, fine-tuned and exported with them.
    """
    return replace(sampler, released_times=False) if isinstance(sampler, Euler) else sampler


def require_rectified(policy: Policy, algo: str, needs: str) -> DenoisingPolicy:
    """Return the policy if its network predicts velocities along a deterministic sampling path.

    Models of finite steps are refused: their outputs are not velocities at a time.

    Raises:
        CapabilityError: If it is not a rectified flow, or its sampler adds noise.
    """
    fits = isinstance(policy, DenoisingPolicy) and isinstance(policy.process, RectifiedFlow)
    if not isinstance(policy, DenoisingPolicy) or not fits or policy.process.has_second_time:
        raise CapabilityError(
            f"algo={algo} {needs} and needs process=flow; got {type(policy).__name__} with "
            f"process '{type(policy.config.process).__name__}'. Clone one, or use algo=dppo or algo=reinflow."
        )
    if not policy.is_deterministic:
        raise CapabilityError(
            f"algo={algo} needs a deterministic sampler, e.g. euler; got '{type(policy.sampler).__name__}'."
        )
    return policy
