"""A task seen from above: what a drawing of it, and a sketch drawn into it, need.

Places are (x, y) in metres, x to the right and y upwards.

Legend: N plans, R rows of a plan that lie ahead, Da action width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from envs.spec import Array

if TYPE_CHECKING:
    from policies.wrappers.sketches import AnySketch

Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""Centre and half-widths: x, y, half of the extent in x, half of that in y."""


@dataclass(frozen=True)
class Plane:
    """A scene from above, and how actions move the robot in it.

    Args:
        low: Lower left corner of what is drawn.
        high: Upper right corner.
        pillars: Round obstacles: x, y, radius.
        walls: Obstacles with corners.
        finish: Line at which an episode succeeds; None: there is none.
        goal: Where it succeeds otherwise: x, y, radius; None: nowhere.
        radius: Of the robot.
        pace: Path length that a usual action covers.
        reach: Change of position by an action of 1; None: actions are places.
        observed: Entries of the state that hold the position.
        slides: Whether pillars can be moved sideways by hand; see `SlidingStepper`.
    """

    low: Place
    high: Place
    pillars: tuple[tuple[float, float, float], ...]
    walls: tuple[Box, ...]
    finish: Box | None
    goal: tuple[float, float, float] | None
    radius: float
    pace: float
    reach: float | None
    observed: tuple[int, int] = (0, 1)
    slides: bool = False

    def sketch(self, points: Sequence[Place]) -> AnySketch:
        """Return the sketch of a line (n, 2).

        Raises:
            ConfigError: If it has fewer than two different points.
        """
        # Imported here, because tasks are listed without torch.
        from policies.wrappers.sketches import PositionSketch, WaypointSketch

        if self.reach is None:
            return WaypointSketch(tuple(points), self.pace, self.observed)
        return PositionSketch(tuple(points), self.pace, self.reach, self.observed)

    def paths(self, here: Array, actions: Array) -> Array:
        """Return the places (N, R + 1, 2) where actions (N, R, Da) aim from a place (2,), which is first.

        Changes of position are summed; the robot itself follows with a delay.
        """
        start = np.broadcast_to(here, (len(actions), 1, 2))
        ahead = actions if self.reach is None else here + self.reach * actions.cumsum(axis=1)
        return np.concatenate([start, ahead], axis=1)


@runtime_checkable
class PlaneStepper(Protocol):
    """A simulator whose scene can be seen from above, and whose robot can be moved by hand."""

    def plane(self, row: int) -> Plane:
        """Return the scene of a running episode."""
        ...

    def place(self, row: int, position: Array) -> Array:
        """Put the robot of a row at a position (2,) within the walls; returns the observation (Do,)."""
        ...


@runtime_checkable
class SlidingStepper(PlaneStepper, Protocol):
    """One whose pillars can be moved by hand, where `Plane.slides`."""

    def slide(self, row: int, pillar: int, x: float) -> Array:
        """Move a pillar, by its place in `Plane.pillars`, and those fixed to it, sideways to x [m].

        They stay within the places of episodes. Returns the observation (Do,).
        """
        ...
