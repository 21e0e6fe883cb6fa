"""Intervals for evaluations: success rates, means over seeds and episodes, risk, paired differences.

Legend: S seeds (independently trained policies), E episodes per seed. All intervals are two-sided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from policies.errors import ConfigError

RISK_SHARE = 0.1  # fraction of worst episodes in risk measures
IQM_FROM_SEEDS = 5  # with fewer seeds quartiles are meaningless; the mean is reported
_BATCH = 500  # resamples per batch, bounds memory


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it."""

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def stated(interval: Interval, num_episodes: int) -> dict[str, float]:
    """Return the fields of a bootstrap interval; one episode alone has no interval, and then no ends."""
    found = asdict(interval)
    return found if num_episodes > 1 else {"value": found["value"]}


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Return the success rate of `n` episodes and its Wilson score interval.

    Raises:
        ConfigError: If the counts are inconsistent.

    Source:
        Wilson 1927; closed form of the roots of (p - x)^2 = z^2 x (1 - x) / n.

    Example:
        >>> interval = wilson(50, 100)
        >>> round(interval.low, 4), round(interval.high, 4)
        (0.4038, 0.5962)
    """
    if n < 1 or not 0 <= successes <= n:
        raise ConfigError(f"wilson needs 0 <= successes <= n and n >= 1; got {successes} of {n}.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    low = 0.0 if successes == 0 else center - half  # exact where rounding would leave the unit interval
    high = 1.0 if successes == n else center + half
    return Interval(p, low, high, confidence)


def success_rate(successes: ArrayLike) -> Interval:
    """Return the success rate of `successes` (S, E) or (E,), true or false, with its interval.

    Episodes of one seed are draws of one policy; the interval is Wilson's. Episodes of several seeds do not
    share one rate; the interval is the bootstrap over seeds and episodes. It is at least as wide as Wilson's
    over all episodes, since resamples of nearly constant episodes hardly differ.

    Raises:
        ConfigError: If there is no episode, or values are not boolean.

    Example:
        >>> seeds = [[1] * count + [0] * (100 - count) for count in (42, 77, 90)]
        >>> pooled, both = success_rate(sum(seeds, [])), success_rate(seeds)
        >>> [round(100 * share) for share in (pooled.low, pooled.high, both.low, both.high)]
        [64, 75, 44, 90]
    """
    values = np.atleast_2d(np.asarray(successes, np.float64))
    if not np.isin(values, (0.0, 1.0)).all():
        raise ConfigError("a success rate needs successes of 0 and 1, false and true.")
    pooled = wilson(int(values.sum()), values.size)
    if len(values) == 1:
        return pooled
    both = bootstrap_mean(values)
    return Interval(pooled.value, min(pooled.low, both.low), max(pooled.high, both.high))


def bootstrap_mean(values: np.ndarray, *, num_resamples: int = 10_000, seed: int = 0) -> Interval:
    """Return the mean of `values` (S, E) with a percentile bootstrap interval.

    Each resample draws seeds with replacement and, within each drawn seed, episodes with replacement, so the
    interval covers both sources of variance. With one seed, (E,) or (1, E), it covers episodes only.
    """
    return _bootstrap(values, lambda means: means.mean(axis=1), num_resamples, seed)


def bootstrap_iqm(values: np.ndarray) -> Interval:
    """Return the interquartile mean of the seeds' means of `values` (S, E); below five seeds, their mean."""
    if np.atleast_2d(values).shape[0] < IQM_FROM_SEEDS:
        return bootstrap_mean(values)
    return _bootstrap(values, _iqm_rows, num_resamples=10_000, seed=0)


def value_at_risk(values: np.ndarray, share: float = RISK_SHARE) -> float:
    """Return the largest of the worst `share` of `values` (E,): share E, rounded down, at least 1."""
    return float(_worst(np.asarray(values, np.float64)[None], share)[0, -1])


def conditional_value_at_risk(
    values: np.ndarray,
    share: float = RISK_SHARE,
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Return the mean of the worst `share` of `values` (S, E) or (E,), with a percentile bootstrap interval.

    The worst are those of all seeds together, share S E of them, rounded down, at least 1. The interval of
    few episodes is too narrow: resamples contain nothing below the observed minimum.

    Raises:
        ConfigError: If the share is not in (0, 1], or the values are not finite.

    Source:
        Rockafellar and Uryasev, Journal of Banking and Finance 26, 2002; for returns: arXiv 2406.07541.
    """
    values = np.atleast_2d(np.asarray(values, np.float64))
    point = float(_worst(values.reshape(1, -1), share).mean())
    draws = [
        _worst(drawn.reshape(len(drawn), -1), share).mean(axis=1)
        for drawn in _resamples(values, num_resamples, seed)
    ]
    return _percentiles(point, np.concatenate(draws), confidence)


def _worst(rows: np.ndarray, share: float) -> np.ndarray:
    """Return the smallest entries of each row (R, E), ascending."""
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the worst episodes must be in (0, 1]; got {share}.")
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all():
        raise ConfigError(f"risk needs finite values (E,), at least one; got shape {rows.shape[1:]}.")
    count = max(1, math.floor(share * rows.shape[1] + 1e-9))  # 0.29 of 100 rounds to below 29
    worst: np.ndarray = np.sort(rows, axis=1)[:, :count]
    return worst


def paired_difference(
    before: np.ndarray, after: np.ndarray, *, num_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean of `after - before` on the same episodes, (S, E) or (E,), with its interval.

    Raises:
        ConfigError: If the shapes differ.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape:
        raise ConfigError(
            f"a paired difference needs the same episodes twice; got {before.shape} and {after.shape}."
        )
    return bootstrap_mean(after - before, num_resamples=num_resamples, seed=seed)


def _bootstrap(
    values: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    num_resamples: int,
    seed: int,
) -> Interval:
    """Percentile interval of a statistic that maps seed means (R, S) to (R,)."""
    values = np.atleast_2d(np.asarray(values, np.float64))
    if values.ndim != 2 or values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(f"a bootstrap needs finite values (S, E); got shape {values.shape}.")
    draws = [statistic(drawn.mean(axis=2)) for drawn in _resamples(values, num_resamples, seed)]
    point = float(statistic(values.mean(axis=1)[None])[0])
    return _percentiles(point, np.concatenate(draws))


def _resamples(values: np.ndarray, num_resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield resamples (R, S, E) of values (S, E): seeds and, within them, episodes, with replacement."""
    rng = np.random.default_rng(seed)
    num_seeds, num_episodes = values.shape
    for start in range(0, num_resamples, _BATCH):
        size = (min(_BATCH, num_resamples - start), num_seeds)
        rows = rng.integers(num_seeds, size=size)
        columns = rng.integers(num_episodes, size=(*size, num_episodes))
        yield values[rows[:, :, None], columns]


def _percentiles(point: float, draws: np.ndarray, confidence: float = 0.95) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(point, float(low), float(high), confidence)


def _iqm_rows(rows: np.ndarray) -> np.ndarray:
    """Means of (R, S) along S without the lowest and highest quarter (rounded down)."""
    cut = rows.shape[1] // 4
    ordered = np.sort(rows, axis=1)
    means: np.ndarray = ordered[:, cut : rows.shape[1] - cut].mean(axis=1)
    return means
