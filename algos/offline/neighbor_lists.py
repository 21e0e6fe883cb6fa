"""The rows whose states are nearest to those of given rows: by a tree, or by comparing with every row.

Legend: M rows, C state width, B rows that are asked for, k neighbours of each.

A tree is the faster way among few dimensions. Among many it comes to nearly every row, one at a time, and a
product of matrices comes to all of them sooner. Which it is, is tried once, on the first rows asked for.
Both compute in float64, and what they find is measured and ordered by the same lines, so lists do not depend
on the way, but for which of the rows that are as far away as the last one are in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from scipy.spatial import KDTree
from torch import Tensor

_TRIED = 16  # rows that each way is tried on
_TILE = 2**22  # distances that are kept at once
NODES = 60
"""Bytes that the nodes of scipy's tree take for each of its rows, about, whatever their width."""

Found = tuple[Tensor, Tensor]


class NeighborLists:
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
        index = self._tree.query(self._state[rows].numpy(), k=self._length)[1]
        return self._ordered(rows, torch.from_numpy(index.reshape(len(rows), self._length)))

    def by_product(self, rows: Tensor) -> Found:
        at_once = max(1, _TILE // len(self._state))
        # One tile for all: each of its own would leave a hole in the heap that the next one does not fit in.
        tile = self._state.new_empty(min(at_once, len(rows)), len(self._state))
        index = [self._among_all(part, tile[: len(part)]) for part in rows.split(at_once)]
        return self._ordered(rows, torch.cat(index))

    def _among_all(self, rows: Tensor, tile: Tensor) -> Tensor:
        # |s - s_j|^2 up to |s|^2, which all rows share; its rounding is why the found are measured again
        cost = torch.addmm(self._square, self._state[rows], self._state.t(), alpha=-2.0, out=tile)
        return cost.topk(self._length, largest=False, sorted=False).indices

    def _ordered(self, rows: Tensor, index: Tensor) -> Found:
        """Return squared distances and rows (B, k) of those found, the first of equally near ones first."""
        index = index.sort(dim=1).values
        square = (self._state[index] - self._state[rows][:, None]).square().sum(dim=2)
        square, order = square.sort(dim=1, stable=True)
        return square, index.gather(1, order)


def listing_bytes(rows: int, width: int) -> int:
    """Return the memory of a listing at work: states, squares, a tree, a tile of distances, a row to sort."""
    return (8 * (width + 2) + NODES) * rows + 8 * max(_TILE, rows) + 16 * rows
