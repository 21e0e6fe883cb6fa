"""Settings of a composition's weights: `search` and `estimate`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from envs.evaluation.settings import check_seeds
from policies.bounds import Checked, bounded
from policies.errors import ConfigError

_DIVISIONS = {2: 10, 3: 5}  # of the default grid by number of members: 11 weights for two, 21 for three
_MORE_DIVISIONS = 4


@dataclass
class SearchSettings(Checked):
    """Settings of the weight search."""

    key: ClassVar[str] = "search"

    divisions: int | None = bounded(None, ge=1)  # divisions of the grid; null: 10 (2 members), 5 (3), else 4
    candidates: Any = None  # list of weights instead of the grid, one number per member each
    episodes: tuple[int, ...] = bounded((20, 100), ge=1)  # episodes per candidate, round by round
    keep: tuple[int, ...] = bounded((3,), ge=1)  # candidates kept after every round but the last
    first_seed: int = 2_000_000  # seed of the first episode; rounds use consecutive seeds

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds = len(self.episodes)
        self.require("keep", rounds == len(self.keep) + 1, f"one entry fewer than search.episodes ({rounds})")
        check_seeds("search.first_seed", self.first_seed, sum(self.episodes))

    def weights(self, members: int, operator: str) -> list[tuple[float, ...]]:
        """Return the candidate weights.

        Raises:
            ConfigError: If candidates do not fit, or are missing for an operator without a default grid.
        """
        if self.candidates is not None:
            try:
                given = [tuple(map(float, one)) for one in self.candidates]
            except (TypeError, ValueError):
                given = []
            if not given or any(len(one) != members for one in given):
                raise ConfigError(
                    f"search.candidates must be lists of {members} weights each; got {self.candidates}."
                )
            return given
        if operator not in ("convex", "or"):
            raise ConfigError(
                f"operator={operator} has no default grid. Give weights=[…], or search.candidates=[[…],[…]]."
            )
        return simplex(members, self.divisions or _DIVISIONS.get(members, _MORE_DIVISIONS))

    def overlaps(self, first_seed: int, episodes: int) -> bool:
        """Return whether the search uses any of these episodes."""
        return first_seed < self.first_seed + sum(self.episodes) and self.first_seed < first_seed + episodes


@dataclass
class EstimateSettings(Checked):
    """Settings of the weight estimate from demonstrations."""

    key: ClassVar[str] = "estimate"

    windows: int = bounded(512, ge=1)  # windows of the data, at most; evenly spaced
    levels: int = bounded(10, ge=1)  # noise levels, evenly spaced in the lead's sampling time
    seed: int = 0  # seed of noise and bootstrap resamples

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds("estimate.seed", self.seed)


def simplex(members: int, divisions: int) -> list[tuple[float, ...]]:
    """Return all non-negative weights of sum 1 whose entries are multiples of 1 / divisions.

    Example:
        >>> simplex(2, 2)
        [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]
    """
    counts = itertools.product(range(divisions, -1, -1), repeat=members)
    return [tuple(n / divisions for n in one) for one in counts if sum(one) == divisions]
