"""Transformer layers: attention, normalisation and a feed-forward network.

Attention is softmax(q kᵀ / √(D/H)) v per head, over the keys that a mask allows. `set_attention` selects one
of two implementations of attention and normalisation:

* `auto`: PyTorch's fused kernels, fast and memory-efficient, first derivatives only;
* `math`: elementary operations, differentiable to any order, forwards and backwards; required by objectives
  with `torch.func.jvp` (MeanFlow) or second derivatives (energies).

Beyond first derivatives the fused attention of PyTorch 2.13 raises an error, and its fused LayerNorm silently
gives wrong gradients of forward-mode derivatives.

Legend: M rows, T queries, S keys, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.errors import ConfigError


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Attend by elementary operations (arXiv 1706.03762, eq. 1), like `F.scaled_dot_product_attention`.

    Shapes:
        query: (M, H, T, D/H) -> (M, H, T, D/H). key, value: (M or 1, H, S, D/H). attn_mask: (T, S) bool, True
        where a query may look; every query needs a key.
    """
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    weights = scores.softmax(dim=-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def explicit_layer_norm(
    h: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise (..., D) over D by elementary operations (arXiv 1607.06450, eq. 4), like `F.layer_norm`."""
    variance, mean = torch.var_mean(h, dim=-1, correction=0, keepdim=True)
    normal = (h - mean) * torch.rsqrt(variance + eps)
    return normal if weight is None or bias is None else torch.addcmul(bias, normal, weight)


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "auto": F.scaled_dot_product_attention,
    "math": explicit_attention,
}
NORMS: dict[str, Callable[..., Tensor]] = {"auto": F.layer_norm, "math": explicit_layer_norm}


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of every token in one of two implementations; weights are those of PyTorch."""

    how = "auto"

    def forward(self, h: Tensor) -> Tensor:
        return NORMS[self.how](h, self.normalized_shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Multi-head attention, to its own input or to a memory with precomputed keys and values.

    `dropout` of the attention weights in training uses PyTorch's global generator.

    Source: arXiv 1706.03762, section 3.2.2; the layout of the weights is that of `nn.MultiheadAttention`.
    """

    how = "auto"

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(width, 3 * width)  # queries, keys, values
        self.outlet = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from every token to the tokens of its row; (M, T, D) -> (M, T, D), mask (T, T)."""
        query, key, value = self._projected(h, slice(0, 3))
        return self._attend(query, key, value, mask)

    def memory(self, tokens: Tensor) -> Tensor:
        """Project tokens (M, S, D) to keys and values (2, M, H, S, D/H) for `read`."""
        return self._projected(tokens, slice(1, 3))

    def read(self, h: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from h (M, T, D) to a memory of M rows, or of one for all; (M, T, D), mask (T, S)."""
        (query,) = self._projected(h, slice(0, 1))
        key, value = memory
        return self._attend(query, key, value, mask)

    def _projected(self, tokens: Tensor, parts: slice) -> Tensor:
        """Return some of queries, keys and values, (n, M, H, T, D/H)."""
        width, count = tokens.shape[-1], parts.stop - parts.start
        rows = slice(parts.start * width, parts.stop * width)
        projected = F.linear(tokens, self.inlet.weight[rows], self.inlet.bias[rows])  # (M, T, n D)
        # Views, not einops: at batch 1 each of its calls would cost as much as a tenth of the projection.
        return projected.unflatten(-1, (count, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        found = ATTENTIONS[self.how](query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.outlet(found.transpose(1, 2).flatten(2))  # (M, H, T, D/H) -> (M, T, D)


class FeedForward(nn.Module):
    """Two linear layers with activation and dropout (PyTorch's global generator), per token."""

    def __init__(
        self, width: int, hidden: int, dropout: float = 0.0, activation: Callable[[Tensor], Tensor] = F.gelu
    ) -> None:
        super().__init__()
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def forward(self, h: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(h))))


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and feed-forward network, of four times the width."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.ffn = FeedForward(width, 4 * width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens h (M, T, D) to (M, T, D); mask (T, T)."""
        h = h + self.dropout(self.attention(self.norm1(h), mask))
        return h + self.dropout(self.ffn(self.norm2(h)))


def set_attention(module: nn.Module, how: str) -> None:
    """Select the implementation of attention and normalisation in a module: `auto` or `math`.

    The choice holds for this object and its copies and is not saved: results agree up to rounding.
    """
    if how not in ATTENTIONS:
        raise ConfigError(f"attention must be one of {', '.join(ATTENTIONS)}; got '{how}'.")
    for part in module.modules():
        if isinstance(part, Attention | LayerNorm):
            part.how = how


def causal_mask(size: int) -> Tensor:
    """Return (T, T) bool: a token attends to itself and earlier ones."""
    return torch.ones(size, size, dtype=torch.bool).tril()


def check_heads(config: Any) -> None:
    """Refuse a number of `heads` that does not divide the `width` of a configuration."""
    width, heads = config.width, config.heads
    choices = ", ".join(str(n) for n in range(1, min(width, 16) + 1) if width % n == 0)
    rule = f"a divisor of {config.key}.width={width} (one of {choices})"
    config.require("heads", width % heads == 0, rule)


def require_equal_parts(tokens: int, cond_dim: int) -> None:
    """Refuse a number of `obs_tokens` that does not divide the width of a condition (ConfigError)."""
    if cond_dim % tokens:
        raise ConfigError(
            f"backbone.obs_tokens must cut the condition (history and goal) into equal parts; got {tokens} "
            f"for a width of {cond_dim}. Use backbone.obs_tokens=1."
        )


def draw_weights(module: nn.Module, *positions: Tensor) -> None:
    """Draw the weights of linear layers, then positions, from N(0, 0.02²); biases are zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
    for one in positions:
        nn.init.normal_(one, std=0.02)
