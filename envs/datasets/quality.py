"""Dataset quality measures, computed before training.

Legend: N frames, Do and Da widths, s standardised state (mean 0, std 1 over the dataset), a action.

- trajectory quality: (mean return - random return) / (reference return - random return); 0 is random, 1 as
  good as the reference.
- coverage (SACo): distinct state-action pairs of the data over those of a reference of equal size; each
  dimension is cut into 100 bins between shared limits.
- action divergence: squared difference between the actions of a frame and of the nearest state's frame in
  another episode, over twice the action variance. 0: one action per state; near 1: states are uninformative.
- disagreement: squared difference between the action of a frame and the mean action of the k nearest states'
  frames in other episodes; of an episode, its mean over frames. Noisy demonstrators disagree with all others.
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

from envs.datasets.episodes import EpisodeDataset
from policies.errors import DatasetError

BINS = 100
NEIGHBOURS = 5
_SPREAD = 1e-3  # added to the state std before division
_LEAST = 1e-12
_AT_ONCE = 2**22  # neighbours of one query


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
    frames = rng.permutation(dataset.num_frames)[:samples]
    found = disagreement(
        _standardised(dataset), dataset.actions.double().numpy(), _episodes(dataset), 1, frames
    )
    return float(found.mean()) / (2 * spread)


def episode_disagreement(dataset: EpisodeDataset, k: int = NEIGHBOURS) -> np.ndarray:
    """Return the mean disagreement of every episode with the k nearest frames of others, (E,).

    Raises:
        DatasetError: If there is one episode.
    """
    if dataset.num_episodes < 2:
        raise DatasetError(f"{dataset.source}: expected two episodes or more to compare; got one.")
    states, actions, episode = _standardised(dataset), dataset.actions.double().numpy(), _episodes(dataset)
    found = disagreement(states, actions, episode, k)
    return np.bincount(episode, found) / np.bincount(episode)


def disagreement(
    states: np.ndarray, actions: np.ndarray, episode: np.ndarray, k: int, frames: np.ndarray | None = None
) -> np.ndarray:
    """Return the disagreement (F,) of frames, by default of all, with k neighbours in other episodes.

    Shapes:
        states: (N, Do), as they are compared. actions: (N, Da). episode: (N,), numbers of episodes.
    """
    frames = np.arange(len(states)) if frames is None else frames
    near = _neighbours(states, episode, frames, k)
    found: np.ndarray = np.square(actions[near].mean(axis=1) - actions[frames]).sum(axis=1)
    return found


def _neighbours(states: np.ndarray, episode: np.ndarray, frames: np.ndarray, k: int) -> np.ndarray:
    """Return the k frames (F, k) of other episodes with the nearest states; fewer if others have fewer."""
    from scipy.spatial import KDTree  # importing it takes a tenth of what a command needs to start

    k = min(k, len(states) - int(np.bincount(episode).max()))
    tree, found = KDTree(states), np.empty((len(frames), k), dtype=np.int64)
    left, wanted = np.arange(len(frames)), min(16 * k, len(states))
    while len(left):
        short = []
        for part in np.array_split(left, -(-len(left) * wanted // _AT_ONCE)):
            _, near = tree.query(states[frames[part]], k=[*range(1, wanted + 1)])
            is_other = episode[near] != episode[frames[part], None]
            first = np.argsort(~is_other, axis=1, kind="stable")[:, :k]  # others, nearest first
            enough = is_other.sum(axis=1) >= k
            found[part[enough]] = np.take_along_axis(near, first, axis=1)[enough]
            short.append(part[~enough])
        left, wanted = np.concatenate(short), min(4 * wanted, len(states))
    return found


def _episodes(dataset: EpisodeDataset) -> np.ndarray:
    """Return the number of every frame's episode, (N,)."""
    return np.repeat(np.arange(dataset.num_episodes), dataset.lengths.numpy())


def cluster_variance(dataset: EpisodeDataset, clusters: int, samples: int, rng: np.random.Generator) -> float:
    """Return the action variance within clusters of states over the total action variance."""
    from scipy.cluster.vq import kmeans2

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
    from scipy.spatial import KDTree

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
