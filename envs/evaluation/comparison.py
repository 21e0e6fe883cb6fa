"""Paired comparison of policies on common episodes, with a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envs.evaluation.evaluate import Evaluation
from envs.evaluation.intervals import Interval, paired_difference, stated
from envs.spec import Array
from policies.errors import ConfigError

FEWEST_EPISODES = 20
"""With fewer, intervals of equal policies exclude zero too often: of five episodes in 15 % of all cases."""


@dataclass(frozen=True)
class Comparison:
    """A paired difference `after - before` on common episodes."""

    quantity: str
    before: float
    after: float
    difference: Interval
    episodes: int
    same_protocol: bool  # noise, steps, engine and versions agree

    @property
    def verdict(self) -> str:
        if self.episodes < FEWEST_EPISODES:
            return "too few episodes to tell"
        return "clearly different" if self.difference.excludes_zero else "within noise"

    def __str__(self) -> str:
        mean, interval = format_interval(self.quantity, stated(self.difference, self.episodes))
        caution = "" if self.same_protocol else " Their protocols differ."
        return (
            f"paired difference of {self.quantity}: {mean} (95 % interval {interval}) on "
            f"{self.episodes} episodes: {self.verdict}.{caution}"
        )


def format_interval(quantity: str, interval: Mapping[str, float]) -> tuple[str, str]:
    """Format mean and interval: success in percent, else three significant digits; "–" without interval.

    Example:
        >>> format_interval("return", {"value": 0.01, "low": 0.0, "high": 0.03})
        ('0.0100', '0.0000 to 0.0300')
    """
    scale, unit = (100.0, " %") if quantity == "success" else (1.0, "")
    value, low, high = (scale * interval.get(key, interval["value"]) for key in ("value", "low", "high"))
    largest = max(abs(value), abs(low), abs(high))
    digits = 1
    if quantity != "success" and 0 < largest < math.inf:
        digits = min(max(2 - math.floor(math.log10(largest)), 1), 6)
    if "low" not in interval:
        return f"{value:.{digits}f}{unit}", "–"
    return f"{value:.{digits}f}{unit}", f"{low:.{digits}f} to {high:.{digits}f}{unit}"


def compare(
    before: Evaluation | Sequence[Evaluation],
    after: Evaluation | Sequence[Evaluation],
    *,
    quantity: str | None = None,
) -> Comparison:
    """Compare two policies on their common episodes.

    Args:
        before: One evaluation, or one per training seed.
        after: As many evaluations as `before`.
        quantity: See `Evaluation.values`; None: success if defined for the task, else the return.

    Raises:
        ConfigError: If tasks or numbers of evaluations differ, or there is no common episode.
    """
    left = [before] if isinstance(before, Evaluation) else list(before)
    right = [after] if isinstance(after, Evaluation) else list(after)
    if len(left) != len(right) or not left:
        raise ConfigError(
            f"compare needs as many evaluations before as after; got {len(left)} and {len(right)}."
        )
    tasks = [evaluation.protocol["env"] for evaluation in (*left, *right)]
    if any(task != tasks[0] for task in tasks):
        raise ConfigError(
            f"compare needs one task; got {[(task['name'], task['options']) for task in tasks]}."
        )
    quantity = quantity or left[0].quantity
    seeds = sorted(set.intersection(*({row.seed for row in e.rows} for e in (*left, *right))))
    if not seeds:
        raise ConfigError(
            "the evaluations have no episode seed in common; evaluate with the same first_seed."
        )
    a, b = (np.stack([_by_seed(e, quantity, seeds) for e in side]) for side in (left, right))
    return Comparison(
        quantity,
        float(a.mean()),
        float(b.mean()),
        paired_difference(a, b),
        a.size,
        len({evaluation.protocol_hash for evaluation in (*left, *right)}) == 1,
    )


def _by_seed(evaluation: Evaluation, quantity: str, seeds: Sequence[int]) -> Array:
    values = dict(zip((row.seed for row in evaluation.rows), evaluation.values(quantity), strict=True))
    return np.array([values[seed] for seed in seeds])
