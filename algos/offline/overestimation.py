"""How far action values lie above what the data obtained: the symptom of actors that leave the data.

Legend: G_t = sum over k of gamma^k (scale r_{t+k} + shift), to the end of the recorded episode::

    overestimation = mean over probes of mean over critics of Q(s_t, a_t) - G_t

Critics value the actor's future, G that of what recorded the data, so a good actor raises the difference too:
compare it between runs and over time. Where a recording was cut off, G lacks what came later; only rows count
for which that weighs less than 1 %: gamma^remaining < 0.01.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algos.transitions import Rewarding, TransitionTable
from envs.datasets.episodes import EpisodeDataset
from policies.networks.critics import Ensemble

_PROBES = 4096  # rows, at most
_CUT_WEIGHT = 0.01  # of what a cut recording lacks


@dataclass(frozen=True)
class Probes:
    """Conditions (P, C), actions (P, A) and discounted returns to go (P,) of rows of the data."""

    cond: Tensor
    action: Tensor
    to_go: Tensor

    @torch.no_grad()
    def overestimation(self, critic: Ensemble) -> Tensor:
        """Return by how much the values of the critics exceed the returns, a scalar."""
        return (critic(self.cond, self.action).mean(dim=0) - self.to_go).mean()


def probes_of(table: TransitionTable, dataset: EpisodeDataset, rewarding: Rewarding) -> Probes | None:
    """Return evenly spread rows whose return to go is known; None where there are none.

    None too where recordings go on after the task was over (`masks`): those returns are not the task's.
    """
    if table.frame is None or "masks" in dataset.extras:
        return None
    known = _known(dataset, rewarding.gamma)[table.frame].nonzero().squeeze(1)
    if not len(known):
        return None
    places = torch.linspace(0, len(known) - 1, min(_PROBES, len(known)), device=known.device).long()
    row = known[places]
    rewards = rewarding.scale * dataset.rewards + rewarding.shift
    to_go = replace(dataset, rewards=rewards).returns_to_go(rewarding.gamma)[table.frame[row]]
    batch = table.gather(row)
    return Probes(batch.cond.contiguous(), batch.action.contiguous(), to_go.to(batch.reward))


def _known(dataset: EpisodeDataset, gamma: float) -> Tensor:
    """Return which frames (N,) have a return to go that no cut changes much."""
    last = (dataset.episode_start[1:] - 1).repeat_interleave(dataset.lengths)
    remaining = last - torch.arange(dataset.num_frames, device=last.device) + 1
    return dataset.terminated[last] | (gamma ** remaining.double() < _CUT_WEIGHT)
