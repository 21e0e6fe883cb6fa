"""Policies whose data are Gaussian, so that everything about them is known in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.processes.schedules import time_of_level
from policies.protocols import BoundField, Cond


@dataclass(frozen=True)
class GaussianConfig:
    """Builds the best denoiser of data N(mean, std^2), in normalised units."""

    process: Any
    mean: tuple[float, ...]
    std: float

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> ExactDenoiser:
        return ExactDenoiser(self)


class ExactDenoiser(nn.Module):
    """E[x0 | x] = mean + alpha std^2 / (alpha^2 std^2 + sigma^2) (x - alpha mean), in the process's words."""

    def __init__(self, config: GaussianConfig) -> None:
        super().__init__()
        self.config = config
        self.calls = 0

    def forward(
        self, x: Tensor, time: Tensor, cond: Cond, *_: Any, time_row: Any = None, **__: Any
    ) -> Tensor:
        self.calls += 1
        t, process = self.sampling_time(time.double()), self.config.process
        mean, var = x.new_tensor(self.config.mean), self.config.std**2
        alpha, sigma = (a[:, None, None].to(x) for a in process.alpha_sigma(t))
        x0 = mean + alpha * var / (alpha**2 * var + sigma**2) * (x - alpha * mean)
        return process.convert(x, t, x0, "x0", process.kind).to(x)

    def sampling_time(self, time: Tensor) -> Tensor:
        process = self.config.process
        if isinstance(process, RectifiedFlow):
            return time / process.time_scale
        return time_of_level(time, process.num_levels)

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


def gaussian_policy(
    process: Any,
    mean: tuple[float, ...],
    std: float,
    *,
    sampler: Any = None,
    scale: float = 1.0,
    offset: float = 0.0,
) -> DenoisingPolicy:
    """Return the float64 policy of physical data N(mean, std^2), normalised by scale and offset.

    Args:
        process: Diffusion or flow.
        mean: (Da,).
        std: Of every element of the chunk.
        sampler: Registered sampler.
        scale: Factor of the normaliser of actions.
        offset: Summand of the normaliser of actions.
    """
    own = tuple(scale * m + offset for m in mean)
    config = PolicyConfig(
        process=process,
        backbone=GaussianConfig(process, own, scale * std),
        sampler=sampler,
        horizon=2,
        act_steps=2,
        normalizer={"state": "identity", "action": "identity"},
    )
    policy = build_policy(config, obs_dim=1, action_dim=len(mean)).double()
    assert isinstance(policy, DenoisingPolicy)
    policy.normalizer.get_buffer("action_scale").fill_(scale)
    policy.normalizer.get_buffer("action_offset").fill_(offset)
    return policy


def log_density(policy: DenoisingPolicy, x: Tensor, t: float) -> Tensor:
    """Return ln q(x) of noisy chunks (B, Th, Da) at a sampling time, up to a constant; (B,)."""
    config = policy.config.backbone
    alpha, sigma = (float(a) for a in policy.process.alpha_sigma(torch.tensor(t, dtype=torch.float64)))
    var = alpha**2 * config.std**2 + sigma**2
    squares = (x - alpha * x.new_tensor(config.mean)).square().sum(dim=(-2, -1))
    return -0.5 * squares / var - 0.5 * x[0].numel() * torch.tensor(var, dtype=torch.float64).log()
