"""Composition: several policies act as one by combining their predictions at every denoising step.

Legend: N members, member 0 leads; B batch, To observation history, Th horizon, Da action width; x noisy
chunk, t sampling time, eps predicted noise, x0 predicted clean chunk.

The lead's process and one of its samplers drive the loop. At every step each member is evaluated at the state
mapped to its own path, at equal signal-to-noise ratio and through physical units
(`policies.composition.time_matching`); its prediction is converted to the lead's parametrisation, and the
predictions are combined (`policies.composition.operators`). At noise levels beyond a member's path (a flow
starts from pure noise, a diffusion close to it), its weight is redistributed. Members may differ in process
(with a Gaussian path), encoder, normaliser, history and observed entries, and may be compositions.

Source: General Policy Composition, arXiv 2510.01068. Deviations from its code: members need not share
process, schedule or normaliser; weights are checked against the operator; every member keeps its own history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from policies.composition.observation import (
    ComposedEncoder,
    check_members,
    joined,
    joint_normalizer,
    member_conds,
    named,
    require_field,
    sizes_of,
)
from policies.composition.operators import BoundMixture, Composition, Sum, Weight, combine, require_ancestral
from policies.composition.time_matching import (
    TimeMatch,
    TimeMatchTable,
    UnitChange,
    is_reached,
    matched_time,
    time_matches,
)
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy
from policies.protocols import BoundField, Chain, Cond, Evaluate
from policies.samplers.ode import Euler
from policies.samplers.step_table import StepRules, StepTable


@dataclass(frozen=True, kw_only=True)
class _At(StepRules):
    """A sampler that only sets the times at which a member is evaluated."""

    times: tuple[float, ...]

    def table(self, process: Any) -> StepTable:
        return Euler().over(process, self.times)


@dataclass(frozen=True, eq=False)
class _Member:
    """A member's evaluation in the lead's sampler."""

    view: DenoisingPolicy  # the member with a step table for its evaluation times
    table: TimeMatchTable | None  # None: it shares path and units with the lead
    limit: float | None  # the member's own bound on x0, applied to converted predictions
    reached: Tensor  # (K,), steps whose noise level is on the member's path

    def bind(self, cond: Cond) -> BoundField:
        bound = self.view.bind(cond)
        if self.table is None:
            return bound
        rows, limit = self.table.rows(cond.vec), self.limit

        def matched(k: int, x: Tensor) -> Tensor:
            state = rows[k].state(x)
            return rows[k].output(x, state, bound(k, state), limit)

        return matched


class ComposedPolicy(DenoisingPolicy):
    """Policy that combines several policies; it has no network of its own.

    Args:
        members: The policies; the first one leads.
        composition: Combination of the members.
        sampler: Sampler of the lead's process; None: the lead's own.

    Raises:
        CapabilityError: If a member has no denoising field, or cannot be evaluated at arbitrary times.
        ConfigError: If the members do not fit together, or the sampler does not fit them.
    """

    def __init__(self, members: Sequence[Policy], composition: Composition, *, sampler: Any = None) -> None:
        nn.Module.__init__(self)
        fields = [require_field(number, member) for number, member in enumerate(members)]
        check_members(fields, composition)
        lead = fields[0]
        self.members = nn.ModuleList(fields)
        self.composition = composition
        self.process = lead.process
        sizes = sizes_of(fields, composition)
        self.chunk = replace(lead.chunk, obs_steps=sizes.obs_steps)
        self.encoder = ComposedEncoder(fields, composition.columns, sizes)
        self.normalizer = joint_normalizer(fields, composition.columns, sizes)
        own = lead.sampler if sampler is None else sampler
        self.config = replace(  # members apply their own guidance
            lead.config, sampler=own, obs_steps=sizes.obs_steps, goal_dropout=0.0, guidance=1.0
        )
        self._use_sampler(own, tuned_steps=None, log_prob_min_std=None)
        self.register_load_state_dict_post_hook(_rebuild_tables)

    def _use_sampler(self, sampler: Any, *, tuned_steps: int | None, log_prob_min_std: float | None) -> None:
        super()._use_sampler(sampler, tuned_steps=tuned_steps, log_prob_min_std=log_prob_min_std)
        t = torch.tensor(self.table.times, dtype=torch.float64)
        self._member_views = tuple(self._member(member, t) for member in self.fields)
        if self.composition.operator == "or":
            require_ancestral(self.table)
        self._active = self.composition.active
        reached = torch.stack([part.reached for part in self._member_views])
        self._sums = _sums(self.composition, self.process, t[:-1], reached)

    def _member(self, member: DenoisingPolicy, t: Tensor) -> _Member:
        """Build a member's step table for the sampler's times (K+1,)."""
        lead = self.fields[0]
        units = UnitChange.between(lead.normalizer, member.normalizer)
        if member.process == lead.process and units.are_same:
            everywhere = torch.ones_like(t[:-1], dtype=torch.bool)
            return _Member(member.with_sampler(self.sampler), None, None, everywhere)
        if member.process.has_second_time and not getattr(self.sampler, "takes_whole_steps", False):
            raise CapabilityError(
                f"{named(member)} needs a sampler of the lead that takes whole steps. Use sampler=euler."
            )
        t_member = matched_time(lead.process, member.process, units, t)
        view = member.with_sampler(_At(times=tuple(t_member.tolist())))
        places = (lead.process, member.process, units, t[:-1], t_member[:-1])
        limit = getattr(member.sampler, "clip_x0", None)
        return _Member(view, TimeMatchTable(time_matches(*places)), limit, is_reached(*places))

    @property
    def fields(self) -> list[DenoisingPolicy]:
        """The members, the lead first."""
        return [member for member in self.members if isinstance(member, DenoisingPolicy)]

    def with_weights(self, *weights: Weight) -> Self:
        """Return a view of this composition with other weights; networks are shared."""
        view = self._view()
        view.composition = replace(self.composition, weights=weights)
        check_members(self.fields, view.composition)
        view._use_sampler(self.sampler, tuned_steps=None, log_prob_min_std=None)
        return view

    def with_act_steps(self, act_steps: int) -> Self:
        view = super().with_act_steps(act_steps)
        lead, *others = self.fields
        view.members = nn.ModuleList([lead.with_act_steps(act_steps), *others])
        return view

    def condition(self, vec: Tensor) -> Cond:
        widths = [member.encoder.cond_dim for member in self.fields]
        parts = zip(self.fields, vec.split(widths, dim=1), strict=True)
        return joined([member.condition(part) for member, part in parts])

    def bind(self, cond: Cond) -> BoundField:
        conds = member_conds(cond)
        bound = {i: self._member_views[i].bind(conds[i]) for i in self._active}
        if self.composition.operator == "or":
            shares = [float(self.composition.weights[i]) for i in bound]  # type: ignore[arg-type]
            return BoundMixture(self.table, list(bound.values()), shares, self.composition.temperature)
        sums = self._sums
        return lambda k, x: sums[k](lambda i: bound[i](k, x), x)

    def bind_packed(self, cond: Cond) -> None:
        """Combine members by `bind` alone."""

    def evaluate(self, cond: Cond) -> Evaluate:
        if self.composition.operator == "or":
            raise CapabilityError(
                "operator=or has densities along a denoising chain only, not at a single state. Use "
                "operator=convex."
            )
        conds, composition, process = member_conds(cond), self.composition, self.process
        chosen = composition.active

        def net(x: Tensor, t: Tensor, until: Tensor | None = None, *, level: Tensor | None = None) -> Tensor:
            wide = t.double()
            answers = [_prediction_of(self.fields[0], self.fields[i], conds[i], x, wide) for i in chosen]
            predictions, reached = zip(*answers, strict=True)
            weights = composition.redistributed(
                composition.coefficients(wide)[list(chosen)], torch.stack(reached)
            )
            surplus = composition.surplus(weights)
            out = combine(predictions, [weight.to(x.dtype)[:, None, None] for weight in weights])
            if composition.operator != "product":
                return out
            from_x = surplus * _noise_free(process, wide)
            more, share = (value.to(x.dtype)[:, None, None] for value in (surplus, from_x))
            return out + more * predictions[0] - share * x

        return net

    @property
    def field(self) -> Any:
        return self._refuse_training()

    @property
    def scored_net(self) -> Any:
        return self._refuse_training()

    def sample_chain(
        self, cond: Cond, *, noise: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Chain:
        return self._refuse_training()

    def _refuse_training(self) -> NoReturn:
        raise CapabilityError(
            "a composition has no network to fine-tune. Fine-tune its members, or steer its noise."
        )


def _prediction_of(
    lead: DenoisingPolicy, member: DenoisingPolicy, cond: Cond, x: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a member's prediction in the lead's parametrisation, and where its path reaches the noise.

    Shapes:
        x: (B, Th, Da), the lead's states. t: (B,) float64, its times.
    """
    units = UnitChange.between(lead.normalizer, member.normalizer)
    kind = member.process.kind
    if member.process == lead.process and units.are_same:
        return member.predict(x, t.to(x.dtype), cond, kind=kind), torch.ones_like(t, dtype=torch.bool)
    t_member = matched_time(lead.process, member.process, units, t)
    places = (lead.process, member.process, units, t, t_member)
    match = TimeMatch(*time_matches(*places).to(x)[:, :, None].unbind(0))
    state = match.state(x)
    raw = member.predict(state, t_member.to(x.dtype), cond, kind=kind)
    return match.output(x, state, raw, getattr(member.sampler, "clip_x0", None)), is_reached(*places)


def _sums(composition: Composition, process: Any, t: Tensor, reached: Tensor) -> tuple[Sum, ...]:
    """Return the weighted sum of every step, at times t (K,) float64 reached by members (N, K)."""
    coefficients = composition.redistributed(composition.coefficients(t), reached)
    surplus = composition.surplus(coefficients)
    alpha, _ = process.alpha_sigma(t)
    if bool(((surplus != 0) & (alpha == 0)).any()):
        raise ConfigError(
            "weights must add up to 1 where the process starts from pure noise. Put a policy with "
            "process=diffusion or edm first, or rescale the weights."
        )
    noise_free = _noise_free(process, t) if bool(surplus.any()) else torch.zeros_like(t)
    sums = []
    rows = zip(coefficients.T.tolist(), surplus.tolist(), noise_free.tolist(), strict=True)
    for weights, more, share in rows:
        chosen = tuple(i for i, weight in enumerate(weights) if weight) or composition.active[:1]
        sums.append(Sum(chosen, tuple(weights[i] for i in chosen), more, share))
    return tuple(sums)


def _noise_free(process: Any, t: Tensor) -> Tensor:
    """Return the network's output per state at times t for zero predicted noise."""
    factor: Tensor = process.convert(torch.ones_like(t), t, torch.zeros_like(t), "eps", process.kind)
    return factor


def _rebuild_tables(policy: ComposedPolicy, _: Any) -> None:
    """Rebuild the members' tables after loading, since these depend on normalisers."""
    policy._use_sampler(
        policy.sampler, tuned_steps=policy.tuned_steps, log_prob_min_std=policy.log_prob_min_std
    )
