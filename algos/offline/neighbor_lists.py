"""Nearest rows by state for given rows: by a tree or by brute force.

Legend: M rows, C state width, B queried rows, k neighbours of each.

A tree is faster in low dimensions. In high dimensions it visits nearly every row singly, and a matrix product
is faster. The choice is timed once, on the first queried rows. Both compute in float64 and share the final
distance computation and sorting, so lists differ only in ties with the last neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from scipy.spatial import KDTree
from torch import Tensor

_TRIED = 16  # timed rows per method
_TILE = 2**22  # distances held at once
NODES = 60  # bytes per row of scipy's tree nodes, approximately, for any width

Found = tuple[Tensor, Tensor]


class NeighborLists:
    """Nearest k (`length`, at most M) neighbours by state (M, C)."""

    def __init__(self, state: Tensor, length: int, clock: Callable[[], float] = time.process_time) -> None:
        self._state, self._length, self._clock = state.double().contiguous(), length, clock
        self._square = self._state.square().sum(dim=1)
        self._tree = KDTree(self._state.numpy(), balanced_tree=False, compact_nodes=True)
        self.method: str | None = None  # product or tree, once timed

    def nearest(self, rows: Tensor) -> Found:
        """Return squared distances (B, k), ascending, and row indices (B, k) int64 for rows (B,)."""
        if self.method is None and len(rows) >= 2 * _TRIED:
            self.method = self._faster(rows[:_TRIED])
        return self.by_product(rows) if self.method == "product" else self.by_tree(rows)

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
        # One tile for all blocks: separate tiles would fragment the heap.
        tile = self._state.new_empty(min(at_once, len(rows)), len(self._state))
        index = [self._among_all(part, tile[: len(part)]) for part in rows.split(at_once)]
        return self._ordered(rows, torch.cat(index))

    def _among_all(self, rows: Tensor, tile: Tensor) -> Tensor:
        # |s - s_j|^2 up to |s|^2, which all rows share; distances are recomputed because of its rounding
        cost = torch.addmm(self._square, self._state[rows], self._state.t(), alpha=-2.0, out=tile)
        return cost.topk(self._length, largest=False, sorted=False).indices

    def _ordered(self, rows: Tensor, index: Tensor) -> Found:
        """Return squared distances and rows (B, k), sorted; ties by row index."""
        index = index.sort(dim=1).values
        square = (self._state[index] - self._state[rows][:, None]).square().sum(dim=2)
        square, order = square.sort(dim=1, stable=True)
        return square, index.gather(1, order)


def listing_bytes(rows: int, width: int) -> int:
    """Return the peak memory of a query: states, squares, a tree, a tile of distances, a row to sort."""
    return (8 * (width + 2) + NODES) * rows + 8 * max(_TILE, rows) + 16 * rows
