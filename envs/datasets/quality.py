"""Dataset quality measures, computed before training.

Legend: N frames, Do and Da widths, s standardised state (mean 0, std 1 over the dataset), a action.

- trajectory quality: (mean return - random return) / (reference return - random return); 0 is random, 1 as
  good as the reference.
- coverage (SACo): distinct state-action pairs of the data over those of a reference of equal size; each
  dimension is cut into 100 bins between shared limits.
- action divergence: squared difference between the actions of a frame and of the nearest state's frame in
  another episode, over twice the action variance. 0: one action per state; near 1: states are uninformative.
- cluster variance: action variance within clusters of states over the total action variance.
- own-row rate: fraction of keys [beta s, a + noise] whose nearest row [beta s_i, a_i] is their own frame or a
  copy of it. Near 1, a nearest-neighbour constraint is equivalent to cloning the frame's own action.

Deviations: distinct pairs are counted exactly, not estimated by HyperLogLog; neighbours come from other
episodes, because adjacent frames are always near.

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
_SPREAD = 1e-3  # added to the state std before division
_LEAST = 1e-12


@dataclass(frozen=True)
class Limits:
    """Bin limits per dimension of (state, action); both (Do + Da,)."""

    low: np.ndarray
    high: np.ndarray


def trajectory_quality(returns: np.ndarray, random_return: float, reference_return: float) -> float:
    """Return the mean of returns (E,), scaled to 0 for random and 1 for the reference."""
    return float((np.mean(returns) - random_return) / (reference_return - random_return))


def limits_of(*datasets: EpisodeDataset) -> Limits:
    """Return the limits that enclose all state-action pairs of some datasets."""
    pairs = [_pairs(one) for one in datasets]
    low, high = (np.stack([edge(pair, axis=0) for pair in pairs]) for edge in (np.min, np.max))
    return Limits(low.min(axis=0), high.max(axis=0))


def distinct_pairs(dataset: EpisodeDataset, limits: Limits) -> int:
    """Count distinct state-action pairs after binning each dimension into 100 bins."""
    width = np.maximum(limits.high - limits.low, _LEAST)
    bins = ((_pairs(dataset) - limits.low) / width * BINS).clip(0, BINS - 1).astype(np.uint8)
    rows = np.ascontiguousarray(bins).view(np.dtype((np.void, bins.shape[1])))
    return len(np.unique(rows))


def coverage(dataset: EpisodeDataset, reference: EpisodeDataset, rng: np.random.Generator) -> float:
    """Return SACo: distinct pairs of the data over those of a reference of equal size.

    Episodes of the longer dataset are subsampled by `rng` to the size of the shorter.
    """
    check_widths(dataset, reference)
    limits = limits_of(dataset, reference)
    size = min(dataset.num_frames, reference.num_frames)
    ours, theirs = (_shortened(one, size, rng) for one in (dataset, reference))
    return distinct_pairs(ours, limits) / distinct_pairs(theirs, limits)


def check_widths(dataset: EpisodeDataset, reference: EpisodeDataset) -> None:
    """Refuse datasets of different widths."""
    if (dataset.obs_dim, dataset.action_dim) != (reference.obs_dim, reference.action_dim):
        raise DatasetError(
            f"{reference.source}: expected {dataset.obs_dim} observation and {dataset.action_dim} action "
            f"entries, as in {dataset.source}; got {reference.obs_dim} and {reference.action_dim}."
        )


def _shortened(dataset: EpisodeDataset, size: int, rng: np.random.Generator) -> EpisodeDataset:
    """Draw episodes of at most `size` frames in total; at least one."""
    if dataset.num_frames <= size:
        return dataset
    order = rng.permutation(dataset.num_episodes)
    fits = np.cumsum(dataset.lengths.numpy()[order]) <= size
    return dataset.select(np.sort(order[: max(int(fits.sum()), 1)]).tolist())


def action_divergence(dataset: EpisodeDataset, samples: int, rng: np.random.Generator) -> float:
    """Return the action divergence between nearest states at `samples` frames; NaN for one episode."""
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
    """Return the frame of another episode with the nearest state."""
    wanted = min(16, len(states))
    while True:
        _, near = tree.query(states[frame], k=wanted)
        others = near[episode[near] != episode[frame]]
        if len(others):
            return int(others[0])
        wanted = min(4 * wanted, len(states))


def cluster_variance(dataset: EpisodeDataset, clusters: int, samples: int, rng: np.random.Generator) -> float:
    """Return the action variance within clusters of states over the total action variance."""
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
    """Return the own-row rate (see the module); `noise` is the standard deviation of actions."""
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
