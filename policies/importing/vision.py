"""The vision MLPs of DPPO and ReinFlow: a small ViT per camera and the MLP over the flattened chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policies.bounds import bounded
from policies.encoders.vit import VitEncoderConfig
from policies.errors import CapabilityError, ConfigError
from policies.importing.dppo import limits_of
from policies.importing.files import Files, Tensors, read_statistics
from policies.importing.formats import Description, PolicySource
from policies.importing.networks import mlp, shape
from policies.policy_config import PolicyConfig

_ENCODER = ("backbone.", "compress")


@dataclass(frozen=True)
class VisionSource(PolicySource):
    """What no file of the vision networks of DPPO and ReinFlow holds.

    Attributes:
        cameras: Names of the cameras, in the order of the training configuration. Must be given.
        activation: Of the MLP: `mish` in all published image configurations.
    """

    cameras: tuple[str, ...] = ()
    activation: str = "mish"
    images: tuple[int, ...] = bounded((96, 96), ge=1)  # height and width; published are 96
    heads: int = bounded(4, ge=1)  # attention heads; published are 4
    obs_steps: int = bounded(1, ge=1)  # observations that the policy sees; published is 1
    act_steps: int | None = bounded(None, ge=1)  # actions that are executed; null: the whole chunk

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("images", len(self.images) == 2, "height and width")


def describe_vision(
    source: VisionSource, files: Files, tuned: str, frozen: Mapping[str, str], process: Any, sampler: Any
) -> Description:
    """Describe the policy of a checkpoint.

    Args:
        source: What its files do not hold.
        files: The checkpoint, and its statistics, which are needed.
        tuned: Prefix of the fine-tuned network, which all steps use.
        frozen: Prefixes that a fine-tuned checkpoint has beside it -> why they are left out.
        process: Ours.
        sampler: That of the program's evaluation.
    """
    if files.normalization is None:
        raise ConfigError("give normalization=<normalization.npz beside the training data>.")
    maps = limits_of(read_statistics(files.normalization))
    obs_dim, action_dim = len(maps["state"][0]), len(maps["action"][0])
    entry, tensors = files.tensors()
    is_tuned = tensors.under(tuned)
    if is_tuned:
        for prefix, why in frozen.items():
            tensors.skip(prefix, why)
    released = tensors.cut(tuned if is_tuned else "network.")
    if not any(name.startswith("mlp_mean.") for name in released):
        raise CapabilityError("only vision networks with an MLP (mlp_mean) can be imported.")
    encoder = _encoder(source, released)
    keys = encoder.official_keys(len(source.cameras))
    network = mlp(
        {name: one for name, one in released.items() if not name.startswith(_ENCODER)}, source.activation
    )
    width = len(source.cameras) * encoder.features + source.obs_steps * obs_dim
    if network.cond_dim != width or network.chunk_size is None or network.chunk_size % action_dim:
        raise ConfigError(
            f"the network reads {network.cond_dim} numbers and gives {network.chunk_size}; the statistics "
            f"and source.obs_steps={source.obs_steps} ask for {width}, and rows of {action_dim}."
        )
    rest = Tensors(released)
    weights = rest.taken(keys, "encoder.")
    weights |= network.placed(rest.left, "field.")
    horizon = network.chunk_size // action_dim
    config = PolicyConfig(
        process=process,
        encoder=encoder,
        backbone=network.backbone,
        sampler=sampler,
        obs_steps=source.obs_steps,
        horizon=horizon,
        act_steps=source.act_steps or horizon,
        observation_clip=None,
    )
    images = {camera: (source.images[0], source.images[1], 3) for camera in source.cameras}
    return Description(config, obs_dim, action_dim, weights, tensors, maps, images, entry)


def _encoder(source: VisionSource, weights: Mapping[str, Tensor]) -> VitEncoderConfig:
    """Read the sizes of the encoder from its tensors."""
    heads = sorted(name for name in weights if name.startswith("compress") and name.count(".") == 1)
    if len(heads) != len(source.cameras) or not heads:
        raise ConfigError(f"source.cameras must name the {len(heads)} cameras; got {list(source.cameras)}.")
    layers = {name.split(".")[3] for name in weights if name.startswith("backbone.vit.net.")}
    return VitEncoderConfig(
        cameras=source.cameras,
        width=shape(weights, "backbone.vit.pos_embed", 3)[2],
        depth=len(layers),
        heads=source.heads,
        features=shape(weights, heads[0], 3)[2],
    )
