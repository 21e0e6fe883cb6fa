"""What stands around a decision on a robot: history, noise, and the chunk that is being executed.

A decision maps the last To observations to Ta actions. `ChunkActor` makes of it a function from one
observation to one action, whoever decides: an exported graph in this process, or a server elsewhere.

This module needs NumPy only, so that it runs where PyTorch does not.

Legend: To observation history, Ta executed steps, Da action width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.errors import ConfigError

Array = NDArray[Any]
Arrays = Mapping[str, Array]

Decide = Callable[[Arrays, tuple[int, ...]], Array]
"""From observations, each (To, ...) or (Dg,), and the key of the noise to actions (Ta, Da), physical."""


class History:
    """The last To observations; where an episode begins, the first one stands for those before it.

    Args:
        obs_steps: To.
        steady: Names of what has no history: the newest value is passed on as it is (goals).
    """

    def __init__(self, obs_steps: int, steady: Sequence[str] = ("goal",)) -> None:
        if obs_steps < 1:
            raise ConfigError(f"obs_steps must be at least 1; got {obs_steps}.")
        self._steady = frozenset(steady)
        self._seen: deque[dict[str, Array]] = deque(maxlen=obs_steps)

    def reset(self) -> None:
        """Forget everything: an episode begins."""
        self._seen.clear()

    def push(self, obs: Mapping[str, Any]) -> None:
        """Remember the observation of one control step.

        Raises:
            ConfigError: If its entries are not those of the steps before.
        """
        now = {name: np.array(value) for name, value in obs.items()}  # a copy: simulators reuse theirs
        if self._seen and set(now) != set(self._seen[-1]):
            raise ConfigError(
                f"an observation must have the entries of the one before, {sorted(self._seen[-1])}; "
                f"got {sorted(now)}. Call reset() where an episode begins."
            )
        self._seen.extend([now] * (1 if self._seen else self._seen.maxlen or 1))

    def stacked(self) -> dict[str, Array]:
        """Return the observations, oldest first: each (To, ...), what is steady as it is.

        Raises:
            ConfigError: If nothing was observed yet.
        """
        if not self._seen:
            raise ConfigError("there is no observation yet; push one first.")
        newest = self._seen[-1]
        return {
            name: newest[name] if name in self._steady else np.stack([one[name] for one in self._seen])
            for name in newest
        }


def draw_noise(key: Sequence[int], shape: Sequence[int]) -> Array:
    """Draw standard normals of one decision, float32.

    They depend on the key and the shape alone, on every machine: not on what was drawn before, nor on the
    decisions of other robots that are made at the same time.

    Args:
        key: Whole numbers, not negative: seed, episode, decision.
        shape: Shape of one row of noise.
    """
    seed, *place = key
    sequence = np.random.SeedSequence(seed, spawn_key=tuple(place))
    return np.random.default_rng(sequence).standard_normal(tuple(shape), dtype=np.float32)


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
    ) -> None:
        if act_steps is not None and act_steps < 1:
            raise ConfigError(f"act_steps must be at least 1, or None; got {act_steps}.")
        if seed < 0:
            raise ConfigError(f"seed must not be negative; got {seed}.")
        self.decisions = 0
        self._decide, self._history = decide, History(obs_steps)
        self._act_steps, self._seed, self._low, self._high = act_steps, seed, low, high
        self._episode = -1
        self._rest: deque[Array] = deque()

    def reset(self) -> None:
        """Begin an episode: forget history and chunk; its noise is another one."""
        self._history.reset()
        self._rest.clear()
        self._episode, self.decisions = self._episode + 1, 0

    @property
    def waiting(self) -> int:
        """How many actions of the chunk are left."""
        return len(self._rest)

    def act(self, obs: Mapping[str, Any]) -> Array:
        """Return the action (Da,) for the observation of this control step.

        A decision that fails leaves everything as it was, except that the observation is remembered.
        """
        if self._episode < 0:
            self.reset()
        self._history.push(obs)
        if not self._rest:
            key = (self._seed, self._episode, self.decisions)
            chunk = self._decide(self._history.stacked(), key)
            self._rest.extend(chunk[: self._act_steps])
            self.decisions += 1
        action = self._rest.popleft()
        return action if self._low is None and self._high is None else np.clip(action, self._low, self._high)
