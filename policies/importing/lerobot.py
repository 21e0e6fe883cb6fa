"""LeRobot's diffusion policy: `model.safetensors`, with `config.json` and its processors beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.errors import CapabilityError, ConfigError
from policies.importing.conditions import columns, film_layers, reordered
from policies.importing.files import Files
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.importing.keypoints import KeypointNames, keypoint_encoder
from policies.importing.lerobot_files import feature_map, read_statistics_of
from policies.importing.networks import renamed, unet
from policies.importing.schedulers import process_of, sampler_of
from policies.policy_config import PolicyConfig
from policies.registry import register

_STATE, _ENV, _ACTION = "observation.state", "observation.environment_state", "action"
_FIXED = {"type": "diffusion", "vision_backbone": "resnet18", "use_group_norm": True, "resize_shape": None}
_UNET = {
    r"^_orig_mod\.": "", r"\.conv1\.": ".blocks.0.", r"\.conv2\.": ".blocks.1.",
    r"^(down|up)_modules\.(\d+)\.2\.": r"\1_modules.\2.2.conv.",
}  # fmt: skip
"""Its names of the U-Net -> those of Diffusion Policy."""
_NAMES = KeypointNames("backbone.", "pool.nets", "out", computed=("pool.pos_grid",))


@register("source", "lerobot")
@dataclass(frozen=True)
class LerobotSource(PolicySource):
    """LeRobot's diffusion policy on images or states; every setting is in its `config.json`.

    Attributes:
        cameras: Our names of its cameras, in the order of `config.json`, such as those of a task; empty: the
            last parts of its own names.

    Source:
        LeRobot 0.4.4, and its earlier files that keep statistics among the weights. Deviation: a state that
        never moved is shifted to -1 and keeps scale 1; the program divides it by 1e-8.
    """

    cameras: tuple[str, ...] = ()

    def read(self, files: Files) -> Description:
        config = files.beside("config.json")
        for name, value in _FIXED.items():
            if config.get(name, value) != value:
                raise CapabilityError(f"only {name}={value} can be imported; config.json has {config[name]}.")
        entry, tensors = files.tensors()
        kinds = {name: one["type"] for name, one in config["input_features"].items()}
        shapes = {name: tuple(one["shape"]) for name, one in config["input_features"].items()}
        shapes[_ACTION] = tuple(config["output_features"][_ACTION]["shape"])
        states = [name for name in (_STATE, _ENV) if name in kinds]
        cameras = [name for name, kind in kinds.items() if kind == "VISUAL"]
        statistics, modes = read_statistics_of(files, tensors), config["normalization_mapping"]
        of_state = [feature_map(statistics, modes, kinds[name], name, shapes[name]) for name in states]
        maps: dict[str, AffineMap] = {
            "state": (torch.cat([one[0] for one in of_state]), torch.cat([one[1] for one in of_state])),
            "action": feature_map(statistics, modes, "ACTION", _ACTION, shapes[_ACTION]),
        }
        images = {
            camera: (*shapes[name][1:], shapes[name][0])
            for camera, name in zip(self._names(cameras), cameras, strict=True)
        }
        weights: dict[str, Tensor] = {}
        encoder, features = None, 0
        if cameras:
            separate = config["use_separate_rgb_encoder_per_camera"]
            prefixes = [f"diffusion.rgb_encoder.{i}." for i in range(len(cameras))]
            encoder, weights = keypoint_encoder(
                tensors, prefixes if separate else ["diffusion.rgb_encoder."], _NAMES, images,
                crop=config["crop_shape"],
                pixels=[feature_map(statistics, modes, "VISUAL", name, (3,)) for name in cameras],
            )  # fmt: skip
            features = encoder.features
        theirs = dict.fromkeys([*states[:1], *cameras, *states[1:]], features)
        theirs |= {name: shapes[name][0] for name in states}
        released = renamed(tensors.cut("diffusion.unet."), _UNET)
        network = unet(released, "diffusion_policy", groups=config["n_groups"], final_groups=8)
        order = columns(theirs, [*cameras, *states], config["n_obs_steps"])
        weights |= network.placed(reordered(released, order, film_layers(released)), "field.")
        policy = PolicyConfig(
            process=process_of(config),
            encoder=encoder,
            backbone=network.backbone,
            sampler=sampler_of(config["noise_scheduler_type"], config, config["num_inference_steps"]),
            obs_steps=config["n_obs_steps"],
            horizon=config["horizon"],
            act_steps=config["n_action_steps"],
            action_start=config["n_obs_steps"] - 1,
            observation_clip=None,
        )
        sizes = (sum(shapes[name][0] for name in states), shapes[_ACTION][0])
        return Description(policy, *sizes, weights, tensors, maps, images, entry, tuple(states), beside=())

    def _names(self, theirs: Sequence[str]) -> Sequence[str]:
        """Return our names of its cameras."""
        if self.cameras and len(set(self.cameras)) != len(theirs):
            raise ConfigError(
                f"source.cameras must name each of {', '.join(theirs) or 'no cameras'}; got "
                f"{', '.join(self.cameras)}."
            )
        return self.cameras or [_camera(name) for name in theirs]


def _camera(name: str) -> str:
    short = name.removeprefix("observation.images.").removeprefix("observation.")
    return short.replace("/", "_").replace(".", "_").removesuffix("_image")
