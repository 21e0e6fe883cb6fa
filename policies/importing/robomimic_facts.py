"""What robomimic writes beside weights and data: statistics, and the task with its controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from policies.errors import CapabilityError, CheckpointError
from policies.importing.formats import AffineMap

ABSOLUTE, CHANGES = "absolute poses", "changes of poses"
"""What the actions of a robosuite task are."""
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


def interface_of_task(env_meta: Any) -> dict[str, Any]:
    """Return `control_hz` and what `actions` are, as far as the metadata of a robosuite task tell.

    Source: robosuite's `control_delta` (to 1.4) and `input_type` of every body part (from 1.5).
    """
    options = env_meta.get("env_kwargs") if isinstance(env_meta, Mapping) else None
    if not isinstance(options, Mapping):
        return {}
    found = {"control_hz": options["control_freq"]} if "control_freq" in options else {}
    controllers = options.get("controller_configs")
    for one in controllers if isinstance(controllers, list) else [controllers]:
        if not isinstance(one, Mapping):
            continue
        arms = one.get("body_parts", {}).values()
        kinds = [part["input_type"] for part in arms if isinstance(part, Mapping) and "input_type" in part]
        if one.get("control_delta") is False or "absolute" in kinds:
            return found | {"actions": ABSOLUTE}
        if one.get("control_delta") or kinds:
            found["actions"] = CHANGES
    return found
