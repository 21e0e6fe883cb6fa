"""Sampler of regression policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from policies.bounds import bounded
from policies.processes.base import incompatible
from policies.processes.regression import RegressionPath
from policies.registry import register
from policies.samplers.step_table import StepRules, StepTable, build_step_table


@register("sampler", "direct")
@dataclass(frozen=True, kw_only=True)
class Direct(StepRules):
    """Use each network output as the next input: x' = alpha' x0, without noise.

    A positive `min_std` injects noise after every evaluation, which gives the chunk a density.

    Source: arXiv 2512.01809.
    """

    clip_x0: float | None = bounded(None, gt=0)

    def table(self, process: Any) -> StepTable:
        if not isinstance(process, RegressionPath):
            raise incompatible(self, process, needs="regression or mip")
        times = [*process.stops, 1.0]
        to_x0 = process.alpha_sigma(torch.tensor(times[1:], dtype=torch.float64))[0][:, None]
        nothing = torch.zeros_like(to_x0)
        return build_step_table(process, self, times, to_x0, nothing, nothing)
