"""A diffusion transformer as a denoising backbone: one token per action of the chunk.

Every sublayer f (self-attention, attention to the tokens of the condition if any, feed-forward) acts on
tokens h as::

    h <- h + gate f(scale n(h) + shift),      out = W (scale n(h) + shift) + b

with n a LayerNorm without weights. All scales, shifts and gates come from network time and condition::

    [scale - 1, shift, gate] = (W_t a(e_time) + b) + W_c a(e_cond)

`forward` computes each part once per distinct row, and `bind` tabulates the bracket over denoising steps
(until a weight changes) and computes the other part once per action. Both are exact.

Legend: M rows, B batch, K times, Th rows of a chunk, C condition width, N tokens of width Ct, D width, L
blocks, H heads, P scales, shifts and gates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import CapabilityError
from policies.networks.attention import Attention, FeedForward, LayerNorm, causal_mask, check_heads
from policies.networks.embeddings import TimeEmbedding, embed_times
from policies.networks.weight_cache import WeightCache
from policies.protocols import BoundField, Cond, Features
from policies.registry import register


@register("backbone", "transformer")
@dataclass(frozen=True)
class TransformerConfig(Checked):
    """Diffusion transformer over the actions of a chunk."""

    width: int = bounded(128, ge=1)  # token width
    depth: int = bounded(4, ge=1)  # blocks
    heads: int = bounded(4, ge=1)  # attention heads, a divisor of the width
    ffn_ratio: int = bounded(4, ge=1)  # feed-forward width over token width
    time_dim: int = bounded(64, ge=4, even=True)  # width of the time embedding
    causal: bool = False  # actions attend only to themselves and earlier ones
    dropout: float = bounded(0.0, ge=0, lt=1)  # on attention weights and features; PyTorch's global generator

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> TransformerBackbone:
        return TransformerBackbone(self, chunk_shape, cond_dim, token_dim=token_dim, second_time=second_time)


Adaptation = tuple[Tensor, Tensor, Tensor]
"""Scale, shift and gate of one sublayer, each (M or 1, Th or 1, D)."""


class Modulation(nn.Module):
    """Scales, shifts and gates of all `sublayers` and the output, from embedded time and condition (width D).

    Initialised to zero: sublayers are inactive until training opens their gates.
    """

    def __init__(self, time_dim: int, width: int, sublayers: int) -> None:
        super().__init__()
        self.sublayers, self.width = sublayers, width
        numbers = (3 * sublayers + 2) * width
        self.time = nn.Linear(time_dim, numbers)
        self.cond = nn.Linear(width, numbers, bias=False)
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def of_time(self, embedded: Tensor) -> Tensor:
        """Return the part of the time, bias included; (..., time_dim) -> (..., P)."""
        return self.time(F.silu(embedded))

    def of_cond(self, embedded: Tensor) -> Tensor:
        """Return the part of the condition; (..., D) -> (..., P)."""
        return self.cond(F.silu(embedded))

    def split(self, numbers: Tensor) -> tuple[list[Adaptation], tuple[Tensor, Tensor]]:
        """Split the sum of both parts (M, Th or 1, P) by sublayer, and scale and shift of the output."""
        sizes = (self.sublayers + 1, self.sublayers + 1, self.sublayers)
        scales, shifts, gates = numbers.unflatten(-1, (sum(sizes), self.width)).split(sizes, dim=-2)
        *scale, scale_out = (1 + scales).unbind(-2)
        *shift, shift_out = shifts.unbind(-2)
        return list(zip(scale, shift, gates.unbind(-2), strict=True)), (scale_out, shift_out)


class Modulated(LayerNorm):
    """Layer normalisation with scale and shift as arguments."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6, elementwise_affine=False)

    def forward(self, h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return torch.addcmul(shift, super().forward(h), scale)


class Block(nn.Module):
    """Self-attention, attention to the condition's tokens if there are any, and a feed-forward network."""

    def __init__(self, config: TransformerConfig, *, has_tokens: bool) -> None:
        super().__init__()
        width, dropout = config.width, config.dropout
        self.attention = Attention(width, config.heads, dropout)
        self.cross = Attention(width, config.heads, dropout) if has_tokens else None
        self.ffn = FeedForward(width, config.ffn_ratio * width, dropout)
        self.dropout = nn.Dropout(dropout)
        self.norm = Modulated(width)

    @property
    def sublayers(self) -> int:
        return 2 if self.cross is None else 3

    def forward(
        self, h: Tensor, adaptations: list[Adaptation], mask: Tensor | None, memory: Tensor | None
    ) -> Tensor:
        """Map tokens h (M, Th, D); mask (Th, Th), memory (2, M or 1, H, N, D/H) of `cross`."""
        parts: list[Callable[[Tensor], Tensor]] = [lambda h: self.attention(h, mask), self.ffn]
        if (cross := self.cross) is not None and memory is not None:
            parts.insert(1, lambda h: cross.read(h, memory))
        for part, (scale, shift, gate) in zip(parts, adaptations, strict=True):
            h = torch.addcmul(h, gate, self.dropout(part(self.norm(h, scale, shift))))
        return h


class TransformerBackbone(nn.Module):
    """See `TransformerConfig`; satisfies `policies.backbones.Backbone`.

    Beyond the protocol, `forward` takes a time per action, (M, Th) or (K, Th) with `time_row`.

    Source: DiT with adaLN-zero (arXiv 2212.09748, section 3.2), whose sizes 256 x 8 x 4 and 384 x 12 x 6 are
    used for actions. Deviations: tokens are actions with learned positions; time and condition enter the
    modulation as a sum of two projections instead of a projection of their sum, so that it can be tabulated;
    tokens of the condition are attended to between self-attention and feed-forward, modulated like these.
    """

    mask: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        chunk_shape: tuple[int, int],
        cond_dim: int,
        *,
        token_dim: int = 0,
        second_time: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        horizon, action_dim = chunk_shape
        width = config.width
        self.inlet = nn.Linear(action_dim, width)
        self.positions = nn.Parameter(torch.empty(horizon, width))
        self.time_embedding = TimeEmbedding(config.time_dim)
        self.second_embedding = TimeEmbedding(config.time_dim) if second_time else None
        self.cond_embedding = nn.Sequential(nn.Linear(cond_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.token_inlet = nn.Sequential(nn.Linear(token_dim, width), LayerNorm(width)) if token_dim else None
        blocks = [Block(config, has_tokens=token_dim > 0) for _ in range(config.depth)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = Modulated(width)
        self.outlet = nn.Linear(width, action_dim)
        self._initialize()
        self.modulation = Modulation(config.time_dim, width, sum(block.sublayers for block in blocks))
        self.register_buffer("mask", causal_mask(horizon) if config.causal else None, persistent=False)
        self._cache: WeightCache[Tensor] = WeightCache()

    def _initialize(self) -> None:
        """Draw weights as DiT does; the output starts at zero."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)
        nn.init.normal_(self.positions, std=0.02)
        nn.init.zeros_(self.outlet.weight)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        of_time = self._of_time(time, second_time)
        of_cond, memory = self._of_cond(cond)
        if time_row is not None:
            of_time = of_time.index_select(0, time_row)
        if cond_row is not None:
            of_cond = of_cond.index_select(0, cond_row)
            memory = None if memory is None else memory.index_select(2, cond_row)
        per_action = of_time if of_time.dim() == 3 else of_time.unsqueeze(1)
        return self._denoise(x, per_action + of_cond.unsqueeze(1), memory)

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        net_times = (times,) if second_times is None else (times, second_times)
        embeddings = (self.time_embedding, self.second_embedding, self.modulation.time)
        weights = [weight for part in embeddings if part is not None for weight in part.parameters()]
        table = self._cache.get((*weights, *net_times), lambda: self._of_time(*net_times)).unbind(0)
        of_cond, memory = self._of_cond(cond)
        return lambda k, x: self._denoise(x, (table[k] + of_cond).unsqueeze(1), memory)

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        embedded = embed_times(self.time_embedding, self.second_embedding, times, second_times)
        return embedded, self.cond_embedding(cond.vec)

    def _of_time(self, time: Tensor, second_time: Tensor | None = None) -> Tensor:
        embedded = embed_times(self.time_embedding, self.second_embedding, time, second_time)
        return self.modulation.of_time(embedded)

    def _of_cond(self, cond: Cond) -> tuple[Tensor, Tensor | None]:
        """Return the condition's part (B, P), and keys and values of its tokens (L, 2, B, H, N, D/H)."""
        if (self.token_inlet is None) != (cond.tokens is None):
            built, called = ("without", "with") if self.token_inlet is None else ("with", "without")
            raise CapabilityError(
                f"the network was built {built} tokens to attend to and called {called} any."
            )
        of_cond = self.modulation.of_cond(self.cond_embedding(cond.vec))
        if self.token_inlet is None:
            return of_cond, None
        tokens = self.token_inlet(cond.tokens)
        return of_cond, torch.stack([block.cross.memory(tokens) for block in self.blocks])

    def _denoise(self, x: Tensor, numbers: Tensor, memory: Tensor | None) -> Tensor:
        """Apply the blocks; `numbers` (M or 1, Th or 1, P), memory (L, 2, M or 1, H, N, D/H)."""
        adaptations, (scale, shift) = self.modulation.split(numbers)
        memories = [None] * len(self.blocks) if memory is None else memory.unbind(0)
        h = self.inlet(x) + self.positions
        for block, memory in zip(self.blocks, memories, strict=True):
            of_block, adaptations = adaptations[: block.sublayers], adaptations[block.sublayers :]
            h = block(h, of_block, self.mask, memory)
        return self.outlet(self.norm(h, scale, shift))
