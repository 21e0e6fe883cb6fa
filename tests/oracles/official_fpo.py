"""The networks of FPO's released programs as velocity networks of ours.

Its JAX program runs time from noise at 1 to the action at 0: v(x, t) = -u(x, 1 - t). The grid world runs as
we do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.build import build_policy
from policies.denoising import DenoisingPolicy
from policies.policy import PolicyConfig
from policies.processes.flow import RectifiedFlow
from policies.protocols import Cond
from policies.samplers.ode import Euler


def embed(t: Tensor) -> Tensor:
    """Return FPO's features of a time of theirs (M,), (M, 8)."""
    angles = t[:, None] * torch.tensor([1.0, 2.0, 4.0, 8.0])
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class Stack(nn.Module):
    """Linear layers `W<i>`, `b<i>` in JAX's layout with an activation between them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value.clone()))
        self.depth = len(weights) // 2

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = x @ getattr(self, f"W{i}") + getattr(self, f"b{i}")
            x = F.silu(x) if i < self.depth - 1 else x
        return x


@dataclass(frozen=True)
class OfficialFpo:
    """Builds a velocity network from a function of (state, x, our time)."""

    net: Callable[[Tensor, Tensor, Tensor], Tensor]
    module: nn.Module

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> OfficialNet:
        return OfficialNet(self)


class OfficialNet(nn.Module):
    """A backbone around `OfficialFpo`; chunks have one row."""

    def __init__(self, config: OfficialFpo) -> None:
        super().__init__()
        self.module, self.net = config.module, config.net

    def forward(self, x: Tensor, time: Tensor, cond: Cond, *_: Any, **__: Any) -> Tensor:
        return self.net(cond.vec, x[:, 0], time)[:, None]

    def bind(self, cond: Cond, times: Tensor, *_: Any) -> Callable[[int, Tensor], Tensor]:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


def playground_policy(arrays: Mapping[str, Tensor], steps: int) -> DenoisingPolicy:
    """Build the JAX program's policy; observations are those of `normalised`."""
    stack = Stack({name[7:]: value for name, value in arrays.items() if name.startswith("policy.")})

    def velocity(state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return -0.25 * stack(torch.cat([state, x, embed(1 - t)], dim=1))

    return build(OfficialFpo(velocity, stack), arrays["obs_mean"].numel(), arrays["cfm_action"], steps)


def gridworld_policy(arrays: Mapping[str, Tensor], steps: int) -> DenoisingPolicy:
    """Build the grid world's policy."""
    names = [f"net.layer{i}" for i in (1, 2, 3)]
    weights = {f"W{i}": arrays[f"{name}.weight"].T for i, name in enumerate(names)}
    stack = Stack(weights | {f"b{i}": arrays[f"{name}.bias"] for i, name in enumerate(names)})

    def velocity(state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        h = torch.cat([state, x, t[:, None]], dim=1)
        for i in range(3):
            h = h @ getattr(stack, f"W{i}") + getattr(stack, f"b{i}")
            h = h.relu() if i < 2 else h
        return h

    return build(OfficialFpo(velocity, stack), arrays["state"].shape[-1], arrays["action"], steps)


def build(net: OfficialFpo, obs_dim: int, action: Tensor, steps: int) -> DenoisingPolicy:
    """Build a flow policy of one action around a network."""
    config = PolicyConfig(
        process=RectifiedFlow(time_scale=1.0),
        backbone=net,
        sampler=Euler(steps=steps, clip_action=None),
        horizon=1,
        act_steps=1,
        normalizer=dict.fromkeys(("state", "goal", "action"), "identity"),
        observation_clip=None,
    )
    policy = build_policy(config, obs_dim=obs_dim, action_dim=action.shape[-1])
    assert isinstance(policy, DenoisingPolicy)
    return policy


def normalised(arrays: Mapping[str, Tensor], obs: Tensor) -> Tensor:
    """Return observations as the networks of the JAX program see them."""
    return (obs - arrays["obs_mean"]) / arrays["obs_std"]
