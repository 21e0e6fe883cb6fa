"""Consistency models: map any noise level to the clean chunk in one evaluation.

Legend: s noise over signal, m = noise_min, M = noise_max, sd standard deviation of the data, N levels; state
x = alpha y on the path of EDM, y = x0 + s eps; f(y, s) what the policy takes for x0.

The output F of the network is mixed with the state so that f is the identity at s = m::

    f(y, s) = c_skip y + c_out F
    c_skip = sd^2 / ((s - m)^2 + sd^2),    c_out = (s - m) sd / sqrt(s^2 + sd^2)

Two states of one trajectory, one level apart (s' < s), must end alike::

    loss = (sqrt(|f(y, s) - sg f(y', s')|^2 + c^2) - c) / (s - s'),    c = huber sqrt(Th Da)
    s'^(1/rho) = max(s^(1/rho) - (M^(1/rho) - m^(1/rho)) / (N - 1), m^(1/rho))

In consistency training y' = x0 + s' eps, with the same chunk and noise. In distillation y' is one Heun step
of the teacher from y. The elementwise loss is each element's share of the chunk's loss; padded rows can be
excluded from the average but contribute to |.|.

Deviations from the publications: s is drawn from a continuous density instead of the levels. N is constant,
so the loss depends only on its arguments. The target uses the current weights without EMA, as in iCT; also
in distillation.

Source: arXiv 2303.01469 (consistency models), 2310.14189 (iCT: loss, weights, density); Consistency Policy,
arXiv 2405.07503.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.processes.base import over_rows
from policies.processes.edm import NOISE_DENSITIES, Edm
from policies.processes.schedules import noise_grid
from policies.protocols import TE, Evaluate, Kind
from policies.registry import register

SMALLEST_GAP = 1e-6  # smallest difference of two levels; keeps the weight finite where both are noise_min

# (state (B, Th, Da), times (B,)) -> (x0, eps) of a teacher, on the student's path
Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@register("process", "consistency")
@dataclass(frozen=True)
class Consistency(Edm):
    """Consistency training, or distillation where `algo.teacher` names a policy.

    Path, network time and densities are those of `edm`. More levels follow trajectories more closely and
    train more slowly. Source: arXiv 2303.01469, 2310.14189.
    """

    is_integrable: ClassVar[bool] = False
    density: str = bounded("log_normal", choices=NOISE_DENSITIES)  # as in `edm`; default of iCT
    density_mean: float = -1.1
    density_scale: float = bounded(2.0, gt=0)
    num_levels: int = bounded(20, ge=2)  # N, levels from noise_max to noise_min; a loss compares neighbours
    huber: float = bounded(0.00054, gt=0)  # c per sqrt(elements of a chunk); far larger errors count as l1

    @property
    def kind(self) -> Kind:
        return "consistency"

    def scalings(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of x and F in f, shaped like t; x = sd c_in y."""
        above = (1.0 - t - self.noise_min * t).clamp(min=0.0)  # t (s - m)
        norm = self.norm(t)
        signal = self.data_std * t
        return signal * norm / (above.square() + signal.square()), self.data_std * above / norm

    def express(self, x0: Tensor, eps: Tensor, t: Tensor, kind: Kind) -> Tensor:
        """Express the pair (x0, eps) as one kind; `consistency` is F, not finite at noise_min."""
        if kind != "consistency":
            return super().express(x0, eps, t, kind)
        skip, out = (over_rows(value, x0) for value in self.scalings(t))
        return (x0 - skip * self.corrupt(x0, eps, t)) / out

    def resolve(self, x: Tensor, t: Tensor, pred: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        if kind != "consistency":
            return super().resolve(x, t, pred, kind)
        return super().resolve(x, t, self.end_of(x, t, pred), "x0")

    def end_of(self, x: Tensor, t: Tensor, pred: Tensor) -> Tensor:
        """Return f (B, Th, Da) at states x, times t (B,) and network outputs F."""
        skip, out = (over_rows(value, x) for value in self.scalings(t))
        return skip * x + out * pred

    def cleaner(self, t: Tensor) -> Tensor:
        """Return the times one level cleaner than t, at most the time of noise_min."""
        power = 1.0 / self.rho
        low, high = self.noise_min**power, self.noise_max**power
        noise = ((1.0 - t) / t) ** power - (high - low) / (self.num_levels - 1)
        return 1.0 / (1.0 + noise.clamp(min=low) ** self.rho)

    def grid(self, steps: int) -> list[float]:
        """Return times evenly spaced on the karras scale, from noise_max, then 1."""
        noise = noise_grid("karras", steps + 1, self.noise_max, self.noise_min, self.rho)[:-1]
        return [*(1.0 / (1.0 + noise)).tolist(), 1.0]

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        """Return the loss (B, Th, Da); `te.more["near"]` is the cleaner state of a teacher (`taught`)."""
        t_near = self.cleaner(te.t)
        x = self.corrupt(action, te.eps, te.t)
        near = te.more["near"] if "near" in te.more else self.corrupt(action, te.eps, t_near)
        with torch.no_grad():
            target = self.end_of(near, t_near, net(near, t_near))
        square = (self.end_of(x, te.t, net(x, te.t)) - target).square()
        gap = ((1.0 - te.t) / te.t - (1.0 - t_near) / t_near).clamp(min=SMALLEST_GAP)
        return shared_huber(square, self.huber) / over_rows(gap, square)

    def taught(self, action: Tensor, te: TE, teacher: Predict) -> TE:
        """Add the next cleaner state, one Heun step of the teacher ahead (arXiv 2303.01469, algorithm 2)."""
        t, t_near = te.t, self.cleaner(te.t)
        (alpha, sigma), (alpha_near, sigma_near) = self.alpha_sigma(t), self.alpha_sigma(t_near)
        x = self.corrupt(action, te.eps, t)
        x0, eps = teacher(x, t)
        _, eps_near = teacher(self.corrupt(x0, eps, t_near), t_near)
        step = over_rows(sigma_near / alpha_near - sigma / alpha, x)
        near = over_rows(alpha_near, x) * (x / over_rows(alpha, x) + step * (eps + eps_near) / 2)
        return replace(te, more={**te.more, "near": near})

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "consistency"}

    def stochastic_sampler(self) -> dict[str, Any]:
        return {"name": "consistency"}

    def deterministic_sampler(self) -> dict[str, Any]:
        """Return one step; further ones draw noise."""
        return {"name": "consistency", "steps": 1}


def shared_huber(square: Tensor, huber: float) -> Tensor:
    """Distribute sqrt(|e|^2 + c^2) - c over a chunk, given e^2 (B, Th, Da); c = huber sqrt(Th Da)."""
    c = huber * math.sqrt(square[0].numel()) if len(square) else huber
    norm = (square.sum(dim=(-2, -1), keepdim=True) + c * c).sqrt()
    return square / (norm + c)
