"""Checkpoints of Diffusion Policy (arXiv 2303.04137): its U-Net and its transformer on states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policies.errors import CapabilityError
from policies.importing.formats import AffineMap, Contents, ForeignSource, Network
from policies.importing.networks import kind_of, transformer, unet
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDPM

_MAPS = "normalizer.params_dict."


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
        network, skipped = {}, {}
        for name, value in tensors.items():
            if name.endswith("_dummy_variable"):
                skipped[name] = "empty"
            elif name.startswith(_MAPS) and ".input_stats." in name:
                skipped[name] = "statistics that the normaliser's map was made from"
            elif not name.startswith(_MAPS):
                network[name] = value
        if any(name.startswith("model.") for name in tensors):
            network = {name.removeprefix("model."): value for name, value in network.items()}
        maps: dict[str, AffineMap] = {}
        for theirs, ours in (("obs", "state"), ("action", "action")):
            scale, offset = (tensors.get(f"{_MAPS}{theirs}.{name}") for name in ("scale", "offset"))
            if scale is not None and offset is not None:
                maps[ours] = (scale, offset)
        return Contents(network, maps=maps, skipped=skipped)

    def network(self, weights: Mapping[str, Tensor], action_dim: int | None) -> Network:
        if kind_of(weights, transformer="transformer", unet="U-Net") == "transformer":
            return transformer(weights, self.heads)
        found = unet(weights, "diffusion_policy", groups=self.groups, final_groups=8)
        if found.cond_dim == 0 or (action_dim is not None and action_dim != found.action_dim):
            raise CapabilityError(
                "this U-Net completes a chunk that holds the observations (inpainting); only networks with "
                "observations as condition (obs_as_global_cond) can be imported."
            )
        return found

    def parts(self) -> tuple[Any, Any]:
        process = VPDiffusion(num_levels=self.num_levels, prediction=self.prediction)
        return process, DDPM(noise_clip=None, min_std=0.0, final_std=None)

    def first_row(self, obs_steps: int) -> int:
        return obs_steps - 1  # that of the newest observation
