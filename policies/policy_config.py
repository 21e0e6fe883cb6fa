"""Policy configuration: parts and chunk horizons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from policies.bounds import Checked, bounded
from policies.errors import ConfigError

PART_GROUPS = ("process", "encoder", "backbone", "sampler")  # fields of `PolicyConfig` with registered parts


@dataclass(frozen=True)
class ChunkSpec(Checked):
    """Horizons of an action chunk; rows `[action_start : action_start + act_steps]` are executed.

    `action_start` is `obs_steps - 1` for windows from the oldest observation (Diffusion Policy) and 0 for
    windows from the newest (DPPO); both agree for `obs_steps` = 1.
    """

    key: ClassVar[str] = "policy"

    action_dim: int = bounded(ge=1)
    horizon: int = bounded(4, ge=1)
    act_steps: int = bounded(4, ge=1)
    obs_steps: int = bounded(1, ge=1)
    action_start: int = bounded(0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action_start > self.horizon - self.act_steps:
            raise ConfigError(
                f"policy.action_start + policy.act_steps must fit into policy.horizon={self.horizon}; got "
                f"{self.action_start} + {self.act_steps}."
            )

    @property
    def shape(self) -> tuple[int, int]:
        return (self.horizon, self.action_dim)

    @property
    def width(self) -> int:
        """A = Ta Da, the numbers of the executed rows."""
        return self.act_steps * self.action_dim

    @property
    def executed(self) -> slice:
        return slice(self.action_start, self.action_start + self.act_steps)


@dataclass
class PolicyConfig(Checked):
    """Policy configuration; `process`, `encoder`, `backbone` and `sampler` are registered parts.

    Attributes:
        observation_clip: Clip normalised states and goals to ± this; null: no clipping.
        goal_dropout: Fraction of training rows with zeroed goal; required for guidance.
        guidance: Goal guidance weight; 0: unconditional, 1: conditional as trained, > 1: amplified.
    """

    key: ClassVar[str] = "policy"

    process: Any = None  # None: VP diffusion with its defaults
    encoder: Any = None  # None: the state without encoding
    backbone: Any = None  # None: the residual MLP with its defaults
    sampler: Any = None  # None: the process's default
    obs_steps: int = 1  # To, observation history length
    horizon: int = 4  # Th, predicted actions per chunk
    act_steps: int = 4  # Ta, executed actions per chunk
    action_start: int = 0  # first executed row; obs_steps - 1 for windows from the oldest observation
    normalizer: dict[str, str] = bounded(
        {"state": "limits", "goal": "limits", "action": "limits"}
        # per feature: limits (to [-1, 1]) | gaussian (mean 0, deviation 1) | identity
    )
    observation_clip: float | None = bounded(5.0, ge=1, le=math.inf)
    goal_dropout: float = bounded(0.0, ge=0, lt=1)
    guidance: float = bounded(1.0, ge=-math.inf)

    def chunk(self, action_dim: int) -> ChunkSpec:
        """Return the horizons for an action width."""
        return ChunkSpec(action_dim, self.horizon, self.act_steps, self.obs_steps, self.action_start)
