"""Hooks of the denoising loop: modify predictions and states.

Legend: x noisy chunk, x0 predicted clean chunk, eps predicted noise, all (B, Th, Da), normalised units;
x = alpha x0 + sigma eps. Hooks receive the network's (x0, eps); the sampler clips their results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.networks.energy import energy_and_gradient
from policies.protocols import Cond, Hook, Step


@dataclass(frozen=True, eq=False)
class Inpaint(Hook):
    """Inpainting: fix a part of the chunk to known values.

    The known values replace x0, so the next state holds them at its noise level. After the last step they are
    exact, even if it adds noise, unless `clip_action` bounds them.

    Source: RePaint, arXiv 2201.09865, without resampling.
    """

    known: Tensor  # (B, Th, Da) or broadcastable, normalised
    mask: Tensor  # as `known`; 1 fixes, 0 leaves free, values between blend

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        return x0 + self.mask * (self.known - x0), eps

    def on_state(self, step: Step, x: Tensor) -> Tensor:
        return x + self.mask * (self.known - x) if step.k == step.num_steps - 1 else x


@dataclass(frozen=True, eq=False)
class Overwrite(Hook):
    """Write known values without noise into every state, for networks that were trained on such states.

    `Inpaint` replaces the clean estimate instead, so that known values have the noise of their step.

    Source: Diffuser, arXiv 2205.09991.
    """

    known: Tensor  # (B, Th, Da) or broadcastable, normalised
    mask: Tensor  # bool, as `known`; True where known

    def before_prediction(self, step: Step, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.known, x)

    on_state = before_prediction


@dataclass(frozen=True, eq=False)
class Ascent(Hook):
    """Move states up a value before the network reads them, `repeats` times by scale std^2 gradient.

    std is the deviation of the noise that the step adds. The last `rest` steps are left alone.

    Source: Diffuser, arXiv 2205.09991, released code (`scale_grad_by_std`).
    """

    value: Callable[[Tensor, float], Tensor]  # states (B, Th, Da) and sampling time to values (B,)
    scale: float
    repeats: int = 1
    rest: int = 0
    fixed: Tensor | None = None  # bool, broadcastable; True where states are not moved

    def before_prediction(self, step: Step, x: Tensor) -> Tensor:
        if step.num_steps - step.k <= self.rest:
            return x
        for _ in range(self.repeats):
            slope = energy_and_gradient(lambda y: self.value(y, step.t), x)[1]
            moved = x + self.scale * step.std**2 * slope
            x = moved if self.fixed is None else torch.where(self.fixed, x, moved)
        return x


@dataclass(frozen=True, eq=False)
class Guidance(Hook):
    """Guide every clean estimate down a cost gradient (x0, cond) -> (B, Th, Da), in normalised units.

    With g = scale * gradient, x0 becomes x0 - g, and eps + (alpha / sigma) g keeps the state consistent.

    Source: forward guidance of arXiv 2302.07121, §3.1, evaluated at x0.
    """

    cost_gradient: Callable[[Tensor, Cond], Tensor]
    scale: float = 1.0  # step size

    def on_prediction(self, step: Step, x: Tensor, x0: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        move = self.scale * self.cost_gradient(x0, step.cond)
        return x0 - move, eps + (step.alpha / step.sigma) * move
