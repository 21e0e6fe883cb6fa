"""Configuration of sketch guidance: the keys of `steer`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.paths import path_field


class Strategy(NamedTuple):
    """Components of a steering strategy besides sampling."""

    candidates: int = 1  # number of plans; the nearest to the guide is executed
    starts_at_guide: bool = False
    scale: float = 0.0  # guidance scale
    resample_steps: int = 1  # evaluations per level
    begins_with_guide: bool = False  # overwrite the first rows of the final plan with the guide


STRATEGIES = {
    "random": Strategy(),
    "output_perturbation": Strategy(candidates=16, begins_with_guide=True),
    "post_hoc_ranking": Strategy(candidates=16),
    "biased_initialization": Strategy(starts_at_guide=True),
    "guided_diffusion": Strategy(scale=20.0),
    "stochastic_sampling": Strategy(scale=60.0, resample_steps=4),
}


@dataclass
class SketchSettings(Checked):
    """Sketch guidance; off unless `strategy` is given.

    Attributes:
        candidates: Number of plans; the nearest to the sketch is executed; null: the strategy's.
        gradient: Evaluation point of the guidance gradient: the noisy (x) or the clean plan (x0).
        limit: Bound on the magnitude of guided clean plans, normalised; null: unbounded.
        resample_steps: Evaluations per noise level; null: the strategy's.
        resample_noise: Fraction of the noise redrawn between evaluations of a level, 0 to 1.
        start: biased_initialization: initial sampling time, 0 (noise) to 1.
        guide_rows: output_perturbation: rows of the guide; null: half of the executed ones.
    """

    key: ClassVar[str] = "steer"

    strategy: str | None = bounded(None, choices=tuple(STRATEGIES))  # null: off; see docs/steering.md
    sketch: str | None = path_field()  # JSON or NPZ: actions, positions or waypoints; see docs/steering.md
    candidates: int | None = bounded(None, ge=1)
    scale: float | None = bounded(None, ge=0)  # guidance scale on the noise; null: the strategy's
    gradient: str = bounded("x0", choices=("x", "x0"))
    limit: float | None = bounded(1.0, gt=0)
    resample_steps: int | None = bounded(None, ge=1, was="visits")
    resample_noise: float = bounded(1.0, ge=0, le=1, was="fresh")
    start: float = bounded(0.49, ge=0, le=1)
    noise_share: float = bounded(0.5, ge=0)  # biased_initialization: weight of the noise added to the guide
    guide_rows: int | None = bounded(None, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given and not self.is_on:
            raise ConfigError(
                f"steer.{given[0]} has no effect without steer.strategy; give one of {', '.join(STRATEGIES)}."
            )

    def unused(self) -> dict[str, str]:
        recipe, why = self.recipe, f"with steer.strategy={self.strategy}"
        used = {
            ("start", "noise_share"): recipe.starts_at_guide,
            ("guide_rows",): recipe.begins_with_guide,
            ("gradient", "limit"): recipe.scale > 0,
        }
        found = {name: why for names, is_used in used.items() if not is_used for name in names}
        once = {"resample_noise": "without steer.resample_steps above 1"}
        return super().unused() | found | ({} if recipe.resample_steps > 1 else once)

    @property
    def is_on(self) -> bool:
        return self.strategy is not None

    @property
    def recipe(self) -> Strategy:
        """The strategy's settings with configured overrides."""
        own = STRATEGIES[self.strategy or "random"]
        given = {name: getattr(self, name) for name in ("candidates", "scale", "resample_steps")}
        return own._replace(**{name: value for name, value in given.items() if value is not None})
