"""Environments of strangers, with gymnasium's interface."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Walk(gymnasium.Env[Any, Any]):
    """A point walks to a place at most 1 away; the observation is a Dict with a picture of 6 x 4 pixels."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(self, render_mode: str | None = None, reach: float = 0.1, key: str = "is_success") -> None:
        self.render_mode, self.reach, self.key = render_mode, reach, key
        low = Box(-9, 9, (1,))
        picture = Box(0, 255, (4, 6, 3), np.uint8)
        self.observation_space = Dict({"place": low, "goal": Box(-9, 9, (1, 1)), "eye": picture})
        self.action_space = Box(np.array([[-0.5]], np.float32), np.array([[0.25]], np.float32))
        self.x = self.goal = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.goal = 0.0, float(self.np_random.uniform(-1, 1))
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.shape(action) == (1, 1)
        self.x += float(action[0, 0])
        done = abs(self.x - self.goal) < self.reach
        return self.seen(), -abs(self.x - self.goal), done, False, {self.key: done}

    def seen(self) -> dict[str, Any]:
        place, goal = np.array([self.x], np.float32), np.array([[self.goal]], np.float32)
        return {"place": place, "goal": goal, "eye": self.render()}

    def render(self) -> Any:
        return np.full((4, 6, 3), int(100 * abs(self.x)) % 256, np.uint8)


class Silent(Walk):
    """The same without any report of success, and without pictures."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return (*super().step(action)[:-1], {})

    def render(self) -> Any:
        return np.zeros((4, 6, 3), np.uint8) if self.render_mode is None else None


gymnasium.register("tests/Walk-v0", entry_point=Walk, max_episode_steps=12)
