"""The loop of `policies.samplers.loop` on a CPU without gradients, with fewer and cheaper calls.

A step of a small network for few rows costs calls, not arithmetic. Several rows take the same operations as
there, in buffers that are made once. One row takes NumPy, whose calls cost a third of torch's; its state,
prediction and noise of a step lie in one array, so that mean and noise are one product::

    x' = (mean_x, mean_y, std) (x, y, noise),    y the clipped x0, or the prediction where nothing is clipped

Legend: K denoising steps, n numbers of a chunk (Th Da).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from policies.protocols import RowField
from policies.samplers.loop import check_request, unrolled
from policies.samplers.step_table import StepTable


def takes_row(table: StepTable, noise: Tensor) -> bool:
    """Return whether these loops serve this noise and table, and no graph or trace is being built."""
    return (
        len(noise) > 0
        and noise.is_cpu
        and noise.dtype == torch.float32
        and type(noise) is Tensor
        and table.row_steps is not None
        and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def denoise_row(
    bound: RowField, table: StepTable, noise: Tensor, *, start: Tensor | None = None, first_step: int = 0
) -> Tensor:
    """Return the chunk (1, Th, Da) that `denoise` returns, to rounding; arguments as there."""
    check_request(table, noise, (), None, None, start, first_step)
    steps, count, limit = table.row_steps, table.num_steps, table.clip_state
    assert steps is not None
    draws = noise.detach().numpy().reshape(-1, noise.shape[-2] * noise.shape[-1])
    states = np.zeros((count + 1, 3, draws.shape[1]), np.float32)  # K+1 times x, y, noise
    if not table.is_deterministic:
        bound_of_noise = np.inf if table.noise_clip is None else table.noise_clip
        np.clip(draws[1:], -bound_of_noise, bound_of_noise, out=states[:-1, 2])
    first = table.start_std * draws[0] if start is None else start.detach().numpy().reshape(-1)
    states[first_step, 0] = first
    x_of, y_of = list(states[:, 0]), list(states[:, 1])
    clips, predicts_x0 = table.clip_x0 is not None, table.predicts_x0
    for k in range(first_step, count):
        x, y, after = x_of[k], y_of[k], x_of[k + 1]
        bound(k, x, y)
        if clips:
            if not predicts_x0:
                np.multiply(y, steps.ratio[k], y)
                np.add(y, x, y)
            np.minimum(y, steps.limit[k], out=y)
            np.maximum(y, steps.least[k], out=y)
        np.dot(steps.weights[k], states[k], after)
        if limit is not None:
            np.clip(after, -limit, limit, out=after)
    chunk = torch.from_numpy(states[-1, 0].copy()).view(1, *noise.shape[-2:])
    return chunk if table.clip_action is None else chunk.clamp_(-table.clip_action, table.clip_action)


def denoise_rows(
    bound: RowField, table: StepTable, noise: Tensor, *, start: Tensor | None = None, first_step: int = 0
) -> Tensor:
    """Return the chunks (B, Th, Da) that `denoise` returns, to the last bit; arguments as there."""
    check_request(table, noise, (), None, None, start, first_step)
    first, draws = unrolled(table, noise)
    x = (first if start is None else start).flatten(1)
    pred, *states = (torch.empty_like(x) for _ in range(3))
    clips, predicts_x0, limit = table.clip_x0 is not None, table.predicts_x0, table.clip_state
    for k in range(first_step, table.num_steps):
        c, draw, after = table.rows[k], draws[k], states[k % 2]
        bound(k, x, pred)
        if clips:
            y = pred if predicts_x0 else torch.add(x, pred, alpha=c.ratio, out=pred)
            one, factor, two, weight = y.clamp_(-c.limit, c.limit), c.mean_y, x, c.mean_x
        else:
            one, factor, two, weight = x, c.mean_x, pred, c.mean_pred
        if draw is None:
            torch.mul(one, factor, out=after)
        else:
            torch.add(draw.flatten(1), one, alpha=factor, out=after)
        x = torch.add(after, two, alpha=weight, out=after)
        if limit is not None:
            x.clamp_(-limit, limit)
    chunk = x.view(len(noise), *noise.shape[-2:])
    return chunk if table.clip_action is None else chunk.clamp_(-table.clip_action, table.clip_action)
