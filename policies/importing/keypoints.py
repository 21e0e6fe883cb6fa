"""ResNet-18 with spatial softmax of other programs as `encoder=resnet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from policies.encoders import ImageShape
from policies.encoders.resnet import ResNetEncoderConfig, official_keys
from policies.errors import CapabilityError, CheckpointError
from policies.importing.files import Tensors
from policies.importing.formats import AffineMap


class KeypointNames(NamedTuple):
    """What a program calls the parts of such an encoder."""

    trunk: str  # prefix of the numbered children of torchvision's ResNet-18
    keypoints: str  # convolution to keypoints
    outlet: str  # last linear layer
    computed: tuple[str, ...] = ()  # constants that ours computes
    aliases: tuple[str, ...] = ()  # prefixes of the same tensors under another name
    temperature: str = ""  # of the spatial softmax, which must be 1; empty: there is none


ROBOMIMIC = KeypointNames(
    "nets.0.nets.", "nets.1.nets", "nets.3", computed=("nets.1.pos_",), aliases=("backbone.", "pool."),
    temperature="nets.1.temperature",
)  # fmt: skip
"""Names of robomimic's encoder, which Diffusion Policy has as well."""


def keypoint_encoder(
    tensors: Tensors,
    prefixes: Sequence[str],
    names: KeypointNames,
    images: Mapping[str, ImageShape],
    *,
    crop: Sequence[int] | None,
    pixels: Sequence[AffineMap] = (),
) -> tuple[ResNetEncoderConfig, dict[str, Tensor]]:
    """Take the encoders of all cameras, in their order; returns ours and its weights by our names.

    Args:
        tensors: Those of the checkpoint.
        prefixes: One per camera, or one for all.
        names: Names below a prefix.
        images: Shapes (H, W, 3) by camera.
        crop: Height and width that the program crops from the centre; None: no crop.
        pixels: Map of the values in [0, 1] of each camera, (3,) each; empty: to [-1, 1].
    """
    weights: dict[str, Tensor] = {}
    for i, prefix in enumerate(prefixes):
        keys = official_keys(f"{prefix}{names.trunk}", prefix + names.keypoints, prefix + names.outlet)
        weights |= tensors.taken(keys, f"encoder.nets.{i}.")
        tensors.skip(f"{prefix}{names.keypoints}.bias", "cancels in the spatial softmax")
        for constant in names.computed:
            tensors.skip(prefix + constant, "rebuilt")
        for alias in names.aliases:
            tensors.skip(prefix + alias, "the encoder under its other name")
        if names.temperature and tensors.take(prefix + names.temperature).item() != 1:
            raise CheckpointError("the temperature of the spatial softmax must be 1.")
    statistics = {}
    if pixels:
        inverse = [(-offset / scale, 1 / scale) for scale, offset in pixels]
        statistics = {
            name: tuple(number for one in inverse for number in one[i].double().tolist())
            for i, name in enumerate(("mean", "std"))
        }
    config = ResNetEncoderConfig(
        cameras=tuple(images),
        crop=_share(crop, images),
        shared=len(prefixes) < len(images),
        width=weights["encoder.nets.0.trunk.stem.weight"].shape[0],
        keypoints=weights["encoder.nets.0.keypoints.weight"].shape[0],
        features=weights["encoder.nets.0.outlet.weight"].shape[0],
        **statistics,
    )
    return config, weights


def _share(crop: Sequence[int] | None, images: Mapping[str, ImageShape]) -> float:
    """Return the fraction of an image that the program crops, one for all cameras."""
    if crop is None:
        return 1.0
    share = crop[0] / next(iter(images.values()))[0]
    for height, width, _ in images.values():
        same = (round(share * height), round(share * width)) == tuple(crop)
        centred = all((size - cut) % 4 != 3 for size, cut in zip((height, width), crop, strict=True))
        if not same or not centred or not 0 < share <= 1:
            raise CapabilityError(
                f"a crop of {crop[0]} x {crop[1]} from {height} x {width} cannot be imported: encoder.crop "
                "is one fraction of height and width, centred on whole pixels."
            )
    return share
