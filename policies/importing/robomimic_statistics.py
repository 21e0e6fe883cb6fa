"""Statistics in robomimic's checkpoints as maps of `state` and `action`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from policies.errors import CapabilityError, CheckpointError
from policies.importing.formats import AffineMap

_PAIRS = (("mean", "std"), ("offset", "scale"))  # statistics of robomimic 0.3 and 0.5


def normalisation_maps(
    whole: Mapping[str, Any], train: Mapping[str, Any], keys: list[str], action_dim: int
) -> dict[str, AffineMap]:
    """Return the maps of normalised observations and actions, where the checkpoint has them."""
    for key, settings in train.get("action_config", {}).items():
        if key in train["action_keys"] and settings.get("format") not in (None, "rot_axis_angle"):
            raise CapabilityError(f"actions '{key}' in format {settings['format']} cannot be imported.")
    maps: dict[str, AffineMap] = {}
    if statistics := whole.get("obs_normalization_stats"):
        maps["state"] = _map([statistics[key] for key in keys])
    if statistics := whole.get("action_normalization_stats"):
        maps["action"] = _map([statistics[key] for key in train.get("action_keys", statistics)])
        if len(maps["action"][0]) != action_dim:
            raise CheckpointError(f"the statistics of actions must have {action_dim} numbers.")
    return maps


def _map(statistics: list[Mapping[str, Any]]) -> AffineMap:
    pair = _PAIRS[0] if "mean" in statistics[0] else _PAIRS[1]
    centre, spread = (
        torch.cat([torch.tensor(one[name], dtype=torch.float64).flatten() for one in statistics])
        for name in pair
    )
    scale: Tensor = 1 / spread
    return scale.float(), (-centre * scale).float()
