"""Exact nearest dataset row for (state, action) queries whose state is a dataset state.

Legend: M rows, B queries, C state width, A action width, k list length. The distance of a query (s, p) from
row j is d_j^2 = beta^2 |s - s_j|^2 + |p - a_j|^2, states being standardised.

Three exact searches: a tree over [beta s, a]; brute force, for accelerators; and lists. The state of a query
is that of a row i, so the rows nearest to s_i are listed once, with distances r_ij in ascending order. With b
the smallest d among the first k, every row outside the list is at least beta r_ik away: b <= beta r_ik
certifies the nearest row. Near the data the first few entries usually suffice. Queries without certificate
search all rows, within b; as states outside the list are beta r_ik away, this also bounds the action distance
(`algos.offline.neighbor_tree`). Lists are valid for every beta and are built at the first query of a row
(`algos.offline.neighbor_lists`). `algos.offline.neighbor_autotune` selects the fastest search for a run.

Source: PRDC, arXiv 2306.06569, which uses this tree; lists, certificate and boxes are ours.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor

from algos.offline.neighbor_lists import NeighborLists
from algos.offline.neighbor_tree import NeighborTree
from policies.networks.compiled import addresses, program

_TILE = 65_536  # rows per tile of brute force, and of keys that are made at once
_PREFIX = 8  # list entries compared first; near the data these usually certify
_NODES = 60  # bytes per row of scipy's tree nodes, approximately, for any width
_LONG = 64  # entries of a list, unless a length is given
_ENTRIES = 28_000_000  # of all those lists together: 112 MB
_SLACK = 1e-5  # tolerated relative error of float32 distances in a certificate


@cache
def _program() -> Any:
    """Return the search of lists and boxes in C; None where there is none."""
    found = program(Path(__file__).with_suffix(".c"), ("nearest_rows",))[0]
    if found is not None:
        found.nearest_rows.restype = None
        sizes, numbers = 8 * (ctypes.c_int,), 2 * (ctypes.c_float,)
        found.nearest_rows.argtypes = (*sizes, *numbers, *(14 * (ctypes.c_void_p,)))
    return found


@dataclass(frozen=True)
class Nearest:
    """Row indices (B,) int64, and whether the list alone certified each, (B,) bool (True without lists)."""

    row: Tensor
    certified: Tensor


@runtime_checkable
class Search(Protocol):
    """Nearest-row search."""

    @property
    def name(self) -> str: ...

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        """Return the nearest rows of queries, actions (B, A) at states (B, C) of rows (B,).

        Rows of non-finite actions are arbitrary.
        """
        ...


class TreeSearch:
    """A k-d tree over [beta s, a], in float64 (scipy).

    Args:
        state: (M, C).
        action: (M, A).
        beta: Weight of states.
        rank: Rank of the neighbour, 1 is the nearest; PRDC's `k`.
    """

    name: ClassVar[str] = "tree"

    def __init__(self, state: Tensor, action: Tensor, beta: float, *, rank: int = 1) -> None:
        self._beta, self._rank = beta, rank
        keys = np.empty((len(state), state.shape[1] + action.shape[1]))
        for start in range(0, len(keys), _TILE):
            tile = slice(start, start + _TILE)
            keys[tile] = _keys(state[tile], action[tile], beta)
        # A tree split at midpoints answers queries off the data twice as fast as a balanced one.
        self._tree = KDTree(keys, balanced_tree=False, compact_nodes=True)

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        # scipy refuses NaN; the trainer then reports the loss and keeps the last good checkpoint.
        index = self.query(np.nan_to_num(_keys(state, action, self._beta)))[1]
        return Nearest(torch.from_numpy(index).to(state.device), torch.ones_like(row, dtype=torch.bool))

    def query(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return distances (B,) and rows (B,) of the neighbours of keys (B, C + A)."""
        distance, index = self._tree.query(keys, k=[self._rank])
        return distance[:, 0], index[:, 0].astype(np.int64)


class BruteSearch:
    """Tiled comparison with every row; a simple exact search for accelerators.

    Squares are expanded into a product in float64: in float32, cancellation would decide between near rows.
    """

    name: ClassVar[str] = "brute"

    def __init__(self, state: Tensor, action: Tensor, beta: float) -> None:
        self._beta = beta
        self._data = _scaled(state, action, beta).double()
        self._square = self._data.square().sum(dim=1)

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        query = _scaled(state, action, self._beta).double()
        best, index = query.new_full(row.shape, torch.inf), torch.zeros_like(row)
        for start in range(0, len(self._data), _TILE):
            tile = slice(start, start + _TILE)
            cost = torch.addmm(self._square[tile], query, self._data[tile].t(), alpha=-2.0)
            value, place = cost.min(dim=1)
            closer = value < best
            best, index = torch.where(closer, value, best), torch.where(closer, place + start, index)
            del cost  # freed before the next tile
        return Nearest(index, torch.ones_like(row, dtype=torch.bool))


class ListSearch:
    """Neighbour lists with a certificate; a box tree for queries without certificate.

    Lists take 4 k M bytes, and of up to 437,500 rows as much for distances; see `list_bytes`. They are built
    and read on the CPU, whatever the query device.

    Args:
        state: (M, C).
        action: (M, A).
        beta: Weight of states.
        length: k.
        exact: Search all rows without certificate; False: best listed row.
    """

    def __init__(
        self, state: Tensor, action: Tensor, beta: float, *, length: int = 64, exact: bool = True
    ) -> None:
        self._state, self._action, m = state.cpu().contiguous(), action.cpu().contiguous(), len(state)
        self.name = "lists" if exact else "approximate"
        self._beta, self._length, self._exact = beta, min(length, m), exact
        self._boxes = NeighborTree(self._state, self._action, beta)
        self.listing = NeighborLists(self._boxes, self._length)
        self._near = torch.zeros(m, self._length, dtype=torch.int32)
        self._square = torch.zeros(m, self._length) if _keeps_squares(m) else None
        self._listed = torch.zeros(m, dtype=torch.bool)

    def make_lists(self, rows: Tensor) -> None:
        """Build the missing lists of rows (B,)."""
        listed = self._listed.index_select(0, rows)  # refuses rows that do not exist
        if listed.all():
            return
        missing = rows[~listed].unique()
        square, index = self.listing.nearest(missing)
        self._near[missing] = index.int()
        if self._square is not None:
            self._square[missing] = (square * self._beta**2).float()
        self._listed[missing] = True

    def nearest(self, row: Tensor, state: Tensor, action: Tensor) -> Nearest:
        device, row, state, action = row.device, row.cpu(), state.cpu(), action.cpu()
        self.make_lists(row)
        if _program() is not None and self._is_plain(row, state, action):
            return self._nearest_in_c(row, state.contiguous(), action.contiguous(), device)
        index, best, last, certified = self._scan(row, action, min(_PREFIX, self._length))
        open_ = (~certified).nonzero().squeeze(1)
        if len(open_) and self._length > _PREFIX:
            found = self._scan(row[open_], action[open_], self._length)
            index[open_], best[open_], last[open_], certified[open_] = found
            open_ = open_[~found[3]]
        if self._exact and len(open_):
            query = _scaled(state[open_], action[open_], self._beta)
            # the states of unlisted rows are beta r_k away
            action_square = best[open_] - last[open_]
            index[open_] = self._boxes.nearest(query, index[open_], best[open_], action_square)[0]
        return Nearest(index.to(device), certified.to(device))

    def _is_plain(self, row: Tensor, state: Tensor, action: Tensor) -> bool:
        """Say whether these queries are of the types and sizes that the program in C reads."""
        pairs = (state, self._state), (action, self._action)
        fits = all(given.shape == (len(row), known.shape[1]) for given, known in pairs)
        return fits and {part.dtype for pair in pairs for part in pair} == {torch.float32}

    def _nearest_in_c(self, row: Tensor, state: Tensor, action: Tensor, device: torch.device) -> Nearest:
        """Search by `neighbors.c`, with the same rows as below but for ties and rounding."""
        boxes, row = self._boxes, row.long().contiguous()
        index, certified = torch.empty_like(row), torch.empty(len(row), dtype=torch.bool)
        low, high = ([level[side] for level in boxes.levels] for side in (0, 1))
        children = (ctypes.c_int * len(low))(*[level.shape[2] for level in low])
        _program().nearest_rows(
            len(row), state.shape[1], action.shape[1], self._length, len(low), boxes.order.shape[1],
            self._length == len(self._action), self._exact, self._beta, _SLACK,
            *(part.data_ptr() for part in (row, state, action, self._state, self._action, self._near)),
            None if self._square is None else self._square.data_ptr(),
            children, addresses(low), addresses(high),
            *(part.data_ptr() for part in (boxes.order, boxes.tails, index, certified)),
        )  # fmt: skip
        return Nearest(index.to(device), certified.to(device))

    def _scan(self, row: Tensor, action: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compare queries with the first `length` entries of their lists.

        Returns, (B,) each: nearest row, its squared distance, beta^2 r^2 of the last entry, certificate.
        """
        near = self._near[:, :length].index_select(0, row)
        every = near.view(-1)
        if self._square is None:
            state = self._state.index_select(0, every).view(*near.shape, -1)
            square = state.sub_(self._state.index_select(0, row)[:, None]).square_().sum(dim=2)
            square = square.mul_(self._beta**2)
        else:
            square = self._square[:, :length].index_select(0, row)
        listed = self._action.index_select(0, every).view(*near.shape, -1)
        cost = listed.sub_(action[:, None]).square_().sum(dim=2).add_(square)
        best, place = cost.min(dim=1)
        index, last = near.gather(1, place[:, None]).squeeze(1).long(), square[:, -1]
        whole = length == len(self._action)  # the list holds every row
        certified = torch.ones_like(best).bool() if whole else best <= last * (1 - _SLACK)
        return index, best, last, certified


def usual_length(rows: int) -> int:
    """Return the length of lists that is taken unless one is given: 64, less among more than 437,500."""
    return max(_PREFIX, min(_LONG, _ENTRIES // rows))


def tree_bytes(rows: int, width: int) -> int:
    """Return the bytes of a tree: keys, their order, nodes."""
    return (8 * width + 8 + _NODES) * rows


def brute_bytes(rows: int, width: int, queries: int) -> int:
    """Return the bytes of brute force: rows, their squares, and temporaries."""
    return 8 * rows * (width + 1) + max(8 * rows * width, 8 * queries * min(rows, _TILE))


def list_bytes(rows: int, length: int) -> int:
    """Return the bytes of lists."""
    return (8 if _keeps_squares(rows) else 4) * rows * min(rows, length)


def _keeps_squares(rows: int) -> bool:
    """Whether distances are kept beside the lists; computing them anew is half of a search near the data."""
    return rows <= _ENTRIES // _LONG


def _scaled(state: Tensor, action: Tensor, beta: float) -> Tensor:
    """Return [beta s, a] (M, C + A), in the data's dtype as in the released code."""
    return torch.cat([beta * state, action], dim=1).detach()


def _keys(state: Tensor, action: Tensor, beta: float) -> np.ndarray:
    return _scaled(state, action, beta).cpu().numpy()
