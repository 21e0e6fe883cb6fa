"""Samplers: how a denoiser is integrated from noise to an action chunk. The only loops are here.

Legend: B batch, K denoising steps, k step in the order of execution, Th horizon, Da action width;
alpha, sigma signal and noise amplitudes, a prime marks the next step. In the notation of `policies.samplers.step_table`:

    ddpm   to_x0 x0 + to_eps eps = posterior mean of q(x' | x, x0)                (arXiv 2006.11239, eq. 7)
    ddim   to_x0 = alpha', to_eps = sqrt(sigma'^2 - s^2), s = eta * ddpm's std    (arXiv 2010.02502, eq. 12)

Samplers of other paths are in `policies.samplers.ode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.processes.diffusion import VPDiffusion
from policies.processes.schedules import spaced_levels, time_of_level
from policies.protocols import BoundField, Cond, SampleHook, Step
from policies.registry import register
from policies.samplers.ode import Euler
from policies.samplers.step_table import (
    StepRules,
    StepTable,
    gaussian_entropy,
    gaussian_log_prob,
    lay_out,
    merge_prediction,
    misfit,
    recall_prediction,
    split_prediction,
    transition,
)

__all__ = [
    "DDIM",
    "DDPM",
    "Denoised",
    "Euler",
    "Sampler",
    "StepRules",
    "StepTable",
    "denoise",
    "gaussian_entropy",
    "gaussian_log_prob",
    "misfit",
    "transition",
]


class Sampler(Protocol):
    """A registered sampler: settings that lay themselves out for a process."""

    min_std: float
    final_std: float | None

    def table(self, process: Any) -> StepTable:
        """Return the steps for a process."""
        ...


class Denoised(NamedTuple):
    """What a loop returns.

    Shapes:
        action: (B, Th, Da). Of S recorded steps, chain: (B, S+1, Th, Da) with the inputs of these steps
        and, last, the action; mean: (B, S, Th, Da) of the transitions between them.
    """

    action: Tensor
    chain: Tensor | None
    mean: Tensor | None


# -- the loop -------------------------------------------------------------------------------------------


def denoise(
    bound: BoundField,
    table: StepTable,
    noise: Tensor,
    *,
    hooks: Sequence[SampleHook] = (),
    cond: Cond | None = None,
    record_from: int | None = None,
    start: Tensor | None = None,
    first_step: int = 0,
) -> Denoised:
    """Run the steps of a table.

    Args:
        bound: The network, bound to a condition and to `table.net_time`.
        table: What to do at every step.
        noise: Start state (B, Th, Da) of a deterministic table; else the tape (B, K+1, Th, Da): start
            state, then one standard-normal draw per step, unscaled and unclipped.
        hooks: Changes to predictions and states, applied in order; they need `cond`.
        cond: What the hooks may know.
        record_from: Record the states and means of the steps from this one on.
        start: (B, Th, Da), replaces the start state that the noise gives (warm start).
        first_step: Begin at this step with the start state as its input.

    Raises:
        ConfigError: If the noise or a step index does not fit the table.
        CapabilityError: If hooks are given without a condition.
    """
    _check(table, noise, hooks, cond, record_from, start, first_step)
    if table.loop is not None:
        return Denoised(table.loop(bound, noise), None, None)
    x, draws = _unroll(table, noise)
    x = x if start is None else start
    states: list[Tensor] = []
    means: list[Tensor] = []
    memory: Tensor | None = None
    for k in range(first_step, table.num_steps):
        draw, is_recorded = draws[k], record_from is not None and k >= record_from
        if not (is_recorded or hooks or table.memory):
            x = _bounded(transition(table, k, x, bound(k, x), plus=draw), table.clip_state)
            continue
        if is_recorded:
            states.append(x)
        step = _step(table, k, cond) if hooks and cond is not None else None
        if table.memory is not None:
            mean, memory = recall_prediction(table, k, *_prediction(table, k, x, bound, step, hooks), memory)
        elif step is not None:
            mean = merge_prediction(table, k, *_prediction(table, k, x, bound, step, hooks))
        else:
            mean = transition(table, k, x, bound(k, x))
        means.append(mean)
        x = _bounded(mean if draw is None else mean + draw, table.clip_state)
        if step is not None:
            for hook in hooks:
                x = hook.on_state(step, x)
    x = _bounded(x, table.clip_action)
    if record_from is None:
        return Denoised(x, None, None)
    return Denoised(x, torch.stack([*states, x], dim=1), torch.stack(means[-len(states) :], dim=1))


def _bounded(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)


def _prediction(
    table: StepTable, k: int, x: Tensor, bound: BoundField, step: Step | None, hooks: Sequence[SampleHook]
) -> tuple[Tensor, Tensor]:
    """Return the (x0, eps) of a step, which the hooks may change."""
    x0, eps = split_prediction(table, k, x, bound(k, x))
    if step is not None:
        for hook in hooks:
            x0, eps = hook.on_prediction(step, x, x0, eps)
    return x0, eps


def _step(table: StepTable, k: int, cond: Cond) -> Step:
    return Step(k, table.num_steps, table.times[k], table.times[k + 1], cond, table.alpha[k], table.sigma[k])


def _unroll(table: StepTable, noise: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the start state and, per step, the scaled noise (None where there is none)."""
    scale = table.start_std
    if table.is_deterministic:
        return (noise if scale == 1 else scale * noise), [None] * table.num_steps
    draws = noise[:, 1:].transpose(0, 1)
    if table.noise_clip is not None:
        draws = draws.clamp(-table.noise_clip, table.noise_clip)
    std = table.placed("std", noise)[:, None, None, :]
    scaled = (draws * std).contiguous().unbind(0)
    steps = [draw if noisy else None for draw, noisy in zip(scaled, table.noisy, strict=True)]
    first = noise[:, 0].contiguous()
    return (first if scale == 1 else scale * first), steps


def _check(
    table: StepTable,
    noise: Tensor,
    hooks: Sequence[SampleHook],
    cond: Cond | None,
    record_from: int | None,
    start: Tensor | None,
    first_step: int,
) -> None:
    """Refuse noise and step indices that do not fit."""
    steps, width = table.num_steps, table.coefficients.shape[-1]
    rank = 3 if table.is_deterministic else 4
    if noise.dim() != rank or (rank == 4 and noise.shape[1] != steps + 1):
        expected = "(B, Th, Da)" if rank == 3 else f"(B, {steps + 1}, Th, Da)"
        raise ConfigError(
            f"noise of this sampler must have shape {expected}; got {tuple(noise.shape)}. "
            "Draw it with policy.sample_noise."
        )
    if width not in (1, noise.shape[-1]):
        raise ConfigError(
            f"sampler.eta_per_dim holds {width} values, but actions have {noise.shape[-1]} dimensions. "
            "Give one value per action dimension, or use sampler.eta."
        )
    if not 0 <= first_step < steps:
        raise ConfigError(f"first_step must lie in 0..{steps - 1}; got {first_step}.")
    if record_from is not None and not first_step <= record_from < steps:
        raise ConfigError(f"record_from must lie in {first_step}..{steps - 1}; got {record_from}.")
    if table.loop is not None and (hooks or record_from is not None or first_step or start is not None):
        raise CapabilityError(
            "sampler=diffusers runs another program's loop, which takes no hooks, no start state and records "
            "no chain. Use one of the package's own samplers."
        )
    if record_from is not None and table.memory is not None:
        raise CapabilityError(
            "a sampler with a memory (heun, midpoint, dpmpp_2m) takes steps that depend on more than the "
            "state, so they cannot be recorded as a chain. Use ddpm, ddim, ancestral or euler."
        )
    if hooks and cond is None:
        raise CapabilityError("denoise(hooks=...) needs `cond`, which hooks may read; got None.")


# -- the samplers ---------------------------------------------------------------------------------------


@register("sampler", "ddpm")
@dataclass(frozen=True, kw_only=True)
class DDPM(StepRules):
    """Ancestral sampling.

    The defaults are DPPO's evaluation: noise floored at 1e-3, none after the last step. DPPO's exploration
    is `min_std=0.1, final_std=None`.

    Args:
        steps: Levels to visit; None: all of the process.
        spacing: Which levels: `leading`, `trailing` or `linspace`.
        variance: `fixed_small` (posterior variance) or `fixed_large` (beta).
        levels: The levels themselves, noisiest first, for a short run that begins from a guess. Every one
            is left by a single step of the process, also where the list then skips some (RTI-DP,
            arXiv 2508.05396). Empty: as steps and spacing say.

    Source:
        arXiv 2006.11239, eq. 7; DPPO (arXiv 2409.00588) for the floors and clips.
    """

    min_std: float = 1e-3
    final_std: float | None = 0.0
    steps: int | None = None
    spacing: str = "leading"
    variance: str = "fixed_small"
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the choices."""
        super().__post_init__()
        object.__setattr__(self, "levels", tuple(self.levels))
        if self.variance not in ("fixed_small", "fixed_large"):
            raise ConfigError(f"sampler.variance must be fixed_small or fixed_large; got '{self.variance}'.")
        if any(later >= earlier for earlier, later in pairwise(self.levels)):
            raise ConfigError(f"sampler.levels must fall, noisiest first; got {list(self.levels)}.")
        if self.levels and self.steps is not None:
            raise ConfigError(
                f"sampler.steps and sampler.levels both choose the levels; got steps={self.steps} and "
                f"levels={list(self.levels)}. Give one of them."
            )

    def table(self, process: Any) -> StepTable:
        """Lay the steps out for a diffusion process.

        Raises:
            ConfigError: If the process is not a diffusion, has fewer levels than steps, or not these levels.
        """
        path = _LevelPath.of(self, process, self.steps, self.spacing, levels=self.levels)
        keep = path.bar / path.bar_next  # product of alphas from the next level to this one
        to_x0 = path.bar_next.sqrt() * (1 - keep) / path.var
        to_x = keep.sqrt() * path.var_next / path.var
        small = path.var_next / path.var * (1 - keep)
        std = (small if self.variance == "fixed_small" else 1 - keep).sqrt()
        to_x0 = to_x0 + to_x * path.bar.sqrt()  # x = alpha x0 + sigma eps
        return lay_out(process, self, path.times, to_x0, to_x * path.var.sqrt(), std)


@register("sampler", "ddim")
@dataclass(frozen=True, kw_only=True)
class DDIM(StepRules):
    """Implicit sampling: deterministic with eta = 0, ancestral with eta = 1.

    As in diffusers, a step from level tau leads to tau - K // steps; with `linspace` spacing, and with
    `trailing` where steps does not divide K, that is not exactly the next level visited.

    Args:
        steps: Levels to visit.
        spacing: Which levels: `leading`, `trailing` or `linspace`.
        eta: Share of ancestral noise, 0 to 1.
        eta_per_dim: One eta per action dimension; replaces `eta` where given.
        recompute_eps: Let eps follow a clipped x0 (DPPO, `use_clipped_model_output`), or keep the network's.
        eps_clip: Bound on eps; None: no bound.
        final_alpha: After the last step: `one` (clean) or `first` (the cleanest level).

    Source:
        arXiv 2010.02502, eq. 12; DPPO (arXiv 2409.00588) for recomputation and noise floor. The mean uses the
        deviation before the floor.
    """

    steps: int = 10
    spacing: str = "leading"
    eta: float = 0.0
    eta_per_dim: tuple[float, ...] = ()
    recompute_eps: bool = True
    eps_clip: float | None = None
    final_alpha: str = "one"

    def __post_init__(self) -> None:
        """Check the choices."""
        super().__post_init__()
        object.__setattr__(self, "eta_per_dim", tuple(self.eta_per_dim))
        if not all(0 <= eta <= 1 for eta in (self.eta, *self.eta_per_dim)):
            raise ConfigError(f"sampler.eta must lie in 0..1; got {self.eta} and {self.eta_per_dim}.")
        if self.final_alpha not in ("one", "first"):
            raise ConfigError(f"sampler.final_alpha must be one or first; got '{self.final_alpha}'.")
        if self.eps_clip is not None and not self.eps_clip > 0:
            raise ConfigError(f"sampler.eps_clip must be positive or null; got {self.eps_clip}.")

    def table(self, process: Any) -> StepTable:
        """Lay the steps out for a diffusion process.

        Raises:
            ConfigError: If the process is not a diffusion or has fewer levels than steps.
        """
        last = 0 if self.final_alpha == "first" else -1
        path = _LevelPath.of(self, process, self.steps, self.spacing, stop_at=last)
        eta = torch.tensor(self.eta_per_dim or (self.eta,), dtype=torch.float64)
        std = eta * (path.var_next / path.var * (1 - path.bar / path.bar_next)).clamp(min=0).sqrt()
        to_eps = (path.var_next - std.square()).clamp(min=0).sqrt()
        to_x0 = path.bar_next.sqrt().expand_as(std)
        recompute, clip = self.recompute_eps, self.eps_clip
        return lay_out(process, self, path.times, to_x0, to_eps, std, recompute=recompute, eps_clip=clip)


class _LevelPath(NamedTuple):
    """Levels of a diffusion that a sampler visits: K+1 times; squared amplitudes here and next, (K, 1)."""

    times: list[float]
    bar: Tensor
    var: Tensor
    bar_next: Tensor
    var_next: Tensor

    @staticmethod
    def of(
        sampler: StepRules,
        process: Any,
        steps: int | None,
        spacing: str,
        *,
        stop_at: int = -1,
        levels: Sequence[int] = (),
    ) -> _LevelPath:
        """Visit `steps` levels of a diffusion, or the given ones, and stop at a level."""
        if not isinstance(process, VPDiffusion):
            raise misfit(sampler, process, needs="diffusion", instead="ancestral or euler")
        count = process.num_levels
        if levels and not 0 <= levels[-1] <= levels[0] < count:
            raise ConfigError(
                f"sampler.levels must lie in 0..{count - 1}, the levels of the process; got {list(levels)}."
            )
        here = list(levels) or spaced_levels(count, count if steps is None else steps, spacing)
        stride = 1 if levels else count // len(here)
        there = [max(tau - stride, stop_at) for tau in here]
        t = time_of_level(torch.tensor([*here, there[-1]], dtype=torch.float64), count)
        t_next = time_of_level(torch.tensor(there, dtype=torch.float64), count)
        squares = [a.square()[:, None] for pair in (t[:-1], t_next) for a in process.alpha_sigma(pair)]
        return _LevelPath(t.tolist(), *squares)
