"""A toy whose answers are arcs: a condition names a direction, the chunk bends to its left or right."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig

ROWS, NOISE, NEAR = 4, 0.02, 0.25


def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return observations (n, 1, 2), demonstrated chunks (n, 4, 2) and both arcs (2, n, 4, 2)."""
    angle = torch.rand(n, generator=generator) - 0.5
    side = torch.randint(2, (n,), generator=generator)
    reach = torch.linspace(1 / ROWS, 1, ROWS)
    turned = angle[:, None] + torch.tensor([1.0, -1.0])[:, None, None] * reach
    arcs = 0.9 * reach[:, None] * torch.stack([turned.cos(), turned.sin()], dim=-1)
    chunk = arcs[side, torch.arange(n)] + NOISE * torch.randn(n, ROWS, 2, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[:, None], chunk, arcs


@functools.cache
def trained(process: Any, *, iterations: int, seed: int = 0) -> DenoisingPolicy:
    """Clone the arcs; the weights are averaged over the last iterations. Tests share what is returned."""
    config = PolicyConfig(process=process, backbone=MlpConfig(width=64, num_blocks=2, time_dim=32))
    policy = build_policy(config, obs_dim=2, action_dim=2, seed=seed)
    assert isinstance(policy, DenoisingPolicy)
    average = policy.clone()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for i in range(iterations):
        obs, chunk, _ = draw(128, generator)
        te = policy.sample_te(128, generator=generator)
        optimizer.zero_grad()
        policy.matching_loss(policy.encode({"state": obs}), chunk, te, reduce="mean").backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), policy.parameters(), strict=True):
                slow.lerp_(fast, 1 - min(0.99, (1 + i) / (10 + i)))
    return average.eval().requires_grad_(False)


@torch.no_grad()
def score(policy: DenoisingPolicy, sampler: Any) -> tuple[float, float]:
    """Return the share of samples near an arc, and the share of the left arc among those."""
    obs, _, arcs = draw(1000, torch.Generator().manual_seed(100))
    noise = policy.sample_noise(1000, generator=torch.Generator().manual_seed(101))
    chunk = policy.with_sampler(sampler).decode(policy.encode({"state": obs}), noise)
    distance, side = (chunk - arcs).flatten(2).norm(dim=-1).min(dim=0)
    is_near = distance < NEAR
    return float(is_near.float().mean()), float((side[is_near] == 0).float().mean())
