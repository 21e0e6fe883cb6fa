"""Small runs of DPPO on the point environment, for tests."""

from __future__ import annotations

from typing import Any

import torch
from point_env import PointEnv

from algos.base import Setup
from algos.dppo import DppoConfig
from algos.onpolicy.advantages import Experience
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ppo_update import GeneratorDraws
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.networks.heads import CriticConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion

SMALL = DppoConfig(
    num_envs=4,
    steps_per_iteration=8,
    iterations=4,
    batch_size=50,
    update_epochs=2,
    tuned_steps=3,
    actor_lr=1e-3,
    critic=CriticConfig(width=8),
    microbatch_size=16,
)


def make_init(
    *, levels: int = 5, prediction: str = "eps", backbone: Any = None, sampler: Any = None, horizon: int = 3
) -> Policy:
    """Build an untrained policy for the point environment."""
    config = PolicyConfig(
        process=VPDiffusion(levels, prediction=prediction),
        backbone=backbone or MlpConfig(width=16, time_dim=4),
        sampler=sampler,
        horizon=horizon,
        act_steps=2,
    )
    limits = {"min": torch.full((2,), -1.0), "max": torch.full((2,), 1.0)}
    statistics = {
        name: limits | {"mean": torch.zeros(2), "std": torch.ones(2)} for name in ("state", "action")
    }
    return build_policy(config, obs_dim=2, action_dim=2, statistics=statistics, seed=3)


def make_run(config: DppoConfig = SMALL, init: Policy | None = None, **setup: Any) -> OnPolicy:
    """Build a run in this process; `setup` replaces what it is given."""
    values = {
        "num_workers": 0,
        "num_threads": 1,
        "env": PointEnv(),
        "init": init or make_init(),
        "seed": 5,
    } | setup
    return config.build(Setup(**values))


def experience_of(run: OnPolicy) -> Experience:
    """Collect one rollout and appraise it."""
    return run.estimate_advantages(run.collect(), run.policy, run.learner.critic, run.scaler)


def draws(seed: int = 0) -> GeneratorDraws:
    """Return the draws of an update, from a seed."""
    return GeneratorDraws(torch.Generator().manual_seed(seed))


def shift_weights(run: OnPolicy, scale: float = 0.01) -> None:
    """Move the actor's weights a little, so that ratios leave one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in run.learner.actor:
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
