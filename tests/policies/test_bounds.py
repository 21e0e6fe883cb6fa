"""Ranges are declared on fields and checked when a configuration is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from policies.bounds import Bounds, Checked, bounded, former_names
from policies.errors import ConfigError


@dataclass(frozen=True)
class Config(Checked):
    key = "algo"
    steps: int = bounded(10, ge=1)
    gamma: float = bounded(0.99, ge=0, le=1)
    keep: float | None = bounded(None, gt=0, lt=1)
    dims: list[int] = bounded([8, 8], ge=1)
    search: str = bounded("lists", choices=("lists", "tree"))
    horizon: float = bounded(1.0, gt=0, le=math.inf)
    time_dim: int = bounded(4, ge=4, even=True)
    widths: tuple[int, ...] = bounded((8, 8), ge=1, some=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps": 0}, r"algo\.steps .*1.*0"),
        ({"gamma": 1.5}, r"algo\.gamma .*\[0, 1\].*1\.5"),
        ({"gamma": math.nan}, r"algo\.gamma .*nan"),
        ({"steps": math.inf}, r"algo\.steps .*inf"),
        ({"keep": 1.0}, r"algo\.keep .*\(0, 1\).*1"),
        ({"dims": [8, 0]}, r"algo\.dims .*1.*\[8, 0\]"),
        ({"time_dim": 5}, r"algo\.time_dim .*even.*4.*5"),
        ({"time_dim": 2}, r"algo\.time_dim .*even.*4.*2"),
        ({"widths": ()}, r"algo\.widths .*one or more.*1.*\[\]"),
        ({"widths": [8, 0]}, r"algo\.widths .*1.*\[8, 0\]"),
        ({"search": "boxes"}, r"algo\.search .*lists, tree.*boxes"),
    ],
)
def test_values_out_of_range_are_refused_by_key(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(Config(), **change)


def test_values_at_closed_ends_none_and_allowed_infinity_pass() -> None:
    made = Config(steps=1, gamma=1.0, keep=None, dims=[1], search="tree", horizon=math.inf)
    assert (made.steps, made.gamma, made.keep, made.horizon) == (1, 1.0, None, math.inf)


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Bounds(ge=1), "at least 1"),
        (Bounds(gt=0), "above 0"),
        (Bounds(lt=2), "below 2"),
        (Bounds(gt=0, le=1), "in (0, 1]"),
        (Bounds(choices=("a", "b")), "one of a, b"),
        (Bounds(ge=4, even=True), "even and at least 4"),
        (Bounds(ge=1, some=True), "one or more, each at least 1"),
        (Bounds(), "finite"),
    ],
)
def test_ranges_read_as_words(bounds: Bounds, text: str) -> None:
    assert str(bounds) == text


def test_lists_become_tuples_where_the_default_is_one() -> None:
    given: Any = [4, 4]
    made = Config(dims=given, widths=given)
    assert made.widths == (4, 4) and made.dims == [4, 4]


def test_lists_are_not_shared() -> None:
    assert Config().dims is not Config().dims


def test_a_renamed_field_knows_its_former_name() -> None:
    @dataclass
    class Renamed(Checked):
        policy_delay: int = bounded(2, ge=1, was="policy_every")
        label: str = bounded("", was="title")

    assert former_names(Renamed) == {"policy_every": "policy_delay", "title": "label"}
    assert Renamed(label="any text").label == "any text"
