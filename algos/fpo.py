"""FPO: policy gradients for denoising policies with ratios from matching losses.

The density of a denoiser's actions is unknown; the matching loss of the executed action replaces the negative
log-likelihood in PPO. The regression target is the executed action. `algo=fpo` fine-tunes `init`, or trains a
new policy from the reward alone.

Source:
    FPO, arXiv 2507.21053, FPO++, arXiv 2602.02481, and AWM, arXiv 2509.25050. Defaults are those of FPO's
    released code; FPO++ settings are marked.

Deviations from the released code:
    * Times of zero weight (pure noise, for the eps loss) are not drawn.
    * Observation statistics are exact and change between iterations only: ratios are 1 on fresh data.
    * Advantages are estimated once per iteration; values bootstrap through truncation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from algos.onpolicy.field_config import FieldConfig
from algos.onpolicy.fpo_ratio import PREDICTIONS, REDUCTIONS, TIMES, AwmRatio, FpoRatio, Matching
from policies.bounds import bounded
from policies.denoising import DenoisingPolicy
from policies.protocols import has_field
from policies.registry import register


@register("algo", "fpo")
@dataclass
class FpoConfig(FieldConfig):
    """FPO; FPO++ with `per_draw`, `surrogate=aspo` and clamps of losses."""

    requires = "compares matching losses, and needs a policy that acts with their denoiser"
    fits = staticmethod(has_field)

    clip_range: float = bounded(0.05, gt=0)  # clip range of the ratio of an action, or of a draw
    target_kl: float | None = bounded(None, gt=0, le=math.inf)  # KL limit, from the ratios; null: off
    num_draws: int = bounded(8, ge=1)  # n, (time, noise) draws stored per action
    per_draw: bool = False  # one ratio per draw (FPO++); false: per action
    prediction: str | None = bounded(None, choices=PREDICTIONS)  # compared; null: eps for flows, else own
    loss_reduction: str = bounded("mean", choices=REDUCTIONS)  # over executed entries
    loss_scale: float = bounded(1.0, gt=0)  # factor of the losses
    huber: float | None = bounded(None, gt=0)  # threshold of the Huber loss (FPO++); null: squared errors
    max_loss: float | None = bounded(None, gt=0)  # clamp of losses before subtraction (FPO++)
    max_loss_negative: float | None = bounded(None, gt=0)  # clamp where the advantage is negative (FPO++)
    difference_range: tuple[float, float] | None = None  # clamp of differences; no gradient beyond
    max_difference: float | None = bounded(None, gt=0)  # upper clamp of differences, gradients kept (FPO++)
    times: str = bounded("grid", choices=TIMES)  # distribution of the drawn times
    time_power: float = bounded(1.0, gt=0)  # of `density`; 1 is uniform
    action_noise: float = bounded(0.0, ge=0)  # std of noise on finished chunks, normalised units (FPO++)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("entropy_coef", self.entropy_coef == 0, "0: the entropy of a flow is not known")
        bounds = self.difference_range
        has_both = bounds is None or (len(bounds) == 2 and bounds[0] < 0 < bounds[1])
        self.require("difference_range", has_both, "a negative and a positive number, or empty")

    def unused(self) -> dict[str, str]:
        times = {"time_power": "without algo.times=density"} if self.times == "grid" else {}
        return super().unused() | times

    def matching(self, policy: DenoisingPolicy) -> Matching:
        """Return the matching loss of a policy."""
        usual = "eps" if policy.process.kind == "velocity" else policy.process.kind
        return Matching(
            prediction=usual if self.prediction is None else self.prediction,
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
        names = ("num_draws", "per_draw", "times", "time_power", "action_noise")
        return {name: getattr(self, name) for name in names}

    def estimator(self, policy: DenoisingPolicy) -> FpoRatio:
        return FpoRatio(policy, self.matching(policy), **self.drawing)


@register("algo", "awm")
@dataclass
class AwmConfig(FpoConfig):
    """Advantage-weighted matching (AWM): FPO without stored losses, for one pass over fresh data."""

    difference_range: ClassVar[None] = None  # type: ignore[misc]  # no keys: ratios compare no losses
    max_difference: ClassVar[None] = None  # type: ignore[misc]
    dropped: ClassVar[tuple[str, ...]] = ("difference_range", "max_difference")  # of saved runs, ignored

    target_kl: float | None = bounded(None, gt=0, le=math.inf)  # limit of the loss decrease; null: off
    update_epochs: int = bounded(1, ge=1)  # passes over the rows; ratios are not clipped
    prediction: str | None = bounded(None, choices=PREDICTIONS)  # compared; null: the network's output
    times: str = bounded("density", choices=TIMES)  # distribution of the drawn times
    weight: str = bounded("one", choices=AwmRatio.WEIGHTS)  # weight of a draw by its noise amplitude

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("surrogate", self.surrogate == "ppo", "ppo: its ratios are 1, so nothing bounds them")

    def unused(self) -> dict[str, str]:
        return super().unused() | {"clip_range": "with algo=awm, whose ratios are 1"}

    def estimator(self, policy: DenoisingPolicy) -> FpoRatio:
        return AwmRatio(policy, self.matching(policy), weight=self.weight, **self.drawing)

    def matching(self, policy: DenoisingPolicy) -> Matching:
        prediction = policy.process.kind if self.prediction is None else self.prediction
        return replace(super().matching(policy), prediction=prediction)
