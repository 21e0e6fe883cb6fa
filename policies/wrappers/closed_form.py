"""One step of improvement in closed form: the best action within a likelihood bound of a density.

Legend: B rows, K modes of weight w_k, mean mu_k and deviation sigma_k (K = 1: a Gaussian), A numbers of the
executed chunk, delta radius, beta standard deviations, g_k slope at mu_k, sums over the A entries::

    worth(a) = mean_i Q_i(s, a) - beta std_i Q_i(s, a)
    R_k      = 2 max(0, delta + l_k - logsumexp l),   l_k = log w_k + log N(mu_k; mu_k, sigma_k^2)
    a_k      = mu_k + sqrt(R_k) sigma_k^2 g_k / sqrt(sum sigma_k^2 g_k^2)
    action   = the a_k of the largest worth, over modes of at least `min_weight` and all radii

a_k maximises the worth, linear around mu_k, where the density is at least exp(-delta) of its bound. Radius 0
is the mean itself, so with it no action is worth less than the best mean. The policy is deterministic and
one graph: K times `radii` candidates are judged in one evaluation of the critics.

Source: CFPI, arXiv 2211.15956, released code. Deviations: the denominator sums over the entries of an action,
where the release sums over modes; R holds the factor 2 once; the constant is the log-sum-exp, where the
release has a maximum or a plain sum; no second proposal by Jensen's inequality; a fixed grid of radii, where
the release draws; deviations over critics are uncorrected (the release's beta is 1 / sqrt(2) of ours for two
critics). A Gaussian or mixture of ours is a density of actions, clipped to the box; `tanh_gaussian`, as the
release has it, is one of what tanh is taken of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import CapabilityError
from policies.networks.critics import EnsembleConfig
from policies.networks.distributions import LOG_2PI
from policies.networks.energy import energy_and_gradient
from policies.policy import Policy
from policies.processes.gaussian import GaussianPolicy
from policies.processes.mixture import MixturePolicy
from policies.processes.squashed import TanhGaussianPolicy
from policies.protocols import Cond, Hooks, Start
from policies.registry import name_of, register
from policies.wrappers.base import WrappedPolicy
from policies.wrappers.candidates import AGGREGATES, JudgedByCritics, select

_LEAST = 1e-7  # added to the length of a slope

Modes = tuple[Tensor, Tensor, Tensor]
"""Means and deviations (B, K, A) and log weights (B, K)."""


def has_modes(policy: Policy) -> bool:
    """Whether the policy has a density of one normal distribution or a few."""
    return isinstance(policy, GaussianPolicy | MixturePolicy | TanhGaussianPolicy)


def proposals(modes: Modes, slope: Tensor, radii: Tensor) -> Tensor:
    """Return a_k (B, K, n, A) for slopes (B, K, A) and radii (n,)."""
    mean, std, log_weight = modes
    log_peak = log_weight - (std.log() + 0.5 * LOG_2PI).sum(dim=-1)
    margin = log_peak - log_peak.logsumexp(dim=1, keepdim=True)
    squared = 2 * (radii + margin[..., None]).clamp(min=0)
    scaled = std.square() * slope
    direction = scaled / ((scaled * slope).sum(dim=-1, keepdim=True).sqrt() + _LEAST)
    return mean[:, :, None] + squared.sqrt()[..., None] * direction[:, :, None]


def improved(
    worth: Callable[[Tensor], Tensor], modes: Modes, radii: Tensor, *, min_weight: float, bound: float | None
) -> tuple[Tensor, Tensor]:
    """Return the chosen actions (B, A) and their modes (B,).

    Args:
        worth: Values (B, R) of actions (B, R, A).
        modes: The density.
        radii: delta (n,); 0 stands for the mean.
        min_weight: Modes of less weight are left out, except for the heaviest.
        bound: Of actions; None: no bound.
    """
    mean, _, log_weight = modes
    _, slope = energy_and_gradient(worth, mean)
    options = proposals(modes, slope, radii).flatten(1, 2)
    options = options if bound is None else options.clamp(-bound, bound)
    kept = (log_weight >= math.log(min_weight)) | (log_weight == log_weight.amax(dim=1, keepdim=True))
    kept = kept.repeat_interleave(len(radii), dim=1)
    value = torch.where(kept, worth(options), -math.inf)
    index = value.argmax(dim=1)
    return select(options, value), index // len(radii)


@register("wrapper", "closed_form")
@dataclass(frozen=True)
class ClosedForm(JudgedByCritics):
    """Radii of the step, and the critics that it climbs."""

    aggregate: str = bounded("mean_std", choices=AGGREGATES)  # reduction over critics
    critic_cosines: int = bounded(0, ge=0)  # of a fraction, for critics of quantiles; 0: expectations
    radii: tuple[float, ...] = bounded((0.0, 0.5), ge=0, some=True)  # delta; 0: the mean
    min_weight: float = bounded(0.05, gt=0, lt=1)  # least weight of a mode of a mixture that may act

    def critic_config(self) -> EnsembleConfig:
        return replace(super().critic_config(), cosines=self.critic_cosines)

    def wrap(self, base: Policy) -> ClosedFormImprovement:
        """Return the wrapped policy, with fresh critics.

        Raises:
            CapabilityError: If the policy is no Gaussian and no mixture.
        """
        return ClosedFormImprovement(base, self)


class ClosedFormImprovement(WrappedPolicy):
    """Acts by the improved action of a Gaussian or a mixture; its critics are `critic`."""

    noise_sensitive = False
    evaluates_gradients = True

    def __init__(self, base: Policy, wrapper: ClosedForm) -> None:
        super().__init__(base, wrapper)
        if not has_modes(base):
            raise CapabilityError(
                f"a closed form needs the density of a Gaussian or a mixture; got {type(base).__name__} of "
                f"process={name_of('process', base.config.process)}. Clone one by process=gaussian, mixture "
                "or tanh_gaussian."
            )
        self.wrapper: ClosedForm = wrapper
        self._squashed = isinstance(base, TanhGaussianPolicy)
        critics = wrapper.critic_config().build(base.encoder.cond_dim, base.chunk.width)
        self.critic = critics.to(base.dtype)
        self.register_buffer("radii", torch.tensor(wrapper.radii, dtype=base.dtype), persistent=False)

    @property
    def is_deterministic(self) -> bool:
        return True

    def with_act_steps(self, act_steps: int) -> Self:
        return self.with_own_act_steps(act_steps, "the critics of this policy value")

    def modes(self, cond: Cond) -> tuple[Tensor, Modes]:
        """Return the means of the modes (B, K, Th, Da), and the density of the executed part."""
        base: Any = self.base
        if isinstance(base, MixturePolicy):
            log_weight, mean, std = base.head(cond.vec)
        else:
            density = base.density(cond)
            mean, std = density.mean.unsqueeze(1), density.std.unsqueeze(1)
            log_weight = torch.zeros_like(mean[:, :, 0, 0])
        parts = (self.executed_part(part) for part in (mean, std.expand_as(mean)))
        return mean, (*parts, log_weight)

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return the improved chunk (B, Th, Da); noise has no effect."""
        if start is not None or hooks:
            raise CapabilityError("a closed form has no start state and no hooks. Leave them out.")
        squash: Any = torch.tanh if self._squashed else lambda action: action
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            plans, modes = self.modes(cond)
            radii: Any = self.radii
            action, mode = improved(
                lambda points: self.wrapper.worth(self.critic, cond.vec, squash(points)),
                modes,
                radii,
                min_weight=self.wrapper.min_weight,
                bound=None if self._squashed else 1.0,
            )
            rows = torch.arange(plans.shape[1], device=plans.device) == mode[:, None]
            plan = (plans * rows[..., None, None]).sum(dim=1)
            return squash(self.with_executed(plan, action))
