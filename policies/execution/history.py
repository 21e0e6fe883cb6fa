"""History, noise and executed chunk around the decisions on a robot.

A decision maps the last To observations to Ta actions. `ChunkActor` makes of it a function from one
observation to one action, for an exported graph in this process or a server elsewhere.

This module needs NumPy only, so that it runs where PyTorch does not.

Legend: To observation history, Ta executed steps, Da action width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.errors import ConfigError
from policies.runner import History, Limits, Track, draw_noise

__all__ = ["Array", "Arrays", "ChunkActor", "Decide", "History", "draw_noise"]

Array = NDArray[Any]
Arrays = Mapping[str, Array]

Decide = Callable[[Arrays, tuple[int, ...]], Array]
"""From observations, each (To, ...) or (Dg,), and the key of the noise to actions (Ta, Da), physical."""


class ChunkActor:
    """Acts step by step: asks for a chunk, executes it, and asks again when it is used up.

    Args:
        decide: Makes the decision; its second argument, (seed, episode, decision), is the key of
            `draw_noise`.
        obs_steps: To.
        act_steps: How many actions of a chunk are executed, at most Ta; None: all of them.
        seed: Of the noise.
        low: Smallest action (Da,), physical; None: actions are not cut off.
        high: Largest action (Da,).
        max_jump: Largest change from one command to the next, see `policies.runner.Limits`; None: any.

    Attributes:
        decisions: How many there were in this episode.
    """

    def __init__(
        self,
        decide: Decide,
        obs_steps: int,
        *,
        act_steps: int | None = None,
        seed: int = 0,
        low: Any = None,
        high: Any = None,
        max_jump: float | None = None,
    ) -> None:
        if seed < 0:
            raise ConfigError(f"seed must not be negative; got {seed}.")
        self.decisions = 0
        self._decide, self._history = decide, History(obs_steps)
        low, high = (None if side is None else np.asarray(side, np.float32) for side in (low, high))
        try:
            self._track = Track(act_steps, limits=Limits(low, high, max_jump))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._seed, self._episode = seed, -1

    def reset(self) -> None:
        """Begin an episode: forget history and chunk; its noise is another one."""
        self._history.reset()
        self._track.reset()
        self._episode, self.decisions = self._episode + 1, 0

    @property
    def limited(self) -> int:
        """Steps of this episode whose action the limits changed."""
        return self._track.limited

    @property
    def waiting(self) -> int:
        """How many actions of the chunk are left."""
        return self._track.left

    def act(self, obs: Mapping[str, Any]) -> Array:
        """Return the action (Da,) for the observation of this control step.

        A decision that fails leaves everything as it was, except that the observation is remembered.
        """
        if self._episode < 0:
            self.reset()
        self._history.push(obs)
        if self._track.is_due:
            key = (self._seed, self._episode, self.decisions)
            chunk = self._decide(self._history.stacked(), key)
            self._track.begin()
            self._track.deliver(chunk)
            self.decisions += 1
        return self._track.next()
