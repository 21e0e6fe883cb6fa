"""From one observation per control step to one action, around the decisions of a robot; needs NumPy only.

Legend: To observation history, Ta executed steps, Da action width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.errors import ConfigError
from policies.runner import History, Limits, Track

Array = NDArray[Any]
Arrays = Mapping[str, Array]

Decide = Callable[[Arrays, tuple[int, ...]], Array]
"""(observations (To, ...) or (Dg,), key of the noise) -> physical actions (Ta, Da)."""


class ChunkActor:
    """Act step by step: request a chunk, execute it, and request the next.

    Args:
        decide: Computes a chunk for histories and the key of the noise (seed, episode, decision).
        obs_steps: To.
        act_steps: Executed actions per chunk, at most Ta; None: all.
        seed: Seed of the noise.
        low: Lower action bounds (Da,), physical; None: no clipping.
        high: Upper action bounds (Da,).
        max_jump: Largest change between consecutive commands, see `policies.runner.Limits`; None: unlimited.
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
        self.decisions = 0  # of this episode
        self._decide, self._history = decide, History(obs_steps)
        try:
            self._track = Track(act_steps, limits=Limits(max_jump=max_jump))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._bound(low, high)
        self._seed, self._episode = seed, -1

    def _bound(self, low: Any, high: Any) -> None:
        """Clip actions to these bounds from now on; None: no clipping."""
        low, high = (None if side is None else np.asarray(side, np.float32) for side in (low, high))
        self._track.limits = replace(self._track.limits, low=low, high=high)

    def reset(self) -> None:
        """Start an episode: clears history and chunk, and changes the noise stream."""
        self._history.reset()
        self._track.reset()
        self._episode, self.decisions = self._episode + 1, 0

    @property
    def limited(self) -> int:
        """Number of steps in this episode whose action the limits changed."""
        return self._track.limited

    @property
    def waiting(self) -> int:
        """Number of remaining actions of the chunk."""
        return self._track.left

    def act(self, obs: Mapping[str, Any]) -> Array:
        """Return the action (Da,) for an observation; a failed decision only changes the history."""
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
