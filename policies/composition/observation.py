"""Observations of a composition's members, and compatibility checks.

Each member encodes and normalises its columns of the state and the newest rows of its history itself.

Legend: B batch, C condition width of a member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.composition.operators import Composition
from policies.denoising import DenoisingPolicy
from policies.encoders import ImageShape, ObservationSizes, read
from policies.errors import CapabilityError, ConfigError
from policies.normalizer import Normalizer
from policies.policy import Policy
from policies.processes.base import GaussianPath
from policies.protocols import Cond, Observation


@dataclass(frozen=True)
class ComposedCond(Cond):
    """The conditions of the members; `vec` (B, sum C) holds their vectors side by side."""

    members: tuple[Cond, ...] = ()

    def _map(self, change: Callable[[Tensor], Tensor]) -> Cond:
        return joined([member._map(change) for member in self.members])


def joined(members: Sequence[Cond]) -> ComposedCond:
    """Return the condition of a composition."""
    return ComposedCond(torch.cat([member.vec for member in members], dim=-1), members=tuple(members))


class ComposedEncoder(nn.Module):
    """Encode an observation by every member; members are referenced, not registered as submodules."""

    token_dim = 0

    def __init__(
        self, members: Sequence[Policy], columns: Sequence[tuple[int, ...] | None], sizes: ObservationSizes
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self._members = tuple(zip(members, columns, strict=True))  # a tuple keeps them out of the state dict

    @property
    def cond_dim(self) -> int:
        return sum(member.encoder.cond_dim for member, _ in self._members)

    def forward(
        self, obs: Observation, normalizer: Normalizer, generator: torch.Generator | None = None
    ) -> ComposedCond:
        state = read(obs, "state", (self.sizes.obs_steps, self.sizes.obs_dim))
        inputs = [(one, _input_of(one, {**obs, "state": state}, columns)) for one, columns in self._members]
        return joined([member.encode(own, generator=generator) for member, own in inputs])


def _input_of(
    member: Policy, obs: Mapping[str, Tensor], columns: tuple[int, ...] | None
) -> dict[str, Tensor]:
    newest = slice(-member.chunk.obs_steps, None)
    histories = ("state", *member.images)
    own = {name: part[:, newest] if name in histories else part for name, part in obs.items()}
    return own if columns is None else {**own, "state": own["state"][..., list(columns)]}


def member_conds(cond: Cond) -> tuple[Cond, ...]:
    """Return the conditions of the members."""
    if not isinstance(cond, ComposedCond):
        raise ConfigError(
            f"a composition needs a condition of its own encode; got the {type(cond).__name__} of one policy."
        )
    return cond.members


def require_field(number: int, member: Policy) -> DenoisingPolicy:
    """Return a member's field, of planners that of plans; refuse one without predictions at every level."""
    as_field = getattr(member, "as_field", None)
    member = member if as_field is None else as_field()
    if isinstance(member, DenoisingPolicy):
        process = member.process
        if isinstance(process, GaussianPath) and process.is_integrable:
            return member
    raise CapabilityError(
        f"members of a composition need a prediction at every noise level (process diffusion, flow, edm, …); "
        f"got member {number}, {named(member)}."
    )


def named(member: Policy) -> str:
    """Return a description of a member for messages."""
    return f"{type(member).__name__} with process '{type(member.config.process).__name__}'"


def check_members(members: Sequence[DenoisingPolicy], composition: Composition) -> None:
    """Refuse members that are incompatible with each other or the composition."""
    if len(members) != len(composition.weights):
        raise ConfigError(
            f"a composition needs one weight per member, {len(members)}; got {len(composition.weights)}."
        )
    for name in ("action_dim", "horizon", "action_start"):
        values = [getattr(member.chunk, name) for member in members]
        if len(set(values)) > 1:
            how = "of one task" if name == "action_dim" else f"with one policy.{name}"
            raise ConfigError(f"members must have one {name}; got {values}. Train them {how}.")
    for number, (member, columns) in enumerate(zip(members, composition.columns, strict=True)):
        if columns is not None and len(columns) != member.obs_dim:
            expected = f"columns of member {number} must list its {member.obs_dim} entries of the state"
            raise ConfigError(f"{expected}; got {len(columns)}.")


def sizes_of(members: Sequence[DenoisingPolicy], composition: Composition) -> ObservationSizes:
    """Return the observation sizes that cover every member."""
    whole = {m.obs_dim for m, seen in zip(members, composition.columns, strict=True) if seen is None}
    widths = whole | ({composition.obs_dim} if composition.obs_dim is not None else set())
    if len(widths) != 1:
        raise ConfigError(
            f"members without columns must expect one width of the state; got {sorted(widths)}. Give the "
            f"columns of each member, and obs_dim if all have columns."
        )
    (obs_dim,) = widths
    named = [column for seen in composition.columns if seen is not None for column in seen]
    if not all(0 <= column < obs_dim for column in named):
        raise ConfigError(f"columns must lie in 0..{obs_dim - 1}; got {named}.")
    goals = {member.goal_dim for member in members if member.goal_dim}
    if len(goals) > 1:
        raise ConfigError(f"members must have one width of the goal; got {sorted(goals)}.")
    images: dict[str, ImageShape] = {}
    for member in members:
        for camera, shape in member.images.items():
            if images.setdefault(camera, shape) != shape:
                sizes = f"{images[camera]} and {shape}"
                raise ConfigError(f"members must have one size of camera '{camera}'; got {sizes}.")
    obs_steps = max(member.chunk.obs_steps for member in members)
    return ObservationSizes(obs_dim, obs_steps, max(goals, default=0), images)


def joint_normalizer(
    members: Sequence[DenoisingPolicy], columns: Sequence[tuple[int, ...] | None], sizes: ObservationSizes
) -> Normalizer:
    """Return the lead's action map, and for every observed entry that of its first member (a range)."""
    lead = members[0]
    dims = {"state": sizes.obs_dim, "goal": sizes.goal_dim, "action": lead.chunk.action_dim}
    modes = {name: "limits" for name, dim in dims.items() if dim} | dict(lead.normalizer.modes)
    joint = Normalizer(modes, dims)
    with torch.no_grad():
        for member, seen in reversed(list(zip(members, columns, strict=True))):
            for name in member.normalizer.modes:
                where = list(seen) if name == "state" and seen is not None else slice(None)
                for part in ("scale", "offset"):
                    key = f"{name}_{part}"
                    joint.get_buffer(key)[where] = member.normalizer.get_buffer(key).to("cpu", torch.float32)
    return joint.to(lead.device, lead.dtype)
