"""The smallest real policies, for tests."""

from __future__ import annotations

from typing import Any

import torch

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig

OBS_DIM, ACTION_DIM, GOAL_DIM = 5, 2, 3


def statistics(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Return statistics in awkward physical units."""
    generator = torch.Generator().manual_seed(seed)
    stats = {}
    for name, dim in (("state", OBS_DIM), ("goal", GOAL_DIM), ("action", ACTION_DIM)):
        data = 3.0 + 2.0 * torch.randn(50, dim, generator=generator)
        stats[name] = {
            "min": data.min(0).values,
            "max": data.max(0).values,
            "mean": data.mean(0),
            "std": data.std(0),
        }
    return stats


def small_policy(process: Any = None, sampler: Any = None, *, goal_dim: int = 0, **chunk: Any) -> Policy:
    """Build a policy of width 16."""
    config = PolicyConfig(
        process=process,
        sampler=sampler,
        backbone=MlpConfig(width=16, time_dim=8),
        **({"horizon": 3, "act_steps": 2} | chunk),
    )
    return build_policy(
        config, obs_dim=OBS_DIM, action_dim=ACTION_DIM, goal_dim=goal_dim, statistics=statistics(), seed=1
    )


def observations(batch: int, obs_steps: int = 1, seed: int = 0) -> torch.Tensor:
    """Draw physical observations (B, To, Do)."""
    return 3.0 + torch.randn(batch, obs_steps, OBS_DIM, generator=torch.Generator().manual_seed(seed))


def policy_for(task: Any) -> Policy:
    """A small policy for the state and the actions of a task."""
    spec = task.spec
    box = {"min": torch.tensor(spec.action_low), "max": torch.tensor(spec.action_high)}
    limits = {"state": {"min": -torch.ones(spec.obs_dim), "max": torch.ones(spec.obs_dim)}, "action": box}
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim}
    return build_policy(PolicyConfig(backbone=MlpConfig(width=8, time_dim=4)), statistics=limits, **sizes)
