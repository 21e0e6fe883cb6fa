"""robomimic's diffusion policy, on images and states: its U-Net, with ResNet-18 and spatial softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from policies.errors import CapabilityError, CheckpointError
from policies.importing.conditions import columns, film_layers, reordered
from policies.importing.files import Tensors
from policies.importing.formats import AffineMap, Description
from policies.importing.keypoints import ROBOMIMIC, keypoint_encoder
from policies.importing.networks import unet
from policies.importing.schedulers import process_of, sampler_of
from policies.policy_config import PolicyConfig

_CAMERA = {
    "core_class": "VisualCore", "core_kwargs.backbone_class": "ResNet18Conv",
    "core_kwargs.pool_class": "SpatialSoftmax", "core_kwargs.backbone_kwargs.input_coord_conv": False,
    "core_kwargs.pool_kwargs.learnable_temperature": False,
}  # fmt: skip
"""Settings of its encoder of images -> the values that can be imported."""
_ENCODER, _UNET = "policy.obs_encoder.nets.obs.obs_nets.", "policy.noise_pred_net."
_GROUPS = 8


def entry_of(model: Mapping[str, Any], wanted: str | None) -> str:
    """Return which weights of a checkpoint to read: averaged ones if it has them."""
    entry = wanted or ("ema" if model.get("ema") else "nets")
    if not model.get(entry):
        raise CheckpointError(f"entry={entry} must be one that the checkpoint has, of ema and nets.")
    return entry


def describe_diffusion(
    whole: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: Tensors,
    states: list[str],
    maps: Mapping[str, AffineMap],
) -> Description:
    """Describe a diffusion policy.

    Args:
        whole: The checkpoint.
        config: Its configuration.
        tensors: The weights.
        states: Parts of `state`, in our order.
        maps: Maps of `state` and `action`, where it has them.
    """
    algo, shapes = config["algo"], whole["shape_metadata"]["all_shapes"]
    seen = config["observation"]["modalities"]["obs"]
    cameras = [key for key in shapes if key in seen.get("rgb", ())]
    if scaled := [key for key in cameras if key in (whole.get("obs_normalization_stats") or {})]:
        raise CapabilityError(
            f"images with statistics of pixels cannot be imported; got {', '.join(scaled)}."
        )
    images = {key.removesuffix("_image"): (*shapes[key][1:], shapes[key][0]) for key in cameras}
    weights: dict[str, Tensor] = {}
    encoder, features = None, 0
    if cameras:
        encoder, weights = keypoint_encoder(
            tensors, [f"{_ENCODER}{key}." for key in cameras], ROBOMIMIC, images,
            crop=_crop(config["observation"]["encoder"]["rgb"]),
            pixels=[(torch.ones(3), torch.zeros(3))] * len(cameras),
        )  # fmt: skip
        features = encoder.features
    widths = {
        key: features if key in cameras else shapes[key][0] for key in shapes if key in {*cameras, *states}
    }
    horizon = algo["horizon"]
    obs_steps = horizon["observation_horizon"]
    released = tensors.cut(_UNET)
    network = unet(released, "diffusion_policy", groups=_GROUPS, final_groups=_GROUPS)
    order = columns(widths, [*cameras, *states], obs_steps)
    weights |= network.placed(reordered(released, order, film_layers(released)), "field.")
    kind = "ddpm" if algo["ddpm"]["enabled"] else "ddim"
    policy = PolicyConfig(
        process_of(algo[kind]), encoder, network.backbone,
        sampler_of(kind.upper(), algo[kind], algo[kind]["num_inference_timesteps"]),
        obs_steps=obs_steps, horizon=horizon["prediction_horizon"], act_steps=horizon["action_horizon"],
        action_start=obs_steps - 1, observation_clip=None,
    )  # fmt: skip
    sizes = sum(shapes[key][0] for key in states), whole["shape_metadata"]["ac_dim"]
    return Description(policy, *sizes, weights, tensors, maps, images, state=tuple(states), beside=())


def _crop(camera: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width that are cropped, None without a crop; other encoders are refused."""
    for name, value in _CAMERA.items():
        found: Any = camera
        for part in name.split("."):
            found = found.get(part, value) if isinstance(found, Mapping) else value
        if found != value:
            raise CapabilityError(
                f"only encoders of images with {name}={value} can be imported; got {found}."
            )
    if camera.get("obs_randomizer_class") is None:
        return None
    crop = camera.get("obs_randomizer_kwargs", {})
    if camera["obs_randomizer_class"] != "CropRandomizer" or crop.get("pos_enc"):
        raise CapabilityError(
            f"only images cropped by CropRandomizer can be imported; got {camera['obs_randomizer_class']}."
        )
    return crop["crop_height"], crop["crop_width"]
