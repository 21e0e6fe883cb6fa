"""A flow on a curved path that begins at noise alone, as `burnish new process` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.processes.base import GaussianPath
from policies.protocols import Device, Kind, Rng

QUARTER = torch.pi / 2


@dataclass(frozen=True)
class CurvedFlow(GaussianPath):
    """x = sin(pi t / 2) x0 + cos(pi t / 2) eps; the network predicts its velocity."""

    @property
    def kind(self) -> Kind:
        return "velocity"

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(QUARTER * t), torch.cos(QUARTER * t)

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return QUARTER * torch.cos(QUARTER * t), -QUARTER * torch.sin(QUARTER * t)

    def net_time(self, t: Tensor) -> Tensor:
        return 100.0 * t

    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.rand(n, generator=generator, dtype=dtype).to(device)

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "euler"}
