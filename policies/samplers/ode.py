"""Samplers on Gaussian paths, from predictions (x0, eps).

Legend: t sampling time, a prime marks the end of a step; alpha, sigma amplitudes of the path;
s = sigma / alpha noise over signal; lambda = -ln s. In the notation of `policies.samplers.step_table`:

    euler      to_x0 = alpha', to_eps = sigma'                   first order on every path: on a flow
                x + (t' - t) velocity, on a diffusion DDIM, with EDM x + (s' - s) (x - x0) / s
    ancestral  Euler with part of the noise redrawn, u = eta s' sqrt(1 - s'^2 / s^2)
    heun       Euler, then repeated from the same state with the mean of both slopes
    midpoint   Euler to the middle, then from the same state with the slope there
    dpmpp_2m   Euler with x0 extrapolated from this and the previous evaluation

Sources: arXiv 2206.00364 (EDM), 2010.02502 (DDIM), 2211.01095 (DPM-Solver++), 2209.03003 (flow).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import ConfigError
from policies.processes.base import GaussianPath, incompatible
from policies.processes.flow import LinearPath
from policies.processes.schedules import GRIDS, noise_grid
from policies.registry import name_of, register
from policies.samplers.step_table import Memory, StepRules, StepTable, build_step_table

_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class PathRules(StepRules, ABC):
    """Settings of all path samplers.

    Args:
        grid: Step spacing: `auto` (the process's own), `uniform` in sampling time, or between `noise_max` and
            `noise_min` in sigma / alpha: `karras` (arXiv 2206.00364, eq. 5), `exponential`, `linear`.
    """

    steps: int = bounded(10, ge=1)  # steps from noise to data
    grid: str = bounded("auto", choices=GRIDS)
    rho: float = bounded(7.0, gt=0)  # exponent of the `karras` grid
    noise_max: float | None = bounded(None, gt=0)  # first sigma / alpha; null: that of the process's grid
    noise_min: float | None = bounded(None, gt=0)  # last sigma / alpha; null: that of the process's grid
    takes_whole_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = [noise for noise in (self.noise_min, self.noise_max) if noise is not None]
        self.require("noise_max", sorted(bounds) == bounds, f"at least noise_min={self.noise_min}")
        if bounds and self.grid in ("auto", "uniform"):
            raise ConfigError(
                f"sampler.noise_min and noise_max belong to the grids {', '.join(GRIDS[2:])}; got "
                f"sampler.grid={self.grid}. Choose one of these, or leave them out."
            )

    def table(self, process: Any) -> StepTable:
        has_path = isinstance(process, GaussianPath) and process.is_integrable
        if not has_path or (process.has_second_time and not self.takes_whole_steps):
            raise incompatible(self, process, needs="diffusion, flow or edm")
        return self.over(process, self.times(process))

    @abstractmethod
    def over(self, process: GaussianPath, times: Sequence[float]) -> StepTable:
        """Build the step table for given times, from noise to 1."""

    def times(self, process: GaussianPath) -> list[float]:
        if self.grid == "auto":
            return process.grid(self.steps)
        if self.grid == "uniform":
            return even_times(process, self.steps)
        alpha, sigma = process.alpha_sigma(torch.tensor(process.grid(self.steps)[:-1], dtype=torch.float64))
        usual = sigma / alpha  # of the process's own grid
        first = float(usual[0]) if self.noise_max is None else self.noise_max
        last = float(usual[-1]) if self.noise_min is None else self.noise_min
        if not math.isfinite(first):
            raise ConfigError(
                f"sampler.grid={self.grid} needs a finite sigma / alpha to start from, and process="
                f"{name_of('process', process)} starts from pure noise. Set sampler.noise_max, e.g. 80."
            )
        alpha, sigma = process.alpha_sigma(torch.zeros((), dtype=torch.float64))
        if first > (1 + _ROUNDING) * float(sigma / alpha):
            raise ConfigError(
                f"sampler.noise_max must be at most {float(sigma / alpha):.4g}, the sigma / alpha from which "
                f"process={name_of('process', process)} starts; got {first:g}."
            )
        noise = noise_grid(self.grid, self.steps, first, last, self.rho)
        return [*process.time_of_lambda(-noise.log()).tolist(), 1.0]


def even_times(process: GaussianPath, steps: int, start: float = 0.0) -> list[float]:
    """Return steps + 1 times from `start`, or the noisiest time that the network was trained for, to 1."""
    start = max(start, float(process.nearest_time(torch.zeros((), dtype=torch.float64))))
    return [start + (1 - start) * k / steps for k in range(steps + 1)]


class _Path(NamedTuple):
    """Amplitudes and noise-to-signal ratio at starts and ends of steps, (K,) float64."""

    alpha: Tensor
    sigma: Tensor
    noise: Tensor
    alpha_next: Tensor
    sigma_next: Tensor
    noise_next: Tensor

    @staticmethod
    def of(process: GaussianPath, times: Sequence[float]) -> _Path:
        alpha, sigma = process.alpha_sigma(torch.tensor(times, dtype=torch.float64))
        noise = sigma / alpha
        return _Path(alpha[:-1], sigma[:-1], noise[:-1], alpha[1:], sigma[1:], noise[1:])


@register("sampler", "euler")
@dataclass(frozen=True, kw_only=True)
class Euler(PathRules):
    """First order: x' = alpha' x0 + sigma' eps; on a flow t_k = k / steps.

    A positive `min_std` adds noise after every step, which turns a flow into a Gaussian chain.

    Args:
        clip_state: Bound on the state after every step, as in ReinFlow's released settings; it truncates
            states near the noise. None: only the final chunk is bounded.
        released_times: Evaluate the network at k / (steps - 1) while stepping by 1 / steps, as ReinFlow's
            released rectified flows were sampled; for evaluation of those weights, not for training.

    Source: arXiv 2209.03003; ReinFlow (arXiv 2505.22094).
    """

    clip_x0: float | None = bounded(None, gt=0)
    clip_action: float | None = bounded(1.0, gt=0)
    clip_state: float | None = bounded(None, gt=0)
    released_times: bool = False
    takes_whole_steps: ClassVar[bool] = True

    def over(self, process: GaussianPath, times: Sequence[float]) -> StepTable:
        path = _Path.of(process, times)
        to_x0, to_eps = path.alpha_next[:, None], path.sigma_next[:, None]
        zeros = torch.zeros_like(to_x0)
        table = build_step_table(process, self, times, to_x0, to_eps, zeros, clip_state=self.clip_state)
        if not self.released_times:
            return table
        if not isinstance(process, LinearPath) or process.has_second_time or self.clip_x0 is not None:
            raise ConfigError(
                "sampler.released_times is for rectified flows (process=flow) with sampler.clip_x0=null; got "
                f"process={name_of('process', process)} and clip_x0={self.clip_x0}. Leave it out."
            )
        released = torch.linspace(0, 1, self.steps, dtype=torch.float64)
        return replace(table, net_time=process.net_time(released).to(torch.float32))


@register("sampler", "ancestral")
@dataclass(frozen=True, kw_only=True)
class Ancestral(PathRules):
    """First order with part of the noise redrawn after every step (arXiv 2010.02502, eq. 16; BESO)."""

    eta: float = bounded(1.0, ge=0, le=1)  # share of the reverse chain's noise, 0 (`euler`) to 1

    def over(self, process: GaussianPath, times: Sequence[float]) -> StepTable:
        path = _Path.of(process, times)
        share = (1 - (path.noise_next / path.noise).square()).clamp(min=0).sqrt()
        fresh = (self.eta * path.noise_next * share).clamp(max=path.noise_next)
        kept = (path.noise_next.square() - fresh.square()).clamp(min=0).sqrt()
        to_x0, to_eps = path.alpha_next[:, None], (path.alpha_next * kept)[:, None]
        return build_step_table(process, self, times, to_x0, to_eps, (path.alpha_next * fresh)[:, None])


@dataclass(frozen=True, kw_only=True)
class SmoothRules(PathRules, ABC):
    """Settings of deterministic multi-evaluation methods: without noise, which would count as slope."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_std or self.final_std:
            raise ConfigError(
                f"sampler={name_of('sampler', self)} is deterministic; got min_std={self.min_std} and "
                f"final_std={self.final_std}. Use ancestral, ddpm or ddim for noise after every step."
            )


@register("sampler", "heun")
@dataclass(frozen=True, kw_only=True)
class Heun(SmoothRules):
    """Second order by a corrector (arXiv 2206.00364, algorithm 1), two evaluations per step but the last."""

    def over(self, process: GaussianPath, times: Sequence[float]) -> StepTable:
        rows = _Rows(process, times)
        for t, t_next in pairwise(times):
            rows.add(t, ends=t_next)
            if t_next < 1:
                rows.correct(t, t_next, slope_at=t_next, share_of_first=0.5)
        return rows.table(self)


@register("sampler", "midpoint")
@dataclass(frozen=True, kw_only=True)
class Midpoint(SmoothRules):
    """Second order by a half step (DPM-Solver-2, arXiv 2206.00927; EDM's `dpm_2`), two evaluations per step.

    The midpoint is the geometric mean of the noise levels; on a linear path or from noise alone, the mean of
    the times.
    """

    def over(self, process: GaussianPath, times: Sequence[float]) -> StepTable:
        rows = _Rows(process, times)
        for t, t_next in pairwise(times):
            middle = rows.middle(t, t_next)
            rows.add(t, ends=t_next if middle is None else middle)
            if middle is not None:
                rows.correct(t, t_next, slope_at=middle, share_of_first=0.0)
        return rows.table(self)


@register("sampler", "dpmpp_2m")
@dataclass(frozen=True, kw_only=True)
class DPMpp2M(SmoothRules):
    """Second order by extrapolation from the previous evaluation; first and last step are first order.

    x' = sigma' eps + alpha' x0 + push (x0 - x0_prev), for `midpoint` with push = alpha' (1 - exp(-h)) h /
    (2 h_prev); h is the step in lambda, h_prev the one before it.

    Source: DPM-Solver++(2M), arXiv 2211.01095, algorithm 2; `heun` as in diffusers.
    """

    solver: str = bounded("midpoint", choices=("midpoint", "heun"))  # weight of the trend of x0 over a step

    def over(self, process: GaussianPath, times: Sequence[float]) -> StepTable:
        path = _Path.of(process, times)
        h = path.noise.log() - path.noise_next.log()  # the last entry is infinite
        shrink = path.noise_next / path.noise  # exp(-h)
        weight = (1 - shrink) / 2 if self.solver == "midpoint" else 1 - (1 - shrink) / h
        push = torch.zeros_like(h)
        push[1:-1] = (path.alpha_next * weight)[1:-1] * h[1:-1] / h[:-2]
        to_x0, to_eps = (path.alpha_next + push)[:, None], path.sigma_next[:, None]
        ones, zeros = (1.0,) * len(h), (0.0,) * len(h)  # the memory is x0 of the row before
        memory = Memory(tuple((-push).tolist()), ones, zeros)
        return build_step_table(process, self, times, to_x0, to_eps, torch.zeros_like(to_x0), memory=memory)


class _Rows:
    """Accumulate the evaluations of a multi-stage method.

    On a linear path, and from a state of noise alone, slopes are dy/ds of y = x / (alpha + sigma) with
    s = sigma / (alpha + sigma); elsewhere of y = x / alpha with s = sigma / alpha. With w = 1 or 0 both are

        y = (1 - w s) x0 + s eps,    dy/ds = eps - w x0
    """

    def __init__(self, process: GaussianPath, times: Sequence[float]) -> None:
        self.process = process
        alpha, sigma = process.alpha_sigma(torch.tensor(times[0], dtype=torch.float64))
        is_noise = float(alpha) < _ROUNDING * float(sigma)
        self.w = 1.0 if is_noise or isinstance(process, LinearPath) else 0.0
        self.times: list[float] = []
        self.to: list[tuple[float, float]] = []
        self.memory: list[tuple[float, float, float]] = []

    def _noise_and_scale(self, t: float) -> tuple[float, float]:
        """Return (s, x / y) at a time; see the class."""
        alpha, sigma = (float(a) for a in self.process.alpha_sigma(torch.tensor(t, dtype=torch.float64)))
        scale = alpha + self.w * sigma
        return sigma / scale, scale

    def middle(self, t: float, t_next: float) -> float | None:
        """Return the midpoint of a step; None for the last step, whose noise has no geometric mean."""
        if self.w:
            return (t + t_next) / 2
        product = self._noise_and_scale(t)[0] * self._noise_and_scale(t_next)[0]
        if not product > 0:
            return None
        middle = torch.tensor(-0.5 * math.log(product), dtype=torch.float64)  # lambda
        return float(self.process.time_of_lambda(middle))

    def add(self, t: float, *, ends: float) -> None:
        """Evaluate at t and step to `ends` with that slope; stores nothing in memory."""
        s, scale = self._noise_and_scale(ends)
        self.times.append(t)
        self.to.append((scale * (1 - self.w * s), scale * s))
        self.memory.append((0.0, 0.0, 0.0))

    def correct(self, t: float, t_next: float, *, slope_at: float, share_of_first: float) -> None:
        """Evaluate at `slope_at` and repeat the step from t to t_next with a mean of both slopes.

        The previous row stores y at t plus the first slope's share of the step in memory.
        """
        s = self._noise_and_scale(t)[0]
        s_next, scale = self._noise_and_scale(t_next)
        first_part = share_of_first * (s_next - s)
        self.memory[-1] = (0.0, 1 - self.w * s - self.w * first_part, s + first_part)
        second_part = (1 - share_of_first) * (s_next - s) * scale
        self.times.append(slope_at)
        self.to.append((-self.w * second_part, second_part))
        self.memory.append((scale, 0.0, 0.0))

    def table(self, rules: PathRules) -> StepTable:
        to_x0, to_eps = torch.tensor(self.to, dtype=torch.float64).unbind(1)
        columns = (tuple(column) for column in zip(*self.memory, strict=True))
        parts = (to_x0[:, None], to_eps[:, None], torch.zeros_like(to_x0)[:, None])
        memory, entries = Memory(*columns), [not row[0] for row in self.memory]
        times = [*self.times, 1.0]
        return build_step_table(self.process, rules, times, *parts, memory=memory, entries=entries)
