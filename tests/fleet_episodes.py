"""Episodes of a fleet, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.serving.fleet_messages import FleetEpisode


def fleet_episode(steps: int = 4, robot: str = "arm1", number: int = 0, **changes: Any) -> FleetEpisode:
    """An episode of states (4,) and actions (2,) that tell its robot and number, and was a success alone."""
    value = number + len(robot) / 100
    values: dict[str, Any] = {
        **{"robot": robot, "number": number, "version": 0, "time": float(number)},
        **{"success": True, "terminated": True, "watched": False},
        "observations": np.full((steps + 1, 4), value, np.float32),
        "actions": np.full((steps, 2), value / 100, np.float32),
        "rewards": np.zeros(steps, np.float32),
        "decision": np.arange(steps) % 2 == 0,
        "corrected": np.zeros(steps, bool),
    }
    return FleetEpisode(**values | changes)
