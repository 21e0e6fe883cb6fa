"""Frames as vectors: a small convolutional autoencoder.

    z = norm(W e(x)),   x^ = d(z + sigma eps),   loss = mean (x^ - x)^2

e halves the sides three times, d doubles them as often and cuts off what is too much. The normalisation is
that of a batch, without weights: entries of z have unit deviation on the data. The noise, in training only,
keeps near vectors near frames: a model that is a little wrong about z is a little wrong about the frame.

Legend: B frames, C cameras, H and W height and width, L latent width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from policies.encoders.images import in_unit_range

NOISE = 0.1  # sigma, in deviations of the vector
_CHANNELS = (16, 32, 64)


class FrameCoder(nn.Module):
    """Frames of C cameras of one size to vectors, and back.

    Args:
        cameras: Names, in the order of the channels.
        size: H and W.
        latent_dim: L.
    """

    def __init__(self, cameras: Sequence[str], size: tuple[int, int], latent_dim: int) -> None:
        super().__init__()
        self.cameras, self.size = tuple(cameras), size
        inner = tuple(-(-side // 2 ** len(_CHANNELS)) for side in size)
        widths, flat = (3 * len(self.cameras), *_CHANNELS), _CHANNELS[-1] * inner[0] * inner[1]
        down: list[nn.Module] = []
        up: list[nn.Module] = [nn.Linear(latent_dim, flat), nn.Unflatten(1, (_CHANNELS[-1], *inner))]
        for wide, narrow in zip(widths[1:], widths, strict=False):
            down += [nn.Conv2d(narrow, wide, 3, stride=2, padding=1), nn.SiLU()]
        for wide, narrow in zip(widths[:0:-1], widths[-2::-1], strict=True):
            up += [nn.SiLU(), nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1)]
        norm = nn.BatchNorm1d(latent_dim, affine=False)
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(flat, latent_dim), norm)
        self.decoder = nn.Sequential(*up)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        return {camera: (*self.size, 3) for camera in self.cameras}

    def stacked(self, images: Mapping[str, Tensor]) -> Tensor:
        """Return the images (B, H, W, 3) of all cameras, (B, 3 C, H, W) in [0, 1]."""
        device = next(self.parameters()).device
        together = torch.cat([images[camera] for camera in self.cameras], dim=-1).to(device)
        return in_unit_range(together.permute(0, 3, 1, 2), torch.float32).contiguous()

    def encode(self, frames: Tensor) -> Tensor:
        """Return the vectors (B, L) of frames (B, 3 C, H, W)."""
        latent: Tensor = self.encoder(frames)
        return latent

    def decode(self, latent: Tensor) -> Tensor:
        """Return the frames (B, 3 C, H, W) of vectors (B, L), about in [0, 1]."""
        frames: Tensor = self.decoder(latent)[:, :, : self.size[0], : self.size[1]]
        return frames

    @torch.no_grad()
    def draw(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the images (B, H, W, 3) uint8 of vectors (B, L), by camera."""
        levels = (self.decode(latent).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        return dict(zip(self.cameras, levels.split(3, dim=-1), strict=True))
