"""The denoising loop: from noise to an action chunk along the step table of any sampler.

Legend: B batch, K denoising steps, k step in the order of execution, Th horizon, Da action width. The steps
are defined in `policies.samplers.ddpm` and `.ode`; `policies.samplers.step_table` turns them into numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.protocols import BoundField, Cond, Hooks, Step
from policies.samplers.step_table import (
    StepTable,
    merge_prediction,
    recall_prediction,
    split_prediction,
    transition,
)


class Sampler(Protocol):
    """A registered sampler: settings that build the steps of a process."""

    min_std: float
    final_std: float | None

    def table(self, process: Any) -> StepTable:
        """Return the steps for a process."""


class Denoised(NamedTuple):
    """Result of the loop: the chunk, and what was recorded.

    Shapes:
        action: (B, Th, Da). Of S recorded steps, chain: (B, S+1, Th, Da) with the inputs of these steps
        and, last, the action; mean: (B, S, Th, Da) of the transitions between them.
    """

    action: Tensor
    chain: Tensor | None
    mean: Tensor | None


def denoise(
    bound: BoundField,
    table: StepTable,
    noise: Tensor,
    *,
    hooks: Hooks = (),
    cond: Cond | None = None,
    record_from: int | None = None,
    start: Tensor | None = None,
    first_step: int = 0,
) -> Denoised:
    """Run the steps of a table.

    Args:
        bound: The network, bound to a condition and to `table.net_time`.
        table: Coefficients of every step.
        noise: Start state (B, Th, Da) of a deterministic table; else (B, K+1, Th, Da): start state, then one
            standard-normal draw per step, unscaled and unclipped.
        hooks: Changes to predictions and states, applied in order; they need `cond`.
        cond: Condition passed to the hooks.
        record_from: Record the states and means of the steps from this one on.
        start: (B, Th, Da), replaces the start state that the noise gives (warm start).
        first_step: Begin at this step with the start state as its input.
    """
    check_request(table, noise, hooks, cond, record_from, start, first_step)
    if table.loop is not None:
        return Denoised(table.loop(bound, noise), None, None)
    x, draws = unrolled(table, noise)
    x = x if start is None else start
    states: list[Tensor] = []
    means: list[Tensor] = []
    memory: Tensor | None = None
    for k in range(first_step, table.num_steps):
        draw, is_recorded = draws[k], record_from is not None and k >= record_from
        if not (is_recorded or hooks or table.memory):  # mean and noise in one pass over the chunk
            x = _bounded(transition(table, k, x, bound(k, x), plus=draw), table.clip_state)
            continue
        step = _step(table, k, cond) if hooks and cond is not None else None
        if step is not None:
            for hook in hooks:
                x = hook.before_prediction(step, x)
        if is_recorded:
            states.append(x)
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
    means = means[-len(states) :]  # steps with hooks have theirs too, recorded or not
    return Denoised(x, torch.stack([*states, x], dim=1), torch.stack(means, dim=1))


def _bounded(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)


def _prediction(
    table: StepTable, k: int, x: Tensor, bound: BoundField, step: Step | None, hooks: Hooks
) -> tuple[Tensor, Tensor]:
    """Return the network's (x0, eps) after the hooks, not yet clipped."""
    x0, eps = split_prediction(table, k, x, bound(k, x))
    if step is not None:
        for hook in hooks:
            x0, eps = hook.on_prediction(step, x, x0, eps)
    return x0, eps


def _step(table: StepTable, k: int, cond: Cond) -> Step:
    t, t_next, alpha, sigma = table.times[k], table.times[k + 1], table.alpha[k], table.sigma[k]
    return Step(k, table.num_steps, t, t_next, cond, alpha, sigma, std=table.spread[k])


def unrolled(table: StepTable, noise: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Scale the noise of a decision: return its start state and the noise of every step; None: no noise."""
    scale = table.start_std
    if table.is_deterministic:
        return (noise if scale == 1 else scale * noise), [None] * table.num_steps
    draws = noise[:, 1:].transpose(0, 1)
    if table.noise_clip is not None:
        draws = draws.clamp(-table.noise_clip, table.noise_clip)
    std = table.to_device("std", noise)[:, None, None, :]
    scaled = (draws * std).contiguous().unbind(0)
    of_steps = [draw if noisy else None for draw, noisy in zip(scaled, table.noisy, strict=True)]
    first = noise[:, 0].contiguous()
    return (first if scale == 1 else scale * first), of_steps


def check_request(
    table: StepTable,
    noise: Tensor,
    hooks: Hooks,
    cond: Cond | None,
    record_from: int | None,
    start: Tensor | None,
    first_step: int,
) -> None:
    """Refuse arguments of `denoise` that do not fit the table."""
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
            "sampler=diffusers takes no hooks and no start state, and records no chain. Use one of the "
            "package's own samplers."
        )
    if record_from is not None and table.memory is not None:
        raise CapabilityError(
            "steps of a sampler with a memory (heun, midpoint, dpmpp_2m) cannot be recorded as a chain. Use "
            "ddpm, ddim, ancestral or euler."
        )
    if hooks and cond is None:
        raise CapabilityError("denoise(hooks=...) needs `cond`, which hooks may read; got None.")
