"""LeRobot's diffusion policy: `model.safetensors`, with `config.json` and its processors beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.errors import CapabilityError, CheckpointError
from policies.importing.conditions import columns, film_layers, reordered
from policies.importing.files import Files, Tensors
from policies.importing.formats import AffineMap, Description, PolicySource
from policies.importing.keypoints import KeypointNames, keypoint_encoder
from policies.importing.networks import unet
from policies.policy_config import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.registry import register
from policies.samplers.ddpm import DDIM, DDPM

Statistics = dict[str, dict[str, Tensor]]
"""Statistics by feature, dots of its name replaced by underscores."""

_STATE, _ENV, _ACTION = "observation.state", "observation.environment_state", "action"
_SCHEDULES = {"squaredcos_cap_v2": "cosine", "linear": "linear", "scaled_linear": "scaled_linear"}
_PREDICTIONS = {"epsilon": "eps", "sample": "x0"}
_FIXED = {"type": "diffusion", "vision_backbone": "resnet18", "use_group_norm": True, "resize_shape": None}
_BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_UNET = {
    r"^_orig_mod\.": "", r"\.conv1\.": ".blocks.0.", r"\.conv2\.": ".blocks.1.",
    r"^(down|up)_modules\.(\d+)\.2\.": r"\1_modules.\2.2.conv.",
}  # fmt: skip
"""Its names of the U-Net -> those of Diffusion Policy."""
_NAMES = KeypointNames("backbone.", "pool.nets", "out", computed=("pool.pos_grid",))
_BUFFERS = "normalize_inputs.buffer_", "unnormalize_outputs.buffer_"
_PROCESSORS = {"policy_preprocessor.json": "normalizer", "policy_postprocessor.json": "unnormalizer"}
_TINY = 1e-8  # added to a deviation; the range of an action that never moves


@register("source", "lerobot")
@dataclass(frozen=True)
class LerobotSource(PolicySource):
    """LeRobot's diffusion policy on images or states; every setting is in its `config.json`.

    Source:
        LeRobot 0.4.4, and its earlier files that keep statistics among the weights. Deviation: a state that
        never moved is shifted to -1 and keeps scale 1; the program divides it by 1e-8.
    """

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
        statistics, modes = _statistics(files, tensors), config["normalization_mapping"]
        of_state = [_map(statistics, modes, kinds[name], name, shapes[name]) for name in states]
        maps: dict[str, AffineMap] = {
            "state": (torch.cat([one[0] for one in of_state]), torch.cat([one[1] for one in of_state])),
            "action": _map(statistics, modes, "ACTION", _ACTION, shapes[_ACTION]),
        }
        images = {_camera(name): (*shapes[name][1:], shapes[name][0]) for name in cameras}
        weights: dict[str, Tensor] = {}
        encoder, features = None, 0
        if cameras:
            separate = config["use_separate_rgb_encoder_per_camera"]
            prefixes = [f"diffusion.rgb_encoder.{i}." for i in range(len(cameras))]
            encoder, weights = keypoint_encoder(
                tensors, prefixes if separate else ["diffusion.rgb_encoder."], _NAMES, images,
                crop=config["crop_shape"],
                pixels=[_map(statistics, modes, "VISUAL", name, (3,)) for name in cameras],
            )  # fmt: skip
            features = encoder.features
        theirs = dict.fromkeys([*states[:1], *cameras, *states[1:]], features)
        theirs |= {name: shapes[name][0] for name in states}
        released = _renamed(tensors.cut("diffusion.unet."))
        network = unet(released, "diffusion_policy", groups=config["n_groups"], final_groups=8)
        order = columns(theirs, [*cameras, *states], config["n_obs_steps"])
        weights |= network.placed(reordered(released, order, film_layers(released)), "field.")
        policy = PolicyConfig(
            process=VPDiffusion(
                num_levels=config["num_train_timesteps"],
                prediction=_PREDICTIONS[config["prediction_type"]],
                schedule=_SCHEDULES[config["beta_schedule"]],
                beta_start=config["beta_start"],
                beta_end=config["beta_end"],
            ),
            encoder=encoder,
            backbone=network.backbone,
            sampler=_sampler(config),
            obs_steps=config["n_obs_steps"],
            horizon=config["horizon"],
            act_steps=config["n_action_steps"],
            action_start=config["n_obs_steps"] - 1,
            observation_clip=None,
        )
        sizes = (sum(shapes[name][0] for name in states), shapes[_ACTION][0])
        return Description(policy, *sizes, weights, tensors, maps, images, entry, tuple(states))


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = dict(weights)
    for theirs, ours in _UNET.items():
        renamed = {re.sub(theirs, ours, name): value for name, value in renamed.items()}
    return renamed


def _camera(name: str) -> str:
    short = name.removeprefix("observation.images.").removeprefix("observation.")
    return short.replace("/", "_").replace(".", "_").removesuffix("_image")


def _statistics(files: Files, tensors: Tensors) -> Statistics:
    """Return the statistics beside the weights, or among them (before version 0.4)."""
    found: Statistics = {}
    among = {name: value for prefix in _BUFFERS for name, value in tensors.cut(prefix).items()}
    tensors.skip("normalize_targets.", "statistics of training")
    if not among:
        for file, kind in _PROCESSORS.items():
            steps = files.beside(file)["steps"]
            states = [one["state_file"] for one in steps if one["registry_name"] == f"{kind}_processor"]
            among |= {name: value for state in states for name, value in files.tensors_beside(state).items()}
    for name, value in among.items():
        feature, _, kind = name.rpartition(".")
        found.setdefault(feature.replace(".", "_"), {})[kind] = value.flatten()
    return found


def _map(
    statistics: Statistics, modes: Mapping[str, str], kind: str, name: str, shape: tuple[int, ...]
) -> AffineMap:
    """Return the map of a feature as the program computes it; one without statistics stays as it is."""
    stats, mode = statistics.get(name.replace(".", "_")), modes.get(kind, "IDENTITY")
    if stats is None or mode == "IDENTITY":
        return torch.ones(shape[0]), torch.zeros(shape[0])
    if mode == "MEAN_STD":
        scale = 1 / (stats["std"] + _TINY)
        return scale, -stats["mean"] * scale
    if mode not in _BOUNDS:
        raise CapabilityError(
            f"normalization {mode} of '{name}' cannot be imported; {', '.join(_BOUNDS)} can."
        )
    low, high = (stats[bound] for bound in _BOUNDS[mode])
    span = (high - low).double()
    never = span == 0
    scale = torch.where(never, 2 / _TINY if kind == "ACTION" else 1.0, 2 / span)
    offset = -1 - scale * low.double()
    return scale.float(), offset.float()


def _sampler(config: Mapping[str, Any]) -> DDPM | DDIM:
    clip = config["clip_sample_range"] if config["clip_sample"] else None
    steps = config["num_inference_steps"]
    if config["noise_scheduler_type"] == "DDIM":
        return DDIM(
            steps=steps or config["num_train_timesteps"], clip_x0=clip, recompute_eps=False, noise_clip=None
        )
    if config["noise_scheduler_type"] != "DDPM":
        raise CheckpointError(
            f"config.json has noise_scheduler_type={config['noise_scheduler_type']}; unknown."
        )
    return DDPM(steps=steps, clip_x0=clip, noise_clip=None, min_std=0.0, final_std=None)
