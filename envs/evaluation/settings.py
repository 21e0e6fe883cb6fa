"""Configuration of the evaluation protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
class EvaluationSettings:
    """Evaluation protocol with its defaults; hashed and stored with the results."""

    episodes: int = 100  # episode i starts from seed first_seed + i; use at least 100 for reported numbers
    first_seed: int = 0  # seed of episode 0
    noise_seed: int = 0  # root of the episodes' sampling noise
    start_noise: str = "random"  # random | zero: initial noise of denoising
    sampling_noise: str = "random"  # random | zero: per-step noise of a stochastic sampler
    steps: int | None = None  # denoising steps; null: the policy's own
    num_envs: int = 16  # parallel environments; no effect on the numbers
    act_steps: int | None = None  # executed actions per decision; null: the policy's own
    warm_start: WarmStart = field(default_factory=WarmStart)
    steer: SketchSettings = field(default_factory=SketchSettings)
    guidance: float | None = None  # weight of the goal or label; null: the policy's own

    def __post_init__(self) -> None:
        for name, least in (("episodes", 0), ("num_envs", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        check_seeds("first_seed", self.first_seed, self.episodes)
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise ConfigError(f"guidance must be at least 0, or null; got {self.guidance}.")
        check_seeds("noise_seed", self.noise_seed)
        for name in ("steps", "act_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, or null; got {getattr(self, name)}.")
        for name in ("start_noise", "sampling_noise"):
            if getattr(self, name) not in NOISES:
                raise ConfigError(f"{name} must be random or zero; got '{getattr(self, name)}'.")
            if self.steer.is_on and getattr(self, name) == "zero":
                raise ConfigError(f"{name}=zero and steer exclude each other. Leave one of them out.")
        if self.steer.is_on and self.warm_start.is_on:
            raise ConfigError("steer and warm_start both set the start of a plan. Give one of them.")
