"""The value of a noisy plan: residual blocks that halve its rows, then two linear layers.

A level has two blocks (`policies.networks.unet`) and a convolution of stride 2. Behind the levels come two
blocks of a half and a quarter of the last width, each with such a convolution. What is left, flattened, and
the embedded time give one number.

Legend: B batch, H rows of a plan, D numbers of a row.

Source: Diffuser (arXiv 2205.09991), `ValueFunction` of the released code, whose sizes fail for some H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from policies.networks.activations import mish
from policies.networks.embeddings import TimeEmbedding
from policies.networks.unet import Modulation, ResidualBlock, UnetConfig
from policies.networks.weight_cache import WeightCache

Block = Callable[[Tensor, Modulation], Tensor]


class PlanValue(nn.Module):
    """See the top of the file.

    Args:
        plan_shape: (H, D).
        widths: Channels per level; the last one divides by 4 times `groups`.
        time_dim: Width of the embedded time.
        groups: Normalisation groups.
    """

    def __init__(
        self, plan_shape: tuple[int, int], widths: tuple[int, ...], time_dim: int, groups: int
    ) -> None:
        super().__init__()
        rows, dims = plan_shape
        ends = (widths[-1] // 2, widths[-1] // 4)
        config = UnetConfig(widths=(*widths, *ends), film="bias", groups=groups)
        self.time_embedding = TimeEmbedding(time_dim, expansion=4)
        blocks: list[ResidualBlock] = []
        self.downs: Any = nn.ModuleList()
        for level, width in enumerate((*widths, *ends)):
            sizes = ((dims, width), (width, width)) if level < len(widths) else ((dims, width),)
            blocks += [ResidualBlock(config, pair, rows, (time_dim, 0), level=level) for pair in sizes]
            self.downs.append(nn.Conv1d(width, width, 3, stride=2, padding=1))
            dims, rows = width, (rows + 1) // 2
        self.blocks: Any = nn.ModuleList(blocks)
        flat = dims * rows
        self.inner, self.outlet = (
            nn.Linear(flat + time_dim, max(flat // 2, 1)),
            nn.Linear(max(flat // 2, 1), 1),
        )
        self._ready: WeightCache[list[Block]] = WeightCache()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the values (B,) of plans x (B, H, D) at network times (B,)."""
        embedded = self.time_embedding(time)
        ready = self._ready.get(tuple(self.blocks.parameters()), lambda: [one.ready() for one in self.blocks])
        known = -1
        for block, evaluate in zip(self.blocks, ready, strict=True):
            if block.level > known >= 0:
                x = self._halved(x, known)
            film, known = block.film, block.level
            x = evaluate(x, film.modulation(film.of_time(film.features(embedded)).unsqueeze(-2)))
        flat = self._halved(x, known).transpose(1, 2).flatten(1)
        value: Tensor = self.outlet(mish(self.inner(torch.cat([flat, embedded], dim=1)))).squeeze(1)
        return value

    def _halved(self, x: Tensor, level: int) -> Tensor:
        halved: Tensor = self.downs[level](x.transpose(1, 2)).transpose(1, 2)
        return halved
