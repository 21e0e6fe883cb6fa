"""DPPO's released vision encoder, and our counterpart around its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from policies.encoders.vit import VitEncoderConfig


def vit_config(
    weights: Mapping[str, Tensor], expected: Tensor, output: Callable[[VitEncoderConfig], Tensor]
) -> VitEncoderConfig:
    """Read the sizes of a released encoder from its weights.

    They do not tell the heads of attention: those are the number with which the recorded output comes out
    best. Weights are young, so that all others come close too, but differ a hundred times as much.

    Args:
        weights: By their released names.
        expected: The recorded output.
        output: That of a network of ours with an encoder and these weights.
    """
    layers = {name.split(".")[3] for name in weights if name.startswith("backbone.vit.net.")}
    width = weights["backbone.vit.pos_embed"].shape[2]
    sizes = {"width": width, "depth": len(layers), "features": heads_of(weights)[0].shape[2]}
    configs = [VitEncoderConfig(heads=n, **sizes) for n in range(1, width + 1) if width % n == 0]
    with torch.no_grad():
        differences = [float((output(config) - expected).abs().max()) for config in configs]
    return configs[differences.index(min(differences))]


def heads_of(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the weights of the spatial embeddings, one per camera."""
    names = [name for name in weights if name.startswith("compress") and name.count(".") == 1]
    return [weights[name] for name in sorted(names)]


def sizes_of(arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the sizes of what the released network was shown: (B, To, Do) and (B, To, cameras 3, H, W)."""
    steps, channels, height, width = arrays["in.rgb"].shape[1:]
    images = {f"camera{i}": (height, width, 3) for i in range(channels // 3)}
    return {"obs_dim": arrays["in.state"].shape[2], "obs_steps": steps, "images": images}


def observation_of(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the observation in our layout, images as bytes."""
    images = arrays["in.rgb"].unflatten(2, (-1, 3)).permute(2, 0, 1, 4, 5, 3).to(torch.uint8)
    assert torch.equal(images.to(torch.float32).sum(), arrays["in.rgb"].sum())
    cameras = {f"camera{i}": image for i, image in enumerate(images)}
    return {"state": arrays["in.state"], **cameras}


def encoder_keys(config: VitEncoderConfig, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the released names of an encoder to ours below `encoder`."""
    keys = config.official_keys(len(heads_of(weights)))
    return {theirs: f"encoder.{ours}" for theirs, ours in keys.items()}
