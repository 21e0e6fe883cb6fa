"""Shuffling: every index once per pass, and a pass that continues anywhere."""

from __future__ import annotations

import copy

import pytest
import torch

from algos.cloning.batches import Shuffle


def test_every_index_is_used_once_per_pass() -> None:
    shuffle = Shuffle(10, torch.Generator().manual_seed(0))
    stream = torch.cat([shuffle.take(7) for _ in range(10)])
    for start in range(0, 70, 10):
        assert sorted(stream[start : start + 10].tolist()) == list(range(10))


def test_batch_larger_than_the_data_repeats_it() -> None:
    assert Shuffle(3, torch.Generator()).take(9).bincount().tolist() == [3, 3, 3]


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 6, 10, 11])
def test_shuffle_continues_anywhere_in_a_pass(taken: int) -> None:
    shuffle = Shuffle(10, torch.Generator().manual_seed(0))
    for _ in range(taken):
        shuffle.take(3)
    state = copy.deepcopy(shuffle.state_dict())
    expected = torch.cat([shuffle.take(3) for _ in range(9)])
    other = Shuffle(10, torch.Generator().manual_seed(1))
    other.take(5)
    other.load_state_dict(state)
    assert torch.equal(torch.cat([other.take(3) for _ in range(9)]), expected)
