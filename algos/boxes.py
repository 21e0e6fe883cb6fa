"""The nearest row to each of many queries: a balanced tree kept as arrays, descended for all queries at once.

Legend: M rows, D width, B queries. Rows are halved at the median of their widest entry until a leaf holds a
few dozen; all leaves are equally large, so a level of the tree is one array of boxes (smallest and largest
entry per dimension) and the leaves are one array of rows. A query comes with a row that is near already. Of
every level the boxes nearer than that row are kept, and of the last one their rows are compared.

This pays where a good row is known beforehand and many queries are asked: the frontier of all of them is
handled by a few array operations per level instead of one walk through the tree per query.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LEAF = 32  # rows of a leaf, at most
_FANOUT = 3  # bits: children of a box are the 8 boxes three halvings further
_TOP = 64  # boxes of the first level, at most
_SLACK = 1e-5  # relative error of float32 distances that is allowed for
_AT_ONCE = 4096  # leaves whose rows are compared at once
_FRONTIER = 2**18  # pairs of a query and a box, at most, at once; one query may have more
_FEWER = 8  # parts into which queries with more of them are divided


class BoxTree:
    """Exact nearest neighbours among rows, given one that is near already for each query.

    Of rows that are equally near one is found, always the same. Memory is about 1.3 times that of the rows.

    Args:
        rows: (M, D) float32.
    """

    def __init__(self, rows: Tensor) -> None:
        depth = 0
        while len(rows) > _LEAF << depth:
            depth += 1
        order = torch.from_numpy(_halved(rows.numpy(), depth))
        self._order = order
        self._leaves = rows.index_select(0, order.flatten()).view(*order.shape, -1)
        low, high = self._leaves.amin(dim=1), self._leaves.amax(dim=1)
        self._levels = [(low, high)]
        while len(low) > _TOP:
            shape = (len(low) >> _FANOUT, 1 << _FANOUT, -1)
            low, high = low.view(shape).amin(dim=1), high.view(shape).amax(dim=1)
            self._levels.insert(0, (low, high))

    def nearest(self, query: Tensor, row: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest rows (B,) and their squared distances (B,).

        Args:
            query: (B, D).
            row: (B,) rows that are near.
            square: (B,) their squared distances.
        """
        best, index = square.clone(), row.clone()
        self._improve(query, best, index)
        return index, best

    def _improve(self, query: Tensor, best: Tensor, index: Tensor) -> None:
        """Put the nearest rows in place of those that are near, in several goes where many boxes are."""
        pairs = self._leaves_within(query, best * (1 + _SLACK))
        if pairs is None:
            size = -(-len(query) // _FEWER)
            parts = (one.split(size) for one in (query, best, index))
            for part in zip(*parts, strict=True):
                self._improve(*part)
            return
        owner, leaf = pairs
        for start in range(0, len(owner), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            self._compare(query, owner[some], leaf[some], best, index)

    def _leaves_within(self, query: Tensor, limit: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return pairs of a query and a leaf that is no further than the limit, (P,) each.

        None where more pairs are on the way to them than may be looked at at once.
        """
        top = len(self._levels[0][0])
        owner = torch.arange(len(query)).repeat_interleave(top)
        box = torch.arange(top).repeat(len(query))
        for level, (low, high) in enumerate(self._levels):
            if level:
                if len(owner) << _FANOUT > _FRONTIER and len(query) > 1:
                    return None
                owner = owner.repeat_interleave(1 << _FANOUT)
                box = ((box << _FANOUT)[:, None] + torch.arange(1 << _FANOUT)).flatten()
            point = query.index_select(0, owner)
            gap = point.clamp(low.index_select(0, box), high.index_select(0, box)).sub_(point)
            kept = (gap.square_().sum(dim=1) <= limit.index_select(0, owner)).nonzero().squeeze(1)
            owner, box = owner.index_select(0, kept), box.index_select(0, kept)
        return owner, box

    def _compare(self, query: Tensor, owner: Tensor, leaf: Tensor, best: Tensor, index: Tensor) -> None:
        """Compare queries with all rows of leaves."""
        rows = self._leaves.index_select(0, leaf)
        square = rows.sub_(query.index_select(0, owner)[:, None]).square_().sum(dim=2)
        value, place = square.min(dim=1)
        row = self._order[leaf, place]
        closest = best.scatter_reduce(0, owner, value, "amin")
        first = index.new_full(index.shape, len(self._order) * self._order.shape[1])
        wins = value == closest[owner]
        first.scatter_reduce_(0, owner[wins], row[wins], "amin")
        better = closest < best
        best.copy_(closest)
        index.copy_(torch.where(better, first, index))


def boxes_bytes(rows: int, width: int) -> int:
    """Return the memory of a tree of boxes at work: leaves, their order, boxes, and the pairs looked at."""
    return (5 * width + 12) * rows + _FRONTIER * (16 * width + 32)


def _halved(rows: np.ndarray, depth: int) -> np.ndarray:
    """Return row numbers (2^depth, L) of the leaves; some rows are in two leaves, to fill the last ones."""
    leaves = 1 << depth
    size = -(-len(rows) // leaves)
    order = (np.arange(size * leaves) % len(rows))[None]
    for _ in range(depth):
        half = order.shape[1] // 2
        for piece in order:
            points = rows[piece]
            widest = int(np.argmax(points.max(axis=0) - points.min(axis=0)))
            piece[:] = piece[np.argpartition(points[:, widest], half)]
        order = order.reshape(-1, half)
    return order
