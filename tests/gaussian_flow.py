"""The flow from N(0, 1) to N(MEAN, STD^2), element by element, with all its steps in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.processes.base import over_rows

MEAN, STD = 0.4, 0.3


def spread(t: Tensor) -> Tensor:
    """Return the deviation of the flow at times t."""
    return (t.square() * STD**2 + (1 - t).square()).sqrt()


def average_velocity(
    x: Tensor, t: Tensor, until: Tensor | None = None, *, level: Tensor | None = None
) -> Tensor:
    """Return what an exact network says: the average velocity of the step from (x, t) to `until`."""
    until = t if until is None else until
    length = until - t
    slope = (t * STD**2 - (1 - t)) / spread(t).square()
    secant = (spread(until) / spread(t) - 1) / torch.where(length == 0, 1.0, length)
    rate = torch.where(length == 0, slope, secant)
    return MEAN + over_rows(rate, x) * (x - over_rows(t, x) * MEAN)
