"""Serialisation of training states as tensors and plain values, so that loading executes no code.

Arrays become tagged tensors, generators become their state. Anything other than numbers, strings, tensors and
containers of these is refused at saving time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.errors import CheckpointError

_ARRAY = "__array__"


def to_plain(value: Any, where: str = "state") -> Any:
    """Convert `value` to tensors, numbers, strings, lists, tuples and dicts.

    Tensors are detached; only views are copied, to drop the rest of their storage.

    Raises:
        CheckpointError: If a value cannot be serialised; gives its path.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        whole = value.untyped_storage().nbytes()
        return value.clone() if whole > value.numel() * value.element_size() else value
    if isinstance(value, np.ndarray):
        return {_ARRAY: _array_to_tensor(value, where)}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise CheckpointError(f"{where} must have keys of type str or int; got {key!r}.")
        return {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise CheckpointError(
        f"{where} must hold tensors, arrays and plain values to be saved; got {type(value).__qualname__}. "
        f"Save its state_dict() or its fields instead."
    )


def from_plain(value: Any) -> Any:
    """Invert `to_plain`."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def capture_generator(generator: torch.Generator | np.random.Generator) -> Any:
    """Return the state of a generator in plain types."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return to_plain(generator.bit_generator.state, "generator")


def restore_generator(generator: torch.Generator | np.random.Generator, state: Any) -> None:
    """Restore a generator from `capture_generator`.

    Raises:
        CheckpointError: If the state belongs to another type of generator.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        else:
            generator.bit_generator.state = from_plain(state)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"a saved random state does not fit a {type(generator).__qualname__}: {error}. "
            f"Resume with the device and versions that the run was started with."
        ) from None


def capture_global_rng() -> dict[str, Any]:
    """Return torch's global random states (used by e.g. dropout layers)."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def restore_global_rng(state: Mapping[str, Any]) -> None:
    """Restore from `capture_global_rng`; states of missing devices are ignored."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _array_to_tensor(value: np.ndarray, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except TypeError:
        raise CheckpointError(f"{where} must be an array of numbers; got dtype {value.dtype}.") from None
