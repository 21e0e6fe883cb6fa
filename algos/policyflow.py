"""PolicyFlow: policy gradients for flow policies through shifts of their velocity.

The flow acts with a little learned noise on the end of its path. How much likelier the new weights make an
action follows from how far they move the velocity at one point of a straight line, so neither the density of
the flow nor its path is needed. `algo=policyflow` fine-tunes a policy (`init`), or a fresh flow learns from
the reward alone. The noise is not part of the evaluated and exported policy.

Source:
    PolicyFlow, arXiv 2602.01156. Clip range and reduction are the published ones; what the text leaves open
    follows common settings of PPO.

Deviations from the paper:
    * Times are drawn when acting, `num_draws` for every action, and the old velocity is stored with them;
      the paper draws one anew for every update and keeps a copy of the old network.
    * Deviations of the noise lie between bounds.
    * The Brownian term is a mean over entries, and off by default: it widens a flow without end, which
      takes a cloned one away from its demonstrations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from algos.onpolicy.flow_setup import RectifiedConfig
from algos.onpolicy.policyflow_ratio import EndNoise, EndNoiseConfig, PolicyflowRatio
from algos.onpolicy.ratios import REDUCTIONS
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.registry import register


@register("algo", "policyflow")
@dataclass
class PolicyFlowConfig(RectifiedConfig):
    """PolicyFlow; with `brownian_coef`, its regulariser."""

    clip_range: float = bounded(0.2, gt=0)  # of the ratio of one draw
    max_grad_norm: float | None = bounded(1.0, gt=0, le=math.inf)  # gradient clipping of the actor; null: off
    log_prob_reduction: str = bounded("joint", choices=REDUCTIONS)  # over executed steps and dims
    num_draws: int = bounded(4, ge=1)  # n, times drawn for every action; each is a row
    brownian_coef: float = bounded(0.0, ge=0)  # weight of the Brownian term, which spreads the flow
    noise: EndNoiseConfig = field(default_factory=EndNoiseConfig)

    needs = "shifts velocities along straight paths"

    def estimator(self, policy: DenoisingPolicy) -> PolicyflowRatio:
        noise = EndNoise(self.noise, policy.chunk.action_dim)
        return PolicyflowRatio(
            policy,
            noise.to(policy.device, policy.dtype),
            num_draws=self.num_draws,
            reduction=self.log_prob_reduction,
            brownian_coef=self.brownian_coef,
        )
