"""The decisions of RTI-DP, made in a few steps from the plan before, on recorded noise.

The arrays of ITPS in the same files are covered by `test_steering_itps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from official_networks import read
from torch import Tensor, nn

from policies.build import build_policy
from policies.execution.replanning import Replanner, WarmStart
from policies.policy import Policy, PolicyConfig
from policies.processes import VPDiffusion
from policies.processes.schedules import cumulative_alphas
from policies.samplers.ddpm import DDPM

TOLERANCE = 1e-4
PREFIX = "rti_steps_"


@dataclass(frozen=True)
class ToyConfig:
    """Builds a `Toy`."""

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Toy:
        return Toy(shape[1])


class Toy(nn.Module):
    """eps(x, tau) = x A + (tau / K) v + c for every row of a chunk."""

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.A, self.v, self.c = (
            nn.Parameter(torch.zeros(shape)) for shape in ((action_dim, action_dim), action_dim, action_dim)
        )
        self.num_levels = 1

    def bind(self, cond: Any, times: Tensor, *_: Any) -> Callable[[int, Tensor], Tensor]:
        return lambda k, x: x @ self.A + times[k] / self.num_levels * self.v + self.c


def toy_policy(arrays: dict[str, Tensor]) -> Policy:
    """The official policy: ancestral steps at every level, one action executed, nothing to normalise."""
    _, horizon, action_dim = arrays["x_init"].shape
    config = PolicyConfig(
        process=VPDiffusion(len(arrays["alphas_cumprod"]), prediction="eps"),
        backbone=ToyConfig(),
        sampler=DDPM(noise_clip=None, min_std=0.0, final_std=None),
        horizon=horizon,
        act_steps=1,
        normalizer={"state": "identity", "action": "identity"},
    )
    policy = build_policy(config, obs_dim=1, action_dim=action_dim)
    toy: Any = policy.field
    toy.load_state_dict({name: arrays[f"net_{name}"] for name in ("A", "v", "c")})
    toy.num_levels = len(arrays["alphas_cumprod"])
    return policy


@pytest.mark.golden("steering_rti_itps*.npz")
def test_decisions_from_the_plan_before(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy, previous = toy_policy(arrays), arrays["rti_previous_plan"]
    bar = cumulative_alphas(policy.config.process.betas())
    torch.testing.assert_close(bar, arrays["alphas_cumprod"], rtol=2e-5, atol=0)
    noise = torch.cat([arrays["x_init"][:, None], arrays["step_noise"].transpose(0, 1)], dim=1)
    obs = torch.zeros(len(previous), 1, 1)
    names = [name for name in arrays if name.startswith(PREFIX)]
    assert names
    for name in names:
        levels = tuple(int(level) for level in name.removeprefix(PREFIX).split("_"))
        decision = Replanner(policy, WarmStart(levels=levels)).decide(obs, noise=noise, previous=previous)
        torch.testing.assert_close(decision.plan, arrays[name], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(decision.actions, arrays[name][:, :1], rtol=0, atol=TOLERANCE)
        assert decision.calls == len(levels)
