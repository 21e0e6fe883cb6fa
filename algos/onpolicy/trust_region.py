"""Updates that bound the divergence of the new policy from the old one instead of its ratios.

Legend: B rows (pairs of environment step and inner step), r ratio, A advantage, D = KL(old || new) per row,
reduced over elements as the log-densities are; it has a closed form for normal transitions, else it is
estimated by r - 1 - log r. `target_kl` is the bound d.

FixPO minimises mean(-r A + beta D) without clipping, and beta follows the largest D of a minibatch; after
every epoch it takes further steps on beta D alone until no row of the iteration exceeds d. TRPO takes one
step per iteration along the natural gradient, as far as mean D = d, and trains the critic as PPO does::

    (F + 0.1) x = g,   step = sqrt(2 d / x.(F + 0.1) x) x,   halted by a line search,   F = Hessian of mean D

Source: FixPO, arXiv 2312.05405; TRPO, arXiv 1502.05477, appendix C. Deviations of FixPO: the largest
divergence only; at most `SWEEPS` passes of fix-up, after which the policy returns to its last weights within
the bound. Deviations of TRPO: KL(old || new) in the line search; the critic's steps are those of PPO.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from algos.base import Quantities
from algos.onpolicy.advantages import Experience
from algos.onpolicy.losses import approx_kl
from algos.onpolicy.ppo_update import GeneratorDraws, PpoUpdate, Task, named_metrics
from algos.onpolicy.ratios import Rows, Score
from algos.optim import clipped, take_step
from algos.training.ranks import current

SWEEPS = 50


def divergence(score: Score) -> Tensor:
    """Return the divergence of each row, (B,)."""
    return approx_kl(score.log_ratio) if score.divergence is None else score.divergence


class TrustRegionUpdate(PpoUpdate):
    """What the updates share: the acting policy as reference, weights that can be set back."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        assert self.config.target_kl is not None
        self.bound, self.stop_kl = float(self.config.target_kl), None

    def update(self, experience: Experience, *, iteration: int, draws: GeneratorDraws) -> Quantities:
        return super().update(self.with_reference(experience), iteration=iteration, draws=draws)

    @torch.no_grad()
    def with_reference(self, experience: Experience) -> Experience:
        """Return the experience with means and entropies of the acting policy, where they are known."""
        parts = []
        for _, rows in self.pieces(experience):
            reference = self.ratio.reference(experience, rows)
            if reference is None:
                return experience
            parts.append(reference)
        return replace(experience, reference=torch.cat(parts, dim=1))

    def pieces(self, experience: Experience, index: Tensor | None = None) -> Iterator[tuple[Tensor, Rows]]:
        """Yield microbatches of sorted row indices; None: all rows."""
        if index is None:
            total = len(experience) * self.ratio.inner_steps
            index = torch.arange(total, device=experience.advantage.device)
        for part in index.split(self.microbatch_size(index)):
            yield part, Rows.sorted_from(part, self.ratio.inner_steps)

    @torch.no_grad()
    def divergences(self, experience: Experience, index: Tensor | None = None) -> Tensor:
        """Return the divergence of rows (B,) under the current weights."""
        scores = (self.ratio.score(experience, rows) for _, rows in self.pieces(experience, index))
        return torch.cat([divergence(score) for score in scores])

    def mean_gradient(
        self, experience: Experience, index: Tensor | None, loss: Callable[..., Tensor]
    ) -> list[Tensor]:
        """Return the gradient of a mean over rows; `loss(index, rows)` returns a microbatch's sum."""
        pieces = list(self.pieces(experience, index))
        total = sum(len(part) for part, _ in pieces)

        def share(part: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
            value = loss(part, rows) / total
            return value, value.detach()

        return self.threads.sum([Task(self.actor, partial(share, *piece)) for piece in pieces])[0]

    @torch.no_grad()
    def set_weights(self, values: Tensor) -> None:
        """Set the actor's weights to the parts of a vector (P,)."""
        for param, value in zip(self.actor, values.split([p.numel() for p in self.actor]), strict=True):
            param.copy_(value.view_as(param))


class FixpoUpdate(TrustRegionUpdate):
    """FixPO; see the module docstring. `policy/penalty` is beta D; `policy/fixes` are steps of fix-up."""

    beta_lr, caution = 0.01, 2.0  # rate of beta; its target is that `caution` times the largest D is d

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.beta = torch.ones((), device=self.actor[0].device, requires_grad=True)
        self.beta_optimizer = torch.optim.Adam([self.beta], self.beta_lr)
        self._largest: list[Tensor] = []

    def update(self, experience: Experience, *, iteration: int, draws: GeneratorDraws) -> Quantities:
        self._taken, self._fixes, self._certified = 0, 0, _flat(self.actor).detach()
        metrics = super().update(experience, iteration=iteration, draws=draws)
        return metrics | {
            "policy/beta": self.beta.detach().clone(),
            "policy/fixes": torch.tensor(float(self._fixes)),
        }

    def score(
        self, experience: Experience, index: Tensor, rows: Rows, advantage: Tensor | None = None
    ) -> Score:
        score = super().score(experience, index, rows, advantage)
        divergences = divergence(score)
        self._largest.append(divergences.detach().max())
        penalty = self.beta.detach() * divergences
        return replace(score, penalty=penalty if score.penalty is None else score.penalty + penalty)

    def actor_step(self, experience: Experience, index: Tensor, draws: GeneratorDraws) -> Quantities:
        self._largest.clear()
        metrics = super().actor_step(experience, index, draws)
        self.move_beta(max(current().gather(float(torch.stack(self._largest).max()))))
        self._taken += 1
        rows = len(experience) * self.ratio.inner_steps
        if self._taken % max(1, rows // len(index)) == 0:
            self.fix_up(experience, draws, len(index))
        return metrics

    def move_beta(self, largest: float) -> None:
        """Take a step of Adam on beta (d - caution D), which keeps beta from falling below 0."""
        self.beta.grad = torch.full_like(self.beta, self.bound - self.caution * largest)
        self.beta_optimizer.step()
        with torch.no_grad():
            self.beta.clamp_(min=0.0)

    def fix_up(self, experience: Experience, draws: GeneratorDraws, piece: int) -> None:
        """Step on beta D, `piece` rows at a time, until a whole pass finds no row beyond the bound."""
        for _ in range(SWEEPS):
            if not self.sweep(experience, draws, piece):
                self._certified = _flat(self.actor).detach()
                return
        self.set_weights(self._certified)

    def sweep(self, experience: Experience, draws: GeneratorDraws, piece: int) -> int:
        """Pass over all rows once; return the number of steps taken."""
        total, steps = len(experience) * self.ratio.inner_steps, 0
        order = draws.permutation(total).to(experience.advantage.device)
        for index in order.split(piece):
            index = index.sort().values
            largest = float(self.divergences(experience, index).max())
            if largest <= self.bound:
                continue

            def penalty(_: Tensor, rows: Rows) -> Tensor:
                return self.beta.detach() * divergence(self.ratio.score(experience, rows)).sum()

            grads = self.mean_gradient(experience, index, penalty)
            take_step(self.actor_optimizer, clipped(grads, self.config.max_grad_norm))
            self.move_beta(largest)
            steps += 1
        self._fixes += steps
        return steps

    def state_dict(self) -> dict[str, Any]:
        own = {"beta": self.beta.detach().clone(), "beta_optimizer": self.beta_optimizer.state_dict()}
        return super().state_dict() | copy.deepcopy(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self.beta.copy_(state["beta"])
        self.beta_optimizer.load_state_dict(state["beta_optimizer"])


class TrpoUpdate(TrustRegionUpdate):
    """TRPO; see the module docstring. `policy/step` is the accepted share of the step; 0: none."""

    damping, iterations, shrink, tries = 0.1, 15, 0.8, 10

    def update(self, experience: Experience, *, iteration: int, draws: GeneratorDraws) -> Quantities:
        self._moved: Quantities | None = None
        return super().update(experience, iteration=iteration, draws=draws)

    def actor_step(self, experience: Experience, index: Tensor, draws: GeneratorDraws) -> Quantities:
        if self._moved is None:
            self._moved = self.natural_step(experience, draws)
        return self._moved

    def natural_step(self, experience: Experience, draws: GeneratorDraws) -> Quantities:
        """Move the actor once, by all rows; return the metrics of the moved policy."""
        every = torch.arange(len(experience) * self.ratio.inner_steps, device=experience.advantage.device)
        grads, before = self.actor_gradient(experience, every, draws=draws)
        fisher = partial(self.curved, experience)
        gradient, old = -_flat(grads), _flat(self.actor).detach()
        start = 1e-4 * draws.noise((len(gradient),), gradient)
        direction = conjugate_gradient(fisher, gradient, start, self.iterations)
        reach = 2.0 * self.bound / direction.dot(fisher(direction))
        for k in range(self.tries if float(reach) > 0 else 0):
            share = self.shrink**k
            self.set_weights(old + share * reach.sqrt() * direction)
            with torch.no_grad():
                parts = [loss()[1] for loss in self.surrogates(experience, every)]
            moved = named_metrics(torch.stack(parts).sum(0))
            mean_divergence = float(self.divergences(experience).mean())
            if mean_divergence < self.bound and float(moved["policy/loss"]) < float(before["policy/loss"]):
                return before | moved | {"policy/step": old.new_tensor(share)}
        self.set_weights(old)
        return before | {"policy/step": old.new_zeros(())}

    def curved(self, experience: Experience, vector: Tensor) -> Tensor:
        """Return (F + damping) v, (P,), by differentiating the slope of mean D along v."""

        def slope(_: Tensor, rows: Rows) -> Tensor:
            total = divergence(self.ratio.score(experience, rows)).sum()
            grads = torch.autograd.grad(
                total, self.actor, create_graph=True, allow_unused=True, materialize_grads=True
            )
            return _flat(grads).dot(vector)

        return _flat(self.mean_gradient(experience, None, slope)) + self.damping * vector


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], target: Tensor, start: Tensor, iterations: int
) -> Tensor:
    """Return x with product(x) = target, (P,) each, after some iterations from `start`."""
    x = start.clone()
    residual = target - product(x)
    direction, square = residual.clone(), residual.dot(residual)
    for _ in range(iterations):
        if float(square) < 1e-10:
            break
        curvature = product(direction)
        rate = square / direction.dot(curvature)
        x, residual = x + rate * direction, residual - rate * curvature
        direction, square = residual + residual.dot(residual) / square * direction, residual.dot(residual)
    return x


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


UPDATES: dict[str, type[PpoUpdate]] = {"fixpo": FixpoUpdate, "trpo": TrpoUpdate}
"""Surrogates that have an update of their own."""
