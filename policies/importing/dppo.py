"""Checkpoints of DPPO (arXiv 2409.00588), cloned or fine-tuned: its MLP and its U-Net on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.errors import ConfigError
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.importing.networks import kind_of, mlp, unet
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDPM

_RANGE_EPS = 1e-6  # added to the range of an observation

_SKIPPED = {
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
        tuned = under("actor_ft.", tensors)
        if not tuned:
            return Contents(without("network.", tensors))
        skipped = {name: why for name in tensors for key, why in _SKIPPED.items() if name.startswith(key)}
        base = {k: v for k, v in tensors.items() if k not in skipped and not k.startswith("actor_ft.")}
        return Contents(without("actor.", base), tuned, self.tuned_steps, skipped=skipped)

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        if kind_of(weights, mlp="MLP", unet="U-Net") == "mlp":
            return mlp(weights, self.activation)
        groups = self.groups if "mid_modules.0.blocks.0.block.2.weight" in weights else 0
        activation = self.activation or "mish"
        return unet(weights, "dppo", groups=groups, norm_eps=self.norm_eps, activation=activation)

    def parts(self) -> tuple[Any, Any]:
        return VPDiffusion(num_levels=self.num_levels, prediction=self.prediction), DDPM()

    def maps(self, statistics: Mapping[str, np.ndarray]) -> Mapping[str, AffineMap]:
        return limits_of(statistics)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors, without the prefix where they have it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


def limits_of(statistics: Mapping[str, np.ndarray]) -> dict[str, AffineMap]:
    """Return the maps that the program makes of `obs_min`, `obs_max`, `action_min` and `action_max`.

    Observations x become 2 (x - min) / (max - min + 1e-6) - 1; actions have no 1e-6, and one that never
    moved is given that range.

    Raises:
        ConfigError: If an array is missing, is no vector, or is not finite.
    """
    limits = limits_in(statistics)
    span = limits["action_max"] - limits["action_min"]
    obs_range = limits["obs_max"] - limits["obs_min"] + _RANGE_EPS
    return maps_of(limits, obs_range, np.where(span == 0, _RANGE_EPS, span))


def limits_in(statistics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return `obs_min`, `obs_max`, `action_min` and `action_max` in float64, checked as `limits_of` says."""
    limits = {}
    for name in ("obs_min", "obs_max", "action_min", "action_max"):
        if name not in statistics:
            known = ", ".join(sorted(statistics)) or "none"
            raise ConfigError(f"the normalization file has no array '{name}'; its arrays are: {known}.")
        limits[name] = np.asarray(statistics[name], dtype=np.float64)
        if limits[name].ndim != 1 or not np.isfinite(limits[name]).all():
            raise ConfigError(f"'{name}' must be a finite vector; got shape {limits[name].shape}.")
    return limits


def maps_of(
    limits: Mapping[str, np.ndarray], obs_range: np.ndarray, action_range: np.ndarray
) -> dict[str, AffineMap]:
    """Return the maps x -> 2 (x - min) / range - 1."""
    maps = {}
    for theirs, ours, size in (("obs", "state", obs_range), ("action", "action", action_range)):
        scale = 2.0 / size
        offset = -1.0 - scale * limits[f"{theirs}_min"]
        maps[ours] = (torch.from_numpy(scale).float(), torch.from_numpy(offset).float())
    return maps
