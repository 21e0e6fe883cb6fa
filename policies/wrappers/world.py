"""A learned world: an ensemble that answers a state and an action with the next state, reward and end.

Every member is a policy whose observation is a state beside an action, and whose chunk is one row: the change
of the state in units of its normaliser, the reward, and two flags, the end and the success. Members share
sizes and statistics and differ in weights.

Legend: G members, B rows, S stored states, F of them first states of episodes, Do and Da widths of state and
action, y_g the normalised change that member g says to a given noise::

    next state  s + y_g / scale
    flag        what member g says is above the threshold at which as many flags are imagined as were recorded
    doubt       max over g of |y_g - mean y| / sqrt(Do)

The doubt of one member is 0. For a deterministic process it is the disagreement of means; else it compares
samples of the same noise.

In a world of frames the state is [s, z], the task's state and the vector of its frames, of widths Dt and L. A
decoder draws z. Its doubt is the root of the mean of two mean squares, of s and of z: however wide z is, it
counts half.

Source: ensembles of PETS (arXiv 1805.12114) and MBPO (arXiv 1906.08253), the disagreement of means of MOReL
(arXiv 2005.05951). Deviation: members are any process of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.networks.frames import FrameCoder
from policies.policy import Policy
from policies.registry import register
from policies.wrappers.base import WrappedPolicy

FLAGS = 2
"""Last entries of a row: the end and the success; the reward stands before them."""
BESIDE = 1 + FLAGS
_NEVER = 1e9  # threshold of a flag that was never recorded, limit of a doubt that is always 0


@dataclass(frozen=True)
class Answers:
    """What the members of a world say to B states and actions.

    Shapes:
        states: (G, B, Do), reached states. rewards: (G, B). terminated, success: (G, B) bool. doubt: (B,).
    """

    states: Tensor
    rewards: Tensor
    terminated: Tensor
    success: Tensor
    doubt: Tensor


@register("wrapper", "world")
@dataclass(frozen=True)
class World(Checked):
    """Sizes of a learned world."""

    members: int = bounded(1, ge=1)  # G
    num_states: int = bounded(1, ge=1)  # S, states of the data in which branches begin
    num_first: int = bounded(1, ge=1)  # F, first states of recorded episodes
    latent_dim: int = bounded(0, ge=0)  # L; 0: no frames
    cameras: tuple[str, ...] = ()  # cameras of the frames
    image_size: tuple[int, ...] = bounded((), ge=1)  # height and width of the frames [pixels]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("image_size", len(self.image_size) == 2 or not self.latent_dim, "height and width")
        self.require("cameras", bool(self.cameras) or not self.latent_dim, "cameras of the frames")

    def coder(self) -> FrameCoder | None:
        """Return a coder of frames, with fresh weights; None without frames."""
        if not self.latent_dim:
            return None
        height, width = self.image_size
        return FrameCoder(self.cameras, (height, width), self.latent_dim)

    def wrap(self, base: Policy) -> WorldModel:
        """Return a world of copies of a member; weights and states are loaded later."""
        return WorldModel([base, *(base.clone() for _ in range(self.members - 1))], self)


class WorldModel(WrappedPolicy):
    """The members, and what a task needs beside them; see the module.

    Attributes:
        states, first_states: (S, Do) and (F, Do), recorded states in which episodes begin.
        state_dim, task_dim: Do and, of it, the width Dt of the task's state, which comes first.
        coder: Of frames; None: the world has none.
        doubt_limit: (), the 99 % quantile of the doubt on the data.
        thresholds: (2,), of the flags.

    Raises:
        ConfigError: If a member is no answer to a state and an action.
    """

    states: Tensor
    first_states: Tensor
    doubt_limit: Tensor
    thresholds: Tensor

    def __init__(self, members: list[Policy], wrapper: World) -> None:
        super().__init__(members[0], wrapper)
        self.others = nn.ModuleList(members[1:])
        self.state_dim = self.chunk.action_dim - BESIDE
        self.task_dim = self.state_dim - wrapper.latent_dim
        self.coder = wrapper.coder()
        if self.chunk.horizon != 1 or not 0 < self.task_dim <= self.state_dim < self.obs_dim:
            raise ConfigError(
                f"a member of a world says one row, a state's change with {BESIDE} entries more, to a state "
                f"and an action; got {self.chunk.horizon} rows of {self.chunk.action_dim} for observations "
                f"of {self.obs_dim}."
            )
        self.register_buffer("states", torch.zeros(wrapper.num_states, self.state_dim))
        self.register_buffer("first_states", torch.zeros(wrapper.num_first, self.state_dim))
        self.register_buffer("doubt_limit", torch.tensor(_NEVER))
        self.register_buffer("thresholds", torch.full((FLAGS,), _NEVER))

    @property
    def members(self) -> list[Policy]:
        return [self.base, *(cast(Policy, other) for other in self.others)]

    def with_sampler(self, sampler: Any, **options: Any) -> Self:
        view = super().with_sampler(sampler, **options)
        view.others = nn.ModuleList(
            cast(Any, other).with_sampler(sampler, **options) for other in self.others
        )
        return view

    @property
    def state_scale(self) -> Tensor:
        """Units of changes, (Do,): normalised per physical."""
        return self.normalizer.get_buffer("state_scale")[: self.state_dim]

    @torch.no_grad()
    def say(self, states: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows (G, B, Do + 3) of all members and their doubt (B,).

        Args:
            states: (B, Do), physical.
            actions: (B, Da), physical.
            noise: (B, *noise_shape), the same for all members.
        """
        obs = {"state": torch.cat([states, actions], dim=-1).unsqueeze(1)}
        rows = torch.stack([member.plan(obs, noise)[:, 0] for member in self.members])
        changes = rows[..., : self.state_dim]
        parts = (changes - changes.mean(dim=0)).square().tensor_split([self.task_dim], dim=-1)
        doubt = torch.stack([part.mean(dim=-1) for part in parts if part.shape[-1]]).mean(dim=0)
        return self.physical(rows), doubt.sqrt().amax(dim=0)

    def answer(self, states: Tensor, actions: Tensor, noise: Tensor) -> Answers:
        """Return what the members say; arguments as `say`."""
        rows, doubt = self.say(states, actions, noise)
        changes, rewards, flags = rows.split([self.state_dim, 1, FLAGS], dim=-1)
        over = flags > self.thresholds
        return Answers(
            states + changes / self.state_scale, rewards[..., 0], over[..., 0], over[..., 1], doubt
        )

    @torch.no_grad()
    def calibrate(self, states: Tensor, actions: Tensor, flags: Tensor, noise: Tensor) -> None:
        """Set thresholds and the limit of the doubt from recorded steps.

        Args:
            states: (B, Do).
            actions: (B, Da).
            flags: (B, 2), whether a step ended its episode, and with success.
            noise: (B, *noise_shape).
        """
        rows, doubt = self.say(states, actions, noise)
        for i, recorded in enumerate(flags.double().mean(dim=0).tolist()):
            said = rows[..., self.state_dim + 1 + i].flatten()
            self.thresholds[i] = torch.quantile(said, 1.0 - recorded) if recorded else _NEVER
        self.doubt_limit.copy_(torch.quantile(doubt, 0.99) if self.others else torch.tensor(_NEVER))
