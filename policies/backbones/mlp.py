"""The multilayer perceptron of DPPO as denoising backbone, without repeated computation.

Its input is [flattened chunk, time embedding, condition or encoded condition], its body a trunk
(`policies/networks/mlp_blocks.py`). The first layer is linear in its three parts::

    z = Wx x + (We e + b) + Ws s

`forward` projects a part once per distinct row, and `bind` tabulates the bracket over denoising steps (until
a weight changes) and computes Ws s once per action. Both are exact.

Legend: M rows, B batch, K times, H' width of the first layer (see `Fold`), C condition width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.bounds import bounded
from policies.errors import CapabilityError, ConfigError
from policies.networks import native
from policies.networks.activations import ACTIVATIONS
from policies.networks.embeddings import (
    JointEmbedding,
    OctaveEmbedding,
    TimeEmbedding,
    UniformEmbedding,
    embed_times,
)
from policies.networks.mlp_blocks import (
    ExpandedTrunk,
    Fold,
    PlainTrunk,
    ResidualTrunk,
    Trunk,
    TrunkConfig,
    official_plain_keys,
)
from policies.networks.packed import PackedBlock, PackedSteps, packed_steps
from policies.networks.residual import FirstLayer
from policies.networks.weight_cache import WeightCache, weights_of
from policies.protocols import BoundField, Cond, Features
from policies.registry import register

EMBEDDINGS = {
    "learned": TimeEmbedding,
    "octaves": OctaveEmbedding,
    "uniform": UniformEmbedding,
    "joint": JointEmbedding,
}
_NAMES = ("time_embedding.", "cond_mlp.", "mlp_mean.", (1, 3))  # DPPO's, and places of its time layers
_JOINT_NAMES = ("t_emb.", "cond_emb.", "vel_head.", (0, 2))  # the same of ReinFlow's shortcut network
_FEW_NUMBERS = 1 << 17  # up to this many, the first layer's offsets of all steps are computed before the loop


@register("backbone", "mlp")
@dataclass(frozen=True)
class MlpConfig(TrunkConfig):
    """Residual or plain MLP over the flattened chunk.

    Attributes:
        times: Embedding of the network time: `learned`; `octaves` and `uniform`, which fit
            process.time_scale=1; `joint` of both times, for processes that learn steps.
        expansion: Blocks as MIP's, which widen inside by this factor; null: as DPPO's.
        cond_activation: Of the condition encoder; null: as `activation`.
        add_cond: Add the encoded condition to the embedded time, whose width `time_dim` it then has, instead
            of concatenating them.
    """

    time_dim: int = bounded(16, ge=4, even=True)  # width of the time embedding
    times: str = bounded("learned", choices=tuple(EMBEDDINGS))
    cond_dims: tuple[int, ...] = bounded((), ge=1)  # widths of a condition encoder, output last; empty: none
    expansion: int | None = bounded(None, ge=1)
    cond_activation: str | None = bounded(None, choices=tuple(ACTIVATIONS))
    add_cond: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.expansion is None or (self.residual and self.layer_norm)
        self.require("expansion", fits, "null without residual=true and layer_norm=true")

    def unused(self) -> dict[str, str]:
        bare = {} if self.cond_dims else {"cond_activation": "without backbone.cond_dims"}
        return super().unused() | bare

    def build(
        self, chunk_shape: tuple[int, int], cond_dim: int, *, token_dim: int = 0, second_time: bool = False
    ) -> MlpBackbone:
        if token_dim:
            raise CapabilityError(
                "backbone=mlp cannot attend to tokens. Use backbone=transformer, or an encoder without them."
            )
        if self.times == "joint" and not second_time:
            raise CapabilityError(
                "backbone.times=joint embeds two times, and this process has one. Use backbone.times=learned."
            )
        width = (cond_dim, *self.cond_dims)[-1]
        if self.add_cond and width != self.time_dim:
            raise ConfigError(
                f"backbone.add_cond needs a condition of width backbone.time_dim={self.time_dim}; got "
                f"{width}. Set the last of backbone.cond_dims."
            )
        return MlpBackbone(self, chunk_shape, cond_dim, second_time=second_time)

    def build_trunk(self, in_dim: int, out_dim: int) -> Trunk:
        if self.expansion is None:
            return super().build_trunk(in_dim, out_dim)
        return ExpandedTrunk((in_dim, self.width, out_dim), self.num_blocks, self.expansion, self.activation)

    def official_keys(self) -> dict[str, str]:
        """Map the parameter names of a released network to ours.

        They are those of DPPO's `DiffusionMLP`, and of ReinFlow's `ShortCutFlowMLP` where times are joint.
        """
        if self.expansion is not None:
            raise ConfigError("DPPO and ReinFlow have no MLP with backbone.expansion; leave it null.")
        time_, cond_, trunk_, places = _JOINT_NAMES if self.times == "joint" else _NAMES
        time = {
            f"{time_}{place}.{kind}": f"time_embedding.{name}.{kind}"
            for place, name in zip(places, ("linear1", "linear2"), strict=True)
            for kind in ("weight", "bias")
        }
        cond = official_plain_keys(len(self.cond_dims), cond_, "cond_encoder.")
        return time | cond | self.official_trunk_keys(trunk_, "trunk.")


class _Bound(NamedTuple):
    """First layer at bound times: table We e + b (K, H'), and Wx (Th Da, H') and Ws (C, H'), transposed.

    `packed` holds the network for the loop in C once `bind_packed` was called.
    """

    table: Tensor
    chunk: Tensor
    cond: Tensor
    fold: Fold
    packed: list[PackedBlock | None]


class MlpBackbone(nn.Module):
    """See `MlpConfig`; satisfies `policies.backbones.Backbone`.

    Source: DPPO (arXiv 2409.00588), `DiffusionMLP`, ReinFlow (arXiv 2505.22094), `ShortCutFlowMLP`, and MIP
    (arXiv 2512.01809), `MLP` of the released code; equal up to rounding.
    """

    def __init__(
        self, config: MlpConfig, chunk_shape: tuple[int, int], cond_dim: int, *, second_time: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.chunk_shape = tuple(chunk_shape)
        chunk = chunk_shape[0] * chunk_shape[1]
        self.time_embedding = EMBEDDINGS[config.times](config.time_dim)
        is_separate = second_time and config.times != "joint"
        self.second_embedding = TimeEmbedding(config.time_dim) if is_separate else None
        cond_dims = (cond_dim, *config.cond_dims)
        activation = config.cond_activation or config.activation
        self.cond_encoder = PlainTrunk(cond_dims, activation) if config.cond_dims else nn.Identity()
        self.part_dims = (chunk, config.time_dim, *([] if config.add_cond else [cond_dims[-1]]))
        self.trunk = config.build_trunk(sum(self.part_dims), chunk)
        self._cache: WeightCache[_Bound] = WeightCache()
        self._packed_cache: WeightCache[PackedBlock | None] = WeightCache()

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        cond: Cond,
        cond_row: Tensor | None = None,
        time_row: Tensor | None = None,
        second_time: Tensor | None = None,
    ) -> Tensor:
        fold = self.trunk.fold()
        embedded = embed_times(self.time_embedding, self.second_embedding, time, second_time)
        parts = (x.flatten(1), embedded, self.cond_encoder(cond.vec))
        if time_row is None and cond_row is None:
            inputs = (parts[0], parts[1] + parts[2]) if self.config.add_cond else parts
            first = fold.first(torch.cat(inputs, dim=1))
        else:
            first = self._first_layer(parts, (None, time_row, cond_row), fold)
        return self.trunk.evaluate(first, fold).view(-1, *self.chunk_shape)

    def _columns(self, fold: Fold) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first layer's weights of chunk, time and condition."""
        chunk, time, *cond = fold.weight.split(self.part_dims, dim=1)
        return chunk, time, cond[0] if cond else time

    def _first_layer(
        self, parts: tuple[Tensor, ...], rows: tuple[Tensor | None, ...], fold: Fold
    ) -> FirstLayer:
        """Return the parts of z (M, H'): inputs with a row each, and projected tables of shared rows."""
        whole: list[tuple[Tensor, Tensor]] = []
        tables: list[tuple[Tensor, Tensor | None]] = []
        for part, weight, row in zip(parts, self._columns(fold), rows, strict=True):
            if row is None:
                whole.append((part, weight))
            else:
                bias = None if tables else fold.bias  # added by the first table alone
                tables.append((F.linear(part, weight, bias), row))
        if len(whole) == 1:
            return FirstLayer(*whole[0], tuple(tables))
        inputs, weights = (torch.cat(tensors, dim=1) for tensors in zip(*whole, strict=True))
        return FirstLayer(inputs, weights, tuple(tables))

    def bind(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        inputs = (cond, times) if second_times is None else (cond, times, second_times)
        if torch.is_grad_enabled() or not native.serves(cond.vec):
            return self._bind_plain(*inputs)
        packed = functools.cache(lambda: self.bind_packed(*inputs))  # each is prepared at its first use
        plain = functools.cache(lambda: self._bind_plain(*inputs))

        def bound(k: int, x: Tensor) -> Tensor:
            fits = 0 <= k < len(times) and x.shape[1:] == self.chunk_shape and len(x) > 0
            in_c = fits and not torch.is_grad_enabled() and native.serves(x)
            if in_c and (nets := packed()) is not None:
                (net,) = nets
                if net.serves(len(x), x[0].numel()):
                    return net.field(k, x.flatten(1).contiguous()).view_as(x)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):  # as it was bound
                field = plain()
            return field(k, x)

        return bound

    def _bind_plain(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> BoundField:
        """Return `bind` by plain operations."""
        first, shape, width = self._first(times, second_times), self.chunk_shape, self.part_dims[0]
        finish, chunk = self.trunk.finish_of(first.fold), first.chunk
        offset = _offsets(first.table, self.cond_encoder(cond.vec) @ first.cond)

        def bound(k: int, x: Tensor) -> Tensor:
            return finish(torch.addmm(offset(k), x.reshape(-1, width), chunk)).view(-1, *shape)

        return bound

    def bind_packed(
        self, cond: Cond, times: Tensor, second_times: Tensor | None = None
    ) -> list[PackedSteps] | None:
        """Return `bind` for the loop in C; None where that has to serve."""
        first = self._first(times, second_times)
        if not first.packed:  # matrices are packed once for all times
            weights = () if self._packed_cache.sealed else weights_of(self)
            first.packed.append(self._packed_cache.get(weights, lambda: self._packed(first.fold)))
        return packed_steps(first.packed[0], self.cond_encoder(cond.vec).contiguous(), first.table)

    def _packed(self, fold: Fold) -> PackedBlock | None:
        chunk, _, cond = self._columns(fold)
        return self.trunk.packed(fold, cond, chunk) if isinstance(self.trunk, ResidualTrunk) else None

    def features(self, cond: Cond, times: Tensor, second_times: Tensor | None = None) -> Features:
        embedded = embed_times(self.time_embedding, self.second_embedding, times, second_times)
        return embedded, self.cond_encoder(cond.vec)

    def _first(self, times: Tensor, second_times: Tensor | None) -> _Bound:
        """Return the first layer at bound times, computed anew when a weight has changed."""
        net_times = (times,) if second_times is None else (times, second_times)
        weights = () if self._cache.sealed else weights_of(self)
        return self._cache.get((*weights, *net_times), lambda: self._compute_first(*net_times))

    def _compute_first(self, times: Tensor, second_times: Tensor | None = None) -> _Bound:
        fold = self.trunk.fold()
        chunk, time, cond = self._columns(fold)
        embedded = embed_times(self.time_embedding, self.second_embedding, times, second_times)
        table = F.linear(embedded, time, fold.bias)
        return _Bound(table, chunk.t().contiguous(), cond.t().contiguous(), fold, [])


def _offsets(table: Tensor, cond: Tensor) -> Callable[[int], Tensor]:
    """Return k -> table[k] + cond, (B, H'), of a table (K, H') and cond (B, H'); precomputed if small."""
    compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not compiled and table.shape[0] * cond.numel() <= _FEW_NUMBERS:
        return (table.unsqueeze(1) + cond).unbind(0).__getitem__
    steps = table.unbind(0)
    return lambda k: steps[k] + cond
