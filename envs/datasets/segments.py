"""Segments of episodes: the frames of chunk transitions.

Legend: M segments, To observation history, Th predicted horizon, Ta executed steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from envs.datasets.episodes import EpisodeDataset
from policies.policy_config import ChunkSpec

_AT_ONCE = 16_384  # frames, which bounds the memory of their segments


@dataclass(frozen=True)
class Segments:
    """Executed frames of M transitions; fewer than Ta where the task ends.

    Shapes:
        first, end: (M,), first and last frame of the episode.
        start, last: (M,), first and last executed frame.
        frames: (M, Ta), the last one repeated. real: (M, Ta), which of them are executed.
        length: (M,), number of executed frames. over: (M,), whether the task ends with them.
    """

    first: Tensor
    end: Tensor
    start: Tensor
    last: Tensor
    frames: Tensor
    real: Tensor
    length: Tensor
    over: Tensor

    @classmethod
    def of(cls, dataset: EpisodeDataset, start: Tensor, steps: int) -> Segments:
        """Return the segments of `steps` frames from frames (M,)."""
        over, (first, end) = dataset.over, episode_bounds(dataset, start)
        wanted = start[:, None] + torch.arange(steps, device=start.device)
        inside = torch.minimum(wanted, end[:, None])
        ended = over[inside].cummax(1).values
        ended_before = torch.cat([over.new_zeros(len(start), 1), ended[:, :-1]], dim=1)
        real = (wanted <= end[:, None]) & ~ended_before
        length = real.sum(dim=1)
        last = start + length - 1
        return cls(first, end, start, last, torch.minimum(wanted, last[:, None]), real, length, over[last])

    def next_chunks(self, dataset: EpisodeDataset) -> tuple[Tensor, Tensor]:
        """Return the frames (M, Ta) of the next chunk, and whether it was recorded (M,) to its end."""
        steps = self.frames.shape[1]
        following = Segments.of(dataset, torch.minimum(self.last + 1, self.end), steps)
        is_whole = (following.length == steps) | following.over
        return following.frames, (self.last < self.end) & ~self.over & is_whole

    def plans(self, chunk: ChunkSpec) -> tuple[Tensor, Tensor]:
        """Return the window frames (M, Th) around executed chunks, and which were recorded (M, Th)."""
        end = torch.where(self.over, self.last, self.end)
        offset = torch.arange(chunk.horizon, device=end.device) - chunk.action_start
        wanted = self.start[:, None] + offset
        inside = torch.minimum(torch.maximum(wanted, self.first[:, None]), end[:, None])
        return inside, inside == wanted


def segment_starts(dataset: EpisodeDataset, steps: int) -> Tensor:
    """Return the frames (M,) from which a segment ends with the task or has a known successor."""

    def known(start: Tensor) -> Tensor:
        segment = Segments.of(dataset, start, steps)
        keep = (segment.length == steps) | segment.over
        if dataset.next_observations is None or dataset.images:
            # a last frame with mask 0 may lack an action
            keep &= (segment.last < segment.end) | dataset.terminated[segment.last]
        return start[keep]

    frames = torch.arange(dataset.num_frames, device=dataset.actions.device)
    return torch.cat([known(block) for block in frames.split(_AT_ONCE)])


def histories(
    dataset: EpisodeDataset, newest: Tensor, obs_steps: int, *, successor: bool
) -> tuple[Tensor, Tensor]:
    """Return the frames (M, To) of the states up to frames (M,), and those of their images and goals.

    With `successor`, histories end with the frame after, where it exists; its state is left to the caller.
    """
    first, end = episode_bounds(dataset, newest)
    back = torch.arange(obs_steps - 1, -1, -1, device=newest.device)
    history = torch.maximum(newest[:, None] - back + successor, first[:, None])
    return torch.minimum(history, newest[:, None]), torch.minimum(history, end[:, None])


def episode_bounds(dataset: EpisodeDataset, frame: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last frame (M,) of the episodes of frames (M,)."""
    after = torch.searchsorted(dataset.episode_start, frame, right=True)
    return dataset.episode_start[after - 1], dataset.episode_start[after] - 1
