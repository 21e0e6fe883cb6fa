"""RLPD: soft actor-critic of which half of every batch comes from recorded episodes.

What makes prior data useful to an off-policy learner from nothing: sampling half of a batch from it, critics
with layer normalisation, which do not overestimate what was never tried, an ensemble of them of which targets
take the least of a random pair, and many updates per step.

Source: RLPD, arXiv 2302.02948, released code. Deviations: those of `algos.sac`; one critic step per batch of
its own, where the release cuts one large batch into pieces; the share of the data is any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from algos.sac import SacConfig
from policies.registry import register


@register("algo", "rlpd")
@dataclass
class RlpdConfig(SacConfig):
    """Soft actor-critic with recorded episodes in every batch."""

    entropy_share: ClassVar[float] = -0.5
    without_data: ClassVar[str] = "use algo=sac"

    offline_ratio: float = 0.5  # share of a batch that comes from the dataset
    updates_per_step: float = 20.0  # steps of the critics per executed control step
    actor_every: int = 20  # steps of the critics per step of actor and temperature
    critics: int = 10  # E
    critic_layer_norm: bool = True  # normalise before each activation
    aggregate: str = "subset_min"  # min | mean | subset_min | mean_std over the critics, in targets
    actor_aggregate: str = "mean"  # the same in the actor's loss
    target_entropy: float | None = None  # of an executed chunk; None: minus half its number of entries

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        self.require("offline_ratio", self.offline_ratio > 0, "above 0 (algo=sac does without a dataset)")
