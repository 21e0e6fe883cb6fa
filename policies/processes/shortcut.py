"""Shortcut models: steps of any length 1, 1/2, 1/4, …, each learned from two of half its length.

Legend: as in `policies.processes.average`; d length of a step, M = max_steps::

    flow rows            u(x, t, 0) towards x0 - eps at any t
    consistency rows     u(x, t, d) towards (u_a + u_b) / 2,  d in {1, 1/2, …, 2/M},  t a multiple of d
                         u_a = u(x, t, d/2),  u_b = u(x + d/2 u_a, t + d/2, d/2),  no gradient through them

The network receives the length 1/M of the finest step as 0. So the flow rows train it, the consistency rows
build on it, and M sampling steps use it: every length that sampling uses was trained.

Source: arXiv 2410.12557; ReinFlow (arXiv 2505.22094) for targets by the weights that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import ConfigError
from policies.processes.average import AveragePath
from policies.processes.base import over_rows
from policies.protocols import TE, Evaluate, Rng
from policies.registry import register

_CLOSE = 1e-9


@register("process", "shortcut")
@dataclass(frozen=True)
class Shortcut(AveragePath):
    """Flow matching that also learns to take steps of 1, 1/2, … at once.

    Source: arXiv 2410.12557, algorithm 1. Deviations: the finest step is requested as 0; the kind of each row
    is drawn; targets come from the trained weights and are not clipped (as in ReinFlow).
    """

    max_steps: int = bounded(16, ge=2)  # M, a power of two; sampling takes 1, 2, 4, … or M steps
    consistency_share: float = bounded(0.25, gt=0, lt=1)  # of the training rows that learn a step from halves

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("max_steps", not self.max_steps & (self.max_steps - 1), "a power of two")

    def second_net_time(self, t: Tensor, t_next: Tensor) -> Tensor:
        length = t_next - t
        return torch.where(length * self.max_steps > 1.5, self.time_scale * length, 0.0)

    def check_steps(self, times: Sequence[float]) -> None:
        for t, t_next in pairwise(times):
            if t_next == t:  # asks for the flow
                continue
            steps = 2 ** round(-math.log2(t_next - t))
            ends = (t * steps, t_next * steps)
            if steps > self.max_steps or any(abs(end - round(end)) > _CLOSE for end in ends):
                choices = ", ".join(str(2**j) for j in range(self.max_steps.bit_length()))
                raise ConfigError(
                    f"process=shortcut learned even steps, {choices} of them (process.max_steps="
                    f"{self.max_steps}); got a step from t={t:.4g} to {t_next:.4g}. Use sampler.grid=auto "
                    "and one of these numbers for sampler.steps."
                )

    def default_sampler(self) -> dict[str, Any]:
        return {"name": "euler", "steps": min(4, self.max_steps)}

    def more_draws(self, te: TE, *, generator: Rng = None) -> dict[str, Tensor]:
        """Draw the length (B,) of the step that a row learns from its halves; 0 for flow rows."""
        n, device = len(te.t), te.t.device
        source = device if generator is None else generator.device
        halvings = torch.randint(self.max_steps.bit_length() - 1, (n,), generator=generator, device=source)
        share = torch.rand(n, generator=generator, device=source)
        length = torch.where(share < self.consistency_share, torch.exp2(-halvings.to(te.t.dtype)), 0.0)
        return {"length": length.to(device)}

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        length = te.more["length"]  # all rows pass all evaluations: only the device knows which need them
        learns_step = length > 0
        t = torch.where(learns_step, torch.floor(te.t / length) * length, te.t)
        x = self.corrupt(action, te.eps, t)
        halves, velocity = _two_halves(net, x, t, length / 2), self.target(action, te.eps, t)
        target = torch.where(learns_step[:, None, None], halves, velocity)
        return (net(x, t, t + length) - target).square()


@torch.no_grad()
def _two_halves(net: Evaluate, x: Tensor, t: Tensor, half: Tensor) -> Tensor:
    """Return the average velocity (B, Th, Da) of two steps of lengths `half` (B,)."""
    middle = t + half
    first = net(x, t, middle)
    second = net(x + over_rows(half, x) * first, middle, middle + half)
    return (first + second) / 2
