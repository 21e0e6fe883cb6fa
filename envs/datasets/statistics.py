"""Single-pass statistics of many rows, in pieces, for arrays larger than memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from envs.datasets.array_storage import pieces

_AT_ONCE = 2**22  # bytes per piece; larger pieces take three times as long


@dataclass(frozen=True)
class Moments:
    """Count, minimum, maximum, mean and unbiased variance (D,) of rows, the last two in float64."""

    count: int
    low: Tensor
    high: Tensor
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        wide = rows.double()
        var = wide.var(0, correction=min(len(rows) - 1, 1))
        return cls(len(rows), rows.min(0).values, rows.max(0).values, wide.mean(0), var)

    def joined(self, other: Moments) -> Moments:
        """Return the moments of the union of rows.

        Source:
            Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
            variances", 1979, equation 2.1.
        """
        count, gap = self.count + other.count, other.mean - self.mean
        squares = self.var * (self.count - 1) + other.var * (other.count - 1)
        squares = squares + gap.square() * (self.count * other.count / count)
        mean = self.mean + gap * (other.count / count)
        low, high = self.low.minimum(other.low), self.high.maximum(other.high)
        return Moments(count, low, high, mean, squares / (count - 1))

    def named(self) -> dict[str, Tensor]:
        found = {"min": self.low, "max": self.high, "mean": self.mean, "std": self.var.sqrt()}
        return {key: value.float() for key, value in found.items()}


def statistics_of(values: Tensor) -> dict[str, Tensor]:
    """Return `min`, `max`, `mean` and `std` (D,) float32 of rows (N, D), in one pass."""
    return reduce(Moments.joined, (Moments.of(values[part]) for part in pieces(values, _AT_ONCE))).named()
