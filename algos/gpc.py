"""Weights of a composition: search by rollouts, or estimate from held-out demonstrations.

Legend: N members, w weights, t noise level, W windows, x noisy chunk, eps its noise, eps_i(x, t) prediction
of member i, e_i = eps_i - eps, G_ij = E[e_i e_j] (averaged over the entries of a chunk).

Search. All weights of a grid are evaluated on the same seeded episodes; the best continue with more, fresh
episodes (successive halving). The winner's score is biased by selection, so it is measured again on unseen
episodes.

Estimate. The mean squared error of the composed noise prediction is quadratic in the weights, w' G w. It is
minimised over non-negative weights of sum 1 without rollouts. For two members::

    A = G_11,  B = G_22,  C = G_12,      w_1 = (B - C) / (A + B - 2 C), limited to [0, 1]

Using the drawn noise eps instead of its mean given x adds one constant to all of G, which cancels: the
weights minimise the error against the true score. A composition beats both members at a level where C <
min(A, B), i.e. where member errors differ. Task performance is measured in episodes.

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
from algos.training.gpc_settings import EstimateSettings, SearchSettings
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.comparison import Comparison, compare
from envs.evaluation.evaluate import Evaluation
from policies.composition.compose import AnyComposition
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError
from policies.policy import Policy
from policies.processes.base import over_rows
from policies.seeds import seeded_generator

NUM_RESAMPLES = 1000
SMALLEST_WEIGHT = 1e-9


@dataclass(frozen=True)
class Trial:
    """Weights and their episodes in one round of a search."""

    round: int
    weights: tuple[float, ...]
    evaluation: Evaluation

    @property
    def sort_key(self) -> tuple[float, float]:
        """Sort key of trials: success (0 if undefined), then return."""
        is_solved = self.evaluation.quantity == "success"
        success = float(self.evaluation.values("success").mean()) if is_solved else 0.0
        return success, float(self.evaluation.values("return").mean())


@dataclass(frozen=True)
class Search:
    """Trials of a search in order of evaluation, round by round."""

    trials: tuple[Trial, ...]

    @property
    def final(self) -> list[Trial]:
        """Trials of the last round, best first; ties by the most balanced weights."""
        return ranked([trial for trial in self.trials if trial.round == self.trials[-1].round])

    @property
    def best(self) -> tuple[float, ...]:
        return self.final[0].weights

    def compare_with_best(self, trial: Trial) -> Comparison:
        """Compare a trial of the last round with the winner on the same episodes: winner - trial."""
        return compare(trial.evaluation, self.final[0].evaluation)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials sorted, best first."""
    return sorted(trials, key=lambda trial: (*trial.sort_key, -max(trial.weights)), reverse=True)


def search_weights(
    policy: AnyComposition,
    settings: SearchSettings,
    play: Callable[[Policy, int, int], Evaluation],
    *,
    on_trial: Callable[[Trial], None] | None = None,
) -> Search:
    """Search the weights of a composition by rollouts; its own weights are ignored.

    Args:
        policy: The composition.
        settings: Grid, rounds and seeds.
        play: (policy, first seed, episodes) -> evaluation.
        on_trial: Called after every trial.

    Raises:
        ConfigError: If a candidate does not fit the operator.
    """
    candidates = settings.weights(len(policy.fields), policy.composition.operator)
    for weights in candidates:
        policy.with_weights(*weights)  # refused before anything is played
    trials: list[Trial] = []
    first_seed = settings.first_seed
    for number, episodes in enumerate(settings.episodes):
        evaluated = []
        for weights in candidates:
            trial = Trial(number, weights, play(policy.with_weights(*weights), first_seed, episodes))
            evaluated.append(trial)
            if on_trial is not None:
                on_trial(trial)
        trials += evaluated
        first_seed += episodes
        candidates = [
            trial.weights for trial in ranked(evaluated)[: (*settings.keep, len(evaluated))[number]]
        ]
    return Search(tuple(trials))


@dataclass(frozen=True)
class WeightEstimate:
    """Weights with the lowest noise-prediction error on demonstrations.

    `t` is the sampling time of the lead; None: all levels together.

    Shapes:
        weights, low, high: (N,), with bounds of 95 % intervals (over episodes).
        error: (N, N), G of the module; the diagonal holds the errors of the members.
    """

    t: float | None
    weights: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    error: tuple[tuple[float, ...], ...]


def estimate_weights(
    policy: AnyComposition, dataset: EpisodeDataset, settings: EstimateSettings | None = None
) -> list[WeightEstimate]:
    """Estimate the weights of a convex composition from held-out demonstrations.

    The composition's own weights are ignored. All levels together come first, then each from noise to data.

    Raises:
        CapabilityError: If the composition is not a convex sum, or of planners.
    """
    if not isinstance(policy, ComposedPolicy):
        raise CapabilityError("weights of planners are searched by rollouts: leave weights out.")
    if policy.composition.operator != "convex":
        raise CapabilityError(
            f"weights are estimated for operator=convex only; got operator={policy.composition.operator}. "
            f"Search them by rollouts."
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
    """Return e_i e_j per level and window (L, W, N, N), and the episodes of the windows (W,).

    Averages cover recorded actions; all levels share the noise; errors are in the lead's units.
    """
    goal_dim, cameras = policy.goal_dim, policy.images
    source = WindowSampler(dataset, policy.chunk, pad_end=True, goal_dim=goal_dim, cameras=cameras)
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
    """Return non-negative weights (..., N) of sum 1 that minimise w' G w for errors G (..., N, N).

    The minimum is taken over all subsets of members with non-negative solutions.

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
    """Return the count of every window in each bootstrap resample of the episodes, (R, W)."""
    rng = np.random.default_rng(seed)
    _, number = np.unique(episode, return_inverse=True)
    count = int(number.max()) + 1
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=NUM_RESAMPLES)
    return drawn[:, number]


def _estimate(t: float | None, products: np.ndarray, draws: np.ndarray) -> WeightEstimate:
    """Estimate weights from products (W, N, N), with a percentile bootstrap interval over (R, W)."""
    error = products.mean(axis=0)
    resampled = np.einsum("rw,wij->rij", draws, products) / draws.sum(axis=1)[:, None, None]
    low, high = np.quantile(best_weights(resampled), [0.025, 0.975], axis=0)
    best, low, high = (tuple(map(float, column)) for column in (best_weights(error), low, high))
    return WeightEstimate(t, best, low, high, tuple(tuple(map(float, row)) for row in error))
