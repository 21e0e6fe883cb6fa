"""The vision networks of DPPO and ReinFlow: a small ViT per camera, and an MLP or a U-Net over the chunk."""

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
from policies.importing.formats import Description, Network, PolicySource
from policies.importing.networks import mlp, outputs, shape, unet
from policies.policy_config import PolicyConfig


@dataclass(frozen=True)
class VisionSource(PolicySource):
    """What no file of the vision networks of DPPO and ReinFlow holds.

    Attributes:
        cameras: Names of the cameras, in the order of the training configuration. Must be given.
        activation: Of the network: `mish` in all published image configurations.
        horizon: Actions that the policy predicts. The U-Net needs it; null: from the tensors of the MLP.
        groups: Groups of channels that the U-Net normalises together; published are 8.
    """

    cameras: tuple[str, ...] = ()
    activation: str = "mish"
    images: tuple[int, ...] = bounded((96, 96), ge=1)  # height and width; published are 96
    heads: int = bounded(4, ge=1)  # attention heads; published are 4
    obs_steps: int = bounded(1, ge=1)  # observations that the policy sees; published is 1
    horizon: int | None = bounded(None, ge=1)
    act_steps: int | None = bounded(None, ge=1)  # actions that are executed; null: the whole chunk
    groups: int = bounded(8, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("images", len(self.images) == 2, "height and width")

    def network(self, weights: Mapping[str, Tensor]) -> Network:
        """Read the network's sizes from its tensors, those of the encoder left out."""
        if any(name.startswith("mlp_mean.") for name in weights):
            return mlp(weights, self.activation)
        if any(name.startswith("vel_head.") for name in weights):
            raise CapabilityError("this shortcut network is imported with source=reinflow_shortcut_image.")
        if any(name.startswith("cond_mlp.") for name in weights):
            raise CapabilityError("a vision U-Net with a state encoder (cond_mlp) cannot be imported.")
        return unet(weights, "dppo", groups=self.groups, activation=self.activation)


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
    encoder, rest = _encoder(source, released), Tensors(released)
    weights = rest.taken(encoder.official_keys(len(source.cameras)), "encoder.")
    network = source.network(rest.left)
    width = _state_width(encoder, released, network.cond_dim)
    if width != source.obs_steps * obs_dim:
        asked = f"the statistics have {obs_dim}, and source.obs_steps={source.obs_steps}"
        raise ConfigError(f"the network reads {width} numbers of the state; {asked}.")
    horizon = _horizon(source, network, action_dim)
    weights |= network.placed(rest.left, "field.")
    config = PolicyConfig(
        process, encoder, network.backbone, sampler,
        obs_steps=source.obs_steps, horizon=horizon, act_steps=source.act_steps or horizon,
        observation_clip=None,
    )  # fmt: skip
    images = {camera: (source.images[0], source.images[1], 3) for camera in source.cameras}
    return Description(config, obs_dim, action_dim, weights, tensors, maps, images, entry)


def _state_width(encoder: VitEncoderConfig, weights: Mapping[str, Tensor], cond_dim: int) -> int:
    """Return how many numbers of the state history the networks read."""
    if encoder.state_dims:
        return shape(weights, "prop_emb.moduleList.0.linear_1.weight", 2)[1]
    return cond_dim - len(encoder.cameras) * encoder.features


def _horizon(source: VisionSource, network: Network, action_dim: int) -> int:
    """Return the number of rows of a chunk; the tensors of a U-Net fit any."""
    whole = network.chunk_size or (source.horizon or 0) * (network.action_dim or 0)
    horizon, rest = divmod(whole, action_dim)
    if not horizon or rest or source.horizon not in (None, horizon):
        raise ConfigError(
            f"chunks of {whole} numbers cannot be source.horizon={source.horizon} rows of {action_dim}, as "
            "the statistics have. Give the horizon that it was trained with."
        )
    return horizon


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
        state_dims=outputs(weights, "prop_emb.moduleList.{}.linear_1.weight"),
    )
