"""Configuration of the evaluation protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.execution.warm_start import WarmStart
from policies.wrappers.sketch_settings import SketchSettings

NOISES = ("random", "zero")
SEEDS = 2**32  # seed range of all simulators: 0 to SEEDS - 1


def check_seeds(name: str, first: int, count: int = 1) -> None:
    """Refuse `count` consecutive seeds outside the simulators' range; `name` is the key of the first."""
    if first < 0 or first + max(count, 1) > SEEDS:
        largest = SEEDS - max(count, 1)
        raise ConfigError(f"{name} must be from 0 to {largest}; got {first}.")


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """Evaluation protocol with its defaults; hashed and stored with the results."""

    episodes: int = bounded(100, ge=0)  # episode i has seed first_seed + i; report 100 or more
    first_seed: int = 0  # seed of episode 0
    noise_seed: int = 0  # root of the episodes' sampling noise
    start_noise: str = bounded("random", choices=NOISES)  # initial noise of denoising
    sampling_noise: str = bounded("random", choices=NOISES)  # per-step noise of a stochastic sampler
    steps: int | None = bounded(None, ge=1)  # denoising steps; null: the policy's own
    num_envs: int = bounded(16, ge=1)  # parallel environments; no effect on the numbers
    act_steps: int | None = bounded(None, ge=1)  # executed actions per decision; null: the policy's own
    warm_start: WarmStart = field(default_factory=WarmStart)
    steer: SketchSettings = field(default_factory=SketchSettings)
    guidance: float | None = bounded(None, ge=0)  # weight of the goal or label; null: the policy's own

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds("first_seed", self.first_seed, self.episodes)
        check_seeds("noise_seed", self.noise_seed)
        for name in ("start_noise", "sampling_noise"):
            if self.steer.is_on and getattr(self, name) == "zero":
                raise ConfigError(f"{name}=zero and steer exclude each other. Leave one of them out.")
        if self.steer.is_on and self.warm_start.is_on:
            raise ConfigError("steer and warm_start both set the start of a plan. Give one of them.")
