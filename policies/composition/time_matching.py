"""Evaluation of one policy at another's state: equal signal-to-noise ratio, conversion of units.

Legend: lead and member, two policies of one action space; t, alpha, sigma time and amplitudes of the lead's
path, the same with m of the member's; x, x_m states, raw output of the member's network; N times, D = 1 or
Da.

Both policies normalise actions by affine maps, so clean chunks are related by x0_m = A x0 + f. With r the
geometric mean of A over the dimensions, the member is evaluated where its path has the lead's ratio in
physical units, at the corresponding state::

    alpha_m / sigma_m = alpha / (r sigma)
    x_m  = sigma_m / (r sigma) A x + alpha_m f              = alpha_m / alpha x  for equal units
    x0_m = x0_x x_m + x0_raw raw                            from its prediction
    x0   = (x0_m - f) / A,  eps = (x - alpha x0) / sigma    so that the pair explains the state

Near pure noise a member's path may not reach the ratio; there it is not evaluated (`is_reached`). A single r
is exact if A is the same in all dimensions; otherwise a member's noise is slightly too large in some
dimensions and too small in others.

Source: equal ratio and scale follow from x = alpha x0 + sigma eps (`policies.processes.base`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.normalizer import Normalizer
from policies.processes.base import GaussianPath

_RATIO_TOLERANCE = 1e-3  # of the signal-to-noise ratio


@dataclass(frozen=True, eq=False)
class UnitChange:
    """Affine map from the lead's to a member's normalised actions: x0_m = scale x0 + offset."""

    scale: Tensor  # (D,) float64, D = 1 for equal units
    offset: Tensor

    @classmethod
    def between(cls, lead: Normalizer, member: Normalizer) -> UnitChange:
        (scale_l, offset_l), (scale_m, offset_m) = (
            [one.get_buffer(f"action_{part}").double().cpu() for part in ("scale", "offset")]
            for one in (lead, member)
        )
        scale = scale_m / scale_l
        offset = offset_m - scale * offset_l
        if bool((scale == 1).all()) and bool((offset == 0).all()):
            return cls(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        return cls(scale, offset)

    @property
    def are_same(self) -> bool:
        return len(self.scale) == 1 and bool(self.scale == 1) and bool(self.offset == 0)

    @property
    def log_ratio(self) -> float:
        """Logarithm of r, the mean of the logarithms of the scale."""
        return float(self.scale.log().mean())


class TimeMatch(NamedTuple):
    """Coefficients of one state (floats), or of many (tensors that broadcast against chunks).

    `x_m = state_x x + state_1`, `x0_m = x0_x x_m + x0_raw raw`, and in the lead's parametrisation
    `out = out_x x + out_raw raw + out_1`, which changes by `out_x0` for every unit of x0_m.
    """

    state_x: Any
    state_1: Any
    x0_x: Any
    x0_raw: Any
    out_x: Any
    out_raw: Any
    out_1: Any
    out_x0: Any

    def state(self, x: Tensor) -> Tensor:
        return self.state_x * x + self.state_1

    def output(self, x: Tensor, state: Tensor, raw: Tensor, limit: float | None) -> Tensor:
        """Return the member's prediction in the lead's parametrisation."""
        out = self.out_x * x + self.out_raw * raw + self.out_1
        if limit is None:
            return out
        x0 = self.x0_x * state + self.x0_raw * raw
        return out + self.out_x0 * (x0.clamp(-limit, limit) - x0)


def matched_time(lead: GaussianPath, member: GaussianPath, units: UnitChange, t: Tensor) -> Tensor:
    """Return the times (N,) of the member's path with the ratio of the lead's at t (N,), float64."""
    alpha, sigma = lead.alpha_sigma(t)
    return member.time_of_lambda(alpha.log() - sigma.log() - units.log_ratio)


def is_reached(
    lead: GaussianPath, member: GaussianPath, units: UnitChange, t: Tensor, t_member: Tensor
) -> Tensor:
    """Return where (N,) the member's path is as noisy as the lead's; arguments as for `time_matches`."""
    alpha, sigma = lead.alpha_sigma(t)
    alpha_m, sigma_m = member.alpha_sigma(t_member)
    return alpha_m * sigma * math.exp(units.log_ratio) <= (1 + _RATIO_TOLERANCE) * alpha * sigma_m


def time_matches(
    lead: GaussianPath, member: GaussianPath, units: UnitChange, t: Tensor, t_member: Tensor
) -> Tensor:
    """Return the coefficients of `TimeMatch`, (8, N, D) float64."""
    scale, offset = units.scale.to(t.device), units.offset.to(t.device)
    one, zero = torch.ones_like(t), torch.zeros_like(t)
    _, sigma = lead.alpha_sigma(t)
    alpha_m, sigma_m = (amplitude[:, None] for amplitude in member.alpha_sigma(t_member))
    state_x = sigma_m / sigma[:, None] * (scale / scale.log().mean().exp())
    state_1 = alpha_m * offset
    x0_x = member.convert(one, t_member, zero, member.kind, "x0")[:, None]
    x0_raw = member.convert(zero, t_member, one, member.kind, "x0")[:, None]
    own_x = lead.convert(one, t, zero, "x0", lead.kind)[:, None]
    out_x0 = lead.convert(zero, t, one, "x0", lead.kind)[:, None] / scale
    out_x = own_x + out_x0 * x0_x * state_x
    out_1 = out_x0 * (x0_x * state_1 - offset)
    columns = TimeMatch(state_x, state_1, x0_x, x0_raw, out_x, out_x0 * x0_raw, out_1, out_x0)
    return torch.stack([column.expand(len(t), len(scale)) for column in columns])


@dataclass(frozen=True, eq=False)
class TimeMatchTable:
    """Time matches of a sampler's steps."""

    coefficients: Tensor  # (8, K, D) float64
    floats: tuple[TimeMatch, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        columns = self.coefficients[:, :, 0].T.tolist() if self.coefficients.shape[-1] == 1 else []
        object.__setattr__(self, "floats", tuple(TimeMatch(*column) for column in columns))

    def rows(self, like: Tensor) -> Sequence[TimeMatch]:
        """Return the match of every step: floats if all dimensions share them, else tensors (D,)."""
        if self.floats:
            return self.floats
        to_device = self.coefficients.to(device=like.device, dtype=like.dtype)
        return [TimeMatch(*step.unbind(0)) for step in to_device.unbind(1)]
