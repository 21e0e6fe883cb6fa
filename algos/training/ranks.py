"""Data-parallel training: several processes ("ranks") compute parts of every gradient of one run.

Every rank holds the whole state and draws the same random numbers. It computes its own rows of a batch; the
gradients are averaged before every optimiser step, so that weights stay equal bit for bit. Rank 0 writes.
`torchrun` starts the processes; in a program of its own, `current()` is one rank and every method returns
what it is given.

Legend: W ranks.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from algos.training.rank_memory import RankMemory
from policies.errors import TrainingError, WorkerError
from policies.seeds import seeded_generator

T = TypeVar("T")
_LARGE = 1 << 18  # numbers of a vector from which on shared memory is faster than sockets
_PATIENCE = timedelta(hours=6)  # of a rank that waits, as for an evaluation; killed ones are noticed at once


class Ranks:
    """One process that trains alone."""

    rank, world, local_rank = 0, 1, 0

    def own(self, rows: T) -> T:
        """Return the rows of this rank: every W-th one of a tensor (B, ...) or of a sequence."""
        return rows if self.world == 1 else rows[self.rank :: self.world]  # type: ignore[index]

    def own_draws(
        self, draws: Mapping[str, Tensor], axes: Mapping[str, int | None] | None = None
    ) -> dict[str, Tensor]:
        """Return the rows of this rank of random numbers by name.

        `axes` gives the axis of rows where it is not the first; None: numbers that all rows share.
        """
        if self.world == 1:
            return dict(draws)
        axis = {name: (axes or {}).get(name, 0) for name in draws}
        return {
            name: draw if (at := axis[name]) is None else self.own(draw.movedim(at, 0)).movedim(0, at)
            for name, draw in draws.items()
        }

    def own_generator(self, generator: torch.Generator) -> torch.Generator:
        """Return a generator of this rank alone, seeded by the state of one that all ranks share."""
        if self.world == 1:
            return generator
        seed = zlib.crc32(generator.get_state().numpy().tobytes())
        return seeded_generator(seed, "rank", self.rank, device=generator.device)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks of a statistic of a batch; without gradient for several ranks."""
        if self.world == 1:
            return value
        found = value.detach().clone()
        self.mean_([found])
        return found

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, such as gradients, by their means over ranks, in one exchange per dtype."""
        self._replace(tensors, self.world)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over ranks, in one exchange per dtype and device."""
        self._replace(tensors, 1)

    def _replace(self, tensors: Sequence[Tensor], divisor: int) -> None:
        if self.world == 1:
            return
        kind = [(str(tensor.dtype), str(tensor.device)) for tensor in tensors]
        for _, group in groupby(sorted(range(len(tensors)), key=kind.__getitem__), key=kind.__getitem__):
            parts = [tensors[i] for i in group]
            sizes = [part.numel() for part in parts]
            flat = torch.cat([part.reshape(-1) for part in parts], out=self._space(sum(sizes), parts[0]))
            summed = self._sum(flat, divisor).split(sizes)
            torch._foreach_copy_(parts, [one.view_as(part) for one, part in zip(summed, parts, strict=True)])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        return [value]

    def share(self, value: T) -> T:
        """Return the value of rank 0."""
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def first(self, value: T | None) -> T | None:
        """Return the first value that is not None, in order of ranks; None without any."""
        return next((one for one in self.gather(value) if one is not None), None)

    def average(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means over ranks of metrics by name."""
        if self.world == 1:
            return dict(values)
        found = torch.tensor(list(values.values()), dtype=torch.float64)
        self.mean_([found])
        return dict(zip(values, found.tolist(), strict=True))

    def require_equal(self, state: Any, what: str) -> None:
        """Compare a state over ranks.

        Raises:
            TrainingError: If it differs.
        """
        if self.world == 1:
            return
        found = self.gather(digest(state))
        if odd := [rank for rank, one in enumerate(found) if one != found[0]]:
            raise TrainingError(
                f"{what} must be equal in all {self.world} processes; ranks {odd} differ from rank 0. The "
                f"last checkpoint is good: resume from it in one process, and report this."
            )

    def _space(self, size: int, like: Tensor) -> Tensor | None:
        """Return where `_sum` wants the vector of this rank; None: anywhere."""
        return None

    def _sum(self, flat: Tensor, divisor: int) -> Tensor:
        """Return the sum of a vector over ranks, divided; it is valid until the next exchange."""
        return flat


class TorchRanks(Ranks):
    """The ranks of `torch.distributed`'s default group: gloo, and nccl for tensors on a GPU.

    On one machine, large vectors of the CPU are summed in memory that the ranks share (`RankMemory`).

    Raises:
        WorkerError: From every exchange, if another rank has ended.
    """

    def __init__(self) -> None:
        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            distributed.init_process_group(backend, timeout=_PATIENCE)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._memory = RankMemory(self, distributed.barrier)

    def _space(self, size: int, like: Tensor) -> Tensor | None:
        if size < _LARGE or like.device.type != "cpu":
            return None
        with self._met():
            return self._memory.space(size, like.dtype)

    def _sum(self, flat: Tensor, divisor: int) -> Tensor:
        with self._met():
            if (found := self._memory.sum(flat, divisor)) is None:
                distributed.all_reduce(flat)
        if found is None:
            return flat if divisor == 1 else flat.div_(divisor)
        return found

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.world
        with self._met():
            distributed.all_gather_object(found, value)
        return found

    @contextmanager
    def _met(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WorkerError(
                f"rank {self.rank} lost another process of this run, which was killed or failed; its own "
                f"error says why. Continue from the last checkpoint: the same command with resume=<run>."
            ) from error


ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """Return the ranks of this process."""
    return _current.get()


def join() -> Ranks:
    """Meet the other processes that `torchrun` started, if there are any; safe to call twice."""
    if current().world == 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ:
        _current.set(TorchRanks())
    return current()


def digest(state: Any) -> str:
    """Return the SHA-256 of nested tensors and plain values."""
    seen = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            seen.update(f"{value.dtype} {tuple(value.shape)}".encode())
            seen.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            for key in value:
                seen.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            seen.update(repr(value).encode())

    add(state)
    return seen.hexdigest()
