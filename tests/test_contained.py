"""The best of many noises: each start is played up to its first success, and counted right."""

from __future__ import annotations

import pytest

from benchmarks.studies import contained
from benchmarks.studies.contained import best_of, first_successes


def test_a_start_is_played_up_to_its_first_success() -> None:
    succeeds = {0: 0, 1: 2, 2: None, 3: 1}  # start -> noise
    played: list[tuple[int, list[int]]] = []

    def play(noise: int, starts: list[int]) -> list[float]:
        played.append((noise, starts))
        return [float(succeeds[start] == noise) for start in starts]

    assert first_successes(play, 4, 4) == [1, 3, None, 2]
    assert played == [(0, [0, 1, 2, 3]), (1, [1, 2, 3]), (2, [1, 2]), (3, [2])]


def test_nothing_is_played_when_all_starts_are_solved() -> None:
    rounds: list[int] = []

    def play(noise: int, starts: list[int]) -> list[float]:
        rounds.append(noise)
        return [1.0] * len(starts)

    assert first_successes(play, 3, 32) == [1, 1, 1] and rounds == [0]


def test_the_best_of_few_noises_is_part_of_what_was_found() -> None:
    counted = {"first_success": [1, 3, None, 2]}
    assert [best_of(counted, count).sum() for count in (1, 2, 3, 32)] == [1, 2, 3, 3]
    returns = {"returns": [[1.0, 5.0], [4.0, 2.0], [3.0, 9.0]]}
    assert best_of(returns, 2).tolist() == [4.0, 5.0] and best_of(returns, 32).tolist() == [4.0, 9.0]


def test_clones_that_are_not_those_of_dsrl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"avoid": [1, 1], "can-varied": [1, 0]}
    monkeypatch.setattr(
        contained,
        "load",
        lambda name: {"dsrl": [{"seed": 0, "before": {"success": before[name]}}]},
    )
    found = {name: [{"seed": 0, "first_success": [1, 3]}] for name in before}
    assert contained.made_anew(found) == " Those of `avoid` are made anew by the same recipe."
    assert contained.made_anew({"can-varied": found["can-varied"]}) == ""
