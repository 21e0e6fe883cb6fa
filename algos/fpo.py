"""FPO: policy gradients for flow policies whose ratios are differences of matching losses.

Nothing is known about the density of a flow's actions, and nothing needs to be: the loss of denoising the
executed action stands in for minus its log-likelihood, PPO does the rest. The regression target is the action
that the policy took. `algo=fpo` fine-tunes a policy (`init`), or a fresh one learns from the reward alone.

Source:
    FPO, arXiv 2507.21053, and FPO++, arXiv 2602.02481. Defaults are those of FPO's released code; what
    belongs to FPO++ says so.

Deviations from the released code:
    * Times without weight (pure noise, for the eps loss) are not drawn.
    * Observation statistics are exact and change between iterations only, so ratios are 1 on fresh data.
    * Advantages are estimated once per iteration; values bootstrap through truncation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from policies.denoising import DenoisingPolicy
from policies.registry import register


@register("algo", "fpo")
@dataclass
class FpoConfig(RectifiedConfig):
    """FPO; with `per_draw`, `surrogate=aspo` and the bounds of losses, FPO++."""

    clip_range: float = 0.05  # of the ratio of an action, or of a draw
    target_kl: float | None = None  # there is no divergence to estimate; of the ratio all the same, if set
    num_draws: int = 8  # n, draws of (time, noise) stored with every action
    per_draw: bool = False  # a ratio per draw (FPO++), else one per action
    prediction: str = "eps"  # velocity | eps | x0: what losses compare
    loss_reduction: str = "mean"  # mean | sqrt | per_step | joint, over executed entries
    loss_scale: float = 1.0  # factor of the losses
    huber: float | None = None  # errors beyond this count linearly (FPO++)
    max_loss: float | None = None  # bound on losses before they are subtracted (FPO++)
    max_loss_negative: float | None = None  # the same where the advantage is negative (FPO++)
    difference_range: tuple[float, float] | None = None  # bound on differences, without gradient beyond
    max_difference: float | None = None  # upper bound on differences, with gradient beyond (FPO++)
    times: str = "grid"  # grid | density: where draws lie
    time_power: float = 1.0  # of `density`; 1 is uniform
    action_noise: float = 0.0  # deviation of noise on finished chunks, normalised units (FPO++)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        known = (("prediction", PREDICTIONS), ("times", TIMES), ("loss_reduction", REDUCTIONS))
        for name, choices in known:
            self.require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        self.require("num_draws", self.num_draws >= 1, "at least 1")
        self.require("entropy_coef", self.entropy_coef == 0, "0: the entropy of a flow is not known")
        for name in ("loss_scale", "time_power"):
            self.require(name, 0 < getattr(self, name) < math.inf, "positive and finite")
        for name in ("huber", "max_loss", "max_loss_negative", "max_difference"):
            value = getattr(self, name)
            self.require(name, value is None or 0 < value < math.inf, "positive and finite, or empty")
        self.require("action_noise", 0 <= self.action_noise < math.inf, "at least 0 and finite")
        bounds = self.difference_range
        self.require(
            "difference_range",
            bounds is None or (len(bounds) == 2 and bounds[0] < 0 < bounds[1]),
            "a negative and a positive number, or empty",
        )

    needs = "compares matching losses"

    @property
    def matching(self) -> Matching:
        """How an action is judged."""
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
        """Return the ratio estimator of a policy."""
        return FpoRatio(policy, self.matching, **self.drawing)


@register("algo", "awm")
@dataclass
class AwmConfig(FpoConfig):
    """Advantage-weighted matching: FPO without stored losses, for one pass over fresh data.

    Source:
        AWM, arXiv 2509.25050.
    """

    target_kl: float | None = None  # there is no divergence; of how far losses fell all the same, if set
    update_epochs: int = 1  # passes over the rows; more drift, for nothing holds a ratio near 1
    prediction: str = "velocity"  # velocity | eps | x0: what losses compare
    times: str = "density"  # grid | density: where draws lie
    weight: str = "one"  # one | noise | noise_squared | huber: weight of a draw by its noise amplitude

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        self.require("surrogate", self.surrogate == "ppo", "ppo: its ratios are 1, so nothing bounds them")
        weights: Sequence[str] = AwmRatio.WEIGHTS
        self.require("weight", self.weight in weights, f"one of {', '.join(weights)}")

    def estimator(self, policy: DenoisingPolicy) -> FpoRatio:
        """Return the ratio estimator of a policy."""
        return AwmRatio(policy, self.matching, weight=self.weight, **self.drawing)
