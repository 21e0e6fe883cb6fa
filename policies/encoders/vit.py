"""The image encoder of DPPO: a small vision transformer with state-conditioned spatial embedding.

    h = conv3(relu(conv8(x))) + positions                  patches, 16 pixels wide and 8 apart
    h <- h + attention(norm(h)),  h <- h + mlp(norm(h))    every layer
    f = sum_d w_d relu(norm(W [h_d | state] + b))          h_d: channel d of all patches ("spatial embedding")

Legend: B batch, To observation history, P patches, D width of a patch, F features.

Source: DPPO (arXiv 2409.00588), `VitEncoder` and `SpatialEmb` of the released code, which are IBRL's
(arXiv 2311.02198); equal up to rounding. The state encoder is that of ReinFlow's `ShortCutFlowViT`
(arXiv 2505.22094). Deviation: one encoder runs once per action; DPPO's is inside each
of its two networks and runs at every denoising step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.encoders import ObservationSizes
from policies.encoders.images import chosen, in_unit_range, pixels, random_shift
from policies.encoders.state import encoded_state, with_goal
from policies.errors import ConfigError
from policies.networks.attention import Attention, FeedForward, LayerNorm, check_heads
from policies.networks.mlp_blocks import PlainTrunk, official_plain_keys
from policies.normalizer import Normalizer
from policies.protocols import Cond, Observation, Rng
from policies.registry import register

_KINDS = ("weight", "bias")
_LAYER = {
    "layer_norm1": "norm1", "mha.qkv_proj": "attention.inlet", "mha.out_proj": "attention.outlet",
    "layer_norm2": "norm2", "linear1": "feed_forward.linear1", "linear2": "feed_forward.linear2",
}  # fmt: skip


@register("encoder", "vit")
@dataclass(frozen=True)
class VitEncoderConfig(Checked):
    """A small vision transformer for all cameras, with state-conditioned readout."""

    cameras: tuple[str, ...] = ()  # cameras in this order; empty: all, sorted by name
    shift: int = bounded(4, ge=0)  # maximum random shift in training [pixels]; 0: none
    width: int = bounded(128, ge=1)  # features of a patch
    depth: int = bounded(1, ge=1)  # layers
    heads: int = bounded(4, ge=1)  # attention heads; must divide the width
    features: int = bounded(128, ge=1)  # features per camera
    state_dims: tuple[int, ...] = bounded((), ge=1)  # widths of a state encoder, output last; empty: none
    tokens: bool = False  # also return patches as tokens for attention backbones

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self)

    def build(self, sizes: ObservationSizes) -> VitEncoder:
        return VitEncoder(self, sizes)

    def official_keys(self, num_cameras: int = 1) -> dict[str, str]:
        """Map the parameter names of the encoder within the released networks to ours."""
        heads = ("compress",) if num_cameras == 1 else [f"compress{i + 1}" for i in range(num_cameras)]
        modules = {"patch_embed.embed.0": "stem1", "patch_embed.embed.3": "stem2", "norm": "norm"}
        for i in range(self.depth):
            modules |= {f"net.{i}.{theirs}": f"layers.{i}.{ours}" for theirs, ours in _LAYER.items()}
        names = {f"backbone.vit.{theirs}": f"vit.{ours}" for theirs, ours in modules.items()}
        for i, head in enumerate(heads):
            names |= {f"{head}.input_proj.0": f"heads.{i}.inlet", f"{head}.input_proj.1": f"heads.{i}.norm"}
        keys = {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in names.items() for kind in _KINDS}
        keys |= {f"{head}.weight": f"heads.{i}.weight" for i, head in enumerate(heads)}
        keys |= official_plain_keys(len(self.state_dims), "prop_emb.", "state_encoder.")
        return keys | {"backbone.vit.pos_embed": "vit.positions"}


class VitEncoder(nn.Module):
    """See `VitEncoderConfig`; satisfies `policies.encoders.Encoder`.

    All cameras share the transformer; each has its own spatial embedding. The images of a history are stacked
    as channels. The condition is [features, state history, goal]. `state_dims` encode its state history, not
    that which the spatial embedding reads.
    """

    def __init__(self, config: VitEncoderConfig, sizes: ObservationSizes) -> None:
        super().__init__()
        self.config = config
        self.sizes = replace(sizes, images=chosen(sizes, config.cameras))
        self.state_dim = sizes.obs_steps * sizes.obs_dim
        self.vit = Vit(config, 3 * sizes.obs_steps, _num_patches(self.sizes))
        self.heads = nn.ModuleList(
            SpatialEmbedding(self.vit.positions.shape[1], config.width, self.state_dim, config.features)
            for _ in self.sizes.images
        )
        dims = (self.state_dim, *config.state_dims)
        self.state_encoder = PlainTrunk(dims, "mish") if config.state_dims else nn.Identity()
        self.cond_dim = len(self.heads) * config.features + dims[-1] + sizes.goal_dim

    @property
    def token_dim(self) -> int:
        return self.config.width if self.config.tokens else 0

    def forward(self, obs: Observation, normalizer: Normalizer, generator: Rng = None) -> Cond:
        state = encoded_state(obs, normalizer, self.sizes).flatten(1)
        patches = [
            self._patches(pixels(obs, camera, self.sizes), state.dtype, generator)
            for camera in self.sizes.images
        ]
        features = [head(seen, state) for head, seen in zip(self.heads, patches, strict=True)]
        known = torch.cat([*features, self.state_encoder(state)], dim=-1)
        vec = with_goal(known, obs, normalizer, self.sizes)
        return Cond(vec, torch.cat(patches, dim=1) if self.config.tokens else None)

    def _patches(self, images: Tensor, dtype: torch.dtype, generator: Rng) -> Tensor:
        """Return the patches (B, P, D) of a history of images (B, To, H, W, 3)."""
        if generator is not None and self.config.shift:
            images = random_shift(images, self.config.shift, generator)
        x = in_unit_range(images, dtype) - 0.5
        return self.vit(rearrange(x, "B To H W rgb -> B (To rgb) H W"))


def _num_patches(sizes: ObservationSizes) -> int:
    shapes = set(sizes.images.values())
    if len(shapes) > 1:
        raise ConfigError(
            f"encoder=vit needs images of one size; got {dict(sizes.images)}. Choose encoder.cameras, or "
            "encoder=resnet."
        )
    ((height, width, _),) = shapes
    if min(height, width) < 16:
        raise ConfigError(f"encoder=vit needs at least 16 x 16 pixels; got {height} x {width}.")
    return (height // 4 - 2) // 2 * ((width // 4 - 2) // 2)


class Vit(nn.Module):
    """A vision transformer with a two-layer convolutional stem."""

    def __init__(self, config: VitEncoderConfig, channels: int, num_patches: int) -> None:
        super().__init__()
        self.stem1 = nn.Conv2d(channels, config.width, 8, stride=4)
        self.stem2 = nn.Conv2d(config.width, config.width, 3, stride=2)
        self.positions = nn.Parameter(torch.zeros(1, num_patches, config.width))
        self.layers = nn.Sequential(*(Layer(config.width, config.heads) for _ in range(config.depth)))
        self.norm = LayerNorm(config.width)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, H, W) in [-0.5, 0.5] -> patches (B, P, D)."""
        patches = rearrange(self.stem2(torch.relu(self.stem1(x))), "B D h w -> B (h w) D")
        return self.norm(self.layers(patches + self.positions))


class Layer(nn.Module):
    """Pre-norm self-attention and feed-forward network over patches."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, 4 * width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.norm1(h))
        return h + self.feed_forward(self.norm2(h))


class SpatialEmbedding(nn.Module):
    """Read patches out per channel, over all positions and with the state (width 0 or more)."""

    def __init__(self, num_patches: int, width: int, state_dim: int, features: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(num_patches + state_dim, features)
        self.norm = LayerNorm(features)
        self.weight = nn.Parameter(torch.zeros(1, width, features))
        nn.init.normal_(self.weight)

    def forward(self, patches: Tensor, state: Tensor) -> Tensor:
        """Patches (B, P, D) and state (B, S) -> (B, F)."""
        places = patches.shape[1]
        of_patches, of_state = self.inlet.weight[:, :places], self.inlet.weight[:, places:]
        known = F.linear(state, of_state, self.inlet.bias).unsqueeze(1)  # the same in every channel
        seen = F.linear(rearrange(patches, "B P D -> B D P"), of_patches)
        return (self.weight * torch.relu(self.norm(seen + known))).sum(dim=1)
