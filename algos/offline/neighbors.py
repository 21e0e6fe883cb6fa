"""The dataset row that is nearest to a state and an action: exact, and cheap where the state is a data row.

Legend: M rows, B queries, C state width, A action width, k list length. The distance of a query (s, p) from
row j is d_j^2 = beta^2 |s - s_j|^2 + |p - a_j|^2, states being standardised.

Three exact ways: a tree over [beta s, a]; brute force, for accelerators; and lists. A query's state is that
of a row i, so the rows nearest to s_i can be listed once, with their distances r_ij in ascending order. With
b the smallest d among the first k, every row that is not listed is at least beta r_ik away, so b <= beta r_ik
certifies that the best listed row is the nearest of all; near the data the first few of a list mostly do.
Only what is not certified is looked for among all rows, no further away than b and, as their states alone
are beta r_ik away, with actions within what that leaves of b: `algos.offline.neighbor_tree`. Lists serve
every beta, and are made when a row is asked for the first time (`algos.offline.neighbor_lists`). Which way
is the fastest for a run, `algos.offline.neighbor_autotune` measures.

Source: PRDC, arXiv 2306.06569, whose tree this is; lists, certificate and boxes are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor

from algos.offline.neighbor_lists import NODES, NeighborLists
from algos.offline.neighbor_tree import NeighborTree

_TILE = 65_536  # rows that brute force compares at once
_PREFIX = 8  # listed rows that are looked at first; where actors are near the data these certify mostly
_SLACK = 1e-5  # relative error of float32 distances that a certificate allows for


@dataclass(frozen=True)
class Nearest:
    """Rows (B,) int64, and whether a list alone certified each, (B,) bool (True where no list is used)."""

    row: Tensor
    certified: Tensor


@runtime_checkable
class Search(Protocol):
    """Finds the nearest row."""

    @property
    def name(self) -> str: ...

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        """Return the nearest rows of queries; any rows where actions are not finite.

        Args:
            row: (B,) the rows whose states these are.
            state: (B, C), unscaled.
            action: (B, A).
        """
        ...


class TreeSearch:
    """A k-d tree over [beta s, a], in float64 as scipy computes.

    Args:
        state: (M, C). action: (M, A).
        beta: Weight of states.
        rank: Which neighbour is taken, 1 the nearest; PRDC's `k`, which is no number of neighbours.
    """

    name: ClassVar[str] = "tree"

    def __init__(self, state: Tensor, action: Tensor, beta: float, *, rank: int = 1) -> None:
        self._beta, self._rank = beta, rank
        # A tree cut at midpoints answers queries off the data twice as fast as a balanced one.
        self._tree = KDTree(_keys(state, action, beta), balanced_tree=False, compact_nodes=True)

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        # scipy refuses NaN before the trainer sees the loss, names it, and keeps the last good checkpoint.
        keys = np.nan_to_num(_keys(state, action, self._beta))
        index = self.query(keys)[1]
        return Nearest(torch.from_numpy(index).to(state.device), torch.ones_like(row, dtype=torch.bool))

    def query(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return distances (B,) and rows (B,) of the neighbours of keys (B, C + A)."""
        distance, index = self._tree.query(keys, k=[self._rank])
        return distance[:, 0], index[:, 0].astype(np.int64)


class BruteSearch:
    """Compares with every row, by tiles; the simple exact way on an accelerator.

    Squares are expanded into a product, in float64: in float32 the difference of large squares would decide
    between near rows by its rounding.

    Args:
        state: (M, C). action: (M, A).
        beta: Weight of states.
    """

    name: ClassVar[str] = "brute"

    def __init__(self, state: Tensor, action: Tensor, beta: float) -> None:
        self._beta = beta
        self._data = _scaled(state, action, beta).double()
        self._square = self._data.square().sum(dim=1)

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        query = _scaled(state, action, self._beta).double()
        best, index = None, None
        for start in range(0, len(self._data), _TILE):
            tile = slice(start, start + _TILE)
            cost = torch.addmm(self._square[tile], query, self._data[tile].t(), alpha=-2.0)
            value, place = cost.min(dim=1)
            if best is None or index is None:
                best, index = value, place
            else:
                closer = value < best
                best, index = torch.where(closer, value, best), torch.where(closer, place + start, index)
            del cost  # before there is another
        assert index is not None
        return Nearest(index, torch.ones_like(row, dtype=torch.bool))


class ListSearch:
    """Lists of neighbouring states with a certificate, and a tree of boxes for what they do not certify.

    Lists take 8 k M bytes; see `list_bytes`. They are made and read on the CPU, wherever queries are.

    Args:
        state: (M, C). action: (M, A).
        beta: Weight of states.
        length: k.
        exact: Look up what is not certified; else take the best listed row.
    """

    def __init__(
        self, state: Tensor, action: Tensor, beta: float, *, length: int = 64, exact: bool = True
    ) -> None:
        state, action, m = state.cpu(), action.cpu(), len(state)
        self.name = "lists" if exact else "approximate"
        self._beta, self._length = beta, min(length, m)
        self._action = action
        self.listing = NeighborLists(state, self._length)
        self._boxes = NeighborTree(_scaled(state, action, beta), action.shape[1]) if exact else None
        self._near = torch.zeros(m, self._length, dtype=torch.int32)
        self._square = torch.zeros(m, self._length)  # beta^2 r^2
        self._listed = torch.zeros(m, dtype=torch.bool)

    @property
    def listed(self) -> float:
        return float(self._listed.float().mean())

    def make_lists(self, rows: Tensor) -> None:
        """List the neighbours of rows (B,) that have no list yet."""
        missing = rows[~self._listed[rows]].unique()
        if not len(missing):
            return
        square, index = self.listing.nearest(missing)
        self._near[missing] = index.int()
        self._square[missing] = (square * self._beta**2).float()
        self._listed[missing] = True

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        device, row, state, action = row.device, row.cpu(), state.cpu(), action.cpu()
        self.make_lists(row)
        index, best, certified = self._scan(row, action, min(_PREFIX, self._length))
        open_ = (~certified).nonzero().squeeze(1)
        if len(open_) and self._length > _PREFIX:
            found = self._scan(row[open_], action[open_], self._length)
            index[open_], best[open_], certified[open_] = found
            open_ = open_[~found[2]]
        if self._boxes is not None and len(open_):
            query = _scaled(state[open_], action[open_], self._beta)
            # rows that are not listed are beta r_k away by their states alone
            action_square = best[open_] - self._square[row[open_], -1]
            index[open_] = self._boxes.nearest(query, index[open_], best[open_], action_square)[0]
        return Nearest(index.to(device), certified.to(device))

    def _scan(self, row: Tensor, action: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nearest of so many listed rows (B,), its squared distance, and whether it is certain."""
        near = self._near[:, :length].index_select(0, row)
        square = self._square[:, :length].index_select(0, row)
        listed = self._action.index_select(0, near.flatten()).view(*near.shape, -1)
        cost = (listed - action[:, None]).square().sum(dim=2).add_(square)
        best, place = cost.min(dim=1)
        index = near.gather(1, place[:, None]).squeeze(1).long()
        whole = length == len(self._action)  # every row is listed: nothing can be nearer
        certified = torch.ones_like(best).bool() if whole else best <= square[:, -1] * (1 - _SLACK)
        return index, best, certified


def tree_bytes(rows: int, width: int) -> int:
    """Return the memory of a tree: keys as they come and as it keeps them, their order, its nodes."""
    return (4 * width + 8 * width + 8 + NODES) * rows


def brute_bytes(rows: int, width: int, queries: int) -> int:
    """Return the memory of brute force: rows, their squares, and what it takes to make or to compare them."""
    return 8 * rows * (width + 1) + max(8 * rows * width, 8 * queries * min(rows, _TILE))


def list_bytes(rows: int, length: int) -> int:
    """Return the memory of lists."""
    return 8 * rows * min(rows, length)


def _scaled(state: Tensor, action: Tensor, beta: float) -> Tensor:
    """Return [beta s, a] (M, C + A), computed in the type of the data as the released code does."""
    return torch.cat([beta * state, action], dim=1).detach()


def _keys(state: Tensor, action: Tensor, beta: float) -> np.ndarray:
    return _scaled(state, action, beta).cpu().numpy()
