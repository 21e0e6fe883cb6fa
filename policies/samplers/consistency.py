"""Sampler of consistency models: predict the clean chunk, add less noise, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from policies.bounds import bounded
from policies.processes.base import incompatible
from policies.processes.consistency import Consistency
from policies.registry import register
from policies.samplers.ode import PathRules
from policies.samplers.step_table import StepTable, build_step_table


@register("sampler", "consistency")
@dataclass(frozen=True, kw_only=True)
class Renoise(PathRules):
    """x' = alpha' (x0 + sqrt(s'^2 - noise_min^2) noise); one step uses the start noise alone.

    Args:
        start_noise: Deviation of the start in units of the data; null: that of the first level. Consistency
            Policy starts from 1 where the first level is 80, for less varied chunks.

    Source: arXiv 2303.01469, algorithm 1; Consistency Policy, arXiv 2405.07503, for start_noise.
    """

    steps: int = bounded(2, ge=1)  # network evaluations
    start_noise: float | None = bounded(None, ge=0)

    def table(self, process: Any) -> StepTable:
        if not isinstance(process, Consistency):
            raise incompatible(self, process, needs="consistency")
        table = self.over(process, self.times(process))
        if self.start_noise is None:
            return table
        return replace(table, start_std=table.alpha[0] * self.start_noise)

    def over(self, process: Any, times: Sequence[float]) -> StepTable:
        alpha, sigma = process.alpha_sigma(torch.tensor(times[1:], dtype=torch.float64))
        remaining = (alpha * process.noise_min).square()  # noise left in the clean end of a trajectory
        std = (sigma.square() - remaining).clamp(min=0.0).sqrt()
        zeros = torch.zeros_like(alpha)[:, None]
        return build_step_table(process, self, times, alpha[:, None], zeros, std[:, None])
