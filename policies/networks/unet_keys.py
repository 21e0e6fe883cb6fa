"""Names of the weights in the U-Nets that Diffusion Policy and DPPO released, and in ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from policies.errors import ConfigError


class _Program(NamedTuple):
    """Names that differ between the two programs."""

    time: str
    norm: int  # place of the normalisation behind a convolution
    film: dict[int, tuple[int, ...]]  # number of linear layers -> their places


_PROGRAMS = {
    "diffusion_policy": _Program("diffusion_step_encoder", 1, {1: (1,)}),
    "dppo": _Program("time_mlp", 2, {1: (1,), 3: (0, 2, 4)}),
}


def official_unet_keys(
    program: str, channels: Sequence[int], *, film_layers: int, has_norm: bool, has_final_norm: bool
) -> dict[str, str]:
    """Map the parameter names of a released U-Net, its condition encoder left out, to ours.

    `program`: `diffusion_policy` or `dppo`. `channels`: of an action, then of the levels. `has_norm`,
    `has_final_norm`: whether the convolutions of the blocks and the last one are normalised.
    """
    if program not in _PROGRAMS:
        raise ConfigError(f"program must be one of {', '.join(_PROGRAMS)}; got '{program}'.")
    theirs = _PROGRAMS[program]
    if film_layers not in theirs.film:
        raise ConfigError(f"{program} has no U-Net with backbone.film_layers={film_layers}; use 1.")
    names = {f"{theirs.time}.{place}": f"time_embedding.linear{n}" for n, place in ((1, 1), (2, 3))}
    for number, (place, changes_width) in enumerate(_blocks(channels)):
        ours = f"unet.blocks.{number}"
        for index, name in enumerate(("first", "second")):
            names[f"{place}.blocks.{index}.block.0"] = f"{ours}.{name}.conv"
            if has_norm:
                names[f"{place}.blocks.{index}.block.{theirs.norm}"] = f"{ours}.{name}.norm"
        for index, layer in enumerate(theirs.film[film_layers]):
            names[f"{place}.cond_encoder.{layer}"] = f"{ours}.film.layers.{index}"
        if changes_width:
            names[f"{place}.residual_conv"] = f"{ours}.shortcut"
    for number in range(len(channels) - 2):
        names[f"down_modules.{number}.2.conv"] = f"unet.downs.{number}"
        names[f"up_modules.{number}.2.conv"] = f"unet.ups.{number}"
    names |= {"final_conv.0.block.0": "unet.head.conv", "final_conv.1": "unet.outlet"}
    if has_final_norm:
        names[f"final_conv.0.block.{theirs.norm}"] = "unet.head.norm"
    return {f"{n}.{kind}": f"{own}.{kind}" for n, own in names.items() for kind in ("weight", "bias")}


def _blocks(channels: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield the released name of every residual block and whether it changes the number of channels."""
    last = len(channels) - 1
    for level in range(last):
        yield f"down_modules.{level}.0", channels[level] != channels[level + 1]
        yield f"down_modules.{level}.1", False
    yield from (("mid_modules.0", False), ("mid_modules.1", False))
    for number, level in enumerate(range(last, 1, -1)):
        yield f"up_modules.{number}.0", 2 * channels[level] != channels[level - 1]
        yield f"up_modules.{number}.1", False
