"""Flows on the point environment, and small runs that fine-tune them."""

from __future__ import annotations

from typing import Any

import torch
from point_env import PointEnv

from algos.base import Setup
from algos.fpo import FpoConfig
from algos.onpolicy.loop import OnPolicy
from algos.policyflow import PolicyFlowConfig
from algos.reinflow import ReinFlowConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.networks.heads import CriticConfig
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.samplers.ode import Euler

SIZES: dict[str, Any] = {
    "num_envs": 4, "steps_per_iteration": 8, "iterations": 4, "batch_size": 16, "update_epochs": 2,
    "critic": CriticConfig(width=8), "microbatch_size": 8,
}  # fmt: skip
RATES: dict[str, Any] = {
    "actor_lr": 1e-3, "actor_min_lr": None, "actor_lr_warmup": 0, "critic_lr": 3e-3, "critic_min_lr": None,
    "critic_lr_warmup": 0,
}  # fmt: skip
REINFLOW = ReinFlowConfig(**SIZES, **RATES)
FPO = FpoConfig(**SIZES, **RATES)
POLICYFLOW = PolicyFlowConfig(**SIZES, **RATES)


def make_flow(*, steps: int = 4, process: Any = None, seed: int = 3, **chunk: Any) -> DenoisingPolicy:
    """Build an untrained flow for the point environment."""
    config = PolicyConfig(
        process=process or RectifiedFlow(),
        backbone=MlpConfig(width=16, time_dim=4),
        sampler=Euler(steps=steps),
        **({"horizon": 3, "act_steps": 2} | chunk),
    )
    limits = {"min": -torch.ones(2), "max": torch.ones(2), "mean": torch.zeros(2), "std": torch.ones(2)}
    statistics = {"state": limits, "action": limits}
    policy = build_policy(config, obs_dim=2, action_dim=2, statistics=statistics, seed=seed)
    assert isinstance(policy, DenoisingPolicy)
    return policy


def make_run(config: Any, init: DenoisingPolicy | None = None, **setup: Any) -> OnPolicy:
    """Build a run in this process; `setup` replaces what it is given."""
    values = {
        "num_workers": 0, "num_threads": 1, "env": PointEnv(), "init": init or make_flow(), "seed": 5,
    }  # fmt: skip
    return config.build(Setup(**(values | setup)))
