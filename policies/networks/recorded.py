"""Functions of tensors on a CUDA device, recorded once and replayed: one launch for hundreds of kernels.

A small network on an accelerator takes as long as the launches of its kernels. A `Recorded` function is
called as it is a few times, then its kernels are recorded as a CUDA graph on copies of its inputs, and every
further call copies the inputs there and replays it: the same kernels, so the same numbers. On a CPU, and
where recording fails, the function is called as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from policies.networks.weight_cache import note_replay, without_caches

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CALLS = 3  # before a recording: they create moments of optimisers, tables that are kept, and handles


class Recorded(Generic[T]):
    """A function that is replayed from its fourth call with equal shapes on.

    Everything that the function decides in Python must follow from its arguments that are no tensors: calls
    that differ in them are recorded apart. It must not wait for the device, and draws from `generators`
    alone. Inputs that take a gradient, as from an encoder in training, are not copied: such calls are not
    recorded. What it returns is valid until its next call.

    Args:
        function: Takes and returns tensors, in dictionaries, sequences and dataclasses of them.
        writes_weights: Whether it changes weights, so that values kept of them are stale.
        is_on: Whether to record at all.
        generators: On the device; the function may draw from them.
    """

    def __init__(
        self,
        function: Callable[..., T],
        *,
        writes_weights: bool = False,
        is_on: bool = True,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.function, self._writes, self._is_on = function, writes_weights, is_on
        self._generators = generators
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Graph[T]] = {}

    def __call__(self, *inputs: Any) -> T:
        if not (self._is_on and torch.cuda.is_initialized()):
            return self.function(*inputs)
        leaves = list(_leaves(inputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        are_copied = all(tensor.is_cuda and not tensor.requires_grad for tensor in tensors)
        if not (tensors and are_copied):
            return self.function(*inputs)
        signature = self._signature(leaves)
        graph = self._graphs.get(signature)
        if graph is None:
            if (count := self._calls.get(signature, 0)) < _CALLS:
                self._calls[signature] = count + 1
                return self.function(*inputs)
            try:
                graph = self._graphs[signature] = _Graph(self.function, inputs, self._generators)
            except RuntimeError as error:
                self._is_on = False
                _warn_once(str(error).splitlines()[0])
                return self.function(*inputs)
        out = graph.replay(tensors)
        if self._writes:
            note_replay()
        return out

    def forget(self) -> None:
        """Record anew: tensors that the function reads or writes are others now."""
        self._calls, self._graphs = {}, {}

    @staticmethod
    def _signature(leaves: list[Any]) -> Hashable:
        return tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        )


class _Graph(Generic[T]):
    """Recorded kernels with the copies of the inputs that they read."""

    def __init__(
        self, function: Callable[..., T], inputs: tuple[Any, ...], generators: Sequence[torch.Generator]
    ) -> None:
        kept = _mapped(inputs, lambda tensor: tensor.detach().clone())
        self._inputs = [leaf for leaf in _leaves(kept) if isinstance(leaf, Tensor)]
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        with without_caches() as self._tables, torch.cuda.graph(self._graph):
            self._output = function(*kept)

    def replay(self, tensors: list[Tensor]) -> T:
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, tensors)
        self._graph.replay()
        return self._output


@cache
def _warn_once(why: str) -> None:
    _log.warning("kernels are launched one by one, since they cannot be recorded: %s", why)


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield tensors and hashable values, with what tells trees of different form apart."""
    if isinstance(tree, Mapping):
        yield tuple(tree)
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        yield len(tree)
        for value in tree:
            yield from _leaves(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for one in fields(tree):
            yield from _leaves(getattr(tree, one.name))
    else:
        yield tree


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(value, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return type(tree)(**{one.name: _mapped(getattr(tree, one.name), change) for one in fields(tree)})
    return tree
