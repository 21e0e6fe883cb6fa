"""Setup shared by the algorithms that evaluate the network between noise and action.

They act with the policy's sampler and differ in the likelihood ratio. Without `init` a new policy learns from
the reward alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from algos.base import Setup
from algos.onpolicy import samplers
from algos.onpolicy.config import OnPolicyConfig
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ratios import FlowRatio
from algos.onpolicy.reinflow_ratio import PathTerm
from algos.onpolicy.start import starting_policy
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy


@dataclass
class FieldConfig(OnPolicyConfig):
    """Settings shared by the algorithms on denoisers that are evaluated between noise and action."""

    denoising_steps: int | None = bounded(None, ge=1)  # K; null: as in the policy's sampler

    @abstractmethod
    def estimator(self, policy: DenoisingPolicy) -> FlowRatio:
        """Return the ratio estimator of a policy."""

    def build(self, setup: Setup) -> OnPolicy:
        """Return the algorithm on a copy of `setup.init`, or on a new policy.

        Raises:
            ConfigError: If the environment is missing, or sizes disagree.
            CapabilityError: If the policy does not fit.
        """
        init, moments = starting_policy(self, setup)
        evaluate = samplers.on_even_times(init.sampler)
        if self.denoising_steps is not None:
            evaluate = samplers.with_steps(evaluate, init, self.denoising_steps)
        explore = replace(evaluate, clip_action=None)  # clipping would change recorded actions
        policy = init.with_sampler(explore).clone().to(setup.device).requires_grad_(False)
        policy.field.requires_grad_(True)
        return tuning_run(
            self, setup, self.estimator(policy), self.frozen(setup, init), explore, evaluate, moments
        )


def tuning_run(
    config: OnPolicyConfig, setup: Setup, ratio: Any, frozen: Any, explore: Any, evaluate: Any, moments: Any
) -> OnPolicy:
    """Return the run that tunes the policy of a ratio estimator.

    Args:
        config: Settings of the run.
        setup: As given to `build`.
        ratio: Estimator with the policy, which acts with `explore`, and its trainable modules.
        frozen: The initial policy for the cloning term, or None.
        explore: Sampler in training.
        evaluate: Sampler of exported policies.
        moments: Running statistics of the observations, or None.
    """
    policy = ratio.policy
    return OnPolicy(
        config,
        setup,
        ratio=ratio,
        trainable=ratio.trainable,
        bc_term=None if frozen is None else PathTerm(frozen.with_sampler(explore), policy),
        export_policy=lambda: policy.with_sampler(evaluate).clone(),
        moments=moments,
    )
