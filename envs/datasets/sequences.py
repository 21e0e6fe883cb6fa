"""Sequences of consecutive steps from any frame, for value functions of action chunks.

Legend: B batch, H horizon, Do and Da widths. Row j of a sequence is frame i + j of the episode of frame i.
Past the end of the episode the last row is repeated, with zero reward and `valid` false.

Source:
    Q-chunking, arXiv 2507.07969: the value of H actions is R + gamma^H mask Q(s', a'), where R sums the
    rewards of the sequence and s' is the observation after its last row. Deviation: the published sampler
    continues into the next episode and masks it afterwards; `across_episodes=True` reproduces it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from policies.errors import DatasetError


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of sequences, in physical units.

    Shapes:
        observations, next_observations: (B, H, Do).
        actions: (B, H, Da).
        rewards: (B, H), discounted sum of the rewards of rows 0..j.
        masks: (B, H), 0 from the row at which the task ended; else 1.
        ends: (B, H) bool, an episode ended in one of the rows 0..j.
        valid: (B, H) bool, the row belongs to the first frame's episode.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    masks: Tensor
    ends: Tensor
    valid: Tensor


class Sequences:
    """All sequences of a dataset with recorded successors, on its device.

    Args:
        dataset: Episodes; move it to the device first.
        horizon: H.
        discount: Discount per step in the summed rewards.
        across_episodes: Continue rows into the next episode, as the published sampler does.

    Attributes:
        num: Number of possible first frames: all, or with `across_episodes` those H rows before the end.
    """

    def __init__(
        self, dataset: EpisodeDataset, horizon: int, discount: float, *, across_episodes: bool = False
    ) -> None:
        if dataset.next_observations is None:
            raise DatasetError(f"{dataset.source}: expected the key 'next_observations'; it is not recorded.")
        if not 1 <= horizon <= dataset.num_frames:
            raise DatasetError(
                f"{dataset.source}: the horizon must be in 1..{dataset.num_frames} (frames); got {horizon}."
            )
        self._data, self._next, self.discount = dataset, dataset.next_observations, discount
        self.num = dataset.num_frames - horizon + 1 if across_episodes else dataset.num_frames
        device = dataset.observations.device
        self._offset = torch.arange(horizon, device=device)
        self._weight = discount ** self._offset.double()
        ends = dataset.episode_start[1:] - 1
        last = torch.full_like(ends, dataset.num_frames - 1) if across_episodes else ends
        self._last = last.repeat_interleave(dataset.lengths)
        self._is_last, self._over = dataset.is_last, dataset.over

    def gather(self, frames: Tensor) -> SequenceBatch:
        """Return the sequences that begin at `frames` (B,), integers in 0..num-1 on the dataset's device."""
        wanted = frames[:, None] + self._offset
        rows = torch.minimum(wanted, self._last[frames][:, None])
        ends = self._is_last[rows].cummax(dim=1).values
        over = self._over[rows].cummax(dim=1).values
        valid = torch.cat([torch.ones_like(ends[:, :1]), ~ends[:, :-1]], dim=1)
        rewards = self._data.rewards[rows].double() * self._weight * (rows == wanted)
        return SequenceBatch(
            observations=self._data.observations[rows],
            actions=self._data.actions[rows],
            rewards=rewards.cumsum(dim=1).float(),
            next_observations=self._next[rows],
            masks=(~over).float(),
            ends=ends,
            valid=valid,
        )

    def sample(self, size: int, *, generator: torch.Generator | None = None) -> SequenceBatch:
        """Draw sequences uniformly with replacement; the generator lives on the dataset's device."""
        device = self._offset.device
        return self.gather(torch.randint(self.num, (size,), generator=generator, device=device))
