"""Append recorded goals to the states.

Legend: N frames, Do entries of a state, Dg of a goal.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from envs.datasets.array_storage import pieces
from envs.datasets.episodes import EpisodeDataset
from envs.datasets.free_memory import require_memory


def with_goals_in_states(dataset: EpisodeDataset) -> EpisodeDataset:
    """Return the dataset with each frame's goal appended to its state and removed from the extra keys.

    A successor has the goal of the next frame of its episode; the last frame's successor has the frame's own
    goal, since no other was recorded. The dataset is on the CPU, with `extras["goal"]` (N, Dg).
    """
    goals, successors = dataset.extras["goal"], dataset.next_observations
    if not dataset.storage.on_disk:
        size = 4 * dataset.num_frames * (dataset.obs_dim + goals.shape[1]) * (1 if successors is None else 2)
        require_memory(size, f"{dataset.source}, with goals in its states")
    following = None
    if successors is not None:
        last = (dataset.episode_start[1:] - 1).repeat_interleave(dataset.lengths)
        following = _joined(dataset, successors, torch.minimum(torch.arange(1, len(last) + 1), last))
    return replace(
        dataset,
        observations=_joined(dataset, dataset.observations, torch.arange(dataset.num_frames)),
        next_observations=following,
        extras={key: value for key, value in dataset.extras.items() if key != "goal"},
    )


def _joined(dataset: EpisodeDataset, states: Tensor, rows: Tensor) -> Tensor:
    """Return states (N, Do) concatenated with the goals of rows (N,), (N, Do + Dg) float32."""
    goals, width = dataset.extras["goal"], states.shape[1]
    out = dataset.storage.empty((len(states), width + goals.shape[1]), np.float32)
    for part in pieces(out):
        out[part, :width] = states[part]
        out[part, width:] = goals[rows[part]]
    return torch.from_numpy(out)
