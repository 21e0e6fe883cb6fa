"""Nearest rows by state for given rows: by boxes or by a matrix product.

Legend: M rows, C state width, B queried rows, k neighbours of each, L rows of a leaf.

Boxes are those of the tree over [beta s, a]. The leaves around a row bound its k-th distance, the nearest
leaves tighten the bound, and the rows of all leaves within it are compared. This is faster in low dimensions.
In high dimensions nearly every leaf is within the bound, and a matrix product is faster. The choice is timed
once, on the first queried rows. Both compute the distances that decide in float64 and share their sorting, so
lists differ only in ties with the last neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from algos.offline.neighbor_tree import NeighborTree

_TRIED = 16  # timed rows per method
_TILE = 2**19  # distances of a product held at once
_AT_ONCE = 128  # rows listed at once
_LEAVES = 4096  # leaves compared at once
_SLACK = 1e-5  # relative error of float32 distances
_ROUNDING = 2.0**-22  # of a scaled state, relative to its norm

Found = tuple[Tensor, Tensor]


class NeighborLists:
    """Nearest k (`length`, at most M) neighbours by state, among the rows of a tree."""

    def __init__(
        self, boxes: NeighborTree, length: int, clock: Callable[[], float] = time.process_time
    ) -> None:
        self._boxes, self._state, self._length, self._clock = boxes, boxes.state, length, clock
        self.method: str | None = None  # product or boxes, once timed

    def nearest(self, rows: Tensor) -> Found:
        """Return squared distances (B, k), ascending, and row indices (B, k) int64 for rows (B,)."""
        if self.method is None and len(rows) >= 2 * _TRIED:
            self.method = self._faster(rows[:_TRIED])
        return self.by_product(rows) if self.method == "product" else self.by_boxes(rows)

    def _faster(self, rows: Tensor) -> str:
        started = self._clock()
        self.by_boxes(rows)
        between = self._clock()
        self.by_product(rows)
        return "boxes" if between - started <= self._clock() - between else "product"

    def by_boxes(self, rows: Tensor) -> Found:
        found = [self._within(part) for part in rows.split(_AT_ONCE)]
        return torch.cat([square for square, _ in found]), torch.cat([index for _, index in found])

    def by_product(self, rows: Tensor) -> Found:
        found = [self._among_all(part) for part in rows.split(_AT_ONCE)]
        return torch.cat([square for square, _ in found]), torch.cat([index for _, index in found])

    def _within(self, rows: Tensor) -> Found:
        boxes, state = self._boxes, self._state[rows]
        bound = self._bound(rows, state)
        scaled = boxes.beta * state
        rounding = _ROUNDING * scaled.norm(dim=1)

        def limit() -> Tensor:
            return (boxes.beta * (1 + _SLACK) * bound.sqrt() + rounding).square_()

        pairs = boxes.leaves_within(scaled, limit())
        if pairs is None:
            halves = [self._within(half) for half in rows.tensor_split(2)]
            return torch.cat([square for square, _ in halves]), torch.cat([index for _, index in halves])
        owner, leaf, gap = pairs
        order = gap.argsort()
        order = order[owner[order].argsort(stable=True)]  # by owner, the nearest leaves of each first
        owner, leaf, gap = owner[order], leaf[order], gap[order]
        bound = torch.minimum(bound, self._bound_of(owner, leaf, state))
        inside = gap <= limit()[owner]
        return self._sorted(rows, *self._compared(owner[inside], leaf[inside], state, bound))

    def _bound(self, rows: Tensor, state: Tensor) -> Tensor:
        """Return an upper bound (B,) on the squared k-th distance, from the leaves around each row."""
        leaves, size = self._boxes.order.shape
        group = 1
        while group < leaves and group * size < 4 * self._length:
            group *= 2
        first = self._boxes.place[rows].long() // (group * size) * group
        leaf = first[:, None] + torch.arange(group)
        square = self._squares(leaf.flatten(), state.repeat_interleave(group, dim=0))
        return square.view(len(rows), -1).kthvalue(self._length, dim=1).values

    def _bound_of(self, owner: Tensor, leaf: Tensor, state: Tensor) -> Tensor:
        """Return the same from the first leaves of each row, of pairs (P,) sorted by owner."""
        size = self._boxes.order.shape[1]
        most = max(_LEAVES // _AT_ONCE, -(-2 * self._length // size))
        rank = _ranks(owner, len(state))
        owner, leaf, rank = (part[rank < most] for part in (owner, leaf, rank))
        square = state.new_full((len(state), most, size), torch.inf)
        square[owner, rank] = self._squares(leaf, state[owner])
        return square.flatten(1).kthvalue(self._length, dim=1).values

    def _squares(self, leaf: Tensor, state: Tensor) -> Tensor:
        """Return squared distances (P, L) of the rows of leaves (P,) from states (P, C); copies are far."""
        order, place = self._boxes.order, self._boxes.place
        row = order[leaf]
        gap = self._state.index_select(0, row.view(-1)).view(*row.shape, -1)
        square = gap.sub_(state[:, None]).square_().sum(dim=2)
        pair, entry = (row < order.numel() - len(place)).nonzero().unbind(1)  # rows that repeat
        copied = place[row[pair, entry].long()] != leaf[pair] * order.shape[1] + entry
        square[pair[copied], entry[copied]] = torch.inf
        return square

    def _compared(self, owner: Tensor, leaf: Tensor, state: Tensor, bound: Tensor) -> Found:
        """Return pairs (P,) of queries and rows within the bounds (B,)."""
        found, limit = [], (bound * (1 + _SLACK)).clamp_(max=torch.finfo(bound.dtype).max)
        for some, leaves in zip(owner.split(_LEAVES), leaf.split(_LEAVES), strict=True):
            square = self._squares(leaves, state[some])
            pair, place = (square <= limit[some][:, None]).nonzero().unbind(1)
            found.append((some[pair], self._boxes.order[leaves[pair], place].long()))
        return torch.cat([query for query, _ in found]), torch.cat([row for _, row in found])

    def _among_all(self, rows: Tensor) -> Found:
        # |s - s_j|^2 up to |s|^2, which all rows share; distances are recomputed because of its rounding
        query, width = self._state[rows].double(), max(self._length, _TILE // len(rows))
        best, index = query.new_empty(len(rows), 0), rows.new_empty(len(rows), 0)
        for start in range(0, len(self._state), width):
            part = self._state[start : start + width].double()
            cost = torch.addmm(part.square().sum(dim=1), query, part.t(), alpha=-2.0)
            least, place = cost.topk(min(self._length, len(part)), largest=False, sorted=False)
            best, index = torch.cat([best, least], dim=1), torch.cat([index, place + start], dim=1)
            best, kept = best.topk(min(self._length, best.shape[1]), largest=False, sorted=False)
            index = index.gather(1, kept)
        return self._sorted(rows, torch.arange(len(rows)).repeat_interleave(self._length), index.view(-1))

    def _sorted(self, rows: Tensor, owner: Tensor, index: Tensor) -> Found:
        """Return squared distances and rows (B, k) of the nearest of pairs (P,); ties by row index."""
        index, order = index.sort()
        owner = owner[order]
        square = (self._state[index].double() - self._state[rows[owner]].double()).square().sum(dim=1)
        square, order = square.sort(stable=True)
        owner, index = owner[order], index[order]
        owner, order = owner.sort(stable=True)
        nearest = order[_ranks(owner, len(rows)) < self._length]
        return square[nearest].view(len(rows), -1), index[nearest].view(len(rows), -1)


def _ranks(owner: Tensor, num: int) -> Tensor:
    """Return the rank (P,) of each pair among those of its owner; owners are sorted."""
    count = owner.bincount(minlength=num)
    return torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]


def listing_bytes(rows: int, states: int) -> int:
    """Return the bytes at work while rows are listed: leaves and what they hold, or a tile of a product."""
    return _LEAVES * 32 * (4 * states + 40) + 8 * _TILE
