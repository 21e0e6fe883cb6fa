"""Observations of a composition's members, and compatibility checks.

A composition receives one observation. Each member takes the newest rows of its history and its columns of
the state, and encodes and normalises them itself.

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
    """Put the conditions of the members together."""
    return ComposedCond(torch.cat([member.vec for member in members], dim=-1), members=tuple(members))


class ComposedEncoder(nn.Module):
    """Pass every member the newest rows of its history and its columns of the state.

    Args:
        members: The policies; referenced, not registered as submodules.
        columns: See `Composition`.
        sizes: Sizes of an observation of the composition.
    """

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
        return joined(
            [
                member.encode(_seen(member, {**obs, "state": state}, columns), generator=generator)
                for member, columns in self._members
            ]
        )


def _seen(member: Policy, obs: Mapping[str, Tensor], columns: tuple[int, ...] | None) -> dict[str, Tensor]:
    newest = slice(-member.chunk.obs_steps, None)
    histories = ("state", *member.images)
    seen = {name: part[:, newest] if name in histories else part for name, part in obs.items()}
    return seen if columns is None else {**seen, "state": seen["state"][..., list(columns)]}


def of_members(cond: Cond) -> tuple[Cond, ...]:
    """Return the conditions of the members."""
    if not isinstance(cond, ComposedCond):
        raise ConfigError(
            f"a composition needs the conditions of all its members; got a {type(cond).__name__} of one "
            f"policy. Make it with the composition's encode."
        )
    return cond.members


def require_field(number: int, member: Policy) -> DenoisingPolicy:
    """Refuse a member without a prediction at every noise level."""
    if isinstance(member, DenoisingPolicy):
        process = member.process
        if isinstance(process, GaussianPath) and process.is_integrable:
            return member
    raise CapabilityError(
        f"a composition needs members with a denoising field at every noise level (process diffusion, flow, "
        f"edm, ...); member {number}, {named(member)}, has none."
    )


def named(member: Policy) -> str:
    """Return the name of a member for messages."""
    return f"{type(member).__name__} with process '{type(member.config.process).__name__}'"


def check_members(members: Sequence[DenoisingPolicy], composition: Composition) -> None:
    """Refuse members that are incompatible with each other or the composition."""
    if len(members) != len(composition.weights):
        raise ConfigError(
            f"a composition needs one weight per member; got {len(composition.weights)} weights for "
            f"{len(members)} members."
        )
    for name, what in (("action_dim", "action width"), ("horizon", "horizon"), ("action_start", "first row")):
        values = [getattr(member.chunk, name) for member in members]
        if len(set(values)) > 1:
            raise ConfigError(
                f"members of a composition must agree on what a chunk is; their {what} ({name}) is {values}. "
                f"Train them with the same policy.{name}."
            )
    for number, (member, columns) in enumerate(zip(members, composition.columns, strict=True)):
        if columns is not None and len(columns) != member.obs_dim:
            raise ConfigError(
                f"columns of member {number} must name the {member.obs_dim} entries of the state that it "
                f"sees; got {len(columns)}."
            )


def sizes_of(members: Sequence[DenoisingPolicy], composition: Composition) -> ObservationSizes:
    """Return the observation sizes that cover every member."""
    whole = {m.obs_dim for m, seen in zip(members, composition.columns, strict=True) if seen is None}
    widths = whole | ({composition.obs_dim} if composition.obs_dim is not None else set())
    if len(widths) != 1:
        raise ConfigError(
            f"members that see the whole state must see one state; they expect the widths {sorted(widths)}. "
            f"Give the columns that each member sees, and obs_dim where none sees all."
        )
    (obs_dim,) = widths
    named = [column for seen in composition.columns if seen is not None for column in seen]
    if not all(0 <= column < obs_dim for column in named):
        raise ConfigError(f"columns must lie in 0..{obs_dim - 1}; got {named}.")
    goals = {member.goal_dim for member in members if member.goal_dim}
    if len(goals) > 1:
        raise ConfigError(f"members with goals must have one kind of goal; got the widths {sorted(goals)}.")
    images: dict[str, ImageShape] = {}
    for member in members:
        for camera, shape in member.images.items():
            if images.setdefault(camera, shape) != shape:
                raise ConfigError(
                    f"members must see camera '{camera}' in one size; got {images[camera]} and {shape}."
                )
    obs_steps = max(member.chunk.obs_steps for member in members)
    return ObservationSizes(obs_dim, obs_steps, max(goals, default=0), images)


def joint_normalizer(
    members: Sequence[DenoisingPolicy], columns: Sequence[tuple[int, ...] | None], sizes: ObservationSizes
) -> Normalizer:
    """Return the lead's action map, and for every observed entry the map of the first member that uses it.

    Members normalise their own observations; this state map only gives the range of expected values.
    """
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
