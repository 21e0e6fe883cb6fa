"""Regression in one evaluation of the network or in two: chunks without noise.

Legend: f(x, t) the network, a clean chunk, z noise, t* time of the second evaluation, e measure of an error::

    regression     e(f(0, 0) - a)                                          acts with f(0, 0)
      start_noise  e(f(z, 0) - a)                                          acts with f(z, 0)
    mip            e((f(0, 0) - a) / t*) + e((f(y, t*) - a) / (1 - t*))
                   with y = a + (1 - t*) z                                 acts with f(f(0, 0), t*)
      origin       e((f(0, 0) - t* a) / t*) + the same
                   with y = t* a + (1 - t*) z                              acts with f(t* f(0, 0), t*)
      tsd          e((f(z', 0) - y) / t*) + the same, with the y of mip    acts with f(f(z', 0), t*)

Errors are averaged over the elements of a chunk; the publication sums them over Da. As a path, sigma = 1 - t,
and alpha runs from 0, where the network sees no action, to its value in y at t*.

All variants learn conditional means (l2) or medians (l1): where demonstrations disagree, the policy acts
between them. The second evaluation adds accuracy, not modes.

Source: MIP, arXiv 2512.01809.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.processes.base import GaussianPath
from policies.protocols import TE, Device, Evaluate, Kind, Rng
from policies.registry import register

ERRORS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": torch.square,
    "l1": torch.abs,
    "smooth_l1": lambda error: F.smooth_l1_loss(error, torch.zeros_like(error), reduction="none"),
}


@dataclass(frozen=True, kw_only=True)
class RegressionPath(Checked, GaussianPath):
    """A network that outputs actions and is evaluated at a few fixed times."""

    is_integrable: ClassVar[bool] = False

    error: str = bounded("l2", choices=tuple(ERRORS))  # measure of an error
    time_scale: float = bounded(100.0, gt=0)  # the network receives time_scale * t

    @property
    @abstractmethod
    def stops(self) -> tuple[float, ...]:
        """Times of evaluation."""

    @property
    def kind(self) -> Kind:
        return "x0"

    def measure(self, error: Tensor) -> Tensor:
        return ERRORS[self.error](error)

    def net_time(self, t: Tensor) -> Tensor:
        return self.time_scale * t

    def sample_time(
        self, n: int, *, generator: Rng = None, device: Device = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the time (n,) of the last evaluation: nothing is drawn."""
        return torch.full((n,), self.stops[-1], device=device, dtype=dtype)

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "direct"}


@register("process", "regression")
@dataclass(frozen=True)
class Regression(RegressionPath):
    """Plain regression of chunks, the baseline without iteration.

    Source: arXiv 2512.01809, regression; `straight_flow` of its code with start_noise.
    """

    start_noise: bool = False  # start from noise, which the network learns to ignore, instead of zero

    @property
    def stops(self) -> tuple[float, ...]:
        return (0.0,)

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return t, 1.0 - t

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(t), -torch.ones_like(t)

    def start_std(self, t: float) -> float:
        return float(self.start_noise)

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        start = te.eps if self.start_noise else torch.zeros_like(action)
        return self.measure(net(start, torch.zeros_like(te.t)) - action)


@register("process", "mip")
@dataclass(frozen=True)
class Mip(RegressionPath):
    """Minimal iterative policy: a guess, then the same network once more on the guess.

    Args:
        variant: `mip`; `origin`, the paper's first form, whose guess is scaled by t*; `tsd`, whose guess
            begins with noise and aims at a noisy chunk. As published, the guess of `origin` is trained
            towards t* a and then scaled by t* again.

    Source: arXiv 2512.01809 and its code.
    """

    variant: str = bounded("mip", choices=("mip", "origin", "tsd"))
    refine_time: float = bounded(0.9, gt=0, lt=1)  # t*, sampling time of the second evaluation

    @property
    def stops(self) -> tuple[float, ...]:
        return (0.0, self.refine_time)

    @property
    def full_time(self) -> float:
        """The time from which on alpha is 1."""
        return 1.0 if self.variant == "origin" else self.refine_time

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return (t / self.full_time).clamp(max=1.0), 1.0 - t

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of `alpha_sigma`; at t* the slope towards the next time."""
        return (t < self.full_time).to(t.dtype) / self.full_time, -torch.ones_like(t)

    def start_std(self, t: float) -> float:
        return float(self.variant == "tsd") if t == 0 else super().start_std(t)

    def more_draws(self, te: TE, *, generator: Rng = None) -> dict[str, Tensor]:
        if self.variant != "tsd":
            return {}
        source = te.eps.device if generator is None else generator.device
        start = torch.randn(te.eps.shape, generator=generator, device=source, dtype=te.eps.dtype)
        return {"start": start.to(te.eps.device)}

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        near = self.corrupt(action, te.eps, te.t)
        start = te.more["start"] if self.variant == "tsd" else torch.zeros_like(action)
        aim = {"mip": action, "origin": self.refine_time * action, "tsd": near}[self.variant]
        guess = (net(start, torch.zeros_like(te.t)) - aim) / self.refine_time
        refined = (net(near, te.t) - action) / (1.0 - self.refine_time)
        return self.measure(guess) + self.measure(refined)
