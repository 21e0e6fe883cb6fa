"""Operators that combine predictions: weighted sums, and mixtures with densities tracked along a chain.

Legend: N members, B batch, Th horizon, Da action width, k denoising step; eps_i noise, s_i = -eps_i / sigma
score and q_i density of member i at the state x; w_i weights.

    convex    sum_i w_i eps_i                          sum_i w_i = 1; the score of prod_i q_i^w_i
    product   sum_i w_i eps_i                          any weights: all of them at once ("and")
    cfg_sum   eps_0 + sum_{i>0} w_i (eps_i - eps_0)    member 0 is the base that the others are compared with
    or        sum_i r_i eps_i                          score of the mixture sum_i w_i q_i,
              r = softmax(log w_i + log q_i / T)       any one of them

A sum with weights that add up to one is the same in every parametrisation p of one state. It is computed as
p_1 + sum_{i>1} w_i (p_i - p_1), so that weights (1, 0), or equal members, give one member bit for bit.

Densities. The state after an ancestral step has, by Bayes' rule, log q_i(x') = log q_i(x) + log q_i(x' | x) -
log q(x | x'); the last term is the forward process, the same for all members, and the middle one the Gaussian
of the step with the member's mean m_i. Up to a common constant, and up to the error of every ancestral step,

    log q_i += -1/2 |x' - m_i|^2 / std^2,              log q_i = 0 at pure noise

This is the Ito density estimator of SuperDiff (arXiv 2412.17762, theorem 1) before the step goes to zero: no
divergence of a network is needed, because the injected noise supplies it. Hence the sampler must inject all
of it: a deterministic one, or one with a share of the noise, does not fit.

Source: GPC (arXiv 2510.01068), section 4; arXiv 2206.01714 (product); 2207.12598 (cfg_sum); 2412.17762 (or).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.protocols import BoundField
from policies.samplers.step_table import StepTable, transition

OPERATORS = ("convex", "product", "cfg_sum", "or")

Weight = float | tuple[tuple[float, float], ...]
"""A number, or knots (t, w) over sampling time between which the weight is linear, and constant beyond."""

_STD_TOLERANCE = 0.01  # of the noise of a step, relative


@dataclass(frozen=True)
class Composition(Checked):
    """Combination of the members of a composition.

    Args:
        weights: One per member, in order. `convex`: sum to 1 at every time (negative ones extrapolate).
            `product`: any. `cfg_sum`: 1 for the base, then any. `or`: constant shares.
        columns: State entries of every member; None: all of them. Empty: None for all.
        obs_dim: Width of the observed state, required if every member has columns.
    """

    weights: tuple[Weight, ...]
    operator: str = bounded("convex", choices=OPERATORS)  # `convex`, `product`, `cfg_sum` or `or`
    columns: tuple[tuple[int, ...] | None, ...] = ()
    obs_dim: int | None = bounded(None, ge=1)
    temperature: float = bounded(1.0, gt=0)  # T of `or`; above 1 the selection between members is softer

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(_weight(weight) for weight in self.weights))
        columns = tuple(None if one is None else tuple(one) for one in self.columns)
        object.__setattr__(self, "columns", columns or (None,) * len(self.weights))
        super().__post_init__()
        if not self.weights or len(self.columns) != len(self.weights):
            got = f"{len(self.weights)} weights and {len(self.columns)} columns"
            raise ConfigError(f"weights must be one per member, and columns for all or none; got {got}.")
        self._check_weights()

    def _check_weights(self) -> None:
        values = torch.stack([weight_at(weight, self._knots) for weight in self.weights])
        total = values.sum(dim=0)
        adds_up = bool(((total - 1).abs() < 1e-6).all())
        shown = [list(weight) if isinstance(weight, tuple) else weight for weight in self.weights]
        if self.operator == "convex" and not adds_up:
            raise ConfigError(
                f"weights of operator=convex must add up to 1 at every time; got {shown}. Rescale them, or "
                f"use operator=product."
            )
        if self.operator == "cfg_sum" and not bool((values[0] == 1).all()):
            raise ConfigError(
                f"the first weight of operator=cfg_sum is that of the base and must be 1; got {shown}."
            )
        is_constant = not any(isinstance(weight, tuple) for weight in self.weights)
        if self.operator == "or" and not (is_constant and adds_up and bool((values >= 0).all())):
            rule = "constant shares of a mixture, none negative, adding up to 1"
            raise ConfigError(f"weights of operator=or must be {rule}; got {shown}.")

    @property
    def _knots(self) -> Tensor:
        """All times (M,) between which weights are piecewise linear."""
        times = [t for weight in self.weights if isinstance(weight, tuple) for t, _ in weight]
        return torch.tensor([0.0, *times], dtype=torch.float64)

    @property
    def active(self) -> tuple[int, ...]:
        """Members with non-zero weight at some time; the first if all weights are zero."""
        used = (self.coefficients(self._knots) != 0).any(dim=1).tolist()
        return tuple(i for i, is_used in enumerate(used) if is_used) or (0,)

    def coefficients(self, t: Tensor) -> Tensor:
        """Return the coefficients of the members' eps at sampling times t (M,), (N, M)."""
        values = torch.stack([weight_at(weight, t) for weight in self.weights])
        if self.operator == "cfg_sum":
            values = torch.cat([(1 - values[1:].sum(dim=0))[None], values[1:]])
        return values

    @staticmethod
    def redistributed(coefficients: Tensor, reached: Tensor) -> Tensor:
        """Redistribute the coefficients (N, M) of members that do not reach (N, M) a noise level.

        If no other member has a weight, they are kept.
        """
        redistributed = torch.where(reached, coefficients, 0.0)
        wanted, left = coefficients.sum(dim=0), redistributed.sum(dim=0)
        return torch.where(left.abs() > 1e-6, redistributed * (wanted / left), coefficients)

    def surplus(self, coefficients: Tensor) -> Tensor:
        """Return the excess over 1 of the sum of coefficients (N, M), (M,); zero unless `product`."""
        total = coefficients.sum(dim=0) - 1
        free = self.operator == "product"
        return torch.where(total.abs() > 1e-9, total, 0.0) if free else torch.zeros_like(total)


def _weight(weight: Weight | Sequence[Sequence[float]]) -> Weight:
    """Check a weight and convert knots to tuples."""
    if isinstance(weight, (int, float)):
        if not math.isfinite(weight):
            raise ConfigError(f"weights must be finite; got {weight}.")
        return float(weight)
    try:
        knots = tuple((float(t), float(w)) for t, w in weight)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a weight is a number or a list of knots [t, w]; got {weight!r}.") from error
    times = [t for t, _ in knots]
    rises = all(a < b for a, b in pairwise(times))
    are_finite = all(math.isfinite(number) for knot in knots for number in knot)
    if not knots or not rises or not 0 <= times[0] <= times[-1] <= 1 or not are_finite:
        raise ConfigError(f"knots [t, w] of a weight need times that rise from 0 to 1; got {list(knots)}.")
    return knots


def weight_at(weight: Weight, t: Tensor) -> Tensor:
    """Return a weight at sampling times t, shaped and typed like t."""
    if not isinstance(weight, tuple):
        return torch.full_like(t, weight)
    times, values = torch.tensor(weight, dtype=t.dtype, device=t.device).T.contiguous()
    if len(times) == 1:
        return values.expand_as(t)
    right = torch.searchsorted(times, t.contiguous()).clamp(1, len(times) - 1)
    share = ((t - times[right - 1]) / (times[right] - times[right - 1])).clamp(0, 1)
    return torch.lerp(values[right - 1], values[right], share)


def combine(predictions: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return sum_i w_i p_i of predictions (B, Th, Da) for weights that add up to 1; w_0 is not used."""
    first, out = predictions[0], predictions[0]
    for prediction, weight in zip(predictions[1:], weights[1:], strict=True):
        out = out + weight * (prediction - first)
    return out


def responsibilities(shares: Sequence[float], log_density: Tensor, temperature: float = 1.0) -> Tensor:
    """Return softmax_i(log w_i + log q_i / T) for log densities (N, ...), up to a common constant."""
    prior = torch.tensor([math.log(share) for share in shares], dtype=log_density.dtype)
    prior = prior.to(log_density.device).reshape(-1, *(1,) * (log_density.dim() - 1))
    return torch.softmax(prior + log_density / temperature, dim=0)


@dataclass(frozen=True)
class Sum:
    """A weighted sum at one step: `combine` of the selected members, plus the surplus of weights."""

    chosen: tuple[int, ...]  # members whose weight is not zero
    weights: tuple[float, ...]  # of these
    surplus: float  # by how much they add up to more than 1
    noise_free: float  # p / x for eps = 0: what the surplus is measured from

    def __call__(self, predict: Callable[[int], Tensor], x: Tensor) -> Tensor:
        predictions = [predict(member) for member in self.chosen]
        out = combine(predictions, self.weights)
        return out + self.surplus * (predictions[0] - self.noise_free * x) if self.surplus else out


class BoundMixture:
    """The network of a mixture of bound networks along one chain; called in the order of the steps."""

    log_density: Tensor  # (N, B), relative to each other, of the last state; (N, 1) at first

    def __init__(
        self, table: StepTable, members: Sequence[BoundField], shares: Sequence[float], temperature: float
    ) -> None:
        self._table, self._members = table, members
        self._shares, self._temperature = shares, temperature
        self._next = -1
        self._means: list[Tensor] = []

    def __call__(self, k: int, x: Tensor) -> Tensor:
        self._update_densities(k, x)
        predictions = [member(k, x) for member in self._members]
        if k < self._table.num_steps - 1:
            self._means = [transition(self._table, k, x, prediction) for prediction in predictions]
        self._next = k + 1
        shares = responsibilities(self._shares, self.log_density, self._temperature)
        return combine(predictions, list(shares[..., None, None].unbind(0)))

    def _update_densities(self, k: int, x: Tensor) -> None:
        """Update the log densities by the last step; a chain begins with equal densities."""
        if k != self._next:
            self.log_density = x.new_zeros(len(self._members), 1)  # the same for all rows
            return
        std = self._table.to_device("std", x)[k - 1]
        errors = [((x - mean) / std).square().sum(dim=(-2, -1)) for mean in self._means]
        self.log_density = self.log_density - 0.5 * torch.stack(errors)


def require_ancestral(table: StepTable) -> None:
    """Refuse steps along which densities cannot be computed."""
    alpha, sigma = (torch.tensor(a, dtype=torch.float64) for a in (table.alpha, table.sigma))
    noise = sigma / alpha
    full = alpha[1:] * noise[1:] * (1 - (noise[1:] / noise[:-1]).square()).clamp(min=0).sqrt()
    difference = (table.schedule_std[:-1] - full[:, None]).abs()
    fits = bool((difference <= _STD_TOLERANCE * full[:, None]).all()) and bool((table.std[:-1] > 0).all())
    if table.memory is not None or not fits:
        raise ConfigError(
            "operator=or needs a sampler that injects the whole noise of the reverse process at every step. "
            "Use sampler=ddpm with all levels, or sampler=ancestral with eta=1 (and many steps)."
        )
