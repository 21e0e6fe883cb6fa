"""Polychromic objectives: sets of rollouts from one start are judged together, by return and by variety.

Legend: T chunk steps, E environments, G groups of N environments that begin their episodes at the same
starts, n rollouts of a set, K episodes of an environment in an iteration.

A set scores f = (mean return) d, where d is the share of distinct kinds among its rollouts, 0 if there is one
kind only. Every rollout's advantage is the mean score of the sets that contain it minus that of all sets; all
its steps take it. That is an unbiased gradient of E f.

Source: Polychromic objectives for reinforcement learning, arXiv 2509.25424. Deviations: sets begin at the
starts of episodes, not at visited states; all sets of a group count; rollouts of no kind add none.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from envs.rollouts.rollout import Rollout

LABEL = "mode"
"""Metric of an episode whose value is its kind; below 0: none."""


def variety(label: Tensor) -> Tensor:
    """Return d (...) of sets of kinds (..., n)."""
    same = label[..., :, None] == label[..., None, :]
    earlier = torch.ones(label.shape[-1], label.shape[-1], dtype=torch.bool, device=label.device).tril(-1)
    is_new = ~(same & earlier).any(dim=-1) & (label >= 0)
    distinct = is_new.sum(dim=-1)
    return torch.where(distinct > 1, distinct, 0) / label.shape[-1]


def set_advantages(returns: Tensor, label: Tensor, n: int) -> Tensor:
    """Return the advantages (G, N) of rollouts with returns and kinds (G, N), by all sets of n of them."""
    total = returns.shape[1]
    sets = torch.tensor(list(combinations(range(total), n)), device=returns.device)  # (S, n)
    score = returns[:, sets].mean(dim=-1) * variety(label[:, sets])  # (G, S)
    member = torch.zeros(len(sets), total, dtype=score.dtype, device=score.device).scatter_(1, sets, 1.0)
    return score @ member / member.sum(dim=0) - score.mean(dim=1, keepdim=True)


@dataclass(frozen=True)
class Sets:
    """Replaces advantages of episodes whose whole group finished them within the iteration."""

    size: int  # n

    @property
    def group(self) -> int:
        """N, environments that share their starts."""
        return 2 * self.size

    def __call__(self, advantage: Tensor, reward: Tensor, rollout: Rollout) -> Tensor:
        """Return advantages (T, E), given those of single steps and scaled rewards (T, E)."""
        number = rollout.first.long().cumsum(dim=0) - 1
        ended = rollout.terminated | rollout.truncated
        count = int(number.max()) + 1
        shape = (count, number.shape[1])
        returns = reward.new_zeros(shape).scatter_add_(0, number, reward)
        label, last = reward.new_full(shape, -1.0), rollout.metrics[LABEL].to(reward.dtype)
        is_whole = torch.zeros(shape, dtype=torch.bool)
        t, env = ended.nonzero(as_tuple=True)
        label[number[t, env], env], is_whole[number[t, env], env] = last[t, env], True
        grouped = (part.unflatten(1, (-1, self.group)).flatten(0, 1) for part in (returns, label, is_whole))
        returns, label, is_whole = grouped  # (K G, N)
        of_episodes = set_advantages(returns, label, self.size).view(shape)
        usable = is_whole.all(dim=1, keepdim=True).expand_as(is_whole).reshape(shape)
        return torch.where(usable.gather(0, number), of_episodes.gather(0, number), advantage)
