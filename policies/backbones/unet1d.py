"""The temporal U-Net of Diffusion Policy and DPPO as a denoising backbone.

The modulation of a block (`policies/networks/unet.py`) is a function of a sum of a time part and a condition
part. `forward` computes each part once per distinct row; `bind` tabulates the time part over denoising steps
(until a weight changes) and computes the condition part once per action. Both are exact.

Legend: M rows, B batch, K times, Th rows of a chunk, T of them at a level, P = T or 1 with a time of their
own, C condition width, F numbers that modulate a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.bounds import bounded
from policies.errors import CapabilityError, ConfigError
from policies.networks.activations import ACTIVATIONS
from policies.networks.embeddings import PositionalEmbedding, TimeEmbedding, embed_times
from policies.networks.mlp_blocks import PlainTrunk, TrunkConfig
from policies.networks.unet import Evaluate, Modulation, TemporalUnet, UnetConfig
from policies.networks.unet_keys import official_unet_keys
from policies.networks.weight_cache import WeightCache
from policies.protocols import BoundField, Cond, Features
from policies.registry import register

EMBEDDINGS = {"learned": TimeEmbedding, "positional": PositionalEmbedding}
_FEW_NUMBERS = 1 << 20  # up to this many, the modulations of all steps are computed before the loop


@register("backbone", "unet1d")
@dataclass(frozen=True)
class Unet1dConfig(UnetConfig):
    """Temporal U-Net over the rows of the chunk.

    Chunks are padded to a multiple of 2^(levels - 1) rows by repeating the last one, for any horizon. Weights
    of Diffusion Policy and DPPO require `film` `scale` or `bias`; Diffusion Policy also `final_groups` 8.

    Attributes:
        times: Embedding of the network time: `learned`, or `positional`, which is MIP's.
        cond_dims: Layer widths of a condition encoder before all blocks, output last; empty: no encoder.
        cond_activation: Of a plain condition encoder; null: it is residual, and `cond_dims` are an odd number
            of equal hidden widths, then its output.
    """

    time_dim: int = bounded(64, ge=4, even=True)  # width of the time embedding; published: 256, 128 and 16
    time_expansion: int = bounded(4, ge=1)  # width inside the time embedding over its width
    times: str = bounded("learned", choices=tuple(EMBEDDINGS))
    cond_dims: tuple[int, ...] = bounded((), ge=1)
    cond_activation: str | None = bounded(None, choices=tuple(ACTIVATIONS))

    def __post_init__(self) -> None:
        super().__post_init__()
        hidden = self.cond_dims[:-1]
        is_residual = len(hidden) % 2 == 1 and len(set(hidden)) == 1
        rule = "an odd number of equal hidden widths and an output width, e.g. [256,64] or [256,256,256,64]"
        is_plain = not self.cond_dims or self.cond_activation is not None
        self.require("cond_dims", is_plain or is_residual, rule)
        fits = self.times == "learned" or self.time_dim % 4 == 0
        self.require("time_dim", fits, "a multiple of 4 for backbone.times=positional")

    def unused(self) -> dict[str, str]:
        found = {} if self.cond_dims else {"cond_activation": "without backbone.cond_dims"}
        if not (self.groups or self.final_groups):
            found["norm_eps"] = "without backbone.groups"
        return super().unused() | found

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> Unet1dBackbone:
        if token_dim:
            raise CapabilityError(
                "backbone=unet1d cannot attend to tokens. Use backbone=transformer, or another encoder."
            )
        return Unet1dBackbone(self, chunk_shape, cond_dim, second_time=second_time)

    def official_keys(self, program: str = "dppo", *, action_dim: int = 0) -> dict[str, str]:
        """Map the parameter names of a released U-Net, `dppo` or `diffusion_policy`, to ours.

        `action_dim` matters only where it equals the first of `widths`: the first block has no shortcut then.
        """
        final_groups = self.groups if self.final_groups is None else self.final_groups
        keys = official_unet_keys(
            program,
            (action_dim, *self.widths),
            film_layers=self.film_layers,
            has_norm=self.groups > 0,
            has_final_norm=final_groups > 0,
        )
        if not self.cond_dims:
            return keys
        if program != "dppo" or self.cond_activation is not None:
            raise ConfigError(f"{program} has no U-Net with such backbone.cond_dims; leave them empty.")
        if trunk := self._cond_trunk():
            return keys | trunk.official_trunk_keys("cond_mlp.", "cond_encoder.")
        pairs = [f"{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")]
        return keys | {f"cond_mlp.layers.{name}": f"cond_encoder.{name}" for name in pairs}

    def build_cond_encoder(self, cond_dim: int) -> nn.Module:
        if not self.cond_dims:
            return nn.Identity()
        if self.cond_activation is not None:
            return PlainTrunk((cond_dim, *self.cond_dims), self.cond_activation)
        width, *_, out = self.cond_dims
        if trunk := self._cond_trunk():
            return trunk.build_trunk(cond_dim, out)
        return nn.Sequential(nn.Linear(cond_dim, width), nn.Linear(width, out))

    def _cond_trunk(self) -> TrunkConfig | None:
        """Return the residual encoder of the condition; None if it has no residual block."""
        num_blocks = (len(self.cond_dims) - 2) // 2
        if num_blocks < 1:
            return None
        return TrunkConfig(width=self.cond_dims[0], num_blocks=num_blocks, activation=self.activation)


class Unet1dBackbone(nn.Module):
    """See `Unet1dConfig`; satisfies `policies.backbones.Backbone`.

    A time per row of the chunk, (M, Th), modulates every row by its own; at coarser levels rows share the
    mean of their embedded times.

    Source: Diffusion Policy (arXiv 2303.04137), `ConditionalUnet1D`, DPPO (arXiv 2409.00588), `Unet1D`, and
    MIP (arXiv 2512.01809), `ChiUNet`, of the released code; equal up to rounding where their weights fit.
    Deviations: any horizon is accepted; by default the scale is 1 + a linear layer, so that blocks start out
    unscaled, and the last convolution has as many groups as the others, not always 8. Diffusion Policy's
    conditions per row are left out.
    """

    def __init__(
        self, config: Unet1dConfig, chunk_shape: tuple[int, int], cond_dim: int, *, second_time: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        time, expansion = config.time_dim, config.time_expansion
        self.time_embedding = EMBEDDINGS[config.times](time, expansion=expansion)
        self.second_embedding = TimeEmbedding(time, expansion=expansion) if second_time else None
        self.cond_encoder = config.build_cond_encoder(cond_dim)
        parts = (time, config.cond_dims[-1] if config.cond_dims else cond_dim)
        self.unet = TemporalUnet(config, chunk_shape, parts)
        self._ready: WeightCache[Evaluate] = WeightCache()
        self._cache: WeightCache[tuple[list[Tensor], Evaluate]] = WeightCache()

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        times, conds = self._time_parts(time, second_time), self._cond_parts(cond)
        if time_row is not None:
            times = [part.index_select(0, time_row) for part in times]
        if cond_row is not None:
            conds = [part.index_select(0, cond_row) for part in conds]
        return self._evaluate()(x, self._modulations(times, conds))

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        net_times = (times,) if second_times is None else (times, second_times)
        sources = (*self.parameters(), *net_times)
        tables, evaluate = self._cache.get(sources, lambda: (self._time_parts(*net_times), self._evaluate()))
        modulations = self._modulations_of_steps(tables, self._cond_parts(cond))
        return lambda k, x: evaluate(x, modulations(k))

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        embedded = embed_times(self.time_embedding, self.second_embedding, times, second_times)
        return embedded, self.cond_encoder(cond.vec)

    def _evaluate(self) -> Evaluate:
        return self._ready.get(tuple(self.unet.parameters()), self.unet.ready)

    def _time_parts(self, time: Tensor, second_time: Tensor | None = None) -> list[Tensor]:
        """Return the time part of every block, (N, P, F); time (N,) or (N, Th)."""
        embedded = embed_times(self.time_embedding, self.second_embedding, time, second_time)
        unet, film = self.unet, self.unet.films[0]
        levels = unet.coarsened(embedded) if time.dim() == 2 else [embedded.unsqueeze(1)] * unet.levels
        features = [film.features(level) for level in levels]
        return [block.film.of_time(features[block.level]) for block in unet.blocks]

    def _cond_parts(self, cond: Cond) -> list[Tensor]:
        films = self.unet.films
        features = films[0].features(self.cond_encoder(cond.vec))
        return [film.of_cond(features) for film in films]

    def _modulations(self, times: Sequence[Tensor], conds: Sequence[Tensor]) -> list[Modulation]:
        """Return the modulation of every block from its two parts: (..., P, F) and (..., F)."""
        parts = zip(self.unet.films, times, conds, strict=True)
        return [film.modulation(time + cond.unsqueeze(-2)) for film, time, cond in parts]

    def _modulations_of_steps(
        self, tables: Sequence[Tensor], conds: Sequence[Tensor]
    ) -> Callable[[int], Sequence[Modulation]]:
        """Return k -> modulations of all blocks, from (K, P, F) and (B, F) each; precomputed if small."""
        steps, batch = tables[0].shape[0], conds[0].shape[0]
        compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if compiled or batch * sum(table.numel() for table in tables) > _FEW_NUMBERS:
            return lambda k: self._modulations([table[k] for table in tables], conds)
        whole = self._modulations([table.unsqueeze(1) for table in tables], conds)
        by_block = (
            zip([None] * steps if scale is None else scale.unbind(0), bias.unbind(0), strict=True)
            for scale, bias in whole
        )
        return list(zip(*by_block, strict=True)).__getitem__
