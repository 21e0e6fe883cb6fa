"""How a decision begins from the plan before: the keys of `warm_start`."""

from __future__ import annotations

from dataclasses import dataclass

from policies.errors import ConfigError


@dataclass
class WarmStart:
    """How a decision begins from what is left of the plan before; off unless `steps` or `levels` is given."""

    steps: int | None = None  # denoising steps of the short run; the last ones of the policy's own
    start: float | None = (
        None  # or as many equal first-order steps from this sampling time, 0 noise to 1 action
    )
    levels: tuple[int, ...] = ()  # instead of both: DDPM steps at these levels of a diffusion, noisiest first
    renoise: bool = False  # corrupt the guess to the level that the short run begins at
    gripper: tuple[int, ...] = ()  # action dimensions that are open or closed: commanded by their sign
    gripper_guess: float = 1.0  # magnitude of these in the guess, normalised units

    def __post_init__(self) -> None:
        """Check the values."""
        self.levels, self.gripper = tuple(self.levels), tuple(self.gripper)
        if self.levels and (self.steps, self.start) != (None, None):
            raise ConfigError(
                f"warm_start.levels and warm_start.steps both choose the short run; got {list(self.levels)} "
                f"and {self.steps}, start={self.start}. Leave one of them out."
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"warm_start.steps must be at least 1, or null; got {self.steps}.")
        if self.start is not None and (self.steps is None or not 0 <= self.start < 1):
            raise ConfigError(
                f"warm_start.start must be at least 0 and below 1, and needs warm_start.steps; got "
                f"{self.start} with steps={self.steps}."
            )
        if not self.gripper_guess > 0:
            raise ConfigError(f"warm_start.gripper_guess must be positive; got {self.gripper_guess}.")

    @property
    def is_on(self) -> bool:
        """Whether there is a short run."""
        return self.steps is not None or bool(self.levels)
