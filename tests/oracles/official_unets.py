"""Load the weights of a released U-Net into ours; compare gradients that were recorded in float32.

Two things are in no array. How many groups are normalised and what is added to their variance: of the pairs
that fit, the one whose outputs come nearest is taken, and with it everything must match. And how far the
recorded gradients are from exact ones: where a group holds few numbers, the rounding of float32 is amplified
beyond the written tolerance, in the reference as in ours. How far is measured on our side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from math import gcd
from typing import Any

import torch
from torch import Tensor

from policies.backbones.unet1d import Unet1dBackbone

ROUNDINGS = 4
"""How many times our own rounding the reference's may be."""

LARGEST_ROUNDING = 1e-2
"""Where float32 changes more than this share of the largest number, it says nothing."""


def shape_of(weights: Mapping[str, Tensor], time: str, film: str) -> dict[str, Any]:
    """Read widths, kernel, time embedding and modulation from the weights.

    Args:
        weights: By released name.
        time: Released name of the time embedding.
        film: Released name of the layer that gives a block its scale and bias.
    """
    names = (f"down_modules.{level}.0.blocks.0.block.0.weight" for level in count())
    widths = tuple(weights[name].shape[0] for name in takewhile(weights.__contains__, names))
    inner, time_dim = weights[f"{time}.1.weight"].shape
    numbers = weights[f"mid_modules.0.{film}.weight"].shape[0]
    return {
        "widths": widths,
        "kernel": weights["mid_modules.0.blocks.0.block.0.weight"].shape[2],
        "time_dim": time_dim,
        "time_expansion": inner // time_dim,
        "film": "scale" if numbers == 2 * widths[-1] else "bias",
    }


@torch.no_grad()
def nearest(
    build: Callable[[int, float], Unet1dBackbone],
    widths: Sequence[int],
    eps: Sequence[float],
    distance: Callable[[Unet1dBackbone], Tensor],
) -> Unet1dBackbone:
    """Return the network whose number of groups and eps bring its outputs nearest."""
    common = gcd(*widths)
    groups = [number for number in range(1, common + 1) if common % number == 0]
    nets = [build(number, value) for number in groups for value in eps]
    return min(nets, key=lambda net: float(distance(net).abs().max()))


def assert_gradient(
    name: str, single: Tensor, double: Tensor, recorded: Tensor, *, rtol: float, atol: float
) -> None:
    """Compare a gradient with the recorded one, up to the tolerance and the rounding of float32.

    Args:
        name: For messages.
        single: Ours in float32.
        double: Ours in float64.
        recorded: The reference, in float32.
        rtol: Tolerance, relative to each number.
        atol: Tolerance of each number, before the rounding that is measured is added.
    """
    rounding = float((single - double).abs().max())
    assert rounding <= LARGEST_ROUNDING * float(recorded.abs().max()), name
    torch.testing.assert_close(
        double,
        recorded.double(),
        rtol=rtol,
        atol=atol + ROUNDINGS * rounding,
        msg=lambda text: f"gradient of {name}: {text}",
    )
