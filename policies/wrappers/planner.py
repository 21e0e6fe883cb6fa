"""Planner: a policy that denoises a whole trajectory and executes its first actions.

Legend: B batch, N plans, H rows of a plan, O and A widths of state and action, row i = [a_i, s_i] with
D = A + O numbers, or s_i alone with D = O; K denoising steps, l level (0 cleanest), V value of a noisy plan.

    known    s_0 = the state; where there is a goal, the first entries of s_{H-1} = the goal
    train    x_t = alpha x + sigma eps, but known entries are clean;  loss = error of all others
    sample   x_K ~ temperature N(0, I); known entries are written into every state
    guide    before step l >= rest: x <- x + scale std_l^2 grad V(x, l), `repeats` times
    choose   the plan of the largest V at l = 0 among N
    act      a_i of the rows, or a_i = inverse(s_i, s_{i+1})

A label, such as the return of the data from here on, is a condition of the network: it stands where goals
stand in the inner policy, is dropped in training, and guides without a classifier. The policy asks for one.

Source: Diffuser (arXiv 2205.09991), Decision Diffuser (arXiv 2211.15657). Deviations: a goal fixes its own
entries alone, where Diffuser fixes the whole last state; plans are compared by the value of the finished
plan, where Diffuser keeps the one before its last move; an unknown label is 0, which the network embeds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.bounds import Checked, bounded
from policies.composition.operators import Weight
from policies.composition.policy import ComposedPolicy
from policies.denoising import DenoisingPolicy
from policies.encoders import ObservationSizes, read
from policies.encoders.state import StateEncoder
from policies.errors import CapabilityError, ConfigError
from policies.networks.mlp_blocks import TrunkConfig
from policies.networks.plan_value import PlanValue
from policies.networks.unet import UnetConfig
from policies.normalizer import MODES, Normalizer
from policies.policy import Policy, reduce_elements
from policies.processes.base import GaussianPath
from policies.protocols import TE, Cond, Hook, Hooks, Observation, Reduction, Rng, Start
from policies.registry import name_of, register
from policies.samplers.hooks import Ascent, Overwrite
from policies.wrappers.base import WrappedPolicy
from policies.wrappers.candidates import select
from policies.wrappers.plan_field import PlanField


@register("wrapper", "planner")
@dataclass(frozen=True)
class Planner(Checked):
    """Sizes of a row, and how plans are sampled and chosen."""

    obs_dim: int = bounded(1, ge=1)  # O
    action_dim: int = bounded(1, ge=1)  # A
    goal_dim: int = bounded(0, ge=0)  # first entries of the last state that a goal fixes
    normalizer: str = bounded("limits", choices=MODES)  # of states and actions
    inverse_dims: tuple[int, ...] = bounded((), ge=1)  # hidden widths of the inverse dynamics; (): rows act
    label: float | None = None  # asked for; null: the network has no label
    temperature: float = bounded(1.0, ge=0)  # scale of all noise
    value_widths: tuple[int, ...] = bounded((), ge=1)  # channels per level of the value; (): no value
    plans: int = bounded(1, ge=1)  # N
    guide_scale: float = bounded(0.1, ge=0)  # step along the value's slope
    guide_repeats: int = bounded(2, ge=0)  # moves per denoising step
    guide_rest: int = bounded(2, ge=0)  # last denoising steps without moves

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("goal_dim", self.goal_dim <= self.obs_dim, f"at most obs_dim={self.obs_dim}")
        self.require("plans", self.plans == 1 or bool(self.value_widths), "1 without value")
        fits = not self.value_widths or self.value_widths[-1] % (4 * UnetConfig.groups) == 0
        self.require("value_widths", fits, f"a last width that divides by {4 * UnetConfig.groups}")

    @property
    def row_dim(self) -> int:
        """D, width of a row."""
        return self.obs_dim + (0 if self.inverse_dims else self.action_dim)

    def wrap(self, base: Policy) -> PlannerPolicy:
        """Return the policy that acts by plans, with fresh inverse dynamics and value."""
        return ComposedPlanner(base, self) if isinstance(base, ComposedPolicy) else PlannerPolicy(base, self)


class PlannerPolicy(WrappedPolicy):
    """Acts by plans of an inner policy, whose chunks are their rows and which reads no state.

    Attributes:
        inverse: Two states (..., 2 O) to an action (..., A); None where rows hold actions.
        value: Plans (B, H, D) and network times (B,) to values (B,); None without guide.

    Raises:
        CapabilityError: If the inner policy does not denoise along a path with a plain loss.
        ConfigError: If its sizes or horizons do not fit.
    """

    def __init__(self, base: Policy, wrapper: Planner) -> None:
        _require_plans(base, wrapper)
        super().__init__(base, wrapper)
        self.wrapper: Planner = wrapper
        sizes = {"state": wrapper.obs_dim, "action": wrapper.action_dim}
        sizes |= {"goal": wrapper.goal_dim} if wrapper.goal_dim else {}
        self._modules["normalizer"] = Normalizer(dict.fromkeys(sizes, wrapper.normalizer), sizes)
        goal = wrapper.goal_dim + base.goal_dim
        self._modules["encoder"] = StateEncoder(ObservationSizes(wrapper.obs_dim, 1, goal))
        self.inverse: Any = None
        if wrapper.inverse_dims:
            trunk = TrunkConfig(residual=False, hidden_dims=wrapper.inverse_dims)
            self.inverse = trunk.build_trunk(2 * wrapper.obs_dim, wrapper.action_dim).to(base.dtype)
        self.value: Any = None
        if wrapper.value_widths:
            self.value = PlanValue(base.chunk.shape, wrapper.value_widths).to(base.dtype)

    chunk: Any = property(lambda self: self.base.config.chunk(self.wrapper.action_dim))
    normalizer: Any = property(lambda self: self._modules["normalizer"])
    encoder: Any = property(lambda self: self._modules["encoder"])

    @property
    def goal_dim(self) -> int:
        """Width of goals in the last state; labels are no part of an observation."""
        return self.wrapper.goal_dim

    def fit(self, statistics: Any) -> None:
        """Set the normaliser from statistics of `state` and `action`; goals are states."""
        count = self.wrapper.goal_dim
        goal = {name: value[:count] for name, value in statistics["state"].items()}
        self.normalizer.fit({**statistics, "goal": goal})

    def encode(self, obs: Observation, *, generator: Rng = None) -> Cond:
        """Return state, goal and label, normalised: (B, O + Dg) or (B, O + Dg + 1).

        In training the label of every row stands in `label`; without it the policy asks for its own.
        """
        wrapper = self.wrapper
        state = self.normalizer.encode("state", read(obs, "state", (1, wrapper.obs_dim)))[:, 0]
        parts = [state]
        if wrapper.goal_dim:
            parts.append(self.normalizer.encode("goal", read(obs, "goal", (wrapper.goal_dim,))))
        if wrapper.label is not None:
            parts.append(obs["label"] if "label" in obs else torch.full_like(state[:, :1], wrapper.label))
        return Cond(torch.cat(parts, dim=1))

    def condition(self, vec: Tensor) -> Cond:
        return Cond(vec)

    def normalize_action(self, action: Tensor) -> Tensor:
        """Physical -> normalised: actions (..., A), or actions and states (..., A + O)."""
        width = self.wrapper.action_dim
        parts = [self.normalizer.encode("action", action[..., :width])]
        if action.shape[-1] > width:
            parts.append(self.normalizer.encode("state", action[..., width:]))
        return torch.cat(parts, dim=-1)

    # -- training ---------------------------------------------------------------------------------------

    def sample_te(self, n: int, *, generator: Rng = None) -> TE:
        return cast(DenoisingPolicy, self.base).sample_te(n, generator=generator)

    def corrupted(self, rows: Tensor, te: TE) -> Tensor:
        """Return noisy plans (B, H, D) of rows (B, H, A + O), known entries clean."""
        plan, base = self.plan_rows(rows), cast(Any, self.base)
        return torch.where(self.known_mask(plan), plan, base.process.corrupt(plan, te.eps, te.t))

    def matching_loss(self, cond: Cond, action: Tensor, te: TE, *, reduce: Reduction = "sample") -> Tensor:
        """Return the loss of rows (B, H, A + O), zero in known entries; unreduced (B, H, D)."""
        base, inner = cast(Any, self.base), self.inner(cond)
        inner = inner.freed(te.more["drops_goal"]) if "drops_goal" in te.more else inner
        plan, x = self.plan_rows(action), self.corrupted(action, te)
        error = base.evaluate(inner)(x, te.t, level=te.level) - base.process.target(plan, te.eps, te.t)
        return reduce_elements(error.square() * ~self.known_mask(plan), reduce)

    def inverse_loss(self, rows: Tensor) -> Tensor:
        """Return the squared errors (B, H) of actions between states; the last row is 0, the mean theirs."""
        action, state = rows.split((self.wrapper.action_dim, self.wrapper.obs_dim), dim=-1)
        error = (self._between(state) - action[:, :-1]).square().mean(dim=-1)
        return F.pad(error, (0, 1)) * (rows.shape[1] / error.shape[1])

    def plan_rows(self, rows: Tensor) -> Tensor:
        """Return what a plan holds of actions and states (..., A + O)."""
        return rows[..., rows.shape[-1] - self.wrapper.row_dim :]

    def known_mask(self, plan: Tensor) -> Tensor:
        """Return where plans are known, (H, D) bool."""
        rows, dims = self.base.chunk.shape
        first, goal = dims - self.wrapper.obs_dim, self.wrapper.goal_dim
        row = torch.arange(rows, device=plan.device)[:, None]
        column = torch.arange(dims, device=plan.device)
        is_goal = (row == rows - 1) & (column >= first) & (column < first + goal)
        return ((row == 0) & (column >= first)) | is_goal

    # -- acting -----------------------------------------------------------------------------------------

    noise_sensitive: Any = property(lambda self: self.wrapper.temperature > 0)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """That of the inner policy, or (N, …) of several plans."""
        several = (self.wrapper.plans,) if self.wrapper.plans > 1 else ()
        return (*several, *self.base.noise_shape)

    @property
    def table(self) -> Any:
        """Steps of the sampler."""
        return cast(Any, self.base).table

    def start_noise(self, noise: Tensor) -> Tensor:
        """Return the noise (B N, H, D) from which plans start, at the planner's temperature."""
        flat = noise.flatten(0, 1) if self.wrapper.plans > 1 else noise
        first: Tensor = cast(Any, self.base).start_noise(flat)
        return self.wrapper.temperature * first

    @property
    def follows_value(self) -> bool:
        """Whether a decision differentiates the value."""
        return self.value is not None and self.wrapper.guide_repeats > 0

    def decode(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return the actions (B, H, A) of the chosen plan, normalised; the last of an inverse is repeated.

        `start` and `hooks` are those of `trajectory`.
        """
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self.chunk_of(self.trajectory(cond, noise, grad=grad, start=start, hooks=hooks))

    def trajectory(
        self, cond: Cond, noise: Tensor, *, grad: bool = False, start: Start = None, hooks: Hooks = ()
    ) -> Tensor:
        """Return the chosen plan (B, H, D), normalised.

        A start has the rows of B plans, or of all B N of them; hooks see B N plans, after the planner's own.
        """
        count = self.wrapper.plans
        repeated = cond.repeat(count) if count > 1 else cond
        scaled = self.wrapper.temperature * (noise.flatten(0, 1) if count > 1 else noise)
        if start is not None:
            start = (start[0].repeat_interleave(len(scaled) // len(start[0]), dim=0), start[1])
        every = [*self.hooks(repeated), *hooks]
        plans = self.base.decode(self.inner(repeated), scaled, grad=grad, start=start, hooks=every)
        if count == 1:
            return plans
        worth = self.worth(plans, cast(Any, self.base).table.times[-2])
        return select(plans.unflatten(0, (-1, count)), worth.unflatten(0, (-1, count)))

    def known(self, cond: Cond) -> tuple[Tensor, Tensor]:
        """Return plans (B, H, D) of what is known and zeros, and where it is known (H, D)."""
        wrapper, (rows, dims) = self.wrapper, self.base.chunk.shape
        state = cond.vec[:, : wrapper.obs_dim]
        goal = cond.vec[:, wrapper.obs_dim : wrapper.obs_dim + wrapper.goal_dim]
        first = dims - wrapper.obs_dim
        start = F.pad(state, (first, 0)).unsqueeze(1)
        end = F.pad(goal, (first, wrapper.obs_dim - wrapper.goal_dim)).unsqueeze(1)
        known = F.pad(start, (0, 0, 0, rows - 1)) + F.pad(end, (0, 0, rows - 1, 0))
        return known, self.known_mask(known)

    def hooks(self, cond: Cond) -> list[Hook]:
        """Return the hooks that write what is known into every state, and follow the value."""
        wrapper, (known, mask) = self.wrapper, self.known(cond)
        found: list[Hook] = [Overwrite(known, mask)]
        if self.follows_value:
            moves = (wrapper.guide_scale, wrapper.guide_repeats, wrapper.guide_rest)
            found.append(Ascent(self.worth, *moves, fixed=mask))
        return found

    def worth(self, plans: Tensor, t: float) -> Tensor:
        """Return the values (B,) of plans (B, H, D) at a sampling time."""
        time = cast(Any, self.base).process.net_time(torch.full_like(plans[:, 0, 0], t))
        values: Tensor = self.value(plans, time)
        return values

    def chunk_of(self, plan: Tensor) -> Tensor:
        """Return the actions (B, H, A) of plans (B, H, D)."""
        if self.inverse is None:
            return plan[..., : self.wrapper.action_dim]
        actions = self._between(plan)
        return torch.cat([actions, actions[:, -1:]], dim=1)

    def _between(self, states: Tensor) -> Tensor:
        actions: Tensor = self.inverse(torch.cat([states[:, :-1], states[:, 1:]], dim=-1))
        return actions

    def inner(self, cond: Cond) -> Cond:
        """Return the condition of the network: the label, if there is one."""
        return self.base.condition(cond.vec[:, self.wrapper.obs_dim + self.wrapper.goal_dim :])

    def as_field(self) -> PlanField:
        """Return the denoiser of its plans, for compositions."""
        return PlanField(self)

    def with_guidance(self, guidance: float) -> Self:
        """Return a view with another weight of the label."""
        view = self._view()
        view.base = cast(Any, self.base).with_guidance(guidance)
        return view

    def with_fields(self, **values: Any) -> Self:
        """Return a view with other fields of `Planner`."""
        view = self._view()
        view.wrapper = replace(self.wrapper, **values)
        return view


class ComposedPlanner(PlannerPolicy):
    """Acts by plans of a composition of planners.

    Every member knows the state and the goal in its own units and asks for its own label. The value, the
    inverse dynamics and the temperature are the lead's.

    Raises:
        CapabilityError: If a member is no planner, or the plans are weighed by densities.
        ConfigError: If members read columns of the state.
    """

    def __init__(self, base: ComposedPolicy, wrapper: Planner) -> None:
        WrappedPolicy.__init__(self, base, wrapper)
        composition = base.composition
        if not all(isinstance(member, PlanField) for member in base.fields):
            raise CapabilityError("planners are composed with planners alone.")
        if composition.operator == "or":
            raise CapabilityError(
                "operator=or weighs chunks by their densities, which plans with known entries lack. Use "
                "operator=convex, product or cfg_sum."
            )
        if any(columns is not None for columns in composition.columns):
            raise ConfigError("planners plan the whole state; leave columns out.")
        self.wrapper = wrapper

    @property
    def lead(self) -> PlannerPolicy:
        """The first member."""
        planner: PlannerPolicy = cast(Any, self.base).fields[0].planner
        return planner

    composition: Any = property(lambda self: self.base.composition)
    fields: Any = property(lambda self: self.base.fields)
    normalizer: Any = property(lambda self: self.lead.normalizer)
    encoder: Any = property(lambda self: self.base.encoder)
    inverse: Any = property(lambda self: self.lead.inverse)
    value: Any = property(lambda self: self.lead.value)

    def encode(self, obs: Observation, *, generator: Rng = None) -> Cond:
        """Return the members' conditions side by side, the lead's state and goal first."""
        return self.base.encode(obs, generator=generator)

    def condition(self, vec: Tensor) -> Cond:
        return self.base.condition(vec)

    def inner(self, cond: Cond) -> Cond:
        """Return the conditions of the members."""
        return cond

    def with_weights(self, *weights: Weight) -> Self:
        """Return a view of this composition with other weights; networks are shared."""
        view = self._view()
        view.base = cast(ComposedPolicy, self.base).with_weights(*weights)
        return view

    def as_field(self) -> PlanField:
        raise CapabilityError("a composition of planners is no member of another; compose all at once.")


def denoises_plans(process: Any) -> bool:
    """Whether a process denoises along a path and learns by the plain squared error of its prediction."""
    is_plain = getattr(type(process), "losses", None) is GaussianPath.losses
    return is_plain and process.is_integrable and not process.has_second_time


def _require_plans(base: Any, wrapper: Planner) -> None:
    process = base.config.process
    if not (isinstance(base, DenoisingPolicy) and denoises_plans(process)):
        raise CapabilityError(
            f"wrapper 'planner' denoises trajectories; got process={name_of('process', process)}. Use "
            "process=diffusion, flow or edm."
        )
    labels = int(wrapper.label is not None)
    expected = {"obs_dim": 0, "action_dim": wrapper.row_dim, "goal_dim": labels}
    found = {"obs_dim": base.obs_dim, "action_dim": base.chunk.action_dim, "goal_dim": base.goal_dim}
    if found != expected:
        raise ConfigError(f"the inner policy of this planner must have {expected}; got {found}.")
    chunk = base.chunk
    if chunk.obs_steps != 1 or chunk.action_start != 0:
        raise ConfigError(
            f"a planner begins with the newest state: policy.obs_steps=1 and policy.action_start=0; got "
            f"{chunk.obs_steps} and {chunk.action_start}."
        )
    if wrapper.inverse_dims and chunk.act_steps >= chunk.horizon:
        raise ConfigError(
            f"policy.act_steps must be below policy.horizon={chunk.horizon} where actions lie between "
            f"states; got {chunk.act_steps}."
        )
