"""The images of the last steps of every environment.

Legend: N environments, M of them addressed, To observation history, H and W height and width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from envs.spec import Array

State = TypeVar("State")


class ImageHistory(ABC, Generic[State]):
    """Keeps what determines the images of the last To steps; they are made where they are asked for.

    Args:
        num_envs: N.
        cameras: Those that are observed.
        obs_steps: To.
    """

    def __init__(self, num_envs: int, cameras: Iterable[str], obs_steps: int) -> None:
        self._cameras, self._obs_steps = tuple(cameras), obs_steps
        self._states: list[deque[State]] = [deque(maxlen=obs_steps) for _ in range(num_envs)]

    @abstractmethod
    def capture(self, row: int) -> State:
        """Return what determines the present images of a row."""

    @abstractmethod
    def draw(self, state: State) -> dict[str, Array]:
        """Return the images (H, W, 3) uint8 of a state by camera."""

    def begin(self, row: int) -> None:
        """Start an episode in a row; its first state fills the history."""
        self._states[row].extend([self.capture(row)] * self._obs_steps)

    def add(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._states[row].append(self.capture(row))

    def renew(self, row: int) -> None:
        """Replace the newest state of a row, whose simulator was changed between steps."""
        self._states[row][-1] = self.capture(row)

    def images(self, rows: Iterable[int]) -> dict[str, Array]:
        """Return the histories of some rows, oldest first, (M, To, H, W, 3) uint8 by camera."""
        drawn = [[self.draw(state) for state in self._states[row]] for row in rows]
        return {
            camera: np.stack([np.stack([images[camera] for images in history]) for history in drawn])
            for camera in self._cameras
        }

    def get_state(self) -> list[list[Any]]:
        return [list(history) for history in self._states]

    def set_state(self, state: Iterable[Iterable[Any]]) -> None:
        for history, saved in zip(self._states, state, strict=True):
            history.clear()
            history.extend(saved)

    def close(self) -> None:
        """Release what draws; by default there is nothing to release."""
