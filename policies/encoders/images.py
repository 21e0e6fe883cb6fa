"""Shared parts of image encoders: camera selection, cropping and shifts.

Images are (B, To, H, W, 3), uint8, or floating point in [0, 1]. All images of a history share one crop or
shift, so that only scene motion differs between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.encoders import ImageShape, ObservationSizes, read
from policies.errors import ConfigError
from policies.protocols import Observation

# Inputs and outputs of a policy and its graph, and what critics may read.
RESERVED = ("state", "goal", "simulator", "action", "observation", "noise")


def chosen(sizes: ObservationSizes, cameras: Sequence[str]) -> dict[str, ImageShape]:
    """Return the image shapes of the selected cameras, in order; empty selection: all, sorted by name."""
    there = ", ".join(sorted(sizes.images)) or "none"
    if not sizes.images:
        raise ConfigError(
            "this encoder needs images; got none. Use data with cameras, env.cameras=[…] of a task, or "
            "encoder=state."
        )
    if len(set(cameras)) < len(cameras) or not set(cameras) <= set(sizes.images):
        raise ConfigError(
            f"encoder.cameras must be distinct cameras that there are ({there}); got {', '.join(cameras)}."
        )
    shapes = {camera: sizes.images[camera] for camera in cameras or sorted(sizes.images)}
    for camera, shape in shapes.items():
        if camera in RESERVED:
            raise ConfigError(f"a camera cannot be called '{camera}'; rename it in the data.")
        if len(shape) != 3 or shape[2] != 3 or min(shape) < 1:
            raise ConfigError(f"images of camera '{camera}' must have shape (H, W, 3); got {tuple(shape)}.")
    return shapes


def pixels(obs: Observation, camera: str, sizes: ObservationSizes) -> Tensor:
    """Return the raw images of a camera, (B, To, H, W, 3)."""
    images = read(obs, camera, (sizes.obs_steps, *sizes.images[camera]))
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ConfigError(
            f"images of camera '{camera}' must be uint8, or floating point in [0, 1]; got {images.dtype}."
        )
    return images


def in_unit_range(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert images to floats in [0, 1]."""
    scaled = images.to(dtype)
    return scaled if images.is_floating_point() else scaled / 255


def windows(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop one window per batch row; pixels outside an image repeat its edge.

    Shapes:
        images: (B, To, H, W, 3) -> (B, To, *size, 3). top, left: (B,) integer corner of the window.
    """
    height, width = images.shape[2:4]
    row = torch.arange(len(images), device=images.device)[:, None, None, None]
    step = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    down = torch.arange(size[0], device=images.device) + top[:, None]
    right = torch.arange(size[1], device=images.device) + left[:, None]
    y, x = down.clamp(0, height - 1)[:, None, :, None], right.clamp(0, width - 1)[:, None, None, :]
    return images[row, step, y, x]


def random_shift(images: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """Shift images (B, To, H, W, 3) by up to `pad` pixels in each direction, drawn per row.

    Source: DrQ (arXiv 2004.13649); DPPO (arXiv 2409.00588), whose interpolation equals this up to rounding.
    """
    top, left = _drawn(len(images), (2 * pad + 1, 2 * pad + 1), generator, images.device) - pad
    return windows(images, top, left, (images.shape[2], images.shape[3]))


def random_crop(images: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Crop images (B, To, H, W, 3) to (B, To, *size, 3) at positions drawn per row."""
    places = (images.shape[2] - size[0] + 1, images.shape[3] - size[1] + 1)
    top, left = _drawn(len(images), places, generator, images.device)
    return windows(images, top, left, size)


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop images (B, To, H, W, 3) to their middle (B, To, *size, 3)."""
    top, left = (images.shape[2] - size[0]) // 2, (images.shape[3] - size[1]) // 2
    return images[:, :, top : top + size[0], left : left + size[1]]


def _drawn(n: int, places: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw integers from 0 up to each of `places`, (2, n)."""
    draws = [torch.randint(0, k, (n,), generator=generator, device=generator.device) for k in places]
    return torch.stack(draws).to(device)
