"""Returns, categorical values and advantages of recorded frames; see `algos.cloning.recap` for the legend."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from policies.errors import ConfigError


def step_rewards(dataset: EpisodeDataset, failure_cost: float) -> Tensor:
    """Return -1 per frame, 0 for the last one of a success, -failure_cost for that of a failure, (N,)."""
    if dataset.success is None:
        remedy = "Use algo.rewards=recorded" if bool(dataset.rewards.any()) else "Record it, or rewards"
        raise ConfigError(
            f"algo.rewards=steps needs the key 'success' of every episode; {dataset.source} has none. "
            f"{remedy}."
        )
    rewards = -torch.ones_like(dataset.rewards)
    rewards[dataset.episode_start[1:] - 1] = torch.where(dataset.success, 0.0, -failure_cost).to(rewards)
    return rewards


def require_unequal(to_go: Tensor, dataset: EpisodeDataset, rewards: str, gamma: float) -> None:
    """Refuse returns to go (N,) that are all equal, in which no action is better than another."""
    low, high = (float(bound) for bound in to_go.aminmax())
    if low < high:
        return
    remedies = ["algo.gamma below 1"] if low and gamma == 1 else []
    if rewards != "steps" and dataset.success is not None:
        remedies.append("algo.rewards=steps")
    found = f"returns to go are {low:g}" if low else "returns are 0"
    remedy = f"Use {' or '.join(remedies)}" if remedies else "Record other 'rewards' or 'success'"
    raise ConfigError(f"{dataset.source}: all {found}, so no action is better than another. {remedy}.")


def two_hot(target: Tensor, atoms: Tensor) -> Tensor:
    """Return distributions (B, K) over evenly spaced atoms (K,) whose means are the targets (B,)."""
    place = (target - atoms[0]) / (atoms[1] - atoms[0])
    return (1 - (place[:, None] - torch.arange(len(atoms)).to(place)).abs()).clamp(min=0)


def advantages(to_go: Tensor, value: Tensor, remaining: Tensor, lookahead: int, gamma: float) -> Tensor:
    """Return A (N,) of returns to go, values, and the frames (N,) left with this one, `lookahead` at most.

    The rewards of n frames are G_t - gamma^n G_{t+n}, hence A_t = d_t - gamma^n d_{t+n} with d = G - V.
    """
    rest = torch.cat([(to_go - value).double(), to_go.new_zeros(1, dtype=torch.float64)])
    frame, n = torch.arange(len(to_go), device=to_go.device), remaining.clamp(max=lookahead)
    later = torch.where(n < remaining, frame + n, len(to_go))
    return rest[frame] - gamma ** n.double() * rest[later]


def is_positive(advantage: Tensor, fraction: float) -> Tensor:
    """Return where advantages (N,) are at least their quantile 1 - fraction, (N,) bool."""
    threshold = np.quantile(advantage.cpu().numpy(), 1 - fraction)
    return advantage >= float(threshold)
