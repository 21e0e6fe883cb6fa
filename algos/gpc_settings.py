"""The keys of a composition's weights: `search` and `estimate`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from envs.evaluation.settings import check_seeds
from policies.errors import ConfigError

DIVISIONS = {2: 10, 3: 5}
"""Steps of the grid by the number of members: 11 weights for two, 21 for three."""
MORE_DIVISIONS = 4


@dataclass
class SearchSettings:
    """How weights are searched."""

    divisions: int | None = (
        None  # steps of the grid of weights; null: 10 for two members, 5 for three, else 4
    )
    candidates: Any = None  # instead of the grid: a list of weights, each one number per member
    episodes: tuple[int, ...] = (20, 100)  # of every weight, round by round
    keep: tuple[int, ...] = (
        3,
    )  # weights that go on to the next round, one number after every round but the last
    first_seed: int = 2_000_000  # seed of the first episode; rounds follow each other

    def __post_init__(self) -> None:
        """Check the values."""
        self.episodes, self.keep = tuple(self.episodes), tuple(self.keep)
        if (
            not self.episodes
            or len(self.keep) != len(self.episodes) - 1
            or min(*self.episodes, *self.keep, 1) < 1
        ):
            raise ConfigError(
                f"search.episodes and search.keep must be positive, with one fewer keep than rounds of "
                f"episodes; got {list(self.episodes)} and {list(self.keep)}."
            )
        if self.divisions is not None and self.divisions < 1:
            raise ConfigError(f"search.divisions must be at least 1; got {self.divisions}.")
        check_seeds("search.first_seed", self.first_seed, sum(self.episodes))

    def weights(self, members: int, operator: str) -> list[tuple[float, ...]]:
        """Return the weights to try.

        Raises:
            ConfigError: If candidates do not fit, or an operator without a natural grid has none.
        """
        if self.candidates is not None:
            given = [tuple(float(weight) for weight in one) for one in self.candidates]
            if not given or any(len(one) != members for one in given):
                raise ConfigError(
                    f"search.candidates must be a list of weights, each with {members} numbers; got "
                    f"{self.candidates}."
                )
            return given
        if operator not in ("convex", "or"):
            raise ConfigError(
                f"operator={operator} has no natural grid of weights. Give weights=[…], or "
                f"search.candidates=[[…],[…]]."
            )
        return simplex(members, self.divisions or DIVISIONS.get(members, MORE_DIVISIONS))

    def overlaps(self, first_seed: int, episodes: int) -> bool:
        """Return whether the search plays one of these episodes."""
        return first_seed < self.first_seed + sum(self.episodes) and self.first_seed < first_seed + episodes


@dataclass
class EstimateSettings:
    """How weights are estimated from demonstrations."""

    windows: int = 512  # windows of the data, at most; spread evenly
    levels: int = 10  # noise levels, evenly spaced in the lead's sampling time
    seed: int = 0  # of the noise and of the resamples

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("windows", "levels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"estimate.{name} must be at least 1; got {getattr(self, name)}.")


def simplex(members: int, divisions: int) -> list[tuple[float, ...]]:
    """Return all weights (none negative, sum 1) whose entries are multiples of 1 / divisions.

    Example:
        >>> simplex(2, 2)
        [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]
    """
    counts = itertools.product(range(divisions, -1, -1), repeat=members)
    return [tuple(n / divisions for n in one) for one in counts if sum(one) == divisions]
