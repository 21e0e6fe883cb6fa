"""The toy network of the composition's reference numbers, and policies made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.protocols import BoundField, Cond


@dataclass(frozen=True)
class ToyConfig:
    """Builds a `Toy`; its output is multiplied by `sign`, its time divided by `time_scale`."""

    sign: float = 1.0
    time_scale: float = 1.0

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> Toy:
        return Toy(self, shape[1], cond_dim)


class Toy(nn.Module):
    """sign (x A + t / time_scale v + c + cond W) for every row of a chunk."""

    def __init__(self, config: ToyConfig, action_dim: int, cond_dim: int) -> None:
        super().__init__()
        shapes = {
            "A": (action_dim, action_dim),
            "v": action_dim,
            "c": action_dim,
            "W": (cond_dim, action_dim),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.config = config

    def forward(
        self, x: Tensor, time: Tensor, cond: Cond, *_: Any, time_row: Any = None, **__: Any
    ) -> Tensor:
        t = (time / self.config.time_scale)[:, None, None]
        return self.config.sign * (x @ self.A + t * self.v + self.c + (cond.vec @ self.W)[:, None])

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> BoundField:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


def toy_policy(
    process: Any, weights: Mapping[str, Tensor], *, sampler: Any = None, obs_dim: int = 1, **options: Any
) -> DenoisingPolicy:
    """Build a policy that normalises nothing around a toy network.

    Args:
        process: Registered process.
        weights: `A`, `v`, `c`, and `W` where the network sees the observation.
        sampler: Registered sampler.
        obs_dim: Do.
        options: `sign` and `time_scale` of the network; the rest goes to `PolicyConfig`.
    """
    net = {name: options.pop(name) for name in ("sign", "time_scale") if name in options}
    config = PolicyConfig(
        process=process,
        backbone=ToyConfig(**net),
        sampler=sampler,
        normalizer={"state": "identity", "action": "identity"},
        observation_clip=None,
        **options,
    )
    policy = build_policy(config, obs_dim=obs_dim, action_dim=len(weights["c"]))
    policy.to(weights["c"].dtype)
    assert isinstance(policy, DenoisingPolicy)
    policy.field.load_state_dict(dict(weights), strict=False)
    return policy
