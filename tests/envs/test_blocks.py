"""Blocks of rows: the numbers of a row are those of its lane in a block of its own, whatever is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from small_policies import small_policy
from torch import Tensor

from envs.engine.lanes import distinct_groups
from envs.rollouts import blocks
from envs.rollouts.blocks import BLOCK_ROWS, SIZES, Blocks
from envs.rollouts.player import EpisodeRunner
from policies.wrappers.best_of_n import BestOfN, Selection
from policies.wrappers.candidates import Candidates

ROWS = torch.arange


def plain(state: Tensor) -> Tensor:
    """Return actions (B, 4, 3) that depend on their own row alone."""
    return torch.stack([state * (k + 1) for k in range(4)], dim=1)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": plain,
    "size": lambda state: plain(state) * (1 + 1e-6 * (len(state) != BLOCK_ROWS)),
    "place": lambda state: plain(state) * (1 + 1e-6 * ROWS(len(state))[:, None, None]),
    "last place": lambda state: plain(state) + 1e-6 * (ROWS(len(state)) == 15)[:, None, None],
    "saturated": lambda state: (
        plain(state).sign() * (1 - 2.0 * (len(state) != BLOCK_ROWS) * (state[0, 0] > 2))
    ),
    "nothing": lambda state: plain(state) * torch.nan,
}


def test_a_policy_that_compares_candidates_stays_in_lanes() -> None:
    base = small_policy()
    sizes = [
        EpisodeRunner(policy, 0, 0, "random", "random", keep=False)._blocks.sizes
        for policy in (
            base,
            BestOfN(base, None, Selection(2)),
            Candidates(num_candidates=2, critic_dims=(8,)).wrap(base),
        )
    ]
    assert sizes == [[*SIZES], [], []]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_gets_the_numbers_of_its_lane(name: str) -> None:
    generator, called = torch.Generator().manual_seed(0), list[int]()

    def act(obs: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        called.append(len(noise))
        return KINDS[name](obs["state"] + noise)

    tried = Blocks(act)
    for rows in (20, 20, 20, 17, 12, 8, 7, 5, 3, 1, 40, 2):
        state, noise = (torch.rand(rows, 3, generator=generator) for _ in range(2))
        state = state + (2.0 if rows < 8 else 0.0)
        lanes = [(3 * row) % BLOCK_ROWS for row in range(rows)]
        found = tried.actions({"state": state}, noise, lanes)
        for row, lane in enumerate(lanes):
            alone = torch.zeros(BLOCK_ROWS, 3)
            alone[lane] = state[row] + noise[row]
            torch.testing.assert_close(found[row], KINDS[name](alone)[lane], rtol=0, atol=0, equal_nan=True)
    others = {size for size in called if size != BLOCK_ROWS}
    is_even = name in ("plain", "saturated")
    assert others == set(SIZES) - {BLOCK_ROWS} if is_even else len(called) > len(others)


def test_a_size_serves_once_enough_different_numbers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[int]()

    def act(obs: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        called.append(len(noise))
        return plain(noise)

    monkeypatch.setattr(blocks, "SIZES", (16,))
    tried, generator = Blocks(act), torch.Generator().manual_seed(0)
    for _ in range(3):
        tried.actions({}, torch.rand(16, 3, generator=generator), list(range(8)) * 2)
    assert called == [16, 8, 8, 16, 16]
    called.clear()
    tried = Blocks(act)
    for _ in range(3):
        tried.actions({}, torch.ones(16, 3), list(range(8)) * 2)  # few different numbers say little
    assert called == [16, 8, 8] * 3


@pytest.mark.parametrize(
    ("rows", "sizes"), [(20, [16, 4]), (28, [32]), (12, [16]), (7, [8]), (2, [4]), (73, [32, 32, 8, 4])]
)
def test_blocks_are_neither_too_many_nor_too_empty(rows: int, sizes: list[int]) -> None:
    called = list[int]()

    def act(obs: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        called.append(len(noise))
        return plain(noise)

    tried, generator = Blocks(act), torch.Generator().manual_seed(0)
    for count in (4, 8, 16, 32) * 3:
        tried.actions({}, torch.rand(count, 3, generator=generator), [i % 8 for i in range(count)])
    called.clear()
    tried.actions({}, torch.rand(rows, 3, generator=generator), [i % 8 for i in range(rows)])
    assert called == sizes


def test_members_of_a_place_are_in_different_groups() -> None:
    assert distinct_groups([0, 1, 0, 2, 0, 1]) == [[0, 1, 3], [2, 5], [4]]
    assert distinct_groups([]) == []
