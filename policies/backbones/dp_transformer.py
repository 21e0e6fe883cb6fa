"""The transformer of Diffusion Policy as denoising backbone: a decoder with memory of time and observations.

The memory holds one token for the time and one for every observation of the history, each embedded, given a
learned position, and encoded. The decoder has one token per action; each of its blocks acts on tokens h as::

    h <- h + attention(n(h)),     h <- h + read(n(h), memory),     h <- h + W2 gelu(W1 n(h) + b1) + b2

with its own LayerNorms n. While the memory is encoded token by token, keys and values of the time token
depend on the time only and those of the observations on the condition only: `forward` computes them once per
distinct row, and `bind` tabulates the former over denoising steps and computes the latter once per action.

Legend: M rows, B batch, K times, Th rows of a chunk, C condition width, N observations, S = 1 + N memory
tokens, D width, L blocks, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.networks.activations import mish
from policies.networks.attention import (
    Attention,
    EncoderBlock,
    FeedForward,
    LayerNorm,
    causal_mask,
    check_heads,
    draw_weights,
    require_equal_parts,
)
from policies.networks.embeddings import TimeEmbedding, embed_times, sinusoid
from policies.networks.weight_cache import WeightCache
from policies.protocols import BoundField, Cond, Features
from policies.registry import register

_FFN_RATIO = 4


@register("backbone", "dp_transformer")
@dataclass(frozen=True)
class DpTransformerConfig(Checked):
    """The transformer of Diffusion Policy.

    Attributes:
        obs_tokens: Number of equal parts of the condition, oldest first; `policy.obs_steps` for one token per
            observation.
        causal: Actions attend only to actions and observations up to their own step; requires windows from
            the oldest observation (`policy.action_start` = `policy.obs_steps` - 1).
    """

    width: int = bounded(128, ge=4, even=True)  # token width
    depth: int = bounded(4, ge=1)  # decoder blocks
    heads: int = bounded(4, ge=1)  # attention heads, a divisor of the width
    memory_depth: int = bounded(0, ge=0)  # encoder blocks of the memory; 0: two layers per token
    obs_tokens: int = bounded(1, ge=1)
    causal: bool = True
    dropout: float = bounded(0.0, ge=0, lt=1)  # on attention weights and features; PyTorch's global generator

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> DpTransformer:
        if token_dim:
            raise CapabilityError(
                "backbone=dp_transformer makes its tokens from the condition vector. Use "
                "backbone=transformer, or an encoder without tokens."
            )
        require_equal_parts(self.obs_tokens, cond_dim)
        if self.causal and self.obs_tokens > chunk_shape[0]:
            raise ConfigError(
                f"with backbone.causal the horizon must be at least backbone.obs_tokens={self.obs_tokens}; "
                f"got {chunk_shape[0]}. Use backbone.causal=false or backbone.obs_tokens=1."
            )
        return DpTransformer(self, chunk_shape, cond_dim, second_time=second_time)

    def official_keys(self) -> dict[str, str]:
        """Map the parameter names of the released `TransformerForDiffusion` to ours."""
        names = {"input_emb": "inlet", "cond_obs_emb": "obs_inlet", "ln_f": "norm", "head": "outlet"}
        if self.memory_depth == 0:
            names |= {"encoder.0": "memory_encoder.linear1", "encoder.2": "memory_encoder.linear2"}
        blocks = {f"encoder.layers.{i}.": f"memory_encoder.{i}." for i in range(self.memory_depth)}
        blocks |= {f"decoder.layers.{i}.": f"blocks.{i}." for i in range(self.depth)}
        keys = {"pos_emb": "positions", "cond_pos_emb": "memory_positions"}
        for theirs, ours in blocks.items():
            is_decoder = ours.startswith("blocks.")
            attentions = {"self_attn": "attention"} | ({"multihead_attn": "cross"} if is_decoder else {})
            for their_name, our_name in attentions.items():
                keys |= {
                    f"{theirs}{their_name}.in_proj_{k}": f"{ours}{our_name}.inlet.{k}"
                    for k in ("weight", "bias")
                }
                names[f"{theirs}{their_name}.out_proj"] = f"{ours}{our_name}.outlet"
            names |= {f"{theirs}linear{n}": f"{ours}ffn.linear{n}" for n in (1, 2)}
            names |= {f"{theirs}norm{n}": f"{ours}norm{n}" for n in range(1, len(attentions) + 2)}
        return keys | {f"{a}.{kind}": f"{b}.{kind}" for a, b in names.items() for kind in ("weight", "bias")}


class DecoderBlock(nn.Module):
    """Pre-norm self-attention, attention to a memory, and feed-forward network."""

    def __init__(self, config: DpTransformerConfig) -> None:
        super().__init__()
        width, dropout = config.width, config.dropout
        self.norm1, self.norm2, self.norm3 = (LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, config.heads, dropout)
        self.cross = Attention(width, config.heads, dropout)
        self.ffn = FeedForward(width, _FFN_RATIO * width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """Map tokens h (M, Th, D) to (M, Th, D).

        Shapes:
            memory: (2, M or 1, H, S, D/H), of `cross`. mask: (Th, Th). memory_mask: (Th, S).
        """
        h = h + self.dropout(self.attention(self.norm1(h), mask))
        h = h + self.dropout(self.cross.read(self.norm2(h), memory, memory_mask))
        return h + self.dropout(self.ffn(self.norm3(h)))


class DpTransformer(nn.Module):
    """See `DpTransformerConfig`; satisfies `policies.backbones.Backbone`.

    Source: Diffusion Policy (arXiv 2303.04137), `TransformerForDiffusion` of the released code with time and
    observations as condition; equal up to rounding. Deviations: a second time has an embedding of its own,
    added to the time token; no dropout of embeddings (zero in the published settings); the variant without a
    memory, which receives no observation, is left out.
    """

    mask: Tensor | None
    memory_mask: Tensor | None

    def __init__(
        self,
        config: DpTransformerConfig,
        chunk_shape: tuple[int, int],
        cond_dim: int,
        *,
        second_time: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        horizon, action_dim = chunk_shape
        width, observations = config.width, config.obs_tokens
        sizes = (width, config.heads, config.dropout)
        self.inlet = nn.Linear(action_dim, width)
        self.positions = nn.Parameter(torch.empty(1, horizon, width))
        self.obs_inlet = nn.Linear(cond_dim // observations, width)
        self.second_embedding = TimeEmbedding(width) if second_time else None
        self.memory_positions = nn.Parameter(torch.empty(1, 1 + observations, width))
        self.memory_encoder = (
            nn.Sequential(*(EncoderBlock(*sizes) for _ in range(config.memory_depth)))
            if config.memory_depth
            else FeedForward(width, _FFN_RATIO * width, activation=mish)
        )
        self.blocks: Any = nn.ModuleList(DecoderBlock(config) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        self.outlet = nn.Linear(width, action_dim)
        draw_weights(self, self.positions, self.memory_positions)
        masks = {"mask": causal_mask(horizon), "memory_mask": memory_mask(horizon, 1 + observations)}
        for name, mask in masks.items():
            self.register_buffer(name, mask if config.causal else None, persistent=False)
        self._cache: WeightCache[Tensor] = WeightCache()

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
            got = tuple(time.shape)
            raise CapabilityError(
                f"backbone=dp_transformer takes one time per chunk, (M,); got {got}. Use transformer."
            )
        times, observations = self._time_token(time, second_time), self._obs_tokens(cond)
        if self._is_tokenwise:
            of_time, of_obs = self._keys_and_values(times), self._keys_and_values(observations)
            parts = (_selected(of_time, time_row, dim=2), _selected(of_obs, cond_row, dim=2))
            return self._denoise(x, torch.cat(parts, dim=-2))
        tokens = (_selected(times, time_row, dim=0), _selected(observations, cond_row, dim=0))
        return self._denoise(x, self._keys_and_values(torch.cat(tokens, dim=1)))

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        net_times = (times,) if second_times is None else (times, second_times)
        observations = self._obs_tokens(cond)
        if self._is_tokenwise:
            sources = (*self._memory_weights(), *net_times)
            table = self._cache.get(sources, lambda: self._keys_and_values(self._time_token(*net_times)))
            of_obs = self._keys_and_values(observations)
            sizes = (-1, -1, of_obs.shape[2], -1, -1, -1)

            def bound(k: int, x: Tensor) -> Tensor:
                of_time = table.narrow(2, k, 1).expand(sizes)
                return self._denoise(x, torch.cat([of_time, of_obs], dim=-2))

            return bound
        tokens = self._time_token(*net_times)

        def bound_and_encoded(k: int, x: Tensor) -> Tensor:
            time = tokens.narrow(0, k, 1).expand(observations.shape[0], -1, -1)
            return self._denoise(x, self._keys_and_values(torch.cat([time, observations], dim=1)))

        return bound_and_encoded

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        return embed_times(self._sinusoids, self.second_embedding, times, second_times), cond.vec

    @property
    def _is_tokenwise(self) -> bool:
        return self.config.memory_depth == 0

    def _time_token(self, time: Tensor, second_time: Tensor | None = None) -> Tensor:
        embedded = embed_times(self._sinusoids, self.second_embedding, time, second_time)
        return embedded.unsqueeze(1) + self.memory_positions[:, :1]

    def _sinusoids(self, time: Tensor) -> Tensor:
        return sinusoid(time.to(self.positions.dtype), self.config.width)

    def _obs_tokens(self, cond: Cond) -> Tensor:
        parts = rearrange(cond.vec, "B (N C) -> B N C", N=self.config.obs_tokens)
        return self.obs_inlet(parts) + self.memory_positions[:, 1:]

    def _keys_and_values(self, tokens: Tensor) -> Tensor:
        """Encode tokens (M, S, D) to keys and values of every block, (L, 2, M, H, S, D/H)."""
        encoded = self.memory_encoder(tokens)
        return torch.stack([block.cross.memory(encoded) for block in self.blocks])

    def _memory_weights(self) -> list[Tensor]:
        parts = [self.second_embedding, self.memory_encoder, *(block.cross.inlet for block in self.blocks)]
        weights = [weight for part in parts if part is not None for weight in part.parameters()]
        return [self.memory_positions, *weights]

    def _denoise(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.inlet(x) + self.positions
        for block, keys_and_values in zip(self.blocks, memory.unbind(0), strict=True):
            h = block(h, keys_and_values, self.mask, self.memory_mask)
        return self.outlet(self.norm(h))


def memory_mask(horizon: int, tokens: int) -> Tensor:
    """Return (Th, S) bool: action t attends to token s <= t + 1: the time, and observations up to t."""
    return torch.ones(horizon, tokens, dtype=torch.bool).tril(1)


def _selected(part: Tensor, row: Tensor | None, dim: int) -> Tensor:
    return part if row is None else part.index_select(dim, row)
