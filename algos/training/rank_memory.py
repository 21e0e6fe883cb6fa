"""Sums of large vectors over the ranks of one machine, in memory that they share.

Every rank writes its vector, sums its own part of all vectors and reads the whole, which takes less time than
sockets do. Linux alone has the folder for it; elsewhere, on several machines or where that folder is too
small, `torch.distributed` sums.

Legend: W ranks, N numbers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_FOLDER = Path("/dev/shm")


class Meeting(Protocol):
    """What ranks need to agree on memory."""

    rank: int
    world: int

    def gather(self, value: Any) -> list[Any]: ...


class RankMemory:
    """Vectors (W, N) of one dtype that all ranks of one machine see.

    Args:
        ranks: Who takes part.
        wait: Returns when every rank has called it; raises if one has ended.
    """

    def __init__(self, ranks: Meeting, wait: Callable[[], Any]) -> None:
        self._ranks, self._wait = ranks, wait
        self._rows: dict[torch.dtype, Tensor | None] = {}

    def space(self, size: int, dtype: torch.dtype) -> Tensor | None:
        """Return where this rank writes its vector (size,), once all have read the last sum.

        All ranks must ask together. None: there is no such memory.
        """
        rows = self._rows.get(dtype)
        if dtype not in self._rows or (rows is not None and rows.shape[1] < size):
            rows = self._rows[dtype] = self._share(size, dtype)
        if rows is None:
            return None
        self._wait()
        return rows[self._ranks.rank, :size]

    def sum(self, flat: Tensor, divisor: int) -> Tensor | None:
        """Return the sum over ranks of vectors written to `space`, divided; valid until the next `space`.

        None if the vector is elsewhere.
        """
        rows = self._rows.get(flat.dtype)
        if rows is None or flat.data_ptr() != rows[self._ranks.rank].data_ptr():
            return None
        own = rows[:, : flat.numel()].tensor_split(self._ranks.world, dim=1)[self._ranks.rank]
        self._wait()
        for row in own[1:]:
            own[0] += row
        if divisor != 1:
            own[0] /= divisor
        self._wait()
        return rows[0, : flat.numel()]

    def _share(self, size: int, dtype: torch.dtype) -> Tensor | None:
        """Return new rows (W, size), or None unless every rank can open them."""
        world, path = self._ranks.world, None
        if self._ranks.rank == 0:
            path = _reserve(size * world * dtype.itemsize)
        try:
            shared, rows = self._ranks.gather(path)[0], None
            with contextlib.suppress(RuntimeError):  # torch's error where there is no such file
                if shared is not None:
                    rows = torch.from_file(shared, shared=True, size=world * size, dtype=dtype)
            opened = all(self._ranks.gather(rows is not None))
        finally:
            if path is not None:
                Path(path).unlink(missing_ok=True)  # the memory lives as long as a rank does
        return rows.view(world, size) if rows is not None and opened else None


def _reserve(size: int) -> str | None:
    """Return a new file of some bytes that are really there; None if there is no room."""
    path = _FOLDER / f"burnish-{secrets.token_hex(16)}"
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except (OSError, AttributeError):  # no such folder, no room, another system
        path.unlink(missing_ok=True)
        return None
    return str(path)
