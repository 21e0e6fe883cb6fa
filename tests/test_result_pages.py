"""Pages of results: the intervals of several seeds, and what is said of the commits that measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks import offline, pages
from envs.statistics import conditional_value_at_risk, success_rate, wilson


def measured(*commits: str) -> list[dict[str, Any]]:
    return [{"environment": {"commit": commit}} for commit in commits]


def test_success_of_a_page_covers_the_luck_of_seeds() -> None:
    seeds = np.arange(100) < np.array([[15], [15], [42]])
    assert pages.success(seeds) == pages.percent(success_rate(seeds)) == "24 % (12–41)"
    assert pages.success(seeds[0]) == pages.percent(wilson(15, 100))


def test_the_worst_tenth_of_a_page_covers_the_luck_of_seeds() -> None:
    returns = np.array([0.0, 10.0, 20.0])[:, None] + np.arange(20.0)  # seeds differ more than episodes
    run = {"steps": 1, "protocol": {"env": {"reference_scores": [0, 100]}}}
    runs = [run | {"evaluations": {"last": {"return": list(seed)}}} for seed in returns]
    worst = conditional_value_at_risk(returns)
    assert worst.high - worst.low > 5  # of the pooled episodes it is less than 3
    (row,) = offline.rows_of("iql", runs)
    assert f"{worst.value:.1f} ({worst.low:.1f} to {worst.high:.1f})" in row


def test_a_page_says_which_code_cannot_be_checked_out() -> None:
    assert pages.about_commits(measured("a" * 40)) == ""
    lost = pages.NOT_IN_HISTORY[0]
    both = pages.about_commits(measured(lost + "0" * 33, lost + "0" * 33 + "-dirty", "a" * 40))
    assert both.count(lost) == 1 and "not in the history" in both and "*with changes*" in both
    assert "history" not in pages.about_commits(measured("a" * 40 + "-dirty"))
