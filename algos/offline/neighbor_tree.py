"""Batched exact nearest-row search: a balanced tree stored as arrays, descended for all queries at once.

Legend: M rows, D width, B queries. Rows are split at the median of their widest dimension until a leaf holds
a few dozen. Leaves have equal size, so a level is one array of bounding boxes (minimum and maximum per
dimension) and the leaves are one array of rows. A query starts from a nearby row. On every level, boxes
nearer than that row are kept; on the last level their rows are compared.

A lower bound on the distance in the first dimensions gives an upper bound for the last ones, the tail. Boxes
and rows whose tails exceed it are pruned before the full distance is computed.

This is fast for many queries with a good initial row: a few array operations per level replace one tree walk
per query.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LEAF = 32  # rows per leaf, at most
_FANOUT = 3  # bits: the children of a box are the 8 boxes three splits below
_TOP = 64  # boxes of the first level, at most
_SLACK = 1e-5  # tolerated relative error of float32 distances
_AT_ONCE = 4096  # leaves compared at once
_FRONTIER = 2**18  # (query, box) pairs at once, at most; one query may exceed it
_FEWER = 8  # parts into which a query batch with more pairs is split


class NeighborTree:
    """Exact nearest neighbours among rows (M, D) float32, given a nearby row per query.

    Ties resolve deterministically. Memory is about 1.3 times that of the rows. The last `tail` dimensions,
    below D, are compared first.
    """

    def __init__(self, rows: Tensor, tail: int = 1) -> None:
        self._tail, depth = tail, 0
        while len(rows) > _LEAF << depth:
            depth += 1
        self._order = torch.from_numpy(_halved(rows.numpy(), depth))  # (leaves, L)
        heads, tails = rows.split([rows.shape[1] - tail, tail], dim=1)
        self._heads = heads.index_select(0, self._order.view(-1))  # (leaves L, D - T)
        self._tails = tails[self._order].mT.contiguous()  # (leaves, T, L): sums over T run along L
        by_leaf = self._heads.view(*self._order.shape, -1)
        low = torch.cat([by_leaf.amin(dim=1), self._tails.amin(dim=2)], dim=1)
        high = torch.cat([by_leaf.amax(dim=1), self._tails.amax(dim=2)], dim=1)
        self._levels: list[tuple[Tensor, Tensor]] = []  # smallest and largest entries (parents, D, children)
        while len(low) > _TOP:
            low, high = (one.view(-1, 1 << _FANOUT, rows.shape[1]) for one in (low, high))
            self._levels.insert(0, (low.mT.contiguous(), high.mT.contiguous()))
            low, high = low.amin(dim=1), high.amax(dim=1)
        self._levels.insert(0, (low.t()[None].contiguous(), high.t()[None].contiguous()))

    def nearest(
        self, query: Tensor, row: Tensor, square: Tensor, tail_square: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the nearest rows (B,) and their squared distances (B,).

        Args:
            query: (B, D).
            row: (B,) nearby rows.
            square: (B,) their squared distances.
            tail_square: (B,) upper bounds on the squared tail distance of nearer rows; None: `square`.
        """
        best, index = square.clone(), row.clone()
        self._improve(query, best, index, square if tail_square is None else tail_square)
        return index, best

    def _improve(self, query: Tensor, best: Tensor, index: Tensor, tail_square: Tensor) -> None:
        """Update `best` and `index` in place with nearer rows; splits the queries if there are many boxes."""
        slack = _SLACK * best
        limits = best + slack, tail_square + slack
        pairs = self._leaves_within(query, *limits)
        if pairs is None:
            size = -(-len(query) // _FEWER)
            parts = (one.split(size) for one in (query, best, index, tail_square))
            for part in zip(*parts, strict=True):
                self._improve(*part)
            return
        owner, leaf = pairs
        for start in range(0, len(owner), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            self._compare(query, owner[some], leaf[some], best, index, limits[1])

    def _leaves_within(
        self, query: Tensor, limit: Tensor, tail_limit: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return (query, leaf) pairs within the limits, (P,) each.

        None if an intermediate level exceeds the limit of pairs.
        """
        owner, parent = torch.arange(len(query)), torch.zeros(len(query), dtype=torch.int64)
        for lows, highs in self._levels:
            children = lows.shape[2]
            if len(owner) * children > _FRONTIER and len(query) > 1:
                return None
            point = query.index_select(0, owner)[:, :, None]
            gap = point.clamp(lows.index_select(0, parent), highs.index_select(0, parent))
            gap = gap.sub_(point).square_()
            near = gap.sum(dim=1) <= limit.index_select(0, owner)[:, None]
            near &= gap[:, -self._tail :].sum(dim=1) <= tail_limit.index_select(0, owner)[:, None]
            pair, child = near.nonzero().unbind(1)
            owner = owner.index_select(0, pair)
            parent = parent.index_select(0, pair).mul_(children).add_(child)
        return owner, parent

    def _compare(
        self, query: Tensor, owner: Tensor, leaf: Tensor, best: Tensor, index: Tensor, tail_limit: Tensor
    ) -> None:
        heads, tails = query.split([query.shape[1] - self._tail, self._tail], dim=1)
        gap = self._tails.index_select(0, leaf).sub_(tails.index_select(0, owner)[:, :, None])
        square = gap.square_().sum(dim=1)
        pair, place = (square <= tail_limit.index_select(0, owner)[:, None]).nonzero().unbind(1)
        owner, square = owner.index_select(0, pair), square[pair, place]
        entry = leaf.index_select(0, pair).mul_(self._order.shape[1]).add_(place)
        value = self._heads.index_select(0, entry).sub_(heads.index_select(0, owner)).square_().sum(dim=1)
        value += square
        row = self._order.view(-1).index_select(0, entry)
        closest = best.scatter_reduce(0, owner, value, "amin")
        first = index.new_full(index.shape, self._order.numel())
        wins = value == closest[owner]
        first.scatter_reduce_(0, owner[wins], row[wins], "amin")
        better = closest < best
        best.copy_(closest)
        index.copy_(torch.where(better, first, index))


def box_tree_bytes(rows: int, width: int) -> int:
    """Return the peak bytes of the tree: leaves, their order, boxes, and candidate pairs."""
    return (5 * width + 12) * rows + _FRONTIER * (16 * width + 32)


def _halved(rows: np.ndarray, depth: int) -> np.ndarray:
    """Return row indices (2^depth, L) of the leaves; a few rows repeat, to fill the last leaves."""
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
