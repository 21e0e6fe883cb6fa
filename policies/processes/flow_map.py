"""Flow maps: steps between any two times, learned from consistency conditions.

Legend: as in `policies.processes.average`. The flow map is characterised by each of

    X(x, s, t) = X(X(x, s, r), r, t)            semigroup:   a step is two steps
    dX/dt (x, s, t) = b(X(x, s, t), t)          Lagrangian:  its end moves with the flow
    dX/ds + dX/dx b(x, s) = 0                   Eulerian:    the end is constant along a trajectory

and by u(x, t, t) = b(x, t). The functions below return the residuals of a network; with
l = t - s, and D the derivative along (x, s) -> (v, 1) at a fixed end::

    psd        u(x, s, t) - [(1 - r) u(x, s, m) + r u(X(x, s, m), m, t)],  m = t - r l
    lsd        b(X, t) - [u + l du/dt]
    esd        b(x, s) - u + l Du,                  v = b(x, s)
    mf         v - u + l Du,                        v = x0 - eps

Source: arXiv 2505.18825 (psd, lsd, esd), 2505.13447 (MeanFlow), 2512.01809 (these objectives for policies).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from policies.backbones import Backbone
from policies.bounds import bounded
from policies.processes.average import AveragePath, allow_derivatives, derivative
from policies.processes.base import over_rows
from policies.protocols import TE, Evaluate, Rng
from policies.registry import register


class _Step(NamedTuple):
    """Steps to learn: states x (B, Th, Da), velocities of their lines, start and end times (B,).

    `share` (B,) is the fraction of the second of two sub-steps.
    """

    net: Evaluate
    x: Tensor
    velocity: Tensor
    start: Tensor
    end: Tensor
    share: Tensor
    paper_compat: bool

    @property
    def length(self) -> Tensor:
        return over_rows(self.end - self.start, self.x)

    def average(self, x: Tensor, start: Tensor) -> Tensor:
        """Return u at another state and time, to the same end time."""
        return self.net(x, start, self.end)


def semigroup(step: _Step) -> Tensor:
    """Return the difference between a step and its two sub-steps (B, Th, Da)."""
    net, x, share, compat = step.net, step.x, over_rows(step.share, step.x), step.paper_compat
    length = step.end - step.start
    middle = step.start + step.share * length if compat else step.end - step.share * length
    with torch.set_grad_enabled(compat and torch.is_grad_enabled()):
        first = net(x, step.start, middle)
        arrived = x + over_rows(middle - step.start, x) * first
        parts = (1 - share) * first + share * net(arrived, middle, step.end)
    return step.average(x, step.start) - parts


def lagrangian(step: _Step) -> Tensor:
    """Return the flow velocity at the end of a step minus the velocity of the end (B, Th, Da)."""
    ones = torch.ones_like(step.end)
    average, rate = derivative(lambda end: step.net(step.x, step.start, end), (step.end,), (ones,))
    with torch.set_grad_enabled(step.paper_compat and torch.is_grad_enabled()):
        target = step.net(step.x + step.length * average, step.end)
    return target - (average + step.length * rate)


def eulerian(step: _Step) -> Tensor:
    """Return the derivative of the step's end along the flow at its start (B, Th, Da)."""
    with torch.no_grad():
        if step.paper_compat:
            velocity = step.net(step.x + step.length * step.average(step.x, step.start), step.end)
        else:
            velocity = step.net(step.x, step.start)
    along = (velocity, torch.ones_like(step.start))
    average, rate = derivative(step.average, (step.x, step.start), along)
    return velocity - average + step.length * rate


def mean_flow(step: _Step) -> Tensor:
    """Return the Eulerian residual along the line; its time derivative carries gradients (B, Th, Da)."""
    ones = torch.ones_like(step.start)
    average, rate = derivative(lambda start: step.average(step.x, start), (step.start,), (ones,))
    with torch.no_grad():
        _, turn = derivative(lambda x: step.average(x, step.start), (step.x,), (step.velocity,))
    return step.velocity - average + step.length * (rate + turn)


OBJECTIVES: dict[str, Callable[[_Step], Tensor]] = {
    "psd": semigroup,
    "lsd": lagrangian,
    "esd": eulerian,
    "mf": mean_flow,
}


@register("process", "flow_map")
@dataclass(frozen=True)
class FlowMap(AveragePath):
    """Flow matching plus a consistency objective for steps of any length.

    Args:
        time_scale: Factor of both time inputs, t and t - s. Derivatives with respect to time scale with it;
            above about 20 all objectives but psd train badly.
        objective: `psd` (a step equals two sub-steps; no derivatives, for every backbone), `lsd`
            (Lagrangian), `esd` (Eulerian) or `mf` (Eulerian along the line, as in MIP's code;
            process=meanflow is the paper's recipe).
        paper_compat: Reproduce MIP's released code: psd with swapped weights of its parts and esd with the
            end's velocity instead of the start's, both non-zero at the exact flow map; psd and lsd with
            gradients through their targets.

    Source: arXiv 2505.18825 and 2512.01809. Deviations: starts and ends are uniform from the first step on,
    without a curriculum of growing steps; errors are averaged over the elements of a chunk, not summed over
    Da.
    """

    time_scale: float = bounded(20.0, gt=0)
    objective: str = bounded("psd", choices=tuple(OBJECTIVES))
    paper_compat: bool = False

    def field_of(self, backbone: Backbone) -> Backbone:
        return backbone if self.objective == "psd" else allow_derivatives(backbone, trained=True)

    def more_draws(self, te: TE, *, generator: Rng = None) -> dict[str, Tensor]:
        """Draw start, end and intermediate time of each row's step; (B,) each."""
        source = te.t.device if generator is None else generator.device
        draws = torch.rand(3, len(te.t), generator=generator, device=source, dtype=te.t.dtype)
        one, other, share = draws.to(te.t.device)
        return {"start": torch.minimum(one, other), "end": torch.maximum(one, other), "share": share}

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        """Return the sum of flow-matching and objective squared errors (B, Th, Da)."""
        start, end, share = (te.more[name] for name in ("start", "end", "share"))
        flow = net(self.corrupt(action, te.eps, te.t), te.t) - self.target(action, te.eps, te.t)
        x, velocity = self.corrupt(action, te.eps, start), self.target(action, te.eps, start)
        step = _Step(net, x, velocity, start, end, share, self.paper_compat)
        return flow.square() + OBJECTIVES[self.objective](step).square()


@register("process", "meanflow")
@dataclass(frozen=True)
class MeanFlow(AveragePath):
    """Regress u on v + (t - s) Du, the Eulerian equation, with a stop-gradient target.

    Args:
        time_scale: Factor of both time inputs, t and t - s. Derivatives with respect to time scale with it;
            above about 20 the method trains badly.

    Source: arXiv 2505.13447, algorithm 1 with equation 22 and its share of s = t; p of MP1 (arXiv
    2507.10543). Deviations: e is a mean over the elements of a chunk, not a sum; logit-normal times have mean
    0, not 0.4; times are uniform by default.
    """

    time_scale: float = bounded(20.0, gt=0)
    flow_share: float = bounded(0.75, gt=0, lt=1)  # fraction of training rows with s = t, flow matching
    weight_power: float = bounded(0.5, ge=0)  # p, weight 1 / (e + c)^p of a row with mean squared error e
    weight_offset: float = bounded(1e-3, gt=0)  # c

    def field_of(self, backbone: Backbone) -> Backbone:
        return allow_derivatives(backbone, trained=False)

    def more_draws(self, te: TE, *, generator: Rng = None) -> dict[str, Tensor]:
        """Draw the other end (B,) of each row's step; flow rows end where they start."""
        n, device, dtype = len(te.t), te.t.device, te.t.dtype
        source = device if generator is None else generator.device
        other = self.sample_time(n, generator=generator, device=device, dtype=dtype)
        share = torch.rand(n, generator=generator, device=source).to(device)
        return {"other": torch.where(share < self.flow_share, te.t, other)}

    def losses(self, net: Evaluate, action: Tensor, te: TE) -> Tensor:
        start, end = torch.minimum(te.t, te.more["other"]), torch.maximum(te.t, te.more["other"])
        x, velocity = self.corrupt(action, te.eps, start), self.target(action, te.eps, start)
        with torch.no_grad():
            along = (velocity, torch.ones_like(start))
            _, rate = derivative(lambda x, start: net(x, start, end), (x, start), along)
            target = velocity + over_rows(end - start, x) * rate
        error = (net(x, start, end) - target).square()
        weight = (error.detach().mean(dim=(-2, -1), keepdim=True) + self.weight_offset) ** -self.weight_power
        return weight * error
