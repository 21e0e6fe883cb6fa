"""Demonstrations replayed by the fast engine and by robosuite; see `benchmarks/simulators/replay.py`."""

from __future__ import annotations

import pytest

from benchmarks.simulators.replay import CHAOS, CLOSE, Replay, replays

SEEDS = {"lift": (10, 13, 18), "can": (11, 14), "square": (10, 12)}  # can 14 is chaotic


@pytest.mark.parametrize("name", SEEDS)
def test_a_demonstration_is_the_same_in_both_engines_as_far_as_contacts_allow(name: str) -> None:
    """Steps from equal states, rewards, and a hundred free steps; see `Replay.is_lawful` for the bounds."""
    pytest.importorskip("robosuite", reason="needs the extra 'robosuite' (and a C compiler to install it)")
    for row in replays(name, SEEDS[name]):
        assert row.success, row
        assert row.is_judged_alike, row
        assert row.one_step <= max(CLOSE, CHAOS * row.nudged_step), row
        assert row.drift <= max(CLOSE, CHAOS * row.nudged_drift), row
        assert not row.shifted or row.drift > CLOSE, row
        assert row.is_lawful, row


def test_a_law_is_broken_by_more_than_chaos_explains() -> None:
    fine = Replay("can", 0, 9, True, True, 0, one_step=1e-9, nudged_step=0, drift=1e-9, nudged_drift=1e-9)
    assert fine.is_lawful
    for changes in (
        {"is_judged_alike": False},
        {"shifted": 1},
        {"one_step": 2e-6},
        {"one_step": 2e-5, "nudged_step": 1e-6},
        {"drift": 2e-6},
        {"drift": 1e-3, "nudged_drift": 9e-5},
    ):
        assert not Replay(**{**vars(fine), **changes}).is_lawful, changes
    assert Replay(**{**vars(fine), "one_step": 9e-6, "nudged_step": 1e-6}).is_lawful
    assert Replay(**{**vars(fine), "shifted": 1, "drift": 1e-4, "nudged_drift": 2e-5}).is_lawful
