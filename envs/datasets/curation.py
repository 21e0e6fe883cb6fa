"""Which episodes of a dataset training sees, and how often.

Legend: E episodes, N frames, G_i return of an episode, alpha temperature, v least-squares fit with intercept
of returns on first states::

    score_i     = G_i (`return`), or G_i - v(s_0,i) (`advantage`)
    weight_row  proportional to exp(u_i / alpha),   u = score, moved and scaled to 0..1

An episode of T frames is drawn with probability proportional to T exp(u / alpha): the best row counts
exp(1 / alpha) times as much as the worst. What is kept is decided first, weights are those of kept episodes.

Source: trajectory weighting, arXiv 2306.13085 (RW and AW), its released code. Deviation: returns are those
recorded, whatever the algorithm makes of rewards. Action divergence: `envs.datasets.quality`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from envs.datasets.quality import episode_disagreement
from policies.bounds import Checked, bounded
from policies.errors import ConfigError

_log = logging.getLogger(__name__)

SAMPLING_WEIGHT = "sampling_weight"
"""Per-frame extra (N,), proportional to the probability of drawing what begins at the frame."""


def _returns(dataset: EpisodeDataset) -> np.ndarray:
    return dataset.returns.numpy()


def advantage_scores(dataset: EpisodeDataset) -> np.ndarray:
    """Return G_i - v(s_0,i), (E,) float64.

    Raises:
        ConfigError: If there are so few episodes that v fits every return.
    """
    first = dataset.observations[dataset.episode_start[:-1]].double().numpy()
    known, returns = np.hstack([first, np.ones((len(first), 1))]), _returns(dataset)
    fit, _, rank, _ = np.linalg.lstsq(known, returns, rcond=None)
    if rank >= len(returns):
        raise ConfigError(
            f"curation.weighting=advantage needs more than {rank} episodes, or first states explain every "
            f"return; {dataset.source} has {len(returns)}. Use curation.weighting=return."
        )
    found: np.ndarray = returns - known @ fit
    return found


SCORES: Mapping[str, Callable[[EpisodeDataset], np.ndarray]] = {
    "return": _returns,
    "advantage": advantage_scores,
}
RANKS: Mapping[str, Callable[[EpisodeDataset], np.ndarray]] = {
    "return": _returns,
    "divergence": lambda dataset: -episode_disagreement(dataset),
}


@dataclass(frozen=True)
class Curation(Checked):
    """Episodes to keep, and weights of the others; by default all, and every row alike."""

    key: ClassVar[str] = "curation"

    keep: str = bounded("all", choices=("all", "success", *RANKS))  # episodes, the best by a ranking
    share: float | None = bounded(None, gt=0, le=1)  # of a ranking to keep: most return, least divergence
    weighting: str = bounded("none", choices=("none", *SCORES))  # of rows, by the score of their episode
    temperature: float = bounded(0.1, gt=0)  # alpha; the best row counts exp(1 / alpha) times the worst

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = self.keep in RANKS
        rule = f"{'given' if needed else 'null'} with curation.keep={self.keep}"
        self.require("share", (self.share is not None) == needed, rule)

    def unused(self) -> dict[str, str]:
        drawn = {} if self.weighting != "none" else {"temperature": "without curation.weighting"}
        return super().unused() | drawn

    def __call__(self, dataset: EpisodeDataset) -> EpisodeDataset:
        """Return the kept episodes, with `SAMPLING_WEIGHT` if they are weighted.

        Raises:
            ConfigError: If nothing is left, or what decides is not recorded or equal for all.
        """
        if self.keep != "all":
            kept = self.kept(dataset)
            _log.info("%s: %d of %d episodes are kept.", dataset.source, len(kept), dataset.num_episodes)
            dataset = dataset.select(kept)
        return dataset if self.weighting == "none" else self.weighted(dataset)

    def kept(self, dataset: EpisodeDataset) -> Tensor:
        """Return the numbers of kept episodes in order, at least one."""
        if self.keep == "success":
            if dataset.success is None or not bool(dataset.success.any()):
                found = "none is recorded" if dataset.success is None else "there is none"
                raise ConfigError(f"{dataset.source}: curation.keep=success needs successes; {found}.")
            return dataset.success.nonzero().squeeze(1)
        assert self.share is not None
        count = max(int(dataset.num_episodes * self.share + 1e-9), 1)  # 100 * 0.29 is 28.999…
        best = np.argsort(-RANKS[self.keep](dataset), kind="stable")[:count]
        return torch.from_numpy(np.sort(best))

    def weighted(self, dataset: EpisodeDataset) -> EpisodeDataset:
        """Return the dataset with `SAMPLING_WEIGHT`; logs how few rows make up the draws."""
        score = SCORES[self.weighting](dataset)
        low, high = float(score.min()), float(score.max())
        if not high - low > 1e-9 * max(abs(low), abs(high)):
            raise ConfigError(
                f"curation.weighting={self.weighting} needs episodes of different scores; all "
                f"{dataset.num_episodes} of {dataset.source} have the same. Leave it out."
            )
        each = torch.from_numpy(np.exp((score - high) / (high - low) / self.temperature))
        weight = each.repeat_interleave(dataset.lengths)
        effective, top = effective_share(weight), float((each * dataset.lengths).max() / weight.sum())
        _log.info(
            "%s: drawn by %s, as if from %.3g %% of its rows; one episode has %.3g %% of the draws.",
            dataset.source, self.weighting, 100 * effective, 100 * top,
        )  # fmt: skip
        return replace(dataset, extras=dict(dataset.extras) | {SAMPLING_WEIGHT: weight / weight.sum()})


def effective_share(weight: Tensor) -> float:
    """Return the effective sample size of weights (N,) over N: (sum w)^2 / (N sum w^2)."""
    return float(weight.sum().square() / weight.square().sum()) / len(weight)


class WeightedRows:
    """Draws of rows by weights (N,), with replacement."""

    def __init__(self, weight: Tensor) -> None:
        self._until = weight.double().cumsum(0)
        if float(weight.min()) < 0 or not 0 < float(self._until[-1]) < math.inf:
            raise ConfigError(f"'{SAMPLING_WEIGHT}' must be 0 or more, and above 0 for some row to draw.")

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return rows (n,) int64 on the weights' device."""
        u = torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64)
        place = u.to(self._until.device) * self._until[-1]
        return torch.searchsorted(self._until, place, right=True).clamp(max=len(self._until) - 1)
