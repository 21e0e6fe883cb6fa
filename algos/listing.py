"""The rows whose states are nearest to those of given rows: by a tree, or by comparing with every row.

Legend: M rows, C state width, B rows that are asked for, k neighbours of each.

A tree is the faster way among few dimensions. Among many it comes to nearly every row, one at a time, and a
product of matrices comes to all of them sooner. Which it is, is tried once, on the first rows asked for.
Both compute in float64, and distances of what was found are taken from differences, so the ways differ in
the order of rows that are equally near, no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from scipy.spatial import KDTree
from torch import Tensor

_TRIED = 16  # rows that each way is tried on
_TILE = 2**22  # distances that are kept at once

Found = tuple[Tensor, Tensor]


class Listing:
    """Finds the nearest states.

    Args:
        state: (M, C).
        length: k, at most M.
        clock: Seconds, for the trial.
    """

    def __init__(self, state: Tensor, length: int, clock: Callable[[], float] = time.process_time) -> None:
        self._state, self._length, self._clock = state.double().contiguous(), length, clock
        self._square = self._state.square().sum(dim=1)
        self._tree = KDTree(self._state.numpy(), balanced_tree=False, compact_nodes=True)
        self.way: str | None = None  # product or tree, once it was tried

    def nearest(self, rows: Tensor) -> Found:
        """Return squared distances (B, k), ascending, and rows (B, k) int64, of rows (B,)."""
        if self.way is None and len(rows) >= 2 * _TRIED:
            self.way = self._faster(rows[:_TRIED])
        return self.by_product(rows) if self.way == "product" else self.by_tree(rows)

    def _faster(self, rows: Tensor) -> str:
        started = self._clock()
        self.by_tree(rows)
        between = self._clock()
        self.by_product(rows)
        return "tree" if between - started <= self._clock() - between else "product"

    def by_tree(self, rows: Tensor) -> Found:
        """See `nearest`."""
        distance, index = self._tree.query(self._state[rows].numpy(), k=self._length)
        shape = (len(rows), self._length)
        return torch.from_numpy(distance.reshape(shape)).square(), torch.from_numpy(index.reshape(shape))

    def by_product(self, rows: Tensor) -> Found:
        """See `nearest`."""
        at_once = max(1, _TILE // len(self._state))
        parts = [self._among_all(part) for part in rows.split(at_once)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _among_all(self, rows: Tensor) -> Found:
        state = self._state[rows]
        # |s - s_j|^2 up to |s|^2, which all rows share; its rounding is why the found are computed again
        cost = torch.addmm(self._square, state, self._state.t(), alpha=-2.0)
        index = cost.topk(self._length, largest=False, sorted=False).indices
        square = (self._state[index] - state[:, None]).square().sum(dim=2)
        square, order = square.sort(dim=1, stable=True)
        return square, index.gather(1, order)


def listing_bytes(rows: int, width: int) -> int:
    """Return the memory of a listing at work: states, squares, order of a tree, a tile of distances."""
    return 8 * rows * (width + 2) + 8 * max(_TILE, rows)
