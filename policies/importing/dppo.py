"""Checkpoints of DPPO (arXiv 2409.00588), cloned or fine-tuned: its MLP and its U-Net on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.backbones.unet1d import Unet1dConfig
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.importing.networks import is_mlp, is_unet, mlp, unet
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDPM

_RANGE_EPS = 1e-6
"""Added to the range of an observation."""

_OTHERS = {
    "network.": "the frozen network under its other name",
    "critic.": "the critic",
    "eta.": "noise that was learned for DDIM; evaluation has none",
}


@register("source", "dppo")
@dataclass(frozen=True)
class DppoSource(ForeignSource):
    """DPPO: its MLP or its U-Net on states, cloned or fine-tuned.

    Attributes:
        activation: Of the network: `relu` (published for Gym and avoiding) or `mish` (kitchen, robomimic,
            furniture). The MLP needs it; null: `mish` for the U-Net.

    Source:
        The released code: names of the tensors, `normalization.npz`, DDPM as in its evaluation.
    """

    activation: str | None = None
    num_levels: int = 20  # denoising levels that it was trained on
    prediction: str = "eps"  # `eps` or `x0`
    tuned_steps: int | None = None  # denoising steps that were fine-tuned; a fine-tuned checkpoint needs it
    groups: int = 8  # groups of channels that the U-Net normalises together
    norm_eps: float = 1e-5  # added to the variance of such a group

    def contents(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Separate the networks from training state; a network alone is accepted too."""
        if any(name.startswith("actor_ft.") for name in tensors):
            skipped = {name: why for name in tensors for key, why in _OTHERS.items() if name.startswith(key)}
            rest = {name: value for name, value in tensors.items() if name not in skipped}
            tuned = under("actor_ft.", rest)
            base = {name: value for name, value in rest.items() if not name.startswith("actor_ft.")}
            return Contents(without("actor.", base), tuned, skipped=skipped)
        return Contents(without("network.", tensors))

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        refuse_images(weights)
        if is_mlp(weights):
            return mlp(weights, asked_activation(self.activation))
        if not is_unet(weights):
            raise CheckpointError(
                f"the tensors are neither DPPO's MLP nor its U-Net: {', '.join(sorted(weights)[:4])}."
            )
        has_norm = "mid_modules.0.blocks.0.block.2.weight" in weights
        return unet(
            weights,
            "time_mlp",
            groups=self.groups if has_norm else 0,
            norm_eps=self.norm_eps,
            activation=self.activation or "mish",
        )

    def keys(self, network: Network, action_dim: int) -> Mapping[str, str]:
        backbone = network.backbone
        if isinstance(backbone, Unet1dConfig):
            return backbone.official_keys("dppo", action_dim=action_dim)
        keys: Mapping[str, str] = backbone.official_keys()
        return keys

    def parts(self) -> tuple[Any, Any]:
        return VPDiffusion(num_levels=self.num_levels, prediction=self.prediction), DDPM()

    def steps_of_tuned(self) -> int | None:
        return self.tuned_steps

    def maps(self, statistics: Mapping[str, np.ndarray]) -> Mapping[str, AffineMap]:
        """Return the normalisation that `normalization.npz` describes."""
        return limits_of(statistics)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors, without the prefix where they have it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


def asked_activation(activation: str | None) -> str:
    """Return the activation of an MLP, which must be given."""
    if activation is None:
        raise ConfigError(
            "source.activation is in no tensor and decides every output; give the one of the configuration "
            "that the weights were trained with (relu for published Gym policies, mish for others)."
        )
    return activation


def refuse_images(weights: Mapping[str, Tensor]) -> None:
    """Refuse a network that looks at images."""
    if seen := [name for name in weights if name.startswith(("backbone.", "compress"))]:
        raise CapabilityError(
            f"'{seen[0]}' belongs to an encoder of images, which this source cannot import; it imports "
            "policies on states."
        )


def limits_of(statistics: Mapping[str, np.ndarray]) -> dict[str, AffineMap]:
    """Return the maps that the program makes of `obs_min`, `obs_max`, `action_min` and `action_max`.

    Observations x become 2 (x - min) / (max - min + 1e-6) - 1; actions have no 1e-6, and one that never
    moved is given that range.

    Raises:
        ConfigError: If an array is missing, is no vector, or is not finite.
    """
    limits = {}
    for name in ("obs_min", "obs_max", "action_min", "action_max"):
        if name not in statistics:
            known = ", ".join(sorted(statistics)) or "none"
            raise ConfigError(f"the normalization file has no array '{name}'; its arrays are: {known}.")
        limits[name] = np.asarray(statistics[name], dtype=np.float64)
        if limits[name].ndim != 1 or not np.isfinite(limits[name]).all():
            raise ConfigError(f"'{name}' must be a finite vector; got shape {limits[name].shape}.")
    span = limits["action_max"] - limits["action_min"]
    ranges = {"obs": limits["obs_max"] - limits["obs_min"] + _RANGE_EPS}
    ranges["action"] = np.where(span == 0, _RANGE_EPS, span)
    maps = {}
    for theirs, ours in (("obs", "state"), ("action", "action")):
        scale = 2.0 / ranges[theirs]
        offset = -1.0 - scale * limits[f"{theirs}_min"]
        maps[ours] = (torch.from_numpy(scale).float(), torch.from_numpy(offset).float())
    return maps
