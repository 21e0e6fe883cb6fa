"""The temporal U-Net: residual convolution blocks modulated by network time and condition.

A block maps rows x (B, T, C) to (B, T, C') and is modulated by scale and bias (FiLM, arXiv 1709.07871)::

    h = a(n(conv(x))),   h <- scale h + bias,   out = a(n(conv(h))) + shortcut(x)

with group normalisation n and activation a. Scale and bias are the output z of one or three linear layers::

    z = (Wt a(e) + b) + Wc a(s),        z = W3 a(W2 a((Wt e + b) + Wc s) + b2) + b3

of embedded time e and condition s. The first layer is linear in both, so each part can be computed alone.

Each level has two blocks on the way down, which halves the rows, and two on the way up, which doubles them;
the latter also receive what left their level on the way down. Two blocks are in the middle; the finest level
has none on the way up. Convolutions are matrix products (`policies/networks/convolutions.py`).

Legend: B batch, Th rows of a chunk, T of them at a level, P = T or 1 with a time of their own, E and C widths
of e and s, F numbers that modulate a block.

Source: Diffusion Policy (arXiv 2303.04137) and DPPO (arXiv 2409.00588), released code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from einops import reduce
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.errors import ConfigError
from policies.networks import native
from policies.networks.activations import ACTIVATIONS
from policies.networks.convolutions import Rows, doubling, group_norm, halving, pointwise, same

Modulation = tuple[Tensor | None, Tensor]
"""Scale (None: there is none) and bias of a block, each (..., P, channels)."""

Evaluate = Callable[[Tensor, Sequence[Modulation]], Tensor]
"""Maps chunks (B, Th, Da) and the modulation of every block to (B, Th, Da), with prepared weights."""


@dataclass(frozen=True)
class UnetConfig(Checked):
    """Shape of a temporal U-Net.

    Attributes:
        film: Modulation of a block by time and condition: `one_plus_scale` (h (1 + scale) + bias), `scale`
            (h scale + bias) or `bias` (h + bias).
    """

    widths: tuple[int, ...] = bounded((64, 128, 256), ge=1, some=True)  # channels; published: 256, 512, 1024
    kernel: int = bounded(5, ge=1)  # kernel size in rows, odd
    groups: int = bounded(8, ge=0)  # normalisation groups, a divisor of every width; 0: no normalisation
    final_groups: int | None = bounded(None, ge=0)  # groups of the last convolution; null: as `groups`
    norm_eps: float = bounded(1e-5, gt=0)  # added to the variance of a group
    film: str = bounded("one_plus_scale", choices=("one_plus_scale", "scale", "bias"))
    film_layers: int = bounded(1, choices=(1, 3))  # linear layers from time and condition to scale and bias
    activation: str = bounded("mish", choices=tuple(ACTIVATIONS))

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.widths
        self.require("kernel", self.kernel % 2 == 1, "odd")
        for name, seen in (("groups", widths), ("final_groups", widths[:1])):
            groups = getattr(self, name)
            divides = not groups or not any(width % groups for width in seen)
            self.require(name, divides, f"0 or a divisor of every width of {seen}")


class ConvBlock(nn.Module):
    """Convolution of T = `rows` rows, group normalisation (0 groups: none) and activation."""

    def __init__(
        self, config: UnetConfig, dims: tuple[int, int], rows: int, groups: int | None = None
    ) -> None:
        super().__init__()
        self.rows, groups = rows, config.groups if groups is None else groups
        self.conv = nn.Conv1d(*dims, config.kernel, padding=config.kernel // 2)
        self.norm = nn.GroupNorm(groups, dims[1], eps=config.norm_eps) if groups else None
        self.activate, _ = ACTIVATIONS[config.activation]

    def ready(self) -> Rows:
        """Return the block as a function; weights that it prepares are prepared once."""
        convolve, activate = same(self.conv, self.rows), self.activate
        if self.norm is None:
            return lambda x: activate(convolve(x))
        norm, normalise = self.norm, group_norm(self.norm)
        is_mish = activate is ACTIVATIONS["mish"][0]

        def normal(x: Tensor) -> Tensor:
            h = convolve(x)
            return (
                native.norm_mish(h, norm)
                if is_mish and native.serves_norm(h, norm)
                else activate(normalise(h))
            )

        return normal


class Film(nn.Module):
    """Map time and condition (widths `parts`) to scale and bias of a block."""

    def __init__(self, config: UnetConfig, parts: tuple[int, int], channels: int) -> None:
        super().__init__()
        self.parts, self.kind = parts, config.film
        numbers = channels if self.kind == "bias" else 2 * channels
        widths = (sum(parts), *[numbers] * config.film_layers)
        self.layers: Any = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.activate, _ = ACTIVATIONS[config.activation]

    def features(self, part: Tensor) -> Tensor:
        """Return the first layer's input from time or condition."""
        return self.activate(part) if len(self.layers) == 1 else part

    def of_time(self, features: Tensor) -> Tensor:
        """Return the time's part of the first layer, bias included; (..., E) -> (..., F)."""
        first = self.layers[0]
        return F.linear(features, first.weight[:, : self.parts[0]], first.bias)

    def of_cond(self, features: Tensor) -> Tensor:
        """Return the condition's part of the first layer; (..., C) -> (..., F)."""
        return F.linear(features, self.layers[0].weight[:, self.parts[0] :])

    def modulation(self, z: Tensor) -> Modulation:
        for layer in list(self.layers)[1:]:
            z = layer(self.activate(z))
        if self.kind == "bias":
            return None, z
        scale, bias = z.chunk(2, dim=-1)
        return (1 + scale if self.kind == "one_plus_scale" else scale), bias


class ResidualBlock(nn.Module):
    """See the top of the file; `level`: how often the rows were halved before the block."""

    def __init__(
        self, config: UnetConfig, dims: tuple[int, int], rows: int, parts: tuple[int, int], *, level: int
    ) -> None:
        super().__init__()
        before, after = dims
        film = Film(config, parts, after)  # the first draws of initial weights
        self.first = ConvBlock(config, dims, rows)
        self.second = ConvBlock(config, (after, after), rows)
        self.film, self.level = film, level
        self.shortcut = nn.Conv1d(before, after, 1) if before != after else None

    def ready(self) -> Callable[[Tensor, Modulation], Tensor]:
        first, second = self.first.ready(), self.second.ready()
        shortcut = None if self.shortcut is None else pointwise(self.shortcut)

        def block(x: Tensor, film: Modulation) -> Tensor:
            scale, bias = film
            h = first(x)
            h = second(h + bias if scale is None else torch.addcmul(bias, h, scale))
            return h + (x if shortcut is None else shortcut(x))

        return block


class TemporalUnet(nn.Module):
    """See the top of the file.

    Chunks are padded to a multiple of 2^(levels - 1) rows by repeating the last one; the result is cropped.
    """

    def __init__(self, config: UnetConfig, chunk_shape: tuple[int, int], parts: tuple[int, int]) -> None:
        super().__init__()
        self.chunk_shape, self.levels = tuple(chunk_shape), len(config.widths)
        horizon, action_dim = chunk_shape
        self.padding = -horizon % 2 ** (self.levels - 1)
        widths, last = config.widths, self.levels - 1
        down = ((level, *dims) for level, dims in enumerate(pairwise((action_dim, *widths))))
        middle = (last, widths[-1], widths[-1])
        up = ((level, 2 * widths[level], widths[level - 1]) for level in range(last, 0, -1))
        self.blocks: Any = nn.ModuleList(
            ResidualBlock(config, dims, self._rows(level), parts, level=level)
            for level, before, after in (*down, middle, *up)
            for dims in ((before, after), (after, after))
        )
        self.downs: Any = nn.ModuleList(
            nn.Conv1d(width, width, 3, stride=2, padding=1) for width in widths[:-1]
        )
        self.ups: Any = nn.ModuleList(
            nn.ConvTranspose1d(width, width, 4, stride=2, padding=1) for width in widths[-2::-1]
        )
        self.head = ConvBlock(config, (widths[0], widths[0]), self._rows(0), config.final_groups)
        self.outlet = nn.Conv1d(widths[0], action_dim, 1)

    def _rows(self, level: int) -> int:
        return (self.chunk_shape[0] + self.padding) >> level

    @property
    def films(self) -> list[Film]:
        return [block.film for block in self.blocks]

    def coarsened(self, rows: Tensor) -> list[Tensor]:
        """Return features of rows at every level, finest first, as means; (N, Th, E) -> L of (N, T, E)."""
        by_level = [pad_rows(rows, self.padding)]
        while len(by_level) < self.levels:
            by_level.append(reduce(by_level[-1], "N (T pair) E -> N T E", "mean", pair=2))
        return by_level

    def ready(self) -> Evaluate:
        blocks = [block.ready() for block in self.blocks]
        last, padding, horizon = self.levels - 1, self.padding, self.chunk_shape[0]
        downs = [halving(conv, self._rows(i)) for i, conv in enumerate(self.downs)]
        ups = [doubling(conv, self._rows(last - i)) for i, conv in enumerate(self.ups)]
        head, outlet = self.head.ready(), pointwise(self.outlet)

        def pair(i: int, x: Tensor, films: Sequence[Modulation]) -> Tensor:
            return blocks[2 * i + 1](blocks[2 * i](x, films[2 * i]), films[2 * i + 1])

        def evaluate(x: Tensor, films: Sequence[Modulation]) -> Tensor:
            if x.shape[1] != horizon:
                raise ConfigError(f"the U-Net was built for chunks of {horizon} rows; got {x.shape[1]}.")
            x = pad_rows(x, padding)
            skips = []
            for i in range(last + 1):
                x = pair(i, x, films)
                skips.append(x)  # the finest one is not used
                if i < last:
                    x = downs[i](x)
            x = pair(last + 1, x, films)
            for i in range(last):
                x = pair(last + 2 + i, torch.cat([x, skips[last - i]], dim=-1), films)
                x = ups[i](x)
            return outlet(head(x))[:, :horizon]

        return evaluate


def pad_rows(x: Tensor, count: int) -> Tensor:
    """Repeat the last row; (B, T, C) -> (B, T + count, C)."""
    return torch.cat([x, *[x[:, -1:]] * count], dim=1) if count else x
