"""The loop of `policies.samplers.loop` in C, for chunks on a CPU without gradients.

A step of a small network for few rows costs calls, not arithmetic; all steps of a decision are one call here.
A chunk is the same however many there are, where that holds of the network's outputs. Numbers are those of
the other loop to rounding.

Legend: B batch, K denoising steps, Th horizon, Da action width, n = Th Da.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from policies.networks import native
from policies.networks.packed import PackedSteps, some_of
from policies.protocols import BoundField
from policies.samplers.loop import Denoised, check_request
from policies.samplers.step_table import StepTable

_ONE_THREAD_ROWS = 64  # rows that one thread decides for sooner than several
_at = Tensor.data_ptr


class _Chain(ctypes.Structure):
    """`chain_t` of the C program: what the steps of a sampler share."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("steps", "record_from", "is_ready")),
        *((name, ctypes.c_float) for name in ("state_limit", "noise_limit")),
        ("noise_row", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("step", "noise", "states", "means")),
    ]


def takes(table: StepTable, noise: Tensor, start: Tensor | None = None) -> bool:
    """Return whether this loop serves noise, start and table, and no graph or trace is being built."""
    if torch.is_grad_enabled() or not len(noise):
        return False
    if not native.serves(noise, with_threads=len(noise) <= _ONE_THREAD_ROWS):
        return False
    shape = len(noise), *noise.shape[-2:]
    has_start = start is None or (start.shape == shape and start.is_cpu and start.dtype == noise.dtype)
    return has_start and table.native_steps is not None  # last: it is kept, and must not be of a trace


def denoise_chunks(
    field: BoundField | Sequence[PackedSteps],
    table: StepTable,
    noise: Tensor,
    *,
    record_from: int | None = None,
    start: Tensor | None = None,
    first_step: int = 0,
) -> Denoised:
    """Return what `denoise` does, to rounding; arguments as there, or the networks of the steps in order."""
    check_request(table, noise, (), None, record_from, start, first_step)
    steps, draws, first = table.native_steps, None, noise
    assert steps is not None
    if not table.is_deterministic:
        noise = noise.contiguous()
        first, draws = noise[:, 0], noise[:, 1:]
    x = (first * table.start_std if start is None else start.clone()).flatten(1).contiguous()
    count, (rows, n), shape = table.num_steps, x.shape, noise.shape[-2:]
    recorded: list[Tensor] = []
    if record_from is not None:
        recorded = [x.new_empty(rows, count - record_from + more, n) for more in (1, 0)]
    chain = _Chain(
        count, record_from or 0, table.predicts_x0 or table.clip_x0 is None,
        _or_no_bound(table.clip_state), _or_no_bound(table.noise_clip),
        0 if draws is None else draws.stride(0), _at(steps), None if draws is None else _at(draws),
        *map(_at, recorded),
    )  # fmt: skip
    take_steps, call, k = native.library().take_steps, ctypes.byref(chain), first_step
    if callable(field):
        for k in range(first_step, count):
            pred = field(k, x.unflatten(1, shape)).to(x.dtype).expand(rows, *shape).contiguous()
            x = x.clone()  # the network may keep what it was given
            take_steps(call, None, rows, k, k + 1, n, None, _at(pred), _at(x), None)
    else:
        for segment in some_of(field, first_step, count):
            net, work, last = segment.net(), segment.work(rows), k + len(segment.table)
            assert segment.serves(rows, n)
            table_of_times = _at(segment.table)
            take_steps(call, ctypes.byref(net), rows, k, last, n, table_of_times, None, _at(x), _at(work))
            k = last
    if table.clip_action is not None:
        x.clamp_(-table.clip_action, table.clip_action)
    if not recorded:
        return Denoised(x.view(rows, *shape), None, None)
    recorded[0][:, -1] = x
    return Denoised(*(part.unflatten(-1, shape) for part in (x, *recorded)))


def _or_no_bound(limit: float | None) -> float:
    return math.inf if limit is None else limit
