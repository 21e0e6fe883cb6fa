"""The image encoder of Diffusion Policy: a residual network with spatial softmax keypoints.

    h = max3(relu(norm(conv7(x))))                         stem: a quarter of the resolution
    h <- relu(norm(conv3(relu(norm(conv3(h))))) + s(h))    eight blocks; s: 1 x 1 where channels change
    p = softmax over positions of conv1(h)                 one distribution per keypoint
    f = relu(W [E_p x | E_p y] + b)                        x from left and y from top, in [-1, 1]

Legend: M images, B batch, To observation history, C channels, N keypoints.

Source: Diffusion Policy (arXiv 2303.04137), "visual encoder"; ResNet (arXiv 1512.03385); group normalisation
(arXiv 1803.08494) where ResNet has batch normalisation, whose running averages do not agree with averaged
weights; spatial softmax (arXiv 1504.00702). Deviation: all images of a history are cropped alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from policies.bounds import Checked, bounded
from policies.encoders import ObservationSizes
from policies.encoders.images import centre_crop, chosen, in_unit_range, pixels, random_crop
from policies.encoders.state import encoded_state, with_goal
from policies.errors import ConfigError
from policies.normalizer import Normalizer
from policies.protocols import Cond, Observation, Rng
from policies.registry import register

_SMALLEST = 33  # pixels from which on the last features have more than one position


@register("encoder", "resnet")
@dataclass(frozen=True)
class ResNetEncoderConfig(Checked):
    """ResNet-18 with spatial softmax for every camera, beside state and goal."""

    cameras: tuple[str, ...] = ()  # cameras in this order; empty: all, sorted by name
    crop: float = bounded(0.9, gt=0, le=1)  # cropped fraction: random in training, else the centre; 1: none
    shared: bool = False  # one network for all cameras instead of one each
    width: int = bounded(64, ge=16)  # channels of the first of four stages, each doubles; a multiple of 16
    keypoints: int = bounded(32, ge=1)  # number of keypoints
    features: int = bounded(64, ge=1)  # features per image

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("width", self.width % 16 == 0, "a multiple of 16")

    def build(self, sizes: ObservationSizes) -> ResNetEncoder:
        return ResNetEncoder(self, sizes)


class ResNetEncoder(nn.Module):
    """See `ResNetEncoderConfig`; satisfies `policies.encoders.Encoder`.

    The condition is [features, state] of each step, oldest first, then the goal: one token per observation.
    """

    token_dim = 0

    def __init__(self, config: ResNetEncoderConfig, sizes: ObservationSizes) -> None:
        super().__init__()
        self.config = config
        self.sizes = replace(sizes, images=chosen(sizes, config.cameras))
        self.crops = {camera: self._crop_of(camera) for camera in self.sizes.images}
        num_nets = 1 if config.shared else len(self.crops)
        self.nets = nn.ModuleList(KeypointNet(config) for _ in range(num_nets))

    def _crop_of(self, camera: str) -> tuple[int, int]:
        height, width, _ = self.sizes.images[camera]
        crop = (round(self.config.crop * height), round(self.config.crop * width))
        if min(crop) < _SMALLEST:
            raise ConfigError(
                f"encoder=resnet needs {_SMALLEST} x {_SMALLEST} pixels; '{camera}' has {height} x {width}, "
                f"of which encoder.crop={self.config.crop:g} leaves {crop[0]} x {crop[1]}. Use encoder=vit."
            )
        return crop

    @property
    def cond_dim(self) -> int:
        per_step = len(self.crops) * self.config.features + self.sizes.obs_dim
        return per_step * self.sizes.obs_steps + self.sizes.goal_dim

    def forward(self, obs: Observation, normalizer: Normalizer, generator: Rng = None) -> Cond:
        state = encoded_state(obs, normalizer, self.sizes)
        parts = []
        for i, camera in enumerate(self.crops):
            net = self.nets[0 if self.config.shared else i]
            features = net(self._inputs(pixels(obs, camera, self.sizes), camera, state.dtype, generator))
            parts.append(rearrange(features, "(B To) F -> B To F", To=self.sizes.obs_steps))
        vec = rearrange(torch.cat([*parts, state], dim=-1), "B To F -> B (To F)")
        return Cond(with_goal(vec, obs, normalizer, self.sizes))

    def _inputs(self, images: Tensor, camera: str, dtype: torch.dtype, generator: Rng) -> Tensor:
        """Crop images (B, To, H, W, 3) and rearrange them to (B To, 3, h, w) in [-1, 1]."""
        size = self.crops[camera]
        crop = centre_crop(images, size) if generator is None else random_crop(images, size, generator)
        x = rearrange(2 * in_unit_range(crop, dtype) - 1, "B To H W rgb -> (B To) rgb H W")
        # Contiguous channels-first: with channels-last, layers take twice as long on a CPU, and the
        # backward pass of a group norm in PyTorch 2.13 crashes when what is before it is frozen.
        return x.contiguous()


class KeypointNet(nn.Module):
    """Features of one image from its keypoint positions."""

    def __init__(self, config: ResNetEncoderConfig) -> None:
        super().__init__()
        self.trunk = ResNet18(config.width)
        self.keypoints = nn.Conv2d(8 * config.width, config.keypoints, 1, bias=False)  # one would cancel
        self.outlet = nn.Linear(2 * config.keypoints, config.features)

    def forward(self, x: Tensor) -> Tensor:
        """(M, 3, H, W) in [-1, 1] -> (M, features)."""
        return torch.relu(self.outlet(spatial_softmax(self.keypoints(self.trunk(x))).flatten(1)))


def spatial_softmax(maps: Tensor) -> Tensor:
    """Return the mean (x, y) under each map's softmax (arXiv 1504.00702): (M, N, H, W) -> (M, N, 2)."""
    height, width = maps.shape[2:]
    share = rearrange(maps, "M N H W -> M N (H W)").softmax(dim=-1)
    share = rearrange(share, "M N (H W) -> M N H W", H=height)
    x, y = (torch.linspace(-1, 1, n, device=maps.device, dtype=maps.dtype) for n in (width, height))
    return torch.stack([share.sum(dim=2) @ x, share.sum(dim=3) @ y], dim=-1)


class ResNet18(nn.Module):
    """The 18-layer residual network without its classifier, normalised over groups of 16 channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = _norm(width)
        blocks = []
        for stage in range(4):
            before, channels = width * 2 ** max(stage - 1, 0), width * 2**stage
            blocks += [ResidualBlock(before, channels), ResidualBlock(channels, channels)]
        self.blocks = nn.Sequential(*blocks)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(M, 3, H, W) -> (M, 8 width, H / 32, W / 32), rounded up."""
        h = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, stride=2, padding=1)
        return self.blocks(h)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; halves the resolution where it changes the channels."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        stride = 1 if before == channels else 2
        self.conv1 = nn.Conv2d(before, channels, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = _norm(channels), _norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if before != channels:
            projection = nn.Conv2d(before, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, _norm(channels))

    def forward(self, h: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(h)))))
        return torch.relu(inner + self.shortcut(h))


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 16, channels)
