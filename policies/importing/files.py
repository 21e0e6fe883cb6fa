"""Reading checkpoints of other programs without running anything that they hold."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies.errors import CheckpointError

ENTRIES = (
    "state_dicts/ema_model",
    "ema_model",
    "ema",
    "policy",
    "state_dicts/model",
    "model",
    "state_dict",
    "",
)
"""Where weights lie in a checkpoint, averaged ones first; the empty entry is the checkpoint itself."""

_DEPTH = 3


def read_entry(path: Path, entry: str | None = None) -> tuple[str, dict[str, Tensor]]:
    """Return one entry of a checkpoint: its name and its tensors, floats in float32.

    Args:
        path: A safetensors file, or one that `torch.save` wrote.
        entry: Which one, e.g. `model`; None: the first of `ENTRIES` that there is.

    Raises:
        CheckpointError: If the file is missing, damaged, holds more than plain data, or has no such entry.
    """
    found = dict(_entries(_read_checkpoint(path)))
    name = next((name for name in (ENTRIES if entry is None else (entry,)) if name in found), None)
    if name is None:
        wanted = "a known name" if entry is None else f"the name '{entry}'"
        there = ", ".join(sorted(found)) or "none"
        raise CheckpointError(f"{path} has no entry of tensors with {wanted}; there are: {there}.")
    return name, {key: value.float() if value.is_floating_point() else value for key, value in found[name]}


def _read_checkpoint(path: Path) -> Any:
    with _reading("weights", path, "a checkpoint (.safetensors, .pt, .pth, .ckpt)"):
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the age of a pickle
            return torch.load(path, map_location="cpu", weights_only=True)


def read_statistics(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file."""
    with (
        _reading("normalization", path, "the npz file beside the training data"),
        np.load(path, allow_pickle=False) as arrays,
    ):
        return {name: np.asarray(arrays[name]) for name in arrays.files}


@contextmanager
def _reading(key: str, path: Path, kind: str) -> Iterator[None]:
    if not path.is_file():
        raise CheckpointError(f"{key}={path} is no file; give {kind}.")
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, str(error))) from None
    except Exception as error:  # a damaged file makes the reader raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")
        raise CheckpointError(f"{path} cannot be read ({reason}); it is damaged, or not {kind}.") from None


def _entries(node: Any, name: str = "") -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """Yield every mapping of names to tensors in a checkpoint."""
    if not isinstance(node, Mapping) or name.count("/") >= _DEPTH:
        return
    tensors = [(key, value) for key, value in node.items() if isinstance(value, Tensor)]
    if tensors and len(tensors) == len(node) and all(isinstance(key, str) for key, _ in tensors):
        yield name, tensors
        return
    for key, value in node.items():
        yield from _entries(value, f"{name}/{key}" if name else str(key))


def _refusal(path: Path, reason: str) -> str:
    """Return the error text of a file that needs code, with a way to convert it where it is trusted."""
    named = re.search(r"GLOBAL ([\w.]+)", reason)
    holds = named[1] if named else "more than tensors"
    to = path.with_suffix(".safetensors").name
    return (
        f"{path} was not read: it holds {holds}, so reading it could run its code. Only if you trust "
        f'its origin, save its tensors where its program is installed: python -c "import dill, torch; from '
        f"safetensors.torch import save_file; d = torch.load('{path.name}', map_location='cpu', "
        f"pickle_module=dill, weights_only=False)['state_dicts']; save_file({{k: v.contiguous().clone() for "
        f"k, v in d.get('ema_model', d['model']).items()}}, '{to}')\", and import {to}."
    )
