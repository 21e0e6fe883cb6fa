"""Order of the parts of a condition: other programs concatenate features and states in other orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from policies.errors import CheckpointError


def columns(theirs: Mapping[str, int], ours: Sequence[str], steps: int = 1) -> Tensor:
    """Return where each column of our condition is in theirs, (C,).

    Args:
        theirs: Parts of the condition of one step with their widths, in their order.
        ours: The same parts in our order.
        steps: Length of the history; the condition holds the steps one after another.
    """
    starts, width = {}, 0
    for name, part in theirs.items():
        starts[name] = width
        width += part
    one = torch.cat([torch.arange(starts[name], starts[name] + theirs[name]) for name in ours])
    return torch.cat([step * width + one for step in range(steps)])


def reordered(weights: Mapping[str, Tensor], order: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights with the last columns of some layers, those of the condition, in another order."""
    changed = dict(weights)
    for name in layers:
        weight = weights[name]
        first = weight.shape[-1] - len(order)
        if first < 0:
            raise CheckpointError(
                f"'{name}' must have at least {len(order)} columns, the width of the condition; got "
                f"{weight.shape[-1]}."
            )
        changed[name] = torch.cat([weight[..., :first], weight[..., first:].index_select(-1, order)], dim=-1)
    return changed


def film_layers(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the layers of Diffusion Policy's U-Net that read the condition."""
    return [name for name in weights if name.endswith("cond_encoder.1.weight")]
