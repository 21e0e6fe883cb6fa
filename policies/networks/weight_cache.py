"""Values computed from weights, kept until a weight changes.

Acting recomputes nothing that depends on the weights alone (folded matrices, time tables), and training never
reads a stale value. A weight counts as changed when

* it is another tensor, or its storage moved (`.to`, `load_state_dict(assign=True)`, swapped `.data`);
* its autograd version advanced (`copy_`, `lerp_`, `load_state_dict`, for-each optimisers, EMA);
* an optimiser of `torch.optim` that holds its storage took a step: fused optimisers do not advance versions.

Call `forget` after other writes: through `weight.data` in place, by fused kernels called directly, to a flat
vector whose slices became the weights (`vector_to_parameters`) or to a stack of which they are views
(`algos.offline.batched_seeds`) by others than its optimiser, by other processes.

Several threads may use one cache, also with different sources: each gets the value of its own sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

T = TypeVar("T")
_PLAIN = (nn.Parameter, Tensor)


class _OptimizerSteps:
    """Steps of every optimiser in this process, and the last one that may have written to a storage."""

    count = 0
    last: ClassVar[dict[int, int]] = {}  # address of a storage -> number of the step
    anywhere = 0  # the last step on tensors whose storage is not known

    @classmethod
    def wrote(cls, storages: Iterable[int], since: int) -> bool:
        return cls.anywhere > since or any(cls.last.get(place, 0) > since for place in storages)


def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count a step of an optimiser; to be called after steps that are not taken by its `step`."""
    _OptimizerSteps.count = number = _OptimizerSteps.count + 1
    for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        if type(tensor) in _PLAIN:
            _OptimizerSteps.last[_storage(tensor)] = number
        else:
            _OptimizerSteps.anywhere = number


def note_replay() -> None:
    """Count a change of weights that are not known: recorded kernels wrote to them."""
    _OptimizerSteps.count = _OptimizerSteps.anywhere = _OptimizerSteps.count + 1


@contextmanager
def without_caches() -> Iterator[list[Any]]:
    """Compute every value anew: recorded kernels must not read one of before.

    Yields the tables that they read all the same, which have to live as long as they.
    """
    before, _Recording.tables = _Recording.tables, []
    _Recording.depth += 1
    try:
        yield _Recording.tables
    finally:
        _Recording.depth -= 1
        _Recording.tables = before


class _Recording:
    depth = 0
    tables: ClassVar[list[Any]] = []


def is_recording() -> bool:
    """Return whether kernels are being recorded: what Python does now, it does once for all replays."""
    return _Recording.depth > 0


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(note_step)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """A value and its sources; immutable, so a thread reads all of it or none."""

    value: T
    sources: tuple[Tensor, ...]
    aliases: tuple[Tensor, ...]  # they keep the storage alive: no new weight sits at a freed address
    storages: frozenset[int]  # their addresses
    versions: tuple[int, ...]
    steps: int

    def is_current(self, sources: Sequence[Tensor]) -> bool:
        if len(sources) != len(self.sources) or _OptimizerSteps.wrote(self.storages, self.steps):
            return False
        known = zip(sources, self.sources, self.aliases, self.versions, strict=True)
        return all(
            new is old and new._version == version and new.data_ptr() == alias.data_ptr()
            for new, old, alias, version in known
        )


class WeightCache(Generic[T]):
    """Keeps one value computed from tensors until one of them changes; copies and pickles are empty."""

    def __init__(self) -> None:
        self.sealed = False
        self.clear()

    def __reduce__(self) -> tuple[type[WeightCache[T]], tuple[()]]:
        return WeightCache, ()

    def clear(self) -> None:
        self._entry: _Entry[T] | None = None

    def get(self, sources: Sequence[Tensor], compute: Callable[[], T], *, are_tables: bool = False) -> T:
        """Return `compute()`, or its cached result where that is valid and safe to reuse.

        Args:
            sources: Every tensor that the value depends on.
            compute: Pure function of the sources; differentiable when a source needs a gradient.
            are_tables: No source is a weight: the value may become part of recorded kernels.

        Returns:
            The value: freshly computed, with its graph, while tracing and whenever a gradient could flow to a
            source; otherwise detached and possibly cached.
        """
        entry = self._entry  # read once: another thread may replace it at any moment
        if self.sealed and entry is not None:
            return entry.value
        if not _cacheable(sources) or (is_recording() and not are_tables):
            return compute()
        if entry is not None and entry.is_current(sources):
            if is_recording():
                _Recording.tables.append(entry.value)
            return entry.value
        _watch_optimizers()
        # Taken before computing: a write in the meantime makes the entry stale.
        steps, versions = _OptimizerSteps.count, tuple(source._version for source in sources)
        aliases = tuple(source.detach() for source in sources)
        if any(type(alias) not in _PLAIN for alias in aliases):  # an unreported tracer
            return compute()
        storages = frozenset(map(_storage, aliases))
        no_autocast = torch.autocast(sources[0].device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), no_autocast:
            value = compute()
        self._entry = _Entry(value, tuple(sources), aliases, storages, versions, steps)
        return value


def _cacheable(sources: Sequence[Tensor]) -> bool:
    """Return whether values computed from these tensors may outlive the call."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # inside `torch.func.jvp` and the like values are wrapped, and die with the call
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        return False
    # Functional transforms, fake tensors and tensors without a version are computed afresh.
    return all(type(source) in _PLAIN and not source.is_inference() for source in sources)


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module and its children, without the bookkeeping of torch."""
    own = (*module._parameters.values(), *module._buffers.values())
    found: list[Tensor] = [weight for weight in own if weight is not None]
    for child in module._modules.values():
        if child is not None:
            found += weights_of(child)
    return found


def seal(module: nn.Module) -> None:
    """Declare that the weights of a module never change again and that it is used in one way only.

    Cached values are then returned unchecked, to a tracer as well, as constants. Evaluate the module once
    before, without gradients, to fill the caches.
    """
    for kept in _caches(module):
        kept.sealed = True


def forget(module: nn.Module) -> None:
    """Empty the caches of a module and its children, after writes that PyTorch does not report."""
    for kept in _caches(module):
        kept.clear()


def keeps_values(module: nn.Module) -> bool:
    """Whether a module, its children aside, owns a cache."""
    return any(isinstance(value, WeightCache) for value in vars(module).values())


def _caches(module: nn.Module) -> list[WeightCache[Any]]:
    values = [value for part in module.modules() for value in vars(part).values()]
    return [value for value in values if isinstance(value, WeightCache)]
