"""RLPD: soft actor-critic of which half of every batch comes from recorded episodes.

What makes prior data useful to an off-policy learner from nothing: sampling half of a batch from it, critics
with layer normalisation, which do not overestimate what was never tried, an ensemble of them of which targets
take the least of a random pair, and many updates per step.

Source: RLPD, arXiv 2302.02948, released code. Deviations: those of `algos.sac`; one critic step per batch of
its own, where the release cuts one large batch into pieces; the share of the data is any number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from algos.sac import SacConfig
from policies.bounds import bounded
from policies.networks.critics import AGGREGATES
from policies.registry import register


@register("algo", "rlpd")
@dataclass
class RlpdConfig(SacConfig):
    """Soft actor-critic with recorded episodes in every batch."""

    entropy_share: ClassVar[float] = -0.5
    without_data: ClassVar[str] = "use algo=sac"

    offline_ratio: float = bounded(0.5, ge=0, lt=1)  # fraction of a batch drawn from the dataset
    updates_per_step: float = bounded(20.0, gt=0)  # critic updates per executed control step
    actor_every: int = bounded(20, ge=1)  # critic updates per update of actor and temperature
    critics: int = bounded(10, ge=1)  # E, size of the critic ensemble
    critic_layer_norm: bool = True  # layer normalisation before each activation
    aggregate: str = bounded("subset_min", choices=AGGREGATES)  # reduction over critics in targets
    actor_aggregate: str = bounded("mean", choices=AGGREGATES)  # reduction over critics in the actor loss
    target_entropy: float | None = bounded(None, ge=-math.inf)  # of a chunk; null: minus half its size

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("offline_ratio", self.offline_ratio > 0, "above 0 (algo=sac does without a dataset)")
