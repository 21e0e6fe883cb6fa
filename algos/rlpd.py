"""RLPD: soft actor-critic with recorded episodes in half of every batch.

Four changes to SAC: half of every batch is prior data; layer normalisation in the critics limits
overestimation off the data; targets take the minimum over a random pair of a critic ensemble; many updates
per step.

Source: RLPD, arXiv 2302.02948, released code. Deviations: those of `algos.sac`; every critic step draws its
own batch, where the release splits one large batch; `offline_ratio` is configurable.
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
    """SAC with recorded episodes in every batch."""

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
