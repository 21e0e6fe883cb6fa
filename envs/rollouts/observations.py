"""What a policy reads of running episodes.

Legend: n rows of a vector, To observation history, Do and Dg widths of state and goal, H and W of images.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from envs.spec import Array, VectorEnv


def observe(vector: VectorEnv, state: Array, rows: Array | None = None) -> dict[str, Array]:
    """Return `state` (n, To, Do) of some rows (default: all) beside their goals and images.

    Returns:
        `state`, `goal` (n, Dg) of tasks with separate goals, and images (n, To, H, W, 3) uint8 by camera.
    """
    return {"state": state} | vector.goals(rows) | vector.images(rows)


def to_tensors(obs: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return observations as tensors: numbers as float32, images as they are."""
    tensors = {name: torch.from_numpy(values) for name, values in obs.items()}
    return {name: one.float() if one.is_floating_point() else one for name, one in tensors.items()}
