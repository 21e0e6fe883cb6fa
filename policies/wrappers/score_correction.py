"""Correction of actions at deployment by the score of the data: towards where data are, and no further.

This follows the idea of CDSA (arXiv 2406.07541): a score model of the dataset's density corrects the action
of any policy, also through the gradient of the state and inverse dynamics. The equations are ours; the
published ones were not available.

Legend: s standardised condition (C,), a executed chunk, normalised, flat (A,), f(s, a; sigma) score of the
data density smoothed by sigma, f_a and f_s its two blocks, I inverse dynamics, K steps::

    a_aux   = I(s, s + kappa sigma_k^2 f_s) - I(s, s)
    a_{k+1} = clip(a_k + eta sigma_k^2 f_a(s, a_k; sigma_k) + eta_s a_aux, -1, 1)

eta has no unit: with eta = 1 and the exact score a step is the best denoising of an action with noise sigma
(Tweedie). The result stays within `radius` of a_0 (root mean square over entries), and a_0 is unchanged where
|sigma f_a| is below `gate`, a quantile of its values on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.networks.mlp_blocks import TrunkConfig
from policies.policy import Policy
from policies.protocols import Cond, Hooks, Start
from policies.registry import register
from policies.wrappers.base import WrappedPolicy

Score = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]  # (s, a, sigma) -> (f_s, f_a)

_TIME_SCALE = 10.0  # the network receives 10 log sigma


@register("wrapper", "correction")
@dataclass(frozen=True)
class Correction(Checked):
    """Settings of the correction and its networks."""

    key: ClassVar[str] = "correction"

    sigmas: tuple[float, ...] = bounded((0.1,), gt=0, some=True)  # noise of the steps; the last is repeated
    steps: int = bounded(10, ge=1)  # K
    eta: float = bounded(0.2, ge=0)  # step size, as a fraction of a denoising step; 0: no correction
    eta_state: float = bounded(0.0, ge=0)  # weight of the auxiliary action
    kappa: float = bounded(1.0, ge=0)  # step of the state along its score
    radius: float | None = bounded(0.3, gt=0)  # maximum RMS change over entries, normalised; null: unlimited
    gate_quantile: float = bounded(0.99, ge=0, lt=1)  # fraction of the data left uncorrected; 0: none
    hidden_dims: tuple[int, ...] = (256, 256, 256)  # of the score network; mish
    dynamics_dims: tuple[int, ...] = (256, 256)  # of the inverse dynamics; relu

    def wrap(self, base: Policy) -> CorrectedPolicy:
        return CorrectedPolicy(base, self)

    def sigma_of(self, step: int) -> float:
        return self.sigmas[min(step, len(self.sigmas) - 1)]


def corrected_path(
    state: Tensor,
    action: Tensor,
    score: Score,
    config: Correction,
    inverse: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Return the actions after 0 ... K steps, each (B, A); without gate and radius."""
    path = [action]
    for k in range(config.steps):
        sigma = config.sigma_of(k)
        by_state, by_action = score(state, path[-1], sigma)
        change = config.eta * sigma**2 * by_action
        if config.eta_state and inverse is not None:
            towards = state + config.kappa * sigma**2 * by_state
            change = change + config.eta_state * (inverse(state, towards) - inverse(state, state))
        path.append((path[-1] + change).clamp(-1, 1))
    return path


def within(action: Tensor, origin: Tensor, radius: float | None) -> Tensor:
    """Project actions (B, A) to an RMS distance of at most `radius` from `origin` (B, A)."""
    if radius is None:
        return action
    change = action - origin
    distance = change.square().mean(dim=1, keepdim=True).sqrt()
    return origin + change * (radius / distance.clamp(min=radius))


class CorrectedPolicy(WrappedPolicy):
    """Policy whose executed chunk is moved towards the data.

    `score` predicts the noise of [s, a]; the score is - noise / sigma. `inverse` is the inverse dynamics.
    """

    mean: Tensor
    std: Tensor
    gate: Tensor  # infinite before training: no correction

    def __init__(self, base: Policy, wrapper: Correction) -> None:
        super().__init__(base, wrapper)
        self.wrapper: Correction = wrapper
        conds, actions = base.encoder.cond_dim, base.chunk.width
        self._actions = actions
        net = MlpConfig(residual=False, hidden_dims=wrapper.hidden_dims, activation="mish")
        self.score = net.build((1, conds + actions), 0)
        trunk = TrunkConfig(residual=False, hidden_dims=wrapper.dynamics_dims)
        self.inverse = trunk.build_trunk(2 * conds, actions)
        self.register_buffer("mean", torch.zeros(conds, dtype=base.dtype))
        self.register_buffer("std", torch.ones(conds, dtype=base.dtype))
        self.register_buffer("gate", torch.tensor(math.inf, dtype=base.dtype))
        for own in (self.score, self.inverse):
            own.to(base.dtype)

    def with_act_steps(self, act_steps: int) -> Self:
        return self.with_own_act_steps(act_steps, "this correction was trained (algo=cdsa) for")

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        chunk = self.base.decode(cond, noise, grad=grad, start=start, hooks=hooks)
        if not (self.wrapper.eta or self.wrapper.eta_state):
            return chunk
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            action = self.corrected(self.standardized(cond.vec), self.executed_part(chunk))
        return self.with_executed(chunk, action)

    def corrected(self, state: Tensor, action: Tensor) -> Tensor:
        """Return actions (B, A) after correction, for standardised conditions (B, C)."""
        moved = corrected_path(state, action, self.scores, self.wrapper, self.dynamics)[-1]
        moved = within(moved, action, self.wrapper.radius)
        return torch.where(self.out_of_distribution_score(state, action)[:, None] > self.gate, moved, action)

    def out_of_distribution_score(self, state: Tensor, action: Tensor) -> Tensor:
        """Return |sigma f_a| (B,), root mean square, at the first noise: large off the data."""
        noise = self.noise_in(state, action, self.wrapper.sigmas[0])[:, -self._actions :]
        return noise.square().mean(dim=1).sqrt()

    def standardized(self, cond: Tensor) -> Tensor:
        return (cond - self.mean) / self.std

    def noise_in(self, state: Tensor, action: Tensor, sigma: float | Tensor) -> Tensor:
        """Return the predicted noise (B, C + A) of standardised conditions and actions."""
        x = torch.cat([state, action], dim=1)[:, None]
        level = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).log() * _TIME_SCALE
        return self.score(x, level.expand(x.shape[0]), Cond(x[:, 0, :0]))[:, 0]

    def scores(self, state: Tensor, action: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        score = self.noise_in(state, action, sigma) / -sigma
        return score[:, : -self._actions], score[:, -self._actions :]

    def dynamics(self, state: Tensor, successor: Tensor) -> Tensor:
        """Return the chunk (B, A) that transitions between two standardised conditions."""
        return torch.tanh(self.inverse(torch.cat([state, successor], dim=1)))


@register("wrapper", "perturbation")
@dataclass(frozen=True)
class Perturbation(Checked):
    """Noise on the actions of a deterministic policy, to measure robustness."""

    key: ClassVar[str] = "perturbation"

    std: float = bounded(0.3, ge=0)  # standard deviation of the noise, normalised units

    def wrap(self, base: Policy) -> PerturbedPolicy:
        return PerturbedPolicy(base, self)


class PerturbedPolicy(WrappedPolicy):
    """A deterministic policy with noise added to its actions, within [-1, 1]."""

    noise_sensitive = True

    def __init__(self, base: Policy, wrapper: Perturbation) -> None:
        if base.noise_sensitive:
            raise ConfigError("perturbation needs a deterministic policy; this one draws noise.")
        super().__init__(base, wrapper)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.base.chunk.shape

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        if start is not None or hooks:
            raise CapabilityError("a perturbed policy takes no hooks or start; give them to its `base`.")
        chunk = self.base.decode(cond, noise, grad=grad)
        return (chunk + self.wrapper.std * noise).clamp(-1, 1)
