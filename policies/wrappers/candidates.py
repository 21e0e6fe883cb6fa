"""Candidates: sample several chunks, edit or improve some of them, execute the one of the largest score.

Legend: B batch, N sampled chunks, M edited ones, Th horizon, Da action width, A = Ta Da executed numbers, E
critics, u an edit, beta its scale, c the bound of actions, C_i aggregate over critics, eps standard
normals::

    a_n  = inner(s, w_n)                                            n < N
    u_m  = tanh(mu(s, a_m) + sigma(s, a_m) eps_m)                   m < M
    a'_m = a_m + clip(beta u_m, -c - a_m, c - a_m)
    n*   = argmax score(s, .)  over a_0 ... a_{N-1}, a'_0 ... a'_{M-1}

    critic   C_i Q_i(s, a)                         of the executed rows; trained by an algorithm
    energy   -E(s, a)                              of the inner policy, at its last noise level
    density  -mean over (t, eps) of its matching loss of a at (t, eps)

With L > 0 steps of ascent of rate eta, the K candidates of the largest values climb before the choice::

    a_k <- clip(a_k + eta grad_a C_i Q_i(s, a_k), -c, c),  and a_k is the best of the L + 1 points visited

Critics and edits see the executed rows; an edit leaves the other rows unchanged. An edit never leaves the
bound, and an action beyond it is moved inwards only. One candidate needs no score. Of equal scores the first
candidate wins, with L > 0 the first that climbs. All randomness comes from the noise: N rows for the chunks,
then M rows whose first A numbers are eps. `density` is the log-density per entry where the policy has one in
closed form, and its variational surrogate where it denoises: the draws (t, eps) are the same for all
candidates, and the times are quantiles of those of training.

Source: best of N as in IDQL (arXiv 2304.10573) and Q-chunking (arXiv 2507.07969); edits as in EXPO (arXiv
2507.07986); ascent as in PA-RL (released code); ranking by matching losses on common draws as in diffusion
classifiers (arXiv 2303.16203), there of classes, here of chunks. Deviation: EXPO leaves edited actions
unbounded (`bound` null).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError
from policies.networks.activations import ACTIVATIONS
from policies.networks.critics import EnsembleConfig, Members, aggregate
from policies.networks.distributions import TanhGaussianConfig, tanh_draw
from policies.networks.energy import energy_and_gradient
from policies.policy import Policy
from policies.protocols import TE, Cond, Hooks, Start, has_density, has_field, has_steps
from policies.registry import register
from policies.wrappers.base import WrappedPolicy

AGGREGATES = ("min", "mean", "mean_std")
SCORES = ("critic", "energy", "density")
_DRAWS_PER_TIME = 64  # training times drawn for each quantile


@dataclass(frozen=True)
class JudgedByCritics(Checked):
    """Critics of executed chunks that a wrapper asks."""

    aggregate: str = bounded("mean", choices=AGGREGATES)  # reduction over critics
    pessimism: float = bounded(0.5, ge=0)  # standard deviations subtracted by mean_std
    members: int = bounded(2, ge=1)  # E, critics
    critic_dims: tuple[int, ...] = bounded((256, 256), ge=1)  # hidden widths of a critic
    critic_activation: str = bounded("gelu", choices=tuple(ACTIVATIONS))
    critic_layer_norm: bool = True  # layer normalisation in the critics
    norm_after: bool = True  # after the activation instead of before it
    critic_bins: int = bounded(0, ge=0)  # bins of a histogram of returns; 0: one value
    value_min: float = bounded(0.0, ge=float("-inf"))  # lower edge of the first bin
    value_max: float = bounded(1.0, ge=float("-inf"))  # upper edge of the last bin

    def critic_config(self) -> EnsembleConfig:
        """Return the configuration of the critics."""
        after = self.critic_layer_norm and self.norm_after
        shape = (self.members, self.critic_dims, self.critic_activation, self.critic_layer_norm, after)
        bins, low, high = self.critic_bins, self.value_min, self.value_max
        return EnsembleConfig(*shape, norm_eps=1e-6, bins=bins, low=low, high=high)

    def worth(self, critic: Any, vec: Tensor, actions: Tensor) -> Tensor:
        """Return the values (B, R) of executed chunks (B, R, A); no gradient reaches the weights."""
        values = ranked(critic, vec, actions, frozen=True)
        return aggregate(values, self.aggregate, pessimism=self.pessimism)


@register("wrapper", "candidates")
@dataclass(frozen=True)
class Candidates(JudgedByCritics):
    """Numbers of candidates, the score that ranks them, the actor that edits them."""

    num_candidates: int = bounded(32, ge=1)  # N, sampled chunks
    num_edited: int = bounded(0, ge=0)  # M of them are edited
    keeps_base: bool = True  # edited chunks are candidates beside the others; false: they replace them
    score: str = bounded("critic", choices=SCORES)  # of trained critics, or of the policy itself
    score_draws: int = bounded(8, ge=1)  # draws (t, eps) of the density of a policy that denoises
    edit_scale: float = bounded(0.0, ge=0)  # beta, normalised action units
    edit_dims: tuple[int, ...] = bounded((256, 256), ge=1)  # hidden widths of the edit actor
    bound: float | None = bounded(1.0, gt=0)  # c, normalised action units; null: edited actions are unbounded
    stochastic: bool = True  # sample the edits; false: use their means
    ascent_steps: int = bounded(0, ge=0)  # L, gradient steps on the best candidates
    ascent_lr: float = bounded(3e-4, gt=0)  # eta, normalised action units per unit of slope
    num_ascended: int = bounded(1, ge=1)  # K, candidates that climb and remain

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("num_edited", self.num_edited <= self.num_candidates, "at most the number of candidates")
        whole = self.num_edited == self.num_candidates
        by_critics = self.score == "critic" or not (self.num_edited or self.ascent_steps)
        self.require("score", by_critics, "critic where candidates are edited or climb")
        self.require("keeps_base", self.keeps_base or whole, "true unless all candidates are edited")
        if self.ascent_steps:
            rule = f"at most the {self.num_ranked} candidates"
            self.require("num_ascended", self.num_ascended <= self.num_ranked, rule)

    @property
    def num_ranked(self) -> int:
        """Chunks that the critics compare."""
        return self.num_edited + (self.num_candidates if self.keeps_base else 0)

    @property
    def has_critic(self) -> bool:
        return self.score == "critic" and (self.num_ranked > 1 or self.ascent_steps > 0)

    def wrap(self, base: Policy) -> CandidatePolicy:
        """Return the wrapped policy, with fresh critics and edits."""
        return CandidatePolicy(base, self)


class CandidatePolicy(WrappedPolicy):
    """Executes the candidate of the largest score.

    Attributes:
        critic: Conditions (B, C) and executed chunks (B, A) to values (E, B); None for one candidate, and
            for scores of the inner policy.
        editor: [condition, executed chunk] (B, C + A) to mean and log deviation (B, A); None without edits.
        scale: Scale of edits now, a buffer: a method may raise it to `edit_scale` gradually.
    """

    scale: Tensor
    score_t: Tensor
    score_eps: Tensor
    score_level: Tensor | None

    def __init__(self, base: Policy, wrapper: Candidates) -> None:
        super().__init__(base, wrapper)
        self.wrapper: Candidates = wrapper
        self.width = base.chunk.width  # A
        cond_dim = base.encoder.cond_dim
        self.critic, self.editor = None, None
        if wrapper.num_ranked > 1 and wrapper.score != "critic":
            _require_score(base, wrapper.score)
        process: Any = base.config.process
        levels = process.levels() if wrapper.score == "energy" and has_steps(base) else None
        self._last = 1.0 if levels is None else float(levels[0])  # time of the last trained noise level
        if wrapper.score == "density":
            self._use_draws()
        if wrapper.has_critic:
            self.critic = wrapper.critic_config().build(cond_dim, self.width).to(base.device, base.dtype)
        if wrapper.num_edited:
            if math.prod(base.noise_shape) < self.width:
                raise CapabilityError(
                    f"edits take their noise from that of the policy, {self.width} numbers; this one has "
                    f"{math.prod(base.noise_shape)}. Use one whose noise has a row for every action."
                )
            head = TanhGaussianConfig(wrapper.edit_dims, "relu", layer_norm=False)
            self.editor = head.build(cond_dim + self.width, self.width).to(base.device, base.dtype)
        self.register_buffer("scale", torch.tensor(wrapper.edit_scale, device=base.device, dtype=base.dtype))

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """(N + M, *noise of the inner policy)."""
        return (self.wrapper.num_candidates + self.wrapper.num_edited, *self.base.noise_shape)

    chooses: Any = property(lambda self: self.wrapper.num_candidates > 1)

    @property
    def noise_sensitive(self) -> bool:  # type: ignore[override]
        has_draws = self.wrapper.num_edited > 0 and self.wrapper.stochastic
        return has_draws or self.base.noise_sensitive

    @property
    def evaluates_gradients(self) -> bool:
        """Whether decoding differentiates the critics."""
        return self.wrapper.ascent_steps > 0

    def sampling_edits(self) -> Self:
        """Return a view that samples its edits."""
        view = self._view()
        view.wrapper = replace(self.wrapper, stochastic=True)
        return view

    def sample_noise(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        rows = self.noise_shape[0]
        return self.base.sample_noise(n * rows, generator=generator).view(n, rows, *self.base.noise_shape)

    def _use_draws(self) -> None:
        """Draw the (t, eps) of the density: noise, and quantiles of the training times."""
        base: Any = self.base
        generator = torch.Generator().manual_seed(0)
        count = 1 if has_density(base) else self.wrapper.score_draws
        te = base.sample_te(count * _DRAWS_PER_TIME, generator=generator)
        middle = te.t.argsort()[_DRAWS_PER_TIME // 2 :: _DRAWS_PER_TIME]
        self.register_buffer("score_t", te.t[middle].clone())
        self.register_buffer("score_eps", te.eps[middle].clone())
        self.register_buffer("score_level", None if te.level is None else te.level[middle].clone())

    def with_act_steps(self, act_steps: int) -> Self:
        if self.critic is None and self.editor is None:
            return super().with_act_steps(act_steps)
        return self.with_own_act_steps(act_steps, "the critics of this policy value")

    def sampled(self, cond: Cond, noise: Tensor, *, grad: bool = False) -> Tensor:
        """Return the inner policy's chunks (B, N, Th, Da) for noise (B, N or more, ...)."""
        count = self.wrapper.num_candidates
        flat = noise[:, :count].flatten(0, 1)
        repeated = cond if count == 1 else cond.repeat(count)
        return self.base.decode(repeated, flat, grad=grad).unflatten(0, (-1, count))

    def edits(self, vec: Tensor, action: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Return edits u (B, A) and their log-densities (B,) of actions (B, A) at conditions (B, C)."""
        assert self.editor is not None
        mean, log_std = self.editor(torch.cat([vec, action], dim=-1))
        return tanh_draw(mean, log_std, eps)

    def edited(self, action: Tensor, u: Tensor) -> Tensor:
        """Return actions (..., A) changed by edits u (..., A)."""
        change, bound = self.scale * u, self.wrapper.bound
        if bound is not None:
            low, high = (-bound - action).clamp(max=0), (bound - action).clamp(min=0)
            change = torch.minimum(torch.maximum(change, low), high)
        return action + change

    def candidates(self, cond: Cond, noise: Tensor, *, grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return the ranked plans (B, R, Th, Da) and their executed parts (B, R, A)."""
        plans = self.sampled(cond, noise, grad=grad)
        actions, edited = self.executed_part(plans), self.wrapper.num_edited
        if not edited:
            return plans, actions
        eps = noise[:, self.wrapper.num_candidates :].flatten(2)[..., : self.width]
        eps = eps if self.wrapper.stochastic else torch.zeros_like(eps)
        vec = cond.vec.unsqueeze(1).expand(-1, edited, -1).flatten(0, 1)
        u = self.edits(vec, actions[:, :edited].flatten(0, 1), eps.flatten(0, 1))[0].view_as(eps)
        changed = self.edited(actions[:, :edited], u)
        changed_plans = self.with_executed(plans[:, :edited], changed)
        if not self.wrapper.keeps_base:
            return changed_plans, changed
        return torch.cat([plans, changed_plans], dim=1), torch.cat([actions, changed], dim=1)

    def worth(self, vec: Tensor, actions: Tensor) -> Tensor:
        """Return the values (B, R) by which candidates (B, R, A) are compared."""
        assert self.critic is not None
        return self.wrapper.worth(self.critic, vec, actions)

    def best(self, plans: Tensor, actions: Tensor, worth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K candidates of the largest worth (B, R), the best last."""
        index = worth.argsort(dim=1)[:, -self.wrapper.num_ascended :]
        return picked(plans, index), picked(actions, index)

    def ascended(self, vec: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best points (B, K, A) that candidates visit as they climb, and their worth (B, K)."""
        wrapper, bound = self.wrapper, self.wrapper.bound
        return ascend(
            lambda points: self.worth(vec, points),
            actions,
            steps=wrapper.ascent_steps,
            lr=wrapper.ascent_lr,
            box=None if bound is None else (-bound, bound),
        )

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return the chosen chunk (B, Th, Da)."""
        if start is not None or hooks:
            raise CapabilityError(
                "a policy that chooses among candidates takes no start state and no hooks. Give them to the "
                "inner policy, `base`."
            )
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            plans, actions = self.candidates(cond, noise, grad=grad)
            if not self.wrapper.has_critic:
                return plans[:, 0] if plans.shape[1] == 1 else select(plans, self.own_score(cond, plans))
            worth = self.worth(cond.vec, actions)
            if self.wrapper.ascent_steps:
                plans, actions = self.best(plans, actions, worth)
                actions, worth = self.ascended(cond.vec, actions)
                plans = self.with_executed(plans, actions)
            return select(plans, worth)

    def own_score(self, cond: Cond, plans: Tensor) -> Tensor:
        """Return the scores (B, R) of plans (B, R, Th, Da) by the inner policy itself."""
        count = plans.shape[1]
        score = self._density if self.wrapper.score == "density" else self._low_energy
        return score(plans.flatten(0, 1), cond.repeat(count)).unflatten(0, (-1, count))

    def _low_energy(self, x: Tensor, cond: Cond) -> Tensor:
        """Return minus the energy (B,) of chunks x (B, Th, Da)."""
        base: Any = self.base
        return -base.energy(x, torch.full_like(x[:, 0, 0], self._last), cond)

    def _density(self, x: Tensor, cond: Cond) -> Tensor:
        """Return minus the matching loss (B,) of chunks x (B, Th, Da), its mean over the draws."""
        base: Any = self.base
        draws = len(self.score_t)
        row = torch.zeros_like(x[:, :1, 0])  # sums broadcast, so that a graph fits any batch
        level = None if self.score_level is None else (row.long() + self.score_level).flatten()
        eps = (row[..., None, None] + self.score_eps).flatten(0, 1)
        te = TE((row + self.score_t).flatten(), eps, level)
        loss: Tensor = base.matching_loss(cond.repeat(draws), x.repeat_interleave(draws, dim=0), te)
        return -loss.unflatten(0, (-1, draws)).mean(dim=1)


def _require_score(policy: Any, score: str) -> None:
    """Refuse a policy whose candidates are equal, or that has no such score."""
    if hasattr(policy, "composition"):
        raise CapabilityError(
            f"a composition has no {score}: it has fields alone. Rank the candidates of one of its members."
        )
    process = type(policy.config.process).__name__
    if not policy.noise_sensitive:
        raise CapabilityError(
            f"candidates differ by the noise of the policy, and process '{process}' with sampler "
            f"'{type(policy.sampler).__name__}' takes none. Use one that draws, e.g. process=flow."
        )
    scores = {"energy": hasattr(policy, "energy"), "density": has_density(policy) or has_field(policy)}
    if not scores[score]:
        others = [f"score={other}" for other, known in scores.items() if known]
        raise CapabilityError(
            f"score=energy needs process=energy or process=ebt; score=density a density in closed form, or "
            f"a denoiser at every noise level. {type(policy).__name__} with process '{process}' has no "
            f"{score}. Use {' or '.join(others) or 'critics, which algo=idql trains'}."
        )


def with_candidates(policy: Policy, score: str, num_candidates: int, **values: Any) -> CandidatePolicy:
    """Return the best of N candidates of a policy, by `score`.

    Args:
        policy: The policy. Of one that chooses already, the candidates are ranked anew.
        score: One of `SCORES`; critics are those that the policy has.
        num_candidates: N.
        values: Further fields of `Candidates`.

    Raises:
        CapabilityError: If the policy has no such score, or no noise.
    """
    if score != "critic":
        inner: Any = policy.base if isinstance(policy, CandidatePolicy) else policy
        return Candidates(num_candidates=num_candidates, score=score, **values).wrap(inner)
    if not isinstance(policy, CandidatePolicy) or policy.critic is None:
        raise CapabilityError(
            f"score=critic needs a policy with critics; {type(policy).__name__} has none. Train them by "
            "algo=idql or algo=qc, or use score=density or score=energy."
        )
    before = policy.wrapper
    edits_all = before.num_edited == before.num_candidates
    num_edited = num_candidates if edits_all else min(before.num_edited, num_candidates)
    view = policy._view()
    view.wrapper = replace(before, num_candidates=num_candidates, num_edited=num_edited, **values)
    if not view.wrapper.has_critic:
        view.critic = None
    return view


def ranked(
    critic: Any, vec: Tensor, actions: Tensor, *, members: Members = None, frozen: bool = False
) -> Tensor:
    """Return values (E, B, R) of R executed chunks (B, R, A) at conditions (B, C); see `Ensemble.forward`."""
    count = actions.shape[1]
    repeated = vec.unsqueeze(1).expand(-1, count, -1).flatten(0, 1)
    values: Tensor = critic(repeated, actions.flatten(0, 1), members=members, frozen=frozen)
    return values.unflatten(1, (-1, count))


def ascend(
    worth: Callable[[Tensor], Tensor],
    actions: Tensor,
    *,
    steps: int,
    lr: float,
    box: tuple[Any, Any] | None,
) -> tuple[Tensor, Tensor]:
    """Return the best points (B, K, A) visited by gradient ascent on worth (B, K), and their worth.

    Points stay between the bounds of `box`. Of equal ones the later is returned.
    """
    best, highest, point = actions, torch.full_like(actions[..., 0], -math.inf), actions
    for step in range(steps + 1):
        if step < steps:
            value, slope = energy_and_gradient(worth, point)
        else:
            value, slope = worth(point), torch.zeros_like(point)
        best = torch.where((value >= highest)[..., None], point, best)
        highest = torch.maximum(highest, value)
        point = point + lr * slope
        point = point if box is None else point.clamp(*box)
    return best, highest


def picked(options: Tensor, index: Tensor) -> Tensor:
    """Return the options (B, K, ...) at an index (B, K) of (B, R, ...)."""
    place = index.view(*index.shape, *[1] * (options.ndim - 2))
    return options.gather(1, place.expand(-1, -1, *options.shape[2:]))


def select(options: Tensor, worth: Tensor) -> Tensor:
    """Return the option (B, ...) of the largest worth (B, R) among (B, R, ...); of equals the first."""
    return picked(options, worth.argmax(dim=1, keepdim=True)).squeeze(1)
