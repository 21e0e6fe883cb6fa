"""Configuration of warm starts: the keys of `warm_start`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.bounds import Checked, bounded
from policies.errors import ConfigError


@dataclass
class WarmStart(Checked):
    """Initialise a decision from previous ones; off unless `steps`, `levels` or `executed` is given.

    Attributes:
        steps: Denoising steps of the short run; the last ones of the policy's own.
        start: Alternatively as many equal first-order steps from this sampling time, 0 noise to 1 action.
        executed: Replaces all others: rows before the newest observation begin as they were executed, the
            rest as noise, and all steps are taken. For windows from the oldest observation, as in BESO.
    """

    key: ClassVar[str] = "warm_start"

    steps: int | None = bounded(None, ge=1)
    start: float | None = bounded(None, ge=0, lt=1)
    levels: tuple[int, ...] = ()  # replaces both: DDPM steps at these diffusion levels, noisiest first
    renoise: bool = False  # add noise of the start level to the guess
    executed: bool = False
    gripper: tuple[int, ...] = ()  # binary action dimensions, commanded by their sign
    gripper_guess: float = bounded(1.0, gt=0)  # magnitude of these dimensions in the guess, normalised units

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels and (self.steps, self.start) != (None, None):
            raise ConfigError(
                f"warm_start.levels and warm_start.steps both choose the short run; got {list(self.levels)} "
                f"and {self.steps}, start={self.start}. Leave one of them out."
            )
        if self.start is not None and self.steps is None:
            raise ConfigError(f"warm_start.start={self.start} needs warm_start.steps; got null.")
        if (self.renoise or self.gripper) and not self.is_on:
            given = "renoise" if self.renoise else "gripper"
            raise ConfigError(
                f"warm_start.{given} has no effect without warm_start.steps or levels; give one."
            )
        if self.executed and (self.levels or self.steps is not None or self.renoise or self.gripper):
            raise ConfigError("warm_start.executed takes all steps; leave the other keys of warm_start out.")

    @property
    def is_on(self) -> bool:
        return self.executed or self.steps is not None or bool(self.levels)
