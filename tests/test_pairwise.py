"""The selection of cases: all pairs, by brute force."""

from __future__ import annotations

import itertools
import random

import pairwise
import pytest


def pairs_of(rows: list[tuple]) -> set[tuple]:
    """Every pair of values of two columns, by their positions."""
    return {
        (a, row[a], b, row[b]) for row in rows for a, b in itertools.combinations(range(len(row)), 2)
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_every_valid_pair_occurs_in_far_fewer_rows(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(2, 5))]
    rows = [row for row in itertools.product(*map(range, sizes)) if draw.random() < 0.7]
    chosen = [rows[index] for index in pairwise.covering(rows)]
    assert pairs_of(chosen) == pairs_of(rows)
    assert len(chosen) == len(set(chosen)) and chosen == sorted(chosen)
    assert pairwise.covering(rows) == pairwise.covering(list(rows)), "the same rows each time"


def test_a_full_product_of_four_axes_shrinks_to_little_more_than_its_largest_pair() -> None:
    rows = list(itertools.product(range(6), range(5), range(3), range(2)))
    assert 6 * 5 <= len(pairwise.covering(rows)) <= 1.3 * 6 * 5


def test_one_axis_keeps_every_value() -> None:
    assert pairwise.covering([("a",), ("b",), ("a",)]) == [0, 1]


def test_invalid_combinations_never_occur_and_all_returns_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def valid(a: int, b: int, c: str) -> bool:
        return a != b

    axes = range(4), range(4), [pytest.param("x", id="first"), pytest.param("y", id="")]
    product = [(a, b, c) for a in range(4) for b in range(4) for c in "xy" if a != b]
    some = pairwise.pairwise(*axes, valid=valid)
    assert pairs_of([case.values for case in some]) == pairs_of(product)
    assert {case.id for case in some} <= {f"{a}-{b}{c}" for a, b, _ in product for c in ("-first", "")}
    monkeypatch.setattr(pairwise, "everything", True)
    assert [case.values for case in pairwise.pairwise(*axes, valid=valid)] == product


def test_laws_share_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "everything", False)
    cases = list(itertools.product("abcd", "xyz"))
    names = [f"law{number}" for number in range(5)]

    def rows() -> list[tuple]:
        laws = pairwise.Laws(("letter", "other"), [pytest.param(*case) for case in cases])
        for name in names:
            test = lambda: None  # noqa: E731
            test.__name__ = name
            laws(test)
        return [(name, *case.values) for name in names for case in laws.of(name)]

    product = [(name, *case) for name in names for case in cases]
    assert pairs_of(rows()) == pairs_of(product) and len(rows()) < len(product) / 2
    monkeypatch.setattr(pairwise, "everything", True)
    assert rows() == product


def test_laws_that_share_values_meet_every_kind_and_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "everything", False)
    values = ["a1", "a2", "b1", *(f"c{number}" for number in range(9))]
    laws = pairwise.Shared("value", values, lambda value: value[0])
    laws.tests += ["one", "two", "three"]
    met = {test: laws.of(test) for test in laws.tests}
    assert all({value[0] for value in found} == set("abc") for found in met.values())
    assert set().union(*met.values()) == set(values) and sum(map(len, met.values())) == 3 + 3 + 9
    monkeypatch.setattr(pairwise, "everything", True)
    assert laws.of("two") == values
