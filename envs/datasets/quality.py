"""Numbers that tell what can be learned from a dataset before anything is trained.

Legend: N frames, Do and Da widths, s standardised state (mean 0, spread 1 over the dataset), a action.

- trajectory quality: (mean return - random return) / (reference return - random return); 0 is random, 1 as
  good as the reference.
- coverage (SACo): distinct state-action pairs in the data over those of a reference of equal size; every
  dimension is cut into 100 bins between limits that both share.
- action divergence: squared difference of the actions of a frame and of the frame of another episode whose
  state is nearest, over twice the variance of actions. 0: one action per state; near 1: states say nothing.
- cluster variance: variance of the actions within clusters of states over their variance as a whole.
- own-row rate: share of keys [beta s, a + noise] whose nearest row [beta s_i, a_i] is the frame they were
  made of, or a copy of it. Near 1, a nearest-neighbour constraint is no other than cloning the frame's own
  action.

Deviations: distinct pairs are counted exactly, not estimated by HyperLogLog; neighbours come from other
episodes, because the frame before and after are always near.

Source:
    TQ and SACo: arXiv 2111.04714; action consistency: arXiv 2306.02437; own-row rate: the constraint of PRDC,
    arXiv 2306.06569.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.cluster.vq import kmeans2
from scipy.spatial import KDTree

from envs.datasets.episodes import EpisodeDataset
from policies.errors import DatasetError

BINS = 100
_SPREAD = 1e-3  # is added to the spread of states before they are divided by it
_LEAST = 1e-12


@dataclass(frozen=True)
class Limits:
    """Where bins begin and end, per dimension of (state, action); both (Do + Da,)."""

    low: np.ndarray
    high: np.ndarray


def trajectory_quality(returns: np.ndarray, random_return: float, reference_return: float) -> float:
    """Return the mean return (E,) on the scale from a random policy, 0, to a reference, 1."""
    return float((np.mean(returns) - random_return) / (reference_return - random_return))


def limits_of(*datasets: EpisodeDataset) -> Limits:
    """Return the limits that hold all state-action pairs of some datasets."""
    pairs = [_pairs(one) for one in datasets]
    return Limits(
        np.min([pair.min(axis=0) for pair in pairs], axis=0),
        np.max([pair.max(axis=0) for pair in pairs], axis=0),
    )


def distinct_pairs(dataset: EpisodeDataset, limits: Limits) -> int:
    """Count the distinct state-action pairs after every dimension is cut into 100 bins."""
    width = np.maximum(limits.high - limits.low, _LEAST)
    bins = ((_pairs(dataset) - limits.low) / width * BINS).clip(0, BINS - 1).astype(np.uint8)
    rows = np.ascontiguousarray(bins).view(np.dtype((np.void, bins.shape[1])))
    return len(np.unique(rows))


def coverage(dataset: EpisodeDataset, reference: EpisodeDataset, rng: np.random.Generator) -> float:
    """Return SACo: distinct pairs of the data over those of a reference of equal size.

    Args:
        dataset: The data.
        reference: E.g. everything that was seen while an online agent learned; of the longer one, as many
            episodes are drawn as make it no longer than the other.
        rng: Decides which episodes.

    Raises:
        DatasetError: If the two have other widths.
    """
    check_widths(dataset, reference)
    limits = limits_of(dataset, reference)
    size = min(dataset.num_frames, reference.num_frames)
    ours, theirs = (_shortened(one, size, rng) for one in (dataset, reference))
    return distinct_pairs(ours, limits) / distinct_pairs(theirs, limits)


def check_widths(dataset: EpisodeDataset, reference: EpisodeDataset) -> None:
    """Refuse to compare what has other widths.

    Raises:
        DatasetError: If the two have other widths.
    """
    if (dataset.obs_dim, dataset.action_dim) != (reference.obs_dim, reference.action_dim):
        raise DatasetError(
            f"{reference.source}: expected {dataset.obs_dim} observation entries and {dataset.action_dim} "
            f"action entries, as in {dataset.source}; got {reference.obs_dim} and {reference.action_dim}."
        )


def _shortened(dataset: EpisodeDataset, size: int, rng: np.random.Generator) -> EpisodeDataset:
    """Draw episodes of at most `size` frames together; at least one."""
    if dataset.num_frames <= size:
        return dataset
    order = rng.permutation(dataset.num_episodes)
    fits = np.cumsum(dataset.lengths.numpy()[order]) <= size
    return dataset.select(np.sort(order[: max(int(fits.sum()), 1)]).tolist())


def action_divergence(dataset: EpisodeDataset, samples: int, rng: np.random.Generator) -> float:
    """Return how much the actions in nearly the same state differ, as a share (see the module).

    Args:
        dataset: At least two episodes, else the result is NaN.
        samples: Frames that are looked at, drawn without replacement.
        rng: Draws them.
    """
    spread = float(dataset.actions.double().var(dim=0, correction=0).sum())
    if dataset.num_episodes < 2 or spread <= _LEAST:
        return float("nan")
    states, actions = _standardised(dataset), dataset.actions.double().numpy()
    episode = np.repeat(np.arange(dataset.num_episodes), dataset.lengths.numpy())
    total, frames = 0.0, rng.permutation(len(states))[:samples]
    tree = KDTree(states)
    for frame in frames:
        total += float(np.sum((actions[frame] - actions[_other(tree, states, episode, frame)]) ** 2))
    return total / len(frames) / (2 * spread)


def _other(tree: KDTree, states: np.ndarray, episode: np.ndarray, frame: int) -> int:
    """Return the frame of another episode whose state is nearest."""
    wanted = min(16, len(states))
    while True:
        _, near = tree.query(states[frame], k=wanted)
        others = near[episode[near] != episode[frame]]
        if len(others):
            return int(others[0])
        wanted = min(4 * wanted, len(states))


def cluster_variance(dataset: EpisodeDataset, clusters: int, samples: int, rng: np.random.Generator) -> float:
    """Return the variance of actions within clusters of states over their variance as a whole."""
    frames = rng.permutation(dataset.num_frames)[:samples]
    states, actions = _standardised(dataset)[frames], dataset.actions.double().numpy()[frames]
    spread = actions.var(axis=0).sum()
    if spread <= _LEAST:
        return float("nan")
    _, label = kmeans2(states, min(clusters, len(states)), minit="++", seed=rng, missing="warn")
    within = sum(
        actions[label == k].var(axis=0).sum() * np.count_nonzero(label == k) for k in np.unique(label)
    )
    return float(within / len(actions) / spread)


def own_row_rate(
    dataset: EpisodeDataset, beta: float, noise: float, samples: int, rng: np.random.Generator
) -> float:
    """Return the share of disturbed actions whose nearest row is their own frame or a copy (see the module).

    Args:
        dataset: The data.
        beta: Weight of states against actions.
        noise: Standard deviation of the disturbance, in units of actions.
        samples: Frames that are looked at.
        rng: Draws frames and disturbances.
    """
    states, actions = beta * _standardised(dataset), dataset.actions.double().numpy()
    frames = rng.permutation(len(states))[:samples]
    moved = actions[frames] + noise * rng.normal(size=(len(frames), actions.shape[1]))
    rows = np.hstack([states, actions])
    _, near = KDTree(rows).query(np.hstack([states[frames], moved]))
    return float(np.mean((rows[near] == rows[frames]).all(axis=1)))


def _standardised(dataset: EpisodeDataset) -> np.ndarray:
    states = dataset.observations.double().numpy()
    scaled: np.ndarray = (states - states.mean(axis=0)) / (states.std(axis=0) + _SPREAD)
    return scaled


def _pairs(dataset: EpisodeDataset) -> np.ndarray:
    return np.hstack([dataset.observations.numpy(), dataset.actions.numpy()]).astype(np.float64)
