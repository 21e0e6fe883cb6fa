"""All-pairs selection: few cases in which every pair of values of any two axes still occurs.

Most defects need one value, or two that meet. So the suite of every change runs a covering array of the valid
combinations, and `pytest --all` (`make test-all`) runs every combination.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

everything = False
"""Whether nothing is left out; set by the option `--all` before test modules are imported."""


def covering(rows: Sequence[Sequence[Any]]) -> list[int]:
    """Indices of rows, in order, that hold every pair of values in two columns which occurs in any row.

    Greedy: the row with the most new pairs is next, the earliest of equals. Values are told apart by `repr`,
    as settings need not be hashable. A single column counts as pairs of each value with itself.
    """
    pairs = [_pairs(row) for row in rows]
    missing = set().union(*pairs)
    queue = [(-len(found), index) for index, found in enumerate(pairs)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        gain, index = heapq.heappop(queue)
        now = len(pairs[index] & missing)
        if now < -gain:  # others were chosen since: it goes back to its new place
            heapq.heappush(queue, (-now, index))
            continue
        missing -= pairs[index]
        chosen.append(index)
    return sorted(chosen)


def _pairs(row: Sequence[Any]) -> set[Any]:
    values = [(column, repr(value)) for column, value in enumerate(row)]
    return set(itertools.combinations(values, 2)) if len(values) > 1 else {(value, value) for value in values}


def pairwise(*axes: Iterable[Any], valid: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Cases of a product of axes: all pairs of the valid combinations, or all of them with `--all`.

    Args:
        axes: Values, or `pytest.param`s with an id; one of several values is as many axes at once.
        valid: Tells of the values of a combination, one argument each, whether it exists.
    """
    products = list(itertools.product(*([_as_param(value) for value in axis] for axis in axes)))
    cases = [case for case in map(_joined, products) if valid(*case.values)]
    return cases if everything else [cases[index] for index in covering([case.values for case in cases])]


def _as_param(value: Any) -> Any:
    return value if hasattr(value, "values") and hasattr(value, "marks") else pytest.param(value)


def _joined(params: Sequence[Any]) -> Any:
    names = [_name(param) for param in params]
    return pytest.param(
        *itertools.chain.from_iterable(param.values for param in params),
        marks=[mark for param in params for mark in param.marks],
        id="-".join(name for name in names if name),
    )


def _name(param: Any) -> str:
    return "-".join(map(_text, param.values)) if param.id is None else param.id


def _text(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def representatives(values: Iterable[Any], features: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """Values among which every pair of features occurs that occurs at all, or all of them with `--all`."""
    values = list(values)
    return values if everything else [values[index] for index in covering([features(v) for v in values])]


def of_each(values: Iterable[Any], features: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """Values among which every feature has each of its values once, or all of them with `--all`."""
    values, met, chosen = list(values), set(), []
    for value in values:
        own = {(column, repr(feature)) for column, feature in enumerate(features(value))}
        if own - met:
            met |= own
            chosen.append(value)
    return values if everything else chosen


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Cases in which every value of every axis occurs, or the product with `--all`.

    For costly tests of axes that do not influence each other.
    """
    if everything:
        return list(itertools.product(*axes))
    return [tuple(axis[row % len(axis)] for axis in axes) for row in range(max(map(len, axes)))]


def repeated(variants: Sequence[Any]) -> list[Any]:
    """The first seed or variant of a test that trains, or all of them with `--all`."""
    return list(variants) if everything else [variants[0]]


class Laws:
    """Laws of the same cases, with the law itself as one more axis.

    Every law meets every value of every axis, and every pair of values occurs under some law; with `--all`
    every law runs on every case. A module makes one such object, decorates its tests by it, and calls
    `generate` the hook `pytest_generate_tests`.
    """

    def __init__(self, names: tuple[str, ...], cases: Iterable[Any]) -> None:
        self.names, self.cases = names, list(cases)
        self.tests: list[str] = []
        self._selected: list[Any] | None = None

    def __call__(self, test: Callable[..., None]) -> Callable[..., None]:
        """Make a test one of the laws."""
        self.tests.append(test.__name__)
        return test

    def generate(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a law by its cases."""
        if metafunc.function.__name__ in self.tests:
            metafunc.parametrize(",".join(self.names), self.of(metafunc.function.__name__))

    def of(self, test: str) -> list[Any]:
        """Cases of one law."""
        if self._selected is None:
            self._selected = pairwise(self.tests, self.cases)
        return [
            pytest.param(*case.values[1:], marks=case.marks, id=case.id.removeprefix(f"{test}-"))
            for case in self._selected
            if case.values[0] == test
        ]


class Shared(Laws):
    """Laws of the same values, which share them: every law meets every kind, and every value meets a law.

    With `--all` every law meets every value. A module makes one such object, decorates its tests by it, and
    calls `generate` the hook `pytest_generate_tests`.
    """

    def __init__(self, name: str, values: Iterable[Any], kind: Callable[[Any], Any]) -> None:
        super().__init__((name,), values)
        self.kinds: dict[Any, list[Any]] = {}
        for value in self.cases:
            self.kinds.setdefault(kind(value), []).append(value)

    def of(self, test: str) -> list[Any]:
        """Values of one law: of every kind the next ones, so that all laws together meet each."""
        law, count, chosen = self.tests.index(test), len(self.tests), []
        for members in self.kinds.values():
            share = members[law::count] or [members[law % len(members)]]
            chosen += members if everything else share
        return chosen
