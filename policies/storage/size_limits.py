"""Upper bound on allocations while a policy is built from an untrusted description.

The size of each operation's result is computed from its arguments; an operation that exceeds the remaining
budget is refused before execution. The declared sizes must match the weights, so a valid description needs
little more memory than these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.errors import ConfigError

_SIZED = ("new_", "repeat", "resize", "empty_strided")  # operations that take sizes


class Budget(TorchDispatchMode):
    """Bound the bytes of new tensors, and the operations that create one; beyond them a `ConfigError`."""

    def __init__(self, nbytes: int, operations: int) -> None:
        super().__init__()
        self._nbytes, self._operations = nbytes, operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler, which takes most of the time of loading

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if all(value.alias_info is None for value in func._schema.returns):  # neither a view nor in place
            self._pay(8 * _entries(func.__name__, args))
        return func(*args, **(kwargs or {}))

    def _pay(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        self._operations -= 1
        if self._nbytes < 0 or self._operations < 0:
            raise ConfigError(
                "it declares sizes that its weights do not have: building it would take more memory than the "
                "file of weights can fill"
            )


def _entries(name: str, args: tuple[Any, ...]) -> int:
    """Return the approximate number of entries of an operation's result, at least for large ones."""
    tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
    sizes = [one for one in args if isinstance(one, (list, tuple)) and all(type(n) is int for n in one)]
    if not tensors:
        numbers = [abs(one) for one in args if isinstance(one, (int, float)) and math.isfinite(one)]
        if name.startswith("eye"):
            return math.prod(int(one) for one in (*numbers, *numbers)[:2])
        return math.prod(sizes[0]) if sizes else int(max(numbers, default=1))  # arange, linspace, randperm
    if name.startswith(_SIZED) and sizes:
        return math.prod(sizes[0]) * (tensors[0].numel() if name.startswith("repeat") else 1)
    together = sum(one.numel() for one in tensors)
    try:
        return max(together, math.prod(torch.broadcast_shapes(*(one.shape for one in tensors))))
    except RuntimeError:  # a product of matrices
        return max(together, math.prod(one.shape[0] if one.dim() else 1 for one in tensors))
