"""PolicyFlow: policy gradients for flow policies through shifts of their velocity.

The flow acts with small learned noise on the end of its path. The likelihood ratio follows from the velocity
shift at one point of a straight line, without the flow's density or path. `algo=policyflow` fine-tunes
`init`, or trains a new flow from the reward alone. Evaluation and export exclude the noise.

Source:
    PolicyFlow, arXiv 2602.01156. Clip range and reduction are the published ones; settings missing from the
    paper follow common PPO settings.

Deviations from the paper:
    * Times are drawn while acting, `num_draws` per action, and stored with the old velocity; the paper draws
      one per update and keeps a copy of the old network.
    * The std of the noise is bounded.
    * The Brownian term is a mean over entries, and off by default: it widens a flow without limit, which
      moves a cloned policy away from its demonstrations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from algos.onpolicy.field_config import FieldConfig
from algos.onpolicy.policyflow_ratio import EndNoise, EndNoiseConfig, PolicyflowRatio
from algos.onpolicy.ratios import REDUCTIONS
from algos.onpolicy.requirements import has_straight_paths
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.registry import register


@register("algo", "policyflow")
@dataclass
class PolicyFlowConfig(FieldConfig):
    """PolicyFlow; with `brownian_coef`, including its regulariser."""

    requires = "shifts velocities along straight paths, and needs process=flow with a deterministic sampler"
    fits = staticmethod(has_straight_paths)

    clip_range: float = bounded(0.2, gt=0)  # clip range of the ratio of one draw
    max_grad_norm: float | None = bounded(1.0, gt=0, le=math.inf)  # gradient clipping of the actor; null: off
    log_prob_reduction: str = bounded("joint", choices=REDUCTIONS)  # over executed steps and dims
    num_draws: int = bounded(4, ge=1)  # n, times drawn per action; each is a row
    brownian_coef: float = bounded(0.0, ge=0)  # weight of the Brownian term, which widens the flow
    noise: EndNoiseConfig = field(default_factory=EndNoiseConfig)

    def estimator(self, policy: DenoisingPolicy) -> PolicyflowRatio:
        noise = EndNoise(self.noise, policy.chunk.action_dim)
        return PolicyflowRatio(
            policy,
            noise.to(policy.device, policy.dtype),
            num_draws=self.num_draws,
            reduction=self.log_prob_reduction,
            brownian_coef=self.brownian_coef,
        )
