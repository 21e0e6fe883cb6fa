"""FPO: policy gradients for flow policies whose ratios are differences of matching losses.

Nothing is known about the density of a flow's actions, and nothing needs to be: the loss of denoising the
executed action stands in for minus its log-likelihood, PPO does the rest. The regression target is the action
that the policy took. `algo=fpo` fine-tunes a policy (`init`), or a fresh one learns from the reward alone.

Source:
    FPO, arXiv 2507.21053, and FPO++, arXiv 2602.02481. Defaults are those of FPO's released code; what
    belongs to FPO++ is marked.

Deviations from the released code:
    * Times without weight (pure noise, for the eps loss) are not drawn.
    * Observation statistics are exact and change between iterations only, so ratios are 1 on fresh data.
    * Advantages are estimated once per iteration; values bootstrap through truncation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from algos.onpolicy.flow_setup import RectifiedConfig
from algos.onpolicy.fpo_ratio import (
    PREDICTIONS,
    REDUCTIONS,
    TIMES,
    AwmRatio,
    FpoRatio,
    Matching,
)
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.registry import register


@register("algo", "fpo")
@dataclass
class FpoConfig(RectifiedConfig):
    """FPO; with `per_draw`, `surrogate=aspo` and the bounds of losses, FPO++."""

    clip_range: float = bounded(0.05, gt=0)  # of the ratio of an action, or of a draw
    target_kl: float | None = bounded(None, gt=0, le=math.inf)  # estimated from the ratios; null: no limit
    num_draws: int = bounded(8, ge=1)  # n, draws of (time, noise) stored with every action
    per_draw: bool = False  # a ratio per draw (FPO++), else one per action
    prediction: str = bounded("eps", choices=PREDICTIONS)  # what losses compare
    loss_reduction: str = bounded("mean", choices=REDUCTIONS)  # over executed entries
    loss_scale: float = bounded(1.0, gt=0)  # factor of the losses
    huber: float | None = bounded(None, gt=0)  # threshold of the Huber loss (FPO++); null: squared errors
    max_loss: float | None = bounded(None, gt=0)  # clamp of losses before they are subtracted (FPO++)
    max_loss_negative: float | None = bounded(None, gt=0)  # clamp where the advantage is negative (FPO++)
    difference_range: tuple[float, float] | None = None  # clamp of differences; no gradient beyond
    max_difference: float | None = bounded(None, gt=0)  # upper clamp of differences, gradients kept (FPO++)
    times: str = bounded("grid", choices=TIMES)  # distribution of the times of draws
    time_power: float = bounded(1.0, gt=0)  # of `density`; 1 is uniform
    action_noise: float = bounded(0.0, ge=0)  # std of noise on finished chunks, normalised units (FPO++)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("entropy_coef", self.entropy_coef == 0, "0: the entropy of a flow is not known")
        bounds = self.difference_range
        self.require(
            "difference_range",
            bounds is None or (len(bounds) == 2 and bounds[0] < 0 < bounds[1]),
            "a negative and a positive number, or empty",
        )

    needs = "compares matching losses"

    @property
    def matching(self) -> Matching:
        return Matching(
            prediction=self.prediction,
            reduction=self.loss_reduction,
            huber=self.huber,
            scale=self.loss_scale,
            max_loss=self.max_loss,
            max_loss_negative=self.max_loss_negative,
            difference_range=self.difference_range,
            max_difference=self.max_difference,
        )

    @property
    def drawing(self) -> dict[str, Any]:
        """What is drawn, as arguments of the ratio."""
        return {
            "num_draws": self.num_draws,
            "per_draw": self.per_draw,
            "times": self.times,
            "time_power": self.time_power,
            "action_noise": self.action_noise,
        }

    def estimator(self, policy: DenoisingPolicy) -> FpoRatio:
        return FpoRatio(policy, self.matching, **self.drawing)


@register("algo", "awm")
@dataclass
class AwmConfig(FpoConfig):
    """Advantage-weighted matching: FPO without stored losses, for one pass over fresh data.

    Source:
        AWM, arXiv 2509.25050.
    """

    target_kl: float | None = bounded(None, gt=0, le=math.inf)  # of how far losses fell; null: no limit
    update_epochs: int = bounded(1, ge=1)  # passes over the rows; more drift, as nothing bounds the ratio
    prediction: str = bounded("velocity", choices=PREDICTIONS)  # what losses compare
    times: str = bounded("density", choices=TIMES)  # distribution of the times of draws
    weight: str = bounded("one", choices=AwmRatio.WEIGHTS)  # weight of a draw by its noise amplitude

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("surrogate", self.surrogate == "ppo", "ppo: its ratios are 1, so nothing bounds them")

    def estimator(self, policy: DenoisingPolicy) -> FpoRatio:
        return AwmRatio(policy, self.matching, weight=self.weight, **self.drawing)
