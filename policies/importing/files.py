"""Reading checkpoints of other programs without running anything that they hold."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies.errors import CheckpointError
from policies.storage.strict_json import own_file, parse_json, read_json

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


class Tensors:
    """The tensors of a checkpoint; each is taken once, or skipped with a reason."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)
        self.count = len(self._left)
        self.skipped: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def left(self) -> dict[str, Tensor]:
        """What was neither taken nor skipped."""
        return dict(self._left)

    def under(self, prefix: str) -> bool:
        """Whether a tensor with this prefix is left."""
        return any(name.startswith(prefix) for name in self._left)

    def take(self, name: str) -> Tensor:
        """Take one tensor; a CheckpointError names a missing one."""
        if name not in self._left:
            some = ", ".join(sorted(self._left)[:4]) or "none"
            raise CheckpointError(
                f"the checkpoint has no tensor '{name}'; left are {len(self._left)}: {some}."
            )
        return self._left.pop(name)

    def taken(self, keys: Mapping[str, str], prefix: str = "") -> dict[str, Tensor]:
        """Take the tensors of a key map {theirs: ours}; returns them as {prefix + ours: tensor}."""
        return {f"{prefix}{ours}": self.take(theirs) for theirs, ours in keys.items()}

    def cut(self, prefix: str) -> dict[str, Tensor]:
        """Take all tensors with a prefix; returns them without it."""
        names = [name for name in self._left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._left.pop(name) for name in names}

    def skip(self, prefix: str, why: str) -> None:
        """Leave out all tensors with a prefix."""
        for name in [name for name in self._left if name.startswith(prefix)]:
            self._left.pop(name)
            self.skipped[name] = why


@dataclass(frozen=True)
class Files:
    """A checkpoint, and the files beside it."""

    path: Path
    entry: str | None = None
    normalization: Path | None = None

    def tensors(self) -> tuple[str, Tensors]:
        """Return the name of the entry, and its tensors."""
        name, tensors = read_entry(self.path, self.entry)
        return name, Tensors(tensors)

    def whole(self) -> Mapping[str, Any]:
        """Return the checkpoint, a mapping of plain data."""
        found = _read_checkpoint(self.path)
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self.path} must hold a mapping; got {type(found).__name__}.")
        return found

    def beside(self, name: str, *, finite: bool = True) -> dict[str, Any]:
        """Return a JSON object that lies beside the checkpoint; `finite`: its numbers must be."""
        path = self.path.parent / name
        with _reading("the checkpoint needs", path, f"the {name} that its program writes beside it"):
            return read_json(own_file(path), finite=finite)

    def member(self, name: str) -> bytes:
        """Return a file within the checkpoint, a zip archive; it must be stored without compression."""
        kind = "the zip archive that its program saves"
        with _reading("weights", self.path, kind), ZipFile(self.path) as archive:
            if archive.getinfo(name).compress_type != ZIP_STORED:
                raise ValueError(f"'{name}' is compressed, which its program does not do")
            return archive.read(name)

    def loaded(self, content: bytes) -> Any:
        """Return the plain data of a file of `torch.save` that is part of the checkpoint."""
        with _reading("weights", self.path, "the file that its program saves"):
            return torch.load(BytesIO(content), map_location="cpu", weights_only=True)

    def json(self, content: str | bytes, name: str) -> dict[str, Any]:
        """Return the JSON object of a part of the checkpoint; NaN and infinite numbers are allowed."""
        with _reading("weights", self.path, "the file that its program saves"):
            return parse_json(content, name, finite=False)

    def tensors_beside(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file that lies beside the checkpoint."""
        path = self.path.parent / Path(name).name
        with _reading("the checkpoint needs", path, "a safetensors file"):
            return load_file(own_file(path))


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, bytes, lists and dictionaries; refuses every name, so nothing is called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def read_plain_pickle(path: Path) -> Any:
    """Return the plain data of a pickle; a CheckpointError names what is more than plain data."""
    with _reading("weights", path, "the file that its program saves"), path.open("rb") as file:
        return _PlainUnpickler(file).load()


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
    if path.suffix not in (".pt", ".pth", ".ckpt"):
        return f"{path} was not read: it holds {holds}, so reading it could run its code."
    to = path.with_suffix(".safetensors").name
    return (
        f"{path} was not read: it holds {holds}, so reading it could run its code. Only if you trust "
        "its origin, save its tensors where its program is installed, those of Diffusion Policy by: "
        f'python -c "import dill, torch; from '
        f"safetensors.torch import save_file; d = torch.load('{path.name}', map_location='cpu', "
        f"pickle_module=dill, weights_only=False)['state_dicts']; save_file({{k: v.contiguous().clone() for "
        f"k, v in d.get('ema_model', d['model']).items()}}, '{to}')\", and import {to}."
    )
