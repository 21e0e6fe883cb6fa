"""Checkpoints of Diffusion Policy on images (arXiv 2303.04137): ResNet-18, spatial softmax and the U-Net."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.bounds import bounded
from policies.errors import CheckpointError, ConfigError
from policies.importing.conditions import columns, film_layers, reordered
from policies.importing.files import Files, Tensors
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.importing.keypoints import ROBOMIMIC, keypoint_encoder
from policies.importing.networks import unet
from policies.policy_config import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDPM

_MAPS, _NETS = "normalizer.params_dict.", "obs_encoder.obs_nets."
_TO_ONE = (2.0, -1.0)  # map of pixels in [0, 1] to [-1, 1]


@register("source", "diffusion_policy_image")
@dataclass(frozen=True)
class DiffusionPolicyImageSource(PolicySource):
    """Diffusion Policy on images: its hybrid U-Net workspace, robomimic's ResNet-18 with spatial softmax.

    Attributes:
        keys: Observations of its `shape_meta`, cameras and states, in the order of that file. Must be given.
        images: Height and width of the images.
        crop: Height and width that is cropped; empty: no crop.

    Source:
        The released code with `obs_encoder_group_norm` and `eval_fixed_crop` true, as all published image
        configurations have them.
    """

    keys: tuple[str, ...] = ()
    horizon: int = bounded(16, ge=1)  # actions that the policy predicts; published are 16
    act_steps: int = bounded(8, ge=1)  # actions that are executed; published are 8
    images: tuple[int, ...] = bounded((84, 84), ge=1)
    crop: tuple[int, ...] = bounded((76, 76), ge=1)
    num_levels: int = bounded(100, ge=2)  # denoising levels that it was trained on
    prediction: str = bounded("eps", choices=("eps", "x0"))
    groups: int = bounded(8, ge=1)  # groups of channels that the U-Net normalises together

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("images", len(self.images) == 2, "height and width")
        self.require("crop", len(self.crop) in (0, 2), "height and width, or empty")

    def read(self, files: Files) -> Description:
        entry, tensors = files.tensors()
        for name in [name for name in tensors.left if name.endswith("_dummy_variable")]:
            tensors.skip(name, "empty")
        maps = _maps(tensors)
        cameras = self._cameras(tensors, maps)
        if not cameras:
            raise CheckpointError(f"{files.path} has no cameras that can be imported; see the other sources.")
        states = [key for key in self.keys if key not in cameras]
        prefixes = [f"{_NETS}{camera}." for camera in cameras]
        pixels = [(scale.expand(3), offset.expand(3)) for scale, offset in map(maps.pop, cameras)]
        usual = all((scale == _TO_ONE[0]).all() and (offset == _TO_ONE[1]).all() for scale, offset in pixels)
        images = {_short(camera): (self.images[0], self.images[1], 3) for camera in cameras}
        encoder, weights = keypoint_encoder(
            tensors, prefixes, ROBOMIMIC, images, crop=self.crop or None, pixels=() if usual else pixels
        )
        released = tensors.cut("model.")
        network = unet(released, "diffusion_policy", groups=self.groups, final_groups=8)
        widths = {key: encoder.features if key in cameras else len(maps[key][0]) for key in self.keys}
        width = sum(widths.values())
        obs_steps = network.cond_dim // width
        if network.cond_dim != obs_steps * width or not obs_steps:
            raise ConfigError(
                f"the condition has {network.cond_dim} numbers, which cannot be rows of {width}, the widths "
                f"of {', '.join(self.keys)}. Give source.keys of this checkpoint."
            )
        order = columns(widths, [*cameras, *states], obs_steps)
        weights |= network.placed(reordered(released, order, film_layers(released)), "field.")
        process = VPDiffusion(num_levels=self.num_levels, prediction=self.prediction)
        sampler = DDPM(noise_clip=None, min_std=0.0, final_std=None)
        config = PolicyConfig(
            process, encoder, network.backbone, sampler,
            obs_steps=obs_steps, horizon=self.horizon, act_steps=self.act_steps, action_start=obs_steps - 1,
            observation_clip=None,
        )  # fmt: skip
        scale, offset = (torch.cat([maps[key][part] for key in states]) for part in (0, 1))
        return Description(
            config, len(scale), len(maps["action"][0]), weights, tensors,
            {"state": (scale, offset), "action": maps["action"]}, images, entry, tuple(states), beside=(),
        )  # fmt: skip

    def _cameras(self, tensors: Tensors, maps: Mapping[str, AffineMap]) -> list[str]:
        """Return the cameras in the order of `keys`, which must be those of the checkpoint."""
        known = sorted(set(maps) - {"action"})
        if sorted(self.keys) != known:
            raise ConfigError(
                f"source.keys must list the observations of the checkpoint ({', '.join(known)}) in the order "
                f"of shape_meta in its configuration; got {', '.join(self.keys) or 'none'}."
            )
        return [key for key in self.keys if tensors.under(f"{_NETS}{key}.")]


def _short(camera: str) -> str:
    return camera.removesuffix("_image")


def _maps(tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Take the map of every feature, by the program's name."""
    names = {name.removeprefix(_MAPS).rpartition(".")[0] for name in tensors.left if name.startswith(_MAPS)}
    for name in sorted(names):
        if name.endswith(".input_stats"):
            tensors.skip(f"{_MAPS}{name}.", "statistics that the normaliser's map was made from")
    features = sorted(name for name in names if not name.endswith(".input_stats"))
    return {
        name: (tensors.take(f"{_MAPS}{name}.scale"), tensors.take(f"{_MAPS}{name}.offset"))
        for name in features
    }
