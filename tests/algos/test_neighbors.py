"""Exact neighbour search: every way finds what comparing all distances finds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algos.offline import neighbors
from algos.offline.neighbor_autotune import Rows
from algos.offline.neighbor_tree import NeighborTree
from algos.offline.neighbors import BruteSearch, ListSearch, Search, TreeSearch, list_bytes
from algos.prdc import NearestRow
from algos.transitions import Batch
from policies.networks.critics import EnsembleConfig


@pytest.fixture(autouse=True, scope="module", params=["compiled", "plain"])
def program(request: pytest.FixtureRequest) -> Iterator[None]:
    """Search lists in C, where it can be, and by plain operations."""
    if request.param == "compiled":
        if neighbors._program() is None:
            pytest.skip("no program in C")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbors, "_program", lambda: None)
        yield


def table(m: int, seed: int, *, copies: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return states (m, 3) and actions (m, 2), the first repeated `copies` times with other actions."""
    generator = torch.Generator().manual_seed(seed)
    state, action = (
        torch.randn(m, 3, generator=generator) * spread,
        torch.rand(m, 2, generator=generator) * 2 - 1,
    )
    if copies:
        state[-copies:] = state[0]
    return state, action


def costs(state: Tensor, action: Tensor, row: Tensor, query: Tensor, beta: float) -> Tensor:
    """Return all squared distances (B, M) in float64."""
    s, a = state.double(), action.double()
    bc_term = (s[row][:, None] - s).square().sum(2) * beta**2
    return bc_term + (query.double()[:, None] - a).square().sum(2)


def assert_exact(
    search: Search, state: Tensor, action: Tensor, row: Tensor, query: Tensor, beta: float
) -> None:
    found = search.nearest(row, state[row], query).row
    all_costs = costs(state, action, row, query, beta)
    chosen = all_costs.gather(1, found[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, all_costs.amin(1), rtol=1e-5, atol=1e-6)


@given(
    m=st.integers(2, 120), seed=st.integers(0, 10_000), copies=st.integers(0, 40), length=st.integers(2, 40),
    beta=st.sampled_from([0.1, 1.0, 2.0, 7.5]), noise=st.sampled_from([0.0, 0.1, 1.0]),
)  # fmt: skip
@settings(max_examples=60)
def test_every_way_is_exact(m: int, seed: int, copies: int, length: int, beta: float, noise: float) -> None:
    state, action = table(m, seed, copies=min(copies, m - 1))
    generator = torch.Generator().manual_seed(seed + 1)
    row = torch.randint(m, (16,), generator=generator)
    query = action[row] + noise * torch.randn(16, 2, generator=generator)
    for search in (
        TreeSearch(state, action, beta),
        BruteSearch(state, action, beta),
        ListSearch(state, action, beta, length=length),
    ):
        assert_exact(search, state, action, row, query, beta)


def test_rows_of_any_layout_and_type_and_no_rows_outside_are_searched() -> None:
    state, action = table(300, 5)
    search, row = ListSearch(state, action, 1.0, length=8), torch.arange(0, 300, 3)
    query = action[row] + 0.3
    expected = search.nearest(row, state[row], query).row
    strided = torch.stack([row, row.flip(0)], dim=1)[:, 0]
    for same in (strided, row.int()):
        assert torch.equal(search.nearest(same, state[row], query).row, expected)
    for wrong in (-1, 300):
        with pytest.raises(IndexError):
            search.nearest(torch.tensor([wrong]), state[:1], action[:1])
    with pytest.raises(RuntimeError):
        search.nearest(row, state[row], query[:, :1].expand(-1, 3)[:7])


def test_copies_of_a_state_do_not_fool_a_short_list() -> None:
    """More copies than a list is long: its last distance is 0, and only a look at all rows finds the best."""
    state, action = table(64, 3, copies=40)
    action[-40:] = torch.linspace(-1, 1, 40)[:, None]
    row, query = torch.full((5,), 63), torch.linspace(-1, 1, 5)[:, None].expand(5, 2).contiguous()
    search = ListSearch(state, action, 1.0, length=4)
    assert_exact(search, state, action, row, query, 1.0)
    assert not search.nearest(row, state[row], query + 0.3).certified.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("how", ["tree", "brute", "lists", "approximate"])
def test_actions_that_are_not_finite_reach_the_check_of_the_loss(how: str, bad: float) -> None:
    state, action = table(200, 4)
    penalty = NearestRow(Rows(state, action, 2.0, length=8).search(how), action)
    row, none = torch.arange(8), torch.zeros(8)
    batch = Batch(
        cond=state[row], action=action[row], reward=none, next_cond=state[row], discount=none,
        next_action=action[row], has_next=none, plan=action[row], real=none[:, None], row=row,
    )  # fmt: skip
    query = action[row].clone()
    query[3] = bad
    critic = EnsembleConfig(hidden_dims=(8,)).build(3, 2)
    loss = penalty.penalty(batch, query, critic, {}).value
    assert not loss.isfinite()
    others = row != 3
    assert torch.equal(penalty.search.nearest(row, state[row], query).row[others], row[others])


def test_a_certificate_is_never_wrong_and_mostly_given_near_the_data() -> None:
    state, action = table(4000, 0, spread=2.0)
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(4000, (512,), generator=generator)
    query = action[row] + 0.05 * torch.randn(512, 2, generator=generator)
    alone = ListSearch(state, action, 2.0, length=32, exact=False)
    found = alone.nearest(row, state[row], query)
    all_costs = costs(state, action, row, query, 2.0)
    chosen = all_costs.gather(1, found.row[:, None]).squeeze(1)
    certified = found.certified
    torch.testing.assert_close(chosen[certified], all_costs.amin(1)[certified], rtol=1e-5, atol=1e-6)
    assert certified.float().mean() > 0.9


@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_looking_at_a_few_listed_rows_first_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    state, action = table(4000, 0)
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(4000, (256,), generator=generator)
    query = action[row] + noise * torch.randn(256, 2, generator=generator)
    search = ListSearch(state, action, 2.0, length=32)
    found = {}
    for prefix in (4, 32):
        monkeypatch.setattr("algos.offline.neighbors._PREFIX", prefix)
        found[prefix] = search.nearest(row, state[row], query)
    assert torch.equal(found[4].row, found[32].row)
    assert torch.equal(found[4].certified, found[32].certified)


def test_boxes_need_not_look_beyond_what_tails_allow() -> None:
    """Heads are at least so far away; what is left of the distance bounds the tails."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5000, 5, generator=generator)
    query = torch.randn(60, 5, generator=generator) + torch.tensor([4.0, 4.0, 4.0, 0.0, 0.0])
    start = (query[:, None] - rows).square().sum(2).topk(20, largest=False).indices[:, -1]
    square = (query - rows[start]).square().sum(1)
    heads = (query[:, None, :3] - rows[:, :3]).square().sum(2).amin(1)
    tree, limits = NeighborTree(rows[:, :3], rows[:, 3:], 1.0), (square, square - heads)
    found, distance = tree.nearest(query, start, *limits)
    torch.testing.assert_close(distance, (query[:, None] - rows).square().sum(2).amin(1))
    torch.testing.assert_close((query - rows[found]).square().sum(1), distance)
    with_tails, without = (tree.leaves_within(query, square, tail) for tail in (square - heads, square))
    assert with_tails is not None and without is not None and len(with_tails[0]) < len(without[0])


@pytest.mark.parametrize("m", [1, 5, 31, 32, 33, 700, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_boxes_find_the_nearest_row_whatever_row_they_start_from(m: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(m)
    rows = torch.randn(m, 6, generator=generator)
    rows[m // 2 :] *= 0.01  # a dense corner
    query = rows[torch.randint(m, (40,), generator=generator)] + spread * torch.randn(
        40, 6, generator=generator
    )
    start = torch.randint(m, (40,), generator=generator)
    square = (query - rows[start]).square().sum(1)
    found, distance = NeighborTree(rows[:, :-1], rows[:, -1:], 1.0).nearest(query, start, square)
    every = (query.double()[:, None] - rows.double()).square().sum(2)
    chosen = every.gather(1, found[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, every.amin(1), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(distance.double(), chosen, rtol=1e-5, atol=1e-9)


def test_boxes_compare_leaves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    query, start = rows[:200].flip(0) + 0.1, torch.full((200,), 999)
    tree, square = (
        NeighborTree(rows[:, :-1], rows[:, -1:], 1.0),
        (rows[:200].flip(0) + 0.1 - rows[999]).square().sum(1),
    )
    whole = tree.nearest(query, start, square)
    monkeypatch.setattr("algos.offline.neighbor_tree._AT_ONCE", 3)
    for one, other in zip(tree.nearest(query, start, square), whole, strict=True):
        assert torch.equal(one, other)


def test_a_start_that_cannot_be_beaten_is_kept() -> None:
    rows = torch.randn(1, 4).expand(70, 4).contiguous()  # copies of one row
    start = torch.arange(70)
    found, square = NeighborTree(rows[:, :-1], rows[:, -1:], 1.0).nearest(rows, start, torch.zeros(70))
    assert torch.equal(found, start) and not square.any()


def test_lists_are_made_for_the_rows_that_are_asked_only() -> None:
    state, action = table(100, 0)
    search = ListSearch(state, action, 1.0, length=8)
    assert not search._listed.any()
    search.nearest(torch.tensor([3, 3, 7]), state[[3, 3, 7]], action[[3, 3, 7]])
    assert search._listed.nonzero().flatten().tolist() == [3, 7]


def test_brute_force_goes_over_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algos.offline.neighbors._TILE", 7)
    state, action = table(50, 5)
    row = torch.arange(50)
    assert torch.equal(BruteSearch(state, action, 1.0).nearest(row, state, action).row, row)


def test_the_rank_counts_neighbours_and_is_no_number_of_them() -> None:
    state, action = table(60, 2)
    row = torch.arange(60)
    order = costs(state, action, row, action, 1.0).argsort(dim=1)
    for rank in (1, 2, 5):
        found = TreeSearch(state, action, 1.0, rank=rank).nearest(row, state, action).row
        np.testing.assert_array_equal(found, order[:, rank - 1])


def test_lists_of_many_rows_compute_distances_anew_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    state, action = table(200, 0)
    kept = ListSearch(state, action, 1.5, length=16)
    assert kept._square is not None
    assert kept._near.nbytes + kept._square.nbytes == list_bytes(200, 16) == 200 * 16 * 8
    monkeypatch.setattr(neighbors, "_ENTRIES", 100)
    anew = ListSearch(state, action, 1.5, length=16)
    assert anew._square is None and anew._near.nbytes == list_bytes(200, 16) == 200 * 16 * 4
    row = torch.arange(200)
    query = action + 0.3 * torch.randn(action.shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(kept.nearest(row, state, query).row, anew.nearest(row, state, query).row)


@pytest.mark.parametrize("way", [TreeSearch, BruteSearch, ListSearch])
def test_near_rows_far_from_the_origin_are_told_apart(way: type) -> None:
    """As in ant mazes: 29 wide, beta 7.5, and rows that differ by less than float32 squares are precise."""
    generator = torch.Generator().manual_seed(0)
    state = 3 * torch.randn(40, 29, generator=generator).repeat_interleave(10, dim=0)
    action = torch.rand(400, 8, generator=generator) * 2 - 1
    action = action[::10].repeat_interleave(10, dim=0) + 1e-3 * action
    row = torch.arange(400)
    query = action + 1e-4 * torch.randn(400, 8, generator=generator)
    search = way(state, action, 7.5)
    assert_exact(search, state, action, row, query, 7.5)
    assert torch.equal(search.nearest(row, state, query).row, row)
