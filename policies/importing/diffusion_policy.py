"""Checkpoints of Diffusion Policy (arXiv 2303.04137): its U-Net and its transformer on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policies.backbones.unet1d import Unet1dConfig
from policies.errors import CapabilityError, CheckpointError
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.importing.networks import is_transformer, is_unet, transformer, unet
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDPM

_MAPS = "normalizer.params_dict."
_FEATURES = {"obs": "state", "action": "action"}


@register("source", "diffusion_policy")
@dataclass(frozen=True)
class DiffusionPolicySource(ForeignSource):
    """Diffusion Policy: the U-Net or the transformer on states, conditioned on a history.

    Source:
        The released code: names of the tensors, the map of the normaliser, DDPM with clipped clean chunks,
        and a chunk that begins at the oldest observation.
    """

    num_levels: int = 100  # denoising levels that it was trained on
    prediction: str = "eps"  # `eps`, or `x0` for what the program calls `sample`
    groups: int = 8  # groups of channels that the U-Net normalises together
    heads: int = 4  # attention heads of the transformer

    def contents(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Separate network and normaliser; a state dict of the network alone is accepted too."""
        whole = any(name.startswith("model.") for name in tensors)
        network, skipped = {}, {}
        for name, value in tensors.items():
            if name.endswith("_dummy_variable"):
                skipped[name] = "empty"
            elif name.startswith(_MAPS):
                if ".input_stats." in name:
                    skipped[name] = "statistics that the normaliser's map was made from"
            elif name.startswith("obs_encoder."):
                raise CapabilityError(
                    f"'{name}' belongs to an encoder of images, which this source cannot import; it imports "
                    "policies on states."
                )
            else:
                network[name.removeprefix("model.") if whole else name] = value
        return Contents(network, maps=_maps(tensors), skipped=skipped)

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        if is_transformer(weights):
            return transformer(weights, self.heads)
        if not is_unet(weights):
            raise CheckpointError(
                f"the tensors are of neither network of Diffusion Policy: {', '.join(sorted(weights)[:4])}."
            )
        found = unet(weights, "diffusion_step_encoder", groups=self.groups, final_groups=8)
        if found.cond_dim == 0 or (action_dim is not None and action_dim != found.action_dim):
            raise CapabilityError(
                "this U-Net is not conditioned on observations but completes a chunk that holds them "
                "(inpainting); only networks with observations as condition (obs_as_global_cond) can be "
                "imported."
            )
        return found

    def keys(self, network: Network, action_dim: int) -> Mapping[str, str]:
        backbone = network.backbone
        if isinstance(backbone, Unet1dConfig):
            return backbone.official_keys("diffusion_policy", action_dim=action_dim)
        keys: Mapping[str, str] = backbone.official_keys()
        return keys

    def parts(self) -> tuple[Any, Any]:
        process = VPDiffusion(num_levels=self.num_levels, prediction=self.prediction)
        return process, DDPM(noise_clip=None, min_std=0.0, final_std=None)

    def first_row(self, obs_steps: int) -> int:
        """Return the first executed row: that of the newest observation."""
        return obs_steps - 1


def _maps(tensors: Mapping[str, Tensor]) -> dict[str, AffineMap]:
    maps = {}
    for theirs, ours in _FEATURES.items():
        scale, offset = (tensors.get(f"{_MAPS}{theirs}.{name}") for name in ("scale", "offset"))
        if scale is not None and offset is not None:
            maps[ours] = (scale, offset)
    return maps
