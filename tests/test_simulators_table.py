"""The table of simulator speeds: complete, honest about differences, made of the numbers that are kept."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from messages import mentions

from benchmarks import pages
from benchmarks.simulators import __main__ as simulators
from benchmarks.simulators.__main__ import families, measure
from benchmarks.simulators.case import Case, Side
from envs.make import env
from policies.registry import parts

CASES = tuple(families())


class Counted(Side):
    """A side whose clock is its own: `seconds` pass per step."""

    def __init__(self, seconds: float, executed: int, state: float = 0.0) -> None:
        self._seconds, self._executed, self._state = seconds, executed, state
        self._now = 0.0

    def begin(self, seed: int, actions: np.ndarray) -> None:
        self._now += 1000.0  # a reset takes long, which is not counted

    def run(self, actions: np.ndarray) -> int:
        self._now += self._seconds * self._executed
        return self._executed

    def state(self) -> np.ndarray:
        return np.array([self._state])

    def clock(self) -> float:
        return self._now


def case(tolerance: float | None = 0.0, **states: float) -> Case:
    sides = {
        "ours": Counted(0.25, 40, states.get("ours", 0.0)),
        "peer": Counted(0.5, 50, states.get("peer", 0.0)),
        "physics": Counted(0.125, 50),
    }
    return Case("task", "exact", "peer", lambda: sides, 2, tolerance)


def test_every_family_of_tasks_has_a_row() -> None:
    own = [part for part in parts("env").values() if not hasattr(part, "needs")]
    assert {env(row.env).spec.family for row in CASES} == {part().spec.family for part in own}
    assert len({(row.env, row.backend, row.num_envs) for row in CASES}) == len(CASES)


def test_speeds_are_executed_steps_per_second_of_the_side_s_own_clock_without_resets() -> None:
    row = measure(case(), rounds=3)
    assert (row.ours_per_s, row.peer_per_s, row.physics_per_s) == pytest.approx((4.0, 2.0, 8.0))
    assert row.ratio == pytest.approx(2.0) and row.difference == 0.0


def test_nothing_is_timed_where_the_sides_differ() -> None:
    with pytest.raises(SystemExit, match=mentions("1.0e-03")):
        measure(case(1e-9, ours=1e-3), rounds=1)
    with pytest.raises(SystemExit, match=mentions("nan")):
        measure(case(1e-9, peer=float("nan")), rounds=1)
    assert measure(case(None, ours=1.0), rounds=1).difference is None


def test_unknown_names_are_answered_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.options.describe_environment", lambda: {"commit": "0a1b2c3d"})
    monkeypatch.setattr(sys, "argv", ["simulators", "hopper", "hoper"])
    with pytest.raises(SystemExit):
        simulators.main()
    message = capsys.readouterr().err
    assert re.search(mentions("hoper avoid transport"), message)


def test_the_page_says_what_the_numbers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Path(__file__).parents[1] / "docs" / "results"
    (tmp_path / "simulators").mkdir()
    (tmp_path / "simulators" / "all.json").write_bytes((kept / "simulators" / "all.json").read_bytes())
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert simulators.report().read_text() == (kept / "simulators.md").read_text()
