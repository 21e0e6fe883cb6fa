"""The toy networks of the reference numbers: affine noise network and affine critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.protocols import Cond

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class AffineConfig:
    """Builds an `AffineNet`."""

    def build(self, shape: tuple[int, int], cond_dim: int, **_: Any) -> AffineNet:
        return AffineNet(shape, cond_dim)


class AffineNet(nn.Module):
    """eps(x, t, s) = Wx vec(x) + Ws vec(s) + wt t + b, as a backbone."""

    def __init__(self, shape: tuple[int, int], cond_dim: int) -> None:
        super().__init__()
        width = shape[0] * shape[1]
        self.Wx = nn.Parameter(torch.zeros(width, width))
        self.Ws = nn.Parameter(torch.zeros(width, cond_dim))
        self.wt = nn.Parameter(torch.zeros(width))
        self.b = nn.Parameter(torch.zeros(width))

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        *,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        state = cond.vec @ self.Ws.T
        state = state if cond_row is None else state[cond_row]
        time = time if time_row is None else time[time_row]
        return (x.flatten(1) @ self.Wx.T + state + time[:, None] * self.wt + self.b).view_as(x)

    def bind(
        self, cond: Cond, times: Tensor, second_times: Tensor | None = None
    ) -> Callable[[int, Tensor], Tensor]:
        return lambda k, x: self(x, times[k].expand(len(x)), cond)


class AffineCritic(nn.Module):
    """V(s) = w vec(s) + b."""

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(cond_dim))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, obs: Tensor) -> Tensor:
        return obs @ self.w + self.b


def load(module: nn.Module, arrays: Arrays, prefix: str) -> None:
    """Copy the arrays `<prefix>_<parameter>` into a module."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(arrays[f"{prefix}_{name}"])


def assert_weights(module: nn.Module, arrays: Arrays, prefix: str, *, atol: float) -> None:
    for name, param in module.named_parameters():
        expected = arrays[f"{prefix}_{name}"]
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=atol)
