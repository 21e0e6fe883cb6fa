"""Batched exact nearest-row search: a balanced tree stored as arrays, descended for all queries at once.

Legend: M rows, C state width, A action width, D = C + A, B queries, L rows of a leaf. The rows [beta s, a]
are split at the median of their widest dimension until a leaf holds a few dozen. Leaves have equal size, so a
level is one array of bounding boxes (minimum and maximum per dimension) and the leaves are one array of
indices. A query starts from a nearby row. On every level, boxes nearer than that row are kept; on the last
level their rows are compared.

A lower bound on the distance in the states, the head, gives an upper bound for the actions, the tail. Boxes
and rows whose tails exceed it are pruned before the full distance is computed. Tails are stored by leaf; the
states are not copied.

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
_FRONTIER = 2**17  # (query, box) pairs at once, at most; one query may exceed it
_FEWER = 8  # parts into which a query batch with more pairs is split


class NeighborTree:
    """Exact nearest neighbours among rows [beta s, a] for states (M, C) and actions (M, A), float32.

    Ties resolve deterministically. Tails are compared first. `order` (leaves, L) int32 holds the rows of the
    leaves; a few rows repeat, to fill the last leaves, and `place` (M,) int32 is one place of each in it.
    """

    def __init__(self, state: Tensor, action: Tensor, beta: float) -> None:
        self.state, self.beta, depth = state, beta, 0
        rows = torch.cat([beta * state, action], dim=1)
        while len(rows) > _LEAF << depth:
            depth += 1
        order = torch.from_numpy(_halved(rows.numpy(), depth))
        self.tails = action[order].mT.contiguous()  # (leaves, A, L): sums over A run along L
        by_leaf = rows.index_select(0, order.view(-1)).view(*order.shape, -1)
        low, high = by_leaf.amin(dim=1), by_leaf.amax(dim=1)
        self.levels: list[tuple[Tensor, Tensor]] = []  # smallest and largest entries (parents, D, children)
        while len(low) > _TOP:
            low, high = (one.view(-1, 1 << _FANOUT, rows.shape[1]) for one in (low, high))
            self.levels.insert(0, (low.mT.contiguous(), high.mT.contiguous()))
            low, high = low.amin(dim=1), high.amax(dim=1)
        self.levels.insert(0, (low.t()[None].contiguous(), high.t()[None].contiguous()))
        self.order, self.place = order.int(), torch.empty(len(rows), dtype=torch.int32)
        self.place[order.view(-1)] = torch.arange(order.numel(), dtype=torch.int32)

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
        pairs = self.leaves_within(query, *limits)
        if pairs is None:
            size = -(-len(query) // _FEWER)
            parts = (one.split(size) for one in (query, best, index, tail_square))
            for part in zip(*parts, strict=True):
                self._improve(*part)
            return
        owner, leaf, _ = pairs
        for start in range(0, len(owner), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            self._compare(query, owner[some], leaf[some], best, index, limits[1])

    def leaves_within(
        self, query: Tensor, limit: Tensor, tail_limit: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return (query, leaf) pairs within the limits and the squared distances of their boxes, (P,) each.

        None if an intermediate level exceeds the limit of pairs. Queries may be heads (B, C) alone.
        """
        owner, parent = torch.arange(len(query)), torch.zeros(len(query), dtype=torch.int64)
        square, width, tail = limit, query.shape[1], self.tails.shape[1]
        for levels in self.levels:
            lows, highs = (level[:, :width] for level in levels)
            children = lows.shape[2]
            if len(owner) * children > _FRONTIER and len(query) > 1:
                return None
            point = query.index_select(0, owner)[:, :, None]
            gap = point.clamp(lows.index_select(0, parent), highs.index_select(0, parent))
            gap = gap.sub_(point).square_()
            total = gap.sum(dim=1)
            near = total <= limit.index_select(0, owner)[:, None]
            if tail_limit is not None:
                near &= gap[:, -tail:].sum(dim=1) <= tail_limit.index_select(0, owner)[:, None]
            pair, child = near.nonzero().unbind(1)
            square, owner = total[pair, child], owner.index_select(0, pair)
            parent = parent.index_select(0, pair).mul_(children).add_(child)
        return owner, parent, square

    def _compare(
        self, query: Tensor, owner: Tensor, leaf: Tensor, best: Tensor, index: Tensor, tail_limit: Tensor
    ) -> None:
        heads, tails = query.split([self.state.shape[1], self.tails.shape[1]], dim=1)
        gap = self.tails.index_select(0, leaf).sub_(tails.index_select(0, owner)[:, :, None])
        square = gap.square_().sum(dim=1)
        pair, place = (square <= tail_limit.index_select(0, owner)[:, None]).nonzero().unbind(1)
        owner, square = owner.index_select(0, pair), square[pair, place]
        entry = leaf.index_select(0, pair).mul_(self.order.shape[1]).add_(place)
        row = self.order.view(-1).index_select(0, entry).long()
        head = self.state.index_select(0, row).mul_(self.beta)
        value = head.sub_(heads.index_select(0, owner)).square_().sum(dim=1).add_(square)
        closest = best.scatter_reduce(0, owner, value, "amin")
        first = index.new_full(index.shape, self.order.numel())
        wins = value == closest[owner]
        first.scatter_reduce_(0, owner[wins], row[wins], "amin")
        better = closest < best
        best.copy_(closest)
        index.copy_(torch.where(better, first, index))


def box_tree_bytes(rows: int, states: int, actions: int) -> tuple[int, int]:
    """Return the bytes of the tree, tails, order, places and boxes, and those that its building takes."""
    width = states + actions
    return (4 * actions + 10 + width // 2) * rows, (8 * width + 24) * rows


def pair_bytes(width: int) -> int:
    """Return the bytes of the candidate pairs of a query."""
    return _FRONTIER * (16 * width + 32)


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
