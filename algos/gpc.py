"""Weights of a composition: searched by rollouts, or estimated from held-out demonstrations.

Legend: N members, w weights, t noise level, W windows, x noisy chunk, eps its noise, eps_i(x, t) what member
i predicts, e_i = eps_i - eps, G_ij = E[e_i e_j] (averaged over the elements of a chunk).

Search. Weights on a grid play the same seeded episodes; after a few of them the best go on to more, fresh
episodes (successive halving). The weights that win were chosen for their luck too: what they are worth is
measured on episodes that the search has not seen.

Estimate. The mean squared error of the composed noise prediction is quadratic in the weights, w' G w, so that
no rollout is needed to minimise it over weights that add up to 1 (none negative). For two members::

    A = G_11,  B = G_22,  C = G_12,      w_1 = (B - C) / (A + B - 2 C), limited to [0, 1]

That eps is the noise that was drawn, not its mean given x, adds one number to all of G, which cancels: the
weights are those of the error against the true score. A composition is better than both members at a level
where C < min(A, B), that is where members err differently. Whether it acts better is measured in episodes.

Source: GPC (arXiv 2510.01068), proposition 4.1; the grid of 11 weights is the paper's. Deviations: common
episodes, intervals and halving instead of 100 or 200 episodes of every weight; the estimate is ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from algos.cloning.batches import WindowSampler
from algos.gpc_settings import EstimateSettings, SearchSettings
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.comparison import Comparison, compare
from envs.evaluation.evaluate import Evaluation
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.processes.base import over_rows
from policies.seeds import seeded_generator

NUM_RESAMPLES = 1000
SMALLEST_WEIGHT = 1e-9


# -- search by rollouts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Weights and the episodes that they played in one round of a search."""

    round: int
    weights: tuple[float, ...]
    evaluation: Evaluation

    @property
    def worth(self) -> tuple[float, float]:
        """What trials are ranked by: success (0 where the task has none), then return."""
        is_solved = self.evaluation.quantity == "success"
        success = float(self.evaluation.values("success").mean()) if is_solved else 0.0
        return success, float(self.evaluation.values("return").mean())


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        trials: In the order in which they were played, round by round.
    """

    trials: tuple[Trial, ...]

    @property
    def final(self) -> list[Trial]:
        """The trials of the last round, best first; of equals the most balanced one comes first."""
        return ranked([trial for trial in self.trials if trial.round == self.trials[-1].round])

    @property
    def best(self) -> tuple[float, ...]:
        return self.final[0].weights

    def behind(self, trial: Trial) -> Comparison:
        """Compare a trial of the last round with the winner, episode by episode: winner - trial."""
        return compare(trial.evaluation, self.final[0].evaluation)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Order trials, best first."""
    return sorted(trials, key=lambda trial: (*trial.worth, -max(trial.weights)), reverse=True)


def search_weights(
    policy: ComposedPolicy,
    settings: SearchSettings,
    play: Callable[[Policy, int, int], Evaluation],
    *,
    on_trial: Callable[[Trial], None] | None = None,
) -> Search:
    """Search the weights of a composition by rollouts.

    Args:
        policy: The composition; its own weights play no part.
        settings: Grid, rounds and seeds.
        play: (policy, first seed, episodes) -> evaluation.
        on_trial: Called after every trial.
    """
    going = settings.weights(len(policy.fields), policy.composition.operator)
    trials: list[Trial] = []
    first_seed = settings.first_seed
    for number, episodes in enumerate(settings.episodes):
        played = []
        for weights in going:
            trial = Trial(number, weights, play(policy.with_weights(*weights), first_seed, episodes))
            played.append(trial)
            if on_trial is not None:
                on_trial(trial)
        trials += played
        first_seed += episodes
        going = [trial.weights for trial in ranked(played)[: (*settings.keep, len(played))[number]]]
    return Search(tuple(trials))


# -- estimate from demonstrations -------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightEstimate:
    """Weights that predict the noise of demonstrations best.

    Shapes:
        weights, low, high: (N,), with the ends of 95 % intervals (over episodes).
        error: (N, N), G of the module; on its diagonal the errors of the members.

    Attributes:
        t: Sampling time of the lead; None: all levels together.
    """

    t: float | None
    weights: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    error: tuple[tuple[float, ...], ...]


def estimate_weights(
    policy: ComposedPolicy, dataset: EpisodeDataset, settings: EstimateSettings | None = None
) -> list[WeightEstimate]:
    """Estimate the weights of a convex composition from demonstrations that no member was trained on.

    Args:
        policy: The composition; its own weights play no part.
        dataset: Held-out demonstrations.
        settings: Windows, levels, seed.

    Returns:
        All levels together, then level by level from noise to data.

    Raises:
        CapabilityError: If the composition is no convex sum.
    """
    if policy.composition.operator != "convex":
        raise CapabilityError(
            f"weights can be estimated from demonstrations for operator=convex only; got "
            f"operator={policy.composition.operator}. Search them by rollouts."
        )
    settings = settings or EstimateSettings()
    levels = torch.linspace(0, 1, settings.levels + 2, dtype=torch.float64)[1:-1]
    products, episode = error_products(policy, dataset, levels, settings)
    draws = _resamples(episode, settings.seed)
    together = _estimate(None, products.mean(axis=0), draws)
    return [together, *(_estimate(float(t), one, draws) for t, one in zip(levels, products, strict=True))]


@torch.no_grad()
def error_products(
    policy: ComposedPolicy, dataset: EpisodeDataset, levels: Tensor, settings: EstimateSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return e_i e_j of every level and window (L, W, N, N), and the episodes of the windows (W,).

    Averages are over recorded actions. The same noise is used at all levels. Errors are in the lead's units.
    """
    source = WindowSampler(
        dataset, policy.chunk, pad_end=True, goal_dim=policy.goal_dim, cameras=policy.images
    )
    index = torch.linspace(0, source.num - 1, min(settings.windows, source.num), dtype=torch.float64).round()
    data = source.gather(index.long())
    generator = seeded_generator(settings.seed, "estimate", device=policy.device)
    eps = torch.randn(data.action.shape, generator=generator, device=policy.device, dtype=policy.dtype)
    action = policy.normalize_action(data.action.to(eps))
    cond = policy.encode(policy.observation(data.obs))
    share = (data.mask / data.mask.sum(dim=1, keepdim=True)).to(eps) / action.shape[-1]  # (W, Th)
    alone = [policy.with_weights(*row) for row in torch.eye(len(policy.fields)).tolist()]
    products = []
    for level in levels:
        t = level.to(eps).expand(len(cond))
        alpha, sigma = (over_rows(a, action) for a in policy.process.alpha_sigma(t))
        x = alpha * action + sigma * eps
        errors = torch.stack([view.predict(x, t, cond, kind="eps") - eps for view in alone])
        products.append(torch.einsum("iwhd,jwhd,wh->wij", errors, errors, share).double().cpu().numpy())
    frames = source.frames[index.long()]
    starts = dataset.episode_start.to(frames.device)
    return np.stack(products), (torch.bucketize(frames, starts, right=True) - 1).cpu().numpy()


def best_weights(error: np.ndarray) -> np.ndarray:
    """Return the weights (..., N), none negative, sum 1, that minimise w' G w for errors G (..., N, N).

    The minimum is the least of the minima over every subset of members that has no negative weight.

    Example:
        >>> best_weights(np.array([[2.0, 0.5], [0.5, 1.0]])).round(6).tolist()
        [0.25, 0.75]
    """
    members = error.shape[-1]
    found, least = np.zeros(error.shape[:-1]), np.full(error.shape[:-2], np.inf)
    for size in range(1, members + 1):
        for chosen in itertools.combinations(range(members), size):
            part = error[..., list(chosen), :][..., list(chosen)]
            solved = np.linalg.pinv(part, hermitian=True).sum(axis=-1)
            weights = np.zeros_like(found)
            weights[..., list(chosen)] = solved / solved.sum(axis=-1, keepdims=True)
            value = np.einsum("...i,...ij,...j->...", weights, error, weights)
            is_better = (weights >= -SMALLEST_WEIGHT).all(axis=-1) & (value < least)
            found = np.where(is_better[..., None], weights.clip(min=0), found)
            least = np.where(is_better, value, least)
    total: np.ndarray = found.sum(axis=-1, keepdims=True)
    return found / total


def _resamples(episode: np.ndarray, seed: int) -> np.ndarray:
    """Return how often every window counts in each resample of the episodes, (R, W)."""
    rng = np.random.default_rng(seed)
    _, number = np.unique(episode, return_inverse=True)
    count = int(number.max()) + 1
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=NUM_RESAMPLES)
    return drawn[:, number]


def _estimate(t: float | None, products: np.ndarray, draws: np.ndarray) -> WeightEstimate:
    """Estimate weights from products (W, N, N), with a percentile interval over resamples (R, W)."""
    error = products.mean(axis=0)
    resampled = np.einsum("rw,wij->rij", draws, products) / draws.sum(axis=1)[:, None, None]
    low, high = np.quantile(best_weights(resampled), [0.025, 0.975], axis=0)
    best, low, high = (tuple(map(float, column)) for column in (best_weights(error), low, high))
    return WeightEstimate(t, best, low, high, tuple(tuple(map(float, row)) for row in error))
