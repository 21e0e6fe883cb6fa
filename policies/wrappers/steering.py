"""How a policy follows a sketch: the keys of `steer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from policies.errors import ConfigError
from policies.paths import path_field


class Strategy(NamedTuple):
    """What a strategy does beside sampling."""

    candidates: int = 1  # plans, of which the nearest to the guide is taken
    starts_at_guide: bool = False
    scale: float = 0.0  # of guidance
    visits: int = 1  # evaluations at every level
    begins_with_guide: bool = False  # overwrites the first rows of the finished plan


STRATEGIES = {
    "random": Strategy(),
    "output_perturbation": Strategy(candidates=16, begins_with_guide=True),
    "post_hoc_ranking": Strategy(candidates=16),
    "biased_initialization": Strategy(starts_at_guide=True),
    "guided_diffusion": Strategy(scale=20.0),
    "stochastic_sampling": Strategy(scale=60.0, visits=4),
}
GRADIENTS = ("x", "x0")


@dataclass
class Steering:
    """How a policy follows a sketch; off unless `strategy` is given."""

    strategy: str | None = None  # one of six, e.g. stochastic_sampling; see docs/steering.md; null: off
    sketch: str | None = path_field()  # JSON or NPZ: actions, positions or waypoints; see docs/steering.md
    candidates: int | None = None  # plans, of which the nearest to the sketch is taken; null: the strategy's
    scale: float | None = None  # weight of the gradient in the noise; null: the strategy's
    gradient: str = "x0"  # x | x0: where guidance takes the gradient: at the noisy or at the clean plan
    limit: float | None = 1.0  # largest magnitude to which guidance moves clean plans, normalised; null: any
    visits: int | None = None  # evaluations at every noise level; null: the strategy's
    fresh: float = 1.0  # share of the noise that a visit draws anew, 0 to 1
    start: float = 0.49  # biased_initialization: sampling time that it begins at, 0 (noise) to 1
    noise_share: float = 0.5  # biased_initialization: weight of the noise beside the guide
    guide_rows: int | None = None  # output_perturbation: rows of the guide; null: half of those executed

    def __post_init__(self) -> None:
        """Check the values."""
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ConfigError(
                f"steer.strategy must be one of {', '.join(STRATEGIES)}, or null; got '{self.strategy}'."
            )
        if self.gradient not in GRADIENTS:
            raise ConfigError(f"steer.gradient must be x or x0; got '{self.gradient}'.")
        for name in ("candidates", "visits", "guide_rows"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"steer.{name} must be at least 1, or null; got {getattr(self, name)}.")
        if self.limit is not None and not self.limit > 0:
            raise ConfigError(f"steer.limit must be positive, or null; got {self.limit}.")
        for name in ("fresh", "start"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"steer.{name} must lie in 0..1; got {getattr(self, name)}.")
        for name in ("scale", "noise_share"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ConfigError(f"steer.{name} must not be negative; got {getattr(self, name)}.")

    @property
    def is_on(self) -> bool:
        """Whether there is anything to follow."""
        return self.strategy is not None

    @property
    def recipe(self) -> Strategy:
        """What is done: the strategy's own switches, and those that were set in their place."""
        own = STRATEGIES[self.strategy or "random"]
        given = {name: getattr(self, name) for name in ("candidates", "scale", "visits")}
        return own._replace(**{name: value for name, value in given.items() if value is not None})
