"""The network of BESO as denoising backbone: a causal transformer over time, goals, states and actions.

    time, goal_1 … goal_G, state_1, action_1, state_2, action_2, …

Every token attends to itself and to earlier ones, so an action sees the noisy actions before it and the
states up to its own. State and action of a step share a learned position, the time has none.

Legend: M rows, B batch, K times, Th rows of a chunk, C condition width, G goals, S states, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.networks.attention import (
    EncoderBlock,
    LayerNorm,
    causal_mask,
    check_heads,
    draw_weights,
    require_equal_parts,
)
from policies.networks.embeddings import LinearEmbedding, embed_times
from policies.protocols import BoundField, Cond, Features
from policies.registry import register


@register("backbone", "gpt")
@dataclass(frozen=True)
class GptConfig(Checked):
    """A causal transformer over time, goals, states and actions, as in BESO.

    Attributes:
        obs_tokens: Number of equal parts of the condition, oldest first; `policy.obs_steps` for one token per
            observation.
        goal_tokens: How many of these parts, the last ones, are goals: states to reach, in addition to
            `policy.obs_steps`.
        goal_unread: Entries of every goal that the network does not read.
        outlet_width: Width of a hidden layer before the actions; null: none.
    """

    width: int = bounded(128, ge=1)  # token width
    depth: int = bounded(4, ge=1)  # blocks
    heads: int = bounded(4, ge=1)  # attention heads, a divisor of the width
    obs_tokens: int = bounded(1, ge=1)
    goal_tokens: int = bounded(0, ge=0)
    goal_unread: tuple[int, ...] = ()
    outlet_width: int | None = bounded(None, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)
        limit = f"below backbone.obs_tokens={self.obs_tokens}"
        self.require("goal_tokens", self.goal_tokens < self.obs_tokens, limit)

    def unused(self) -> dict[str, str]:
        return {} if self.goal_tokens else {"goal_unread": "without backbone.goal_tokens"}

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> Gpt:
        if token_dim:
            raise CapabilityError(
                "backbone=gpt makes its tokens from the condition vector. Use backbone=transformer, or an "
                "encoder without tokens."
            )
        require_equal_parts(self.obs_tokens, cond_dim)
        if self.obs_tokens - self.goal_tokens > chunk_shape[0]:
            raise ConfigError(
                f"with backbone=gpt the horizon must be at least the {self.obs_tokens - self.goal_tokens} "
                f"states; got {chunk_shape[0]}. Use backbone.obs_tokens=1."
            )
        width = cond_dim // self.obs_tokens
        if not all(0 <= i < width for i in self.goal_unread):
            raise ConfigError(
                f"backbone.goal_unread must name entries of a goal, 0 to {width - 1}; got "
                f"{list(self.goal_unread)}."
            )
        return Gpt(self, chunk_shape, cond_dim, second_time=second_time)


class Gpt(nn.Module):
    """See `GptConfig`; satisfies `policies.backbones.Backbone`.

    Source: BESO (arXiv 2304.02532), `DiffusionGPT` of the released code; equal up to rounding. Deviations: no
    dropout; states may be fewer than actions, which then follow the last pair; a second time has an embedding
    of its own, added to the time token.
    """

    mask: Tensor
    read: Tensor

    def __init__(
        self,
        config: GptConfig,
        chunk_shape: tuple[int, int],
        cond_dim: int,
        *,
        second_time: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        horizon, action_dim = chunk_shape
        width, goals, obs_dim = config.width, config.goal_tokens, cond_dim // config.obs_tokens
        self.states = config.obs_tokens - goals
        self.time_embedding = LinearEmbedding(width)
        self.second_embedding = LinearEmbedding(width) if second_time else None
        self.obs_inlet = nn.Linear(obs_dim, width)  # of states and goals
        self.inlet = nn.Linear(action_dim, width)
        self.positions = nn.Parameter(torch.empty(1, goals + horizon, width))
        self.blocks: Any = nn.ModuleList(EncoderBlock(width, config.heads) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        hidden = config.outlet_width
        self.outlet: Any = (
            nn.Linear(width, action_dim)
            if hidden is None
            else nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, action_dim))
        )
        draw_weights(self, self.positions)
        read = torch.tensor([i not in config.goal_unread for i in range(obs_dim)])
        self.register_buffer("read", read, persistent=False)
        mask = causal_mask(1 + config.obs_tokens + horizon)
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        if time.dim() != 1:
            raise CapabilityError(
                f"backbone=gpt takes one time per chunk, (M,); got {tuple(time.shape)}. Use transformer."
            )
        times, observations = self._time_token(time, second_time), self._obs_tokens(cond)
        times = times if time_row is None else times.index_select(0, time_row)
        observations = observations if cond_row is None else observations.index_select(0, cond_row)
        return self._denoise(x, times, observations)

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        tokens, observations = self._time_token(times, second_times), self._obs_tokens(cond)
        return lambda k, x: self._denoise(x, tokens.narrow(0, k, 1), observations)

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        return self._time_token(times, second_times).squeeze(1), cond.vec

    def _time_token(self, time: Tensor, second_time: Tensor | None = None) -> Tensor:
        return embed_times(self.time_embedding, self.second_embedding, time, second_time).unsqueeze(1)

    def _obs_tokens(self, cond: Cond) -> Tensor:
        """Return the tokens of goals, then states (B, G + S, D), with their positions."""
        states, goals = cond.vec.unflatten(-1, (self.config.obs_tokens, -1)).tensor_split(
            [self.states], dim=1
        )
        tokens = self.obs_inlet(torch.cat([torch.where(self.read, goals, 0.0), states], dim=1))
        return tokens + self.positions[:, : tokens.shape[1]]

    def _denoise(self, x: Tensor, time: Tensor, observations: Tensor) -> Tensor:
        """Evaluate at x (M, Th, Da); tokens of the time, and of goals and states, (M or 1, …, D)."""
        goals, n = self.config.goal_tokens, self.states
        actions = self.inlet(x) + self.positions[:, goals:]
        time, observations = (part.expand(x.shape[0], -1, -1) for part in (time, observations))
        pairs = torch.stack([observations[:, goals:], actions[:, :n]], dim=2).flatten(1, 2)
        h = torch.cat([time, observations[:, :goals], pairs, actions[:, n:]], dim=1)
        for block in self.blocks:
            h = block(h, self.mask)
        h = h[:, 1 + goals :]  # state_1, action_1, …, state_S, action_S, then the other actions
        h = torch.cat([h[:, 1 : 2 * n : 2], h[:, 2 * n :]], dim=1)  # actions only
        return self.outlet(self.norm(h))
