"""A toy task with two right answers: the action is +level or -level, the whole episode long."""

from __future__ import annotations

import torch

from algos.base import Setup
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.policy import PolicyConfig
from policies.processes import RectifiedFlow

LEVEL = 2.0
"""Distance of both modes from zero, physical units."""


def two_mode_dataset(num_episodes: int = 40, length: int = 6, seed: int = 0) -> EpisodeDataset:
    """Episodes of `length` frames; observation (x, 1), action sign * (LEVEL + 0.2 x)."""
    generator = torch.Generator().manual_seed(seed)
    frames = num_episodes * length
    x = torch.rand(frames, generator=generator) * 2.0 - 1.0
    sign = torch.randint(0, 2, (num_episodes,), generator=generator).float() * 2.0 - 1.0
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    return EpisodeDataset(
        observations=torch.stack([x, torch.ones_like(x)], dim=1),
        actions=(sign.repeat_interleave(length) * (LEVEL + 0.2 * x)).unsqueeze(1),
        rewards=torch.zeros(frames),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        episode_start=torch.arange(0, frames + 1, length),
        meta={"source": "two-modes"},
    )


def two_mode_setup(seed: int = 0, *, process: object | None = None, width: int = 16, **dataset: int) -> Setup:
    """A tiny policy (flow unless said otherwise) on the toy data."""
    process = process if process is not None else RectifiedFlow()
    policy = PolicyConfig(process=process, backbone=MlpConfig(width=width), horizon=2, act_steps=2)
    return Setup(policy=policy, dataset=two_mode_dataset(**dataset), seed=seed)
