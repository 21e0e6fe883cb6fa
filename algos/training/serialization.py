"""Serialisation of training states as tensors and plain values, so that loading runs no code.

Arrays become tagged tensors, generators become their state; everything else that is not a number, a
string, a tensor or a container of these is refused when it is saved, not when it is needed.
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
    """Return `value` made of tensors, numbers, strings, lists, tuples and dicts only.

    Tensors are detached and not copied, but for views: of these nothing is kept beside themselves.

    Raises:
        CheckpointError: If something cannot be expressed; names the place.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        whole = value.untyped_storage().nbytes()
        return value.clone() if whole > value.numel() * value.element_size() else value
    if isinstance(value, np.ndarray):
        return {_ARRAY: _array_to_tensor(value, where)}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float | bool | bytes):
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
        f"{where} must be made of tensors, arrays and plain values to be saved; got "
        f"{type(value).__qualname__}. Save its state_dict() or its fields instead."
    )


def from_plain(value: Any) -> Any:
    """Undo `to_plain`."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def capture_generator(generator: torch.Generator | np.random.Generator) -> Any:
    """Return the state of a generator, plain."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return to_plain(generator.bit_generator.state, "generator")


def restore_generator(generator: torch.Generator | np.random.Generator, state: Any) -> None:
    """Continue a generator from `capture_generator`.

    Raises:
        CheckpointError: If the state is of another kind of generator.
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
    """Return the global torch random states (libraries such as dropout layers draw from them)."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def restore_global_rng(state: Mapping[str, Any]) -> None:
    """Continue from `capture_global_rng`; states of devices that are absent here are ignored."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _array_to_tensor(value: np.ndarray, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except TypeError:
        raise CheckpointError(
            f"{where} must be an array of numbers to be saved; got dtype {value.dtype}."
        ) from None
