"""Gradient descent on an energy: loop and policy of `process=ebt`.

Legend: B batch, Th horizon, Da action width, S maximum number of steps; E (B,) energy. Each row stops
independently: once its gradient norm is below a threshold it takes one more step.

Source: EBT-Policy, arXiv 2510.27545, and its released code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.networks.energy import BoundEnergy, EnergyField
from policies.policy import Policy, PolicyConfig, reduce_elements
from policies.processes.base import incompatible
from policies.processes.ebt import EnergyDescent, where_on
from policies.processes.one_step import require_own_sampler
from policies.protocols import TE, Cond, Hooks, Reduction, Rng, Start
from policies.registry import register


@register("sampler", "descent")
@dataclass(frozen=True)
class Descent(Checked):
    """Gradient descent on the energy until the gradient vanishes.

    Source: EBT-Policy (arXiv 2510.27545); deviation: every row stops independently.
    """

    steps: int = bounded(20, ge=1)  # S, maximum number of descent steps
    min_slope: float = bounded(1e-3, ge=0)  # gradient norm below which a row takes its last step

    def table(self, process: Any) -> NoReturn:
        raise incompatible(self, process, needs="ebt")


class Descended(NamedTuple):
    """Normalised action (B, Th, Da), energy (B,) at the last step and number of steps (B,) int64."""

    action: Tensor
    energy: Tensor
    steps: Tensor


def descend(
    process: EnergyDescent, sampler: Descent, energy: BoundEnergy, x: Tensor, *, first_step: int = 0
) -> Descended:
    """Descend from x (B, Th, Da), skipping the first `first_step` steps.

    On a CPU the loop ends when all rows have stopped. Elsewhere this check would synchronise with the host:
    all steps run, and stopped rows stay unchanged.
    """
    v = torch.zeros_like(x)
    active = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    steps = torch.ones(x.shape[0], dtype=torch.int64, device=x.device)
    may_stop = type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()
    for _ in range(first_step, sampler.steps - 1):
        *new, _, gradient = process.step(energy, x, v)
        x, v = where_on(active, tuple(new), (x, v))
        steps = steps + active
        active = active & (process.slope(gradient.detach()) > sampler.min_slope)
        if may_stop and not bool(active.any()):
            break
    x, _, value, _ = process.step(energy, x, v)
    return Descended(x, value, steps)


@register("policy_class", "descent")
class DescentPolicy(Policy):
    """Descend an energy from noise to a chunk; `sampler` is replaced with `with_sampler`, never mutated."""

    is_deterministic = True

    def __init__(self, config: PolicyConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        require_own_sampler(config.process, config.sampler)
        self.process: EnergyDescent = config.process
        self.sampler: Descent = config.sampler
        net = config.backbone.build(self.chunk.shape, self.encoder.cond_dim, token_dim=self.encoder.token_dim)
        self.field = EnergyField(net, "mean")
        self.register_buffer("no_time", torch.zeros(1), persistent=False)

    def with_sampler(self, sampler: Any) -> Self:
        require_own_sampler(self.process, sampler)
        view = self._view()
        view.sampler = sampler
        return view

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Descend from noise or a start, both (B, Th, Da), to a normalised chunk (B, Th, Da).

        `start` = (x, t) begins at x (B, Th, Da) and skips the fraction t of the steps; `grad` keeps the graph
        through all steps. Hooks are refused: they require states with signal and noise parts.
        """
        if hooks:
            raise CapabilityError(
                "process=ebt has no noise levels, so its states have no clean part that hooks could change. "
                "Leave them out, or use process=energy."
            )
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self.descend(cond, noise, start=start).action

    def descend(self, cond: Cond, noise: Tensor, *, start: Start = None) -> Descended:
        """Descend as in `decode`; also returns final energies and step counts."""
        x, first = (noise, 0) if start is None else (start[0], self._step_at(start[1]))
        return descend(self.process, self.sampler, self.bind(cond), x, first_step=first)

    def _step_at(self, t: float) -> int:
        steps = self.sampler.steps
        first = math.ceil(steps * t - 1e-6)
        if not 0 <= first < steps:
            raise ConfigError(
                f"a start time must lie in 0..{1 - 1 / steps:.4g}, the last of {steps} steps; got {t:.4g}."
            )
        return first

    def bind(self, cond: Cond) -> BoundEnergy:
        return self.field.bind_energy(cond, self.get_buffer("no_time"))

    def energy(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """Return the energy (B,) of chunks x (B, Th, Da); the time t is ignored."""
        return self.field.energy(x, self.get_buffer("no_time").expand(x.shape[0]), cond)

    def sample_te(self, n: int, *, generator: Rng = None) -> TE:
        """Draw start states and step sizes; the times (n,) are zero."""
        t = torch.zeros(n, device=self.device, dtype=self.dtype)
        te = TE(t, self._randn((n, *self.chunk.shape), generator))
        return replace(te, more=self.process.more_draws(te, generator=generator))

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        return reduce_elements(self.process.losses(self.bind(cond), action, te), reduce)


@register("policy_class", "energy")
class EnergyPolicy(DenoisingPolicy):
    """A denoising policy whose network is the gradient of an energy."""

    def energy(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """Return the energy (B,) of chunks x (B, Th, Da) as states at sampling times t (B,).

        The density of these states is proportional to exp(-energy / sigma(t)): energies are comparable at
        equal time and condition. Clean chunks are ranked at the last trained level, `process.levels()[0]`.
        """
        return self.field.energy(x, self.process.net_time(t), cond)
