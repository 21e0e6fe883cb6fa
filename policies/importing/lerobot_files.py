"""Files beside a policy of LeRobot: statistics in its processors, or among the weights before 0.4."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from policies.errors import CapabilityError
from policies.importing.files import Files, Tensors
from policies.importing.formats import AffineMap

Statistics = dict[str, dict[str, Tensor]]
"""Statistics by feature, dots of its name replaced by underscores."""

_BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_BUFFERS = "normalize_inputs.buffer_", "unnormalize_outputs.buffer_"
_PROCESSORS = {"policy_preprocessor.json": "normalizer", "policy_postprocessor.json": "unnormalizer"}
_TINY = 1e-8  # added to a deviation; the range of an action that never moves


def read_statistics_of(files: Files, tensors: Tensors) -> Statistics:
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


def feature_map(
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
