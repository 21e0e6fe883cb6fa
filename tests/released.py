"""Weights of networks that other programs define, drawn by name: reference files hold names and shapes.

The recorders in `tests/fixtures/importing` load the same weights into the original modules.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent / "fixtures" / "importing"


def weights_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Draw weights by name and shape: matrices of unit gain, scales near 1, biases near 0."""
    return {name: _drawn(name, tuple(shape)) for name, shape in shapes.items()}


@functools.lru_cache(maxsize=512)  # of one or two networks; nobody writes into them
def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    draws = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) < 2:
        draws = 0.1 * draws + (1.0 if name.endswith("weight") else 0.0)
    else:
        draws = draws / np.float32(np.prod(shape[1:])) ** 0.5
    return torch.from_numpy(np.asarray(draws, dtype=np.float32))


def record(name: str, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a reference file: JSON facts, and arrays."""
    numbers = {key: np.asarray(value) for key, value in arrays.items()}
    np.savez_compressed(FOLDER / f"{name}.npz", facts=json.dumps(facts), **numbers)


def recorded(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return facts and arrays of a reference file."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != "facts"}
        return json.loads(str(file["facts"])), arrays
