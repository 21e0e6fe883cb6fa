"""The smallest runs that steer a policy: a flow on the point task."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from point_env import PointEnv

from algos.base import Setup
from algos.dsrl import DsrlConfig
from algos.offpolicy.loop import OffPolicyRun
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.composition.compose import compose
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.samplers.ddpm import DDIM
from policies.wrappers.noise_policy import Steering

SMALL = DsrlConfig(
    total_steps=60, warmup_steps=0, num_envs=2, steps_per_iteration=3, log_every=1, updates_per_step=0.5,
    batch_size=8, critic_dims=(8,), steering=Steering(hidden_dims=(8,)),
)  # fmt: skip

AS_IT_IS = Steering(hidden_dims=(8,), zero_init=True, density="gaussian")
"""An actor that begins as the policy alone, noise by noise."""


def flow(process: Any = None, *, seed: int = 3, scale: float = 1.0) -> Policy:
    """Return an untrained policy of the point task, a flow unless told otherwise.

    Args:
        process: Of the policy.
        seed: Of its weights.
        scale: Of the observations, whose normaliser divides by it.
    """
    one = torch.ones(2)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    config = PolicyConfig(
        process=process or RectifiedFlow(), backbone=MlpConfig(width=8, time_dim=4), horizon=3, act_steps=2
    )
    states = {name: scale * value for name, value in limits.items()}
    return build_policy(
        config, obs_dim=2, action_dim=2, statistics={"state": states, "action": limits}, seed=seed
    )


def composed() -> Policy:
    """Half a flow and half a diffusion without noise."""
    other = flow(VPDiffusion(num_levels=4), seed=8).with_sampler(DDIM(steps=3))  # type: ignore[attr-defined]
    return compose([flow(), other], (0.5, 0.5))


def dataset(episodes: int = 6, length: int = 5, scale: float = 1.0) -> EpisodeDataset:
    """Return random episodes of reward 7, with actions up to a scale."""
    generator, frames = torch.Generator().manual_seed(0), episodes * length
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    return EpisodeDataset(
        observations=torch.rand(frames, 2, generator=generator), rewards=torch.full((frames,), 7.0),
        actions=scale * (torch.rand(frames, 2, generator=generator) * 2 - 1), terminated=ends,
        truncated=torch.zeros_like(ends), episode_start=torch.arange(0, frames + 1, length),
    )  # fmt: skip


def changed(**values: Any) -> DsrlConfig:
    """Return the smallest configuration with changes."""
    return dataclasses.replace(SMALL, **values)


def start(config: DsrlConfig = SMALL, limit: int = 5, **changes: Any) -> OffPolicyRun:
    """Build a run."""
    values: dict[str, Any] = {"env": PointEnv(limit=limit), "init": flow(), "seed": 5, "num_workers": 0}
    return config.build(Setup(**(values | {"num_threads": 1} | changes)))
