"""Lists of the nearest states: two ways that agree, of which the faster is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algos.offline import neighbor_lists
from algos.offline.neighbor_lists import NeighborLists
from algos.offline.neighbor_tree import NeighborTree


def states(m: int, width: int, *, copies: int = 0) -> Tensor:
    state = torch.randn(m, width, generator=torch.Generator().manual_seed(m))
    state[m - copies :] = state[0]
    return state


def boxes(state: Tensor, beta: float = 2.0) -> NeighborTree:
    """Return boxes of states with actions of their own."""
    action = torch.rand(len(state), 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
    return NeighborTree(state, action, beta)


@given(m=st.integers(1, 300), width=st.integers(1, 20), copies=st.integers(0, 40), length=st.integers(1, 64))
@settings(max_examples=40)
def test_both_ways_find_the_nearest_states(m: int, width: int, copies: int, length: int) -> None:
    state, length, rows = states(m, width, copies=min(copies, m - 1)), min(length, m), torch.arange(m)
    every = (state.double()[:, None] - state.double()).square().sum(2)
    made = NeighborLists(boxes(state), length)
    for square, index in (made.by_boxes(rows), made.by_product(rows)):
        torch.testing.assert_close(square, every.sort(dim=1).values[:, :length], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(square, every.gather(1, index), rtol=1e-9, atol=1e-12)
        assert all(len(row.unique()) == length for row in index)


def test_lists_do_not_depend_on_the_way() -> None:
    """Copies included: a run that is continued may list by the other way, and goes on to the last bit."""
    state, rows = states(400, 6, copies=20), torch.arange(400)
    made = NeighborLists(boxes(state), 64)
    (square, index), (other_square, other_index) = made.by_boxes(rows), made.by_product(rows)
    assert torch.equal(square, other_square)
    every = (state.double()[:, None] - state.double()).square().sum(2).sort(dim=1).values
    decided = every[:, 63] < every[:, 64]  # else which of several equally far rows are in is open
    assert torch.equal(index[decided], other_index[decided]) and 300 < decided.sum() < 400


def test_far_from_zero_nothing_is_lost() -> None:
    """Squares are expanded, whose rounding grows with the states; those returned are of differences."""
    state = states(200, 3) * 1e-3 + 1e3
    made, rows = NeighborLists(boxes(state), 8), torch.arange(200)
    torch.testing.assert_close(made.by_product(rows)[0], made.by_boxes(rows)[0], rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize(("ticks", "kept"), [((0.0, 1.0, 3.0), "boxes"), ((0.0, 2.0, 3.0), "product")])
def test_the_faster_way_is_kept_after_one_trial(ticks: tuple[float, ...], kept: str) -> None:
    clock: Iterator[float] = iter(ticks)
    made, rows = NeighborLists(boxes(states(100, 4)), 5, lambda: next(clock)), torch.arange(100)
    few = made.nearest(rows[:3])  # too few to try
    square, index = made.nearest(rows)
    assert made.method == kept
    torch.testing.assert_close(square, made.by_boxes(rows)[0], rtol=1e-9, atol=1e-12)
    assert torch.equal(index, made.by_boxes(rows)[1]) and torch.equal(few[1], index[:3])
    made.nearest(rows)  # asks the clock no more


def test_all_rows_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = NeighborLists(boxes(states(50, 3)), 4), torch.arange(50)
    whole = made.by_product(rows)
    monkeypatch.setattr(neighbor_lists, "_TILE", 120)
    pieces = made.by_product(rows)
    assert torch.equal(pieces[1], whole[1])
