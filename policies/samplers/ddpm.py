"""DDPM and DDIM on the trained noise levels of a diffusion, in the conventions of diffusers and DPPO.

Legend: alpha, sigma signal and noise amplitudes at a level, a prime marks the next one; `bar` alpha^2, `var`
sigma^2; level -1 is the clean chunk. In the notation of `policies.samplers.step_table`::

    ddpm   to_x0 x0 + to_eps eps = posterior mean of q(x' | x, x0)                (arXiv 2006.11239, eq. 7)
    ddim   to_x0 = alpha', to_eps = sqrt(sigma'^2 - s^2), s = eta * ddpm's std    (arXiv 2010.02502, eq. 12)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import ConfigError
from policies.processes.base import incompatible
from policies.processes.diffusion import VPDiffusion
from policies.processes.schedules import SPACINGS, spaced_levels, time_of_level
from policies.registry import register
from policies.samplers.step_table import StepRules, StepTable, build_step_table


@register("sampler", "ddpm")
@dataclass(frozen=True, kw_only=True)
class DDPM(StepRules):
    """Ancestral sampling.

    The defaults are DPPO's evaluation: noise floored at 1e-3, none after the last step. DPPO's exploration is
    `min_std=0.1, final_std=None`.

    Args:
        variance: `fixed_small` (posterior variance) or `fixed_large` (beta).
        levels: Noise levels to visit, noisiest first, for short runs from a warm start; empty: from steps and
            spacing. Each level is left by one step of the process, even where the list skips levels
            (RTI-DP, arXiv 2508.05396).

    Source: arXiv 2006.11239, eq. 7; DPPO (arXiv 2409.00588) for the floors and clips.
    """

    min_std: float = bounded(1e-3, ge=0)
    final_std: float | None = bounded(0.0, ge=0)
    steps: int | None = bounded(None, ge=1)  # number of noise levels to visit; None: all of the process
    spacing: str = bounded("leading", choices=SPACINGS)  # level spacing: `leading`, `trailing` or `linspace`
    variance: str = bounded("fixed_small", choices=("fixed_small", "fixed_large"))
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        falls = all(later < earlier for earlier, later in pairwise(self.levels))
        self.require("levels", falls, "falling, noisiest first")
        if self.levels and self.steps is not None:
            raise ConfigError(
                "sampler.steps and sampler.levels both choose the levels; got "
                f"steps={self.steps} and levels={list(self.levels)}. Give one of them."
            )

    def table(self, process: Any) -> StepTable:
        path = _LevelPath.of(self, process, levels=self.levels)
        kept = path.bar / path.bar_next  # product of the paper's alphas = 1 - beta over the step
        to_x0 = path.bar_next.sqrt() * (1 - kept) / path.var
        to_x = kept.sqrt() * path.var_next / path.var
        posterior = path.var_next / path.var * (1 - kept)
        std = (posterior if self.variance == "fixed_small" else 1 - kept).sqrt()
        to_x0 = to_x0 + to_x * path.bar.sqrt()  # x = alpha x0 + sigma eps
        return build_step_table(process, self, path.times, to_x0, to_x * path.var.sqrt(), std)


@register("sampler", "ddim")
@dataclass(frozen=True, kw_only=True)
class DDIM(StepRules):
    """Implicit sampling: deterministic with eta = 0, ancestral with eta = 1.

    As in diffusers, a step leads from level tau to tau - K // steps; for `linspace`, and for `trailing` where
    steps does not divide K, this is not the next visited level.

    Source: arXiv 2010.02502, eq. 12; DPPO (arXiv 2409.00588) for recomputation and noise floor. The mean uses
    the standard deviation before the floor.
    """

    steps: int = bounded(10, ge=1)  # number of noise levels to visit
    spacing: str = bounded("leading", choices=SPACINGS)  # level spacing: `leading`, `trailing` or `linspace`
    eta: float = bounded(0.0, ge=0, le=1)  # noise scale: 0 deterministic (DDIM), 1 ancestral (DDPM)
    eta_per_dim: tuple[float, ...] = bounded((), ge=0, le=1)  # eta per action dimension; overrides `eta`
    recompute_eps: bool = True  # recompute eps from the clipped x0 (DPPO, `use_clipped_model_output`)
    eps_clip: float | None = bounded(None, gt=0)  # bound on eps; None: no bound
    final_alpha: str = bounded("one", choices=("one", "first"))  # after the last step: 1, or that of level 0

    def table(self, process: Any) -> StepTable:
        last = 0 if self.final_alpha == "first" else -1
        path = _LevelPath.of(self, process, stop_at=last)
        eta = torch.tensor(self.eta_per_dim or (self.eta,), dtype=torch.float64)
        std = eta * (path.var_next / path.var * (1 - path.bar / path.bar_next)).clamp(min=0).sqrt()
        to_eps = (path.var_next - std.square()).clamp(min=0).sqrt()
        to_x0 = path.bar_next.sqrt().expand_as(std)
        rows, recompute = (to_x0, to_eps, std), self.recompute_eps
        return build_step_table(process, self, path.times, *rows, recompute=recompute, eps_clip=self.eps_clip)


class _LevelPath(NamedTuple):
    """Visited diffusion levels: K+1 times; squared amplitudes at this level and the next, (K, 1)."""

    times: list[float]
    bar: Tensor
    var: Tensor
    bar_next: Tensor
    var_next: Tensor

    @staticmethod
    def of(
        sampler: DDPM | DDIM, process: Any, *, stop_at: int = -1, levels: Sequence[int] = ()
    ) -> _LevelPath:
        if not isinstance(process, VPDiffusion):
            raise incompatible(sampler, process, needs="diffusion")
        count = process.num_levels
        if levels and not 0 <= levels[-1] <= levels[0] < count:
            raise ConfigError(f"sampler.levels must lie in 0..{count - 1}; got {list(levels)}.")
        visited = list(levels) or spaced_levels(count, sampler.steps or count, sampler.spacing)
        stride = 1 if levels else count // len(visited)
        reached = [max(tau - stride, stop_at) for tau in visited]
        t = time_of_level(torch.tensor([*visited, reached[-1]], dtype=torch.float64), count)
        t_next = time_of_level(torch.tensor(reached, dtype=torch.float64), count)
        squares = [a.square()[:, None] for times in (t[:-1], t_next) for a in process.alpha_sigma(times)]
        return _LevelPath(t.tolist(), *squares)
