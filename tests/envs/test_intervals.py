"""Intervals equal closed forms and references, and cover what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions
from scipy.stats import binomtest, norm, trim_mean

from envs.evaluation.intervals import (
    Interval,
    bootstrap_iqm,
    bootstrap_mean,
    conditional_value_at_risk,
    paired_difference,
    success_rate,
    value_at_risk,
    wilson,
)
from policies.errors import ConfigError


@given(n=st.integers(1, 400), share=st.floats(0, 1), confidence=st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_equals_scipy(n: int, share: float, confidence: float) -> None:
    successes = round(n * share)
    interval = wilson(successes, n, confidence=confidence)
    expected = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1


def _seeds(*counts: int) -> np.ndarray:
    """Return successes (S, 100) of seeds that succeeded so often."""
    return np.arange(100) < np.array(counts)[:, None]


def test_the_success_of_one_seed_has_wilsons_interval() -> None:
    assert success_rate(_seeds(42)) == success_rate(_seeds(42)[0]) == wilson(42, 100)


def test_the_success_of_several_seeds_covers_the_luck_of_seeds() -> None:
    rate, seeds = success_rate(_seeds(42, 77, 90)), bootstrap_mean(_seeds(42, 77, 90))
    assert rate.value == pytest.approx(wilson(209, 300).value)
    assert (rate.low, rate.high) == (seeds.low, seeds.high)
    assert rate.low < 0.5 < wilson(209, 300).low, "a third of the policies succeeded in 42 %"


@pytest.mark.parametrize("counts", [(100, 100, 100), (0, 0, 0), (99, 100, 100), (70, 70, 70)])
def test_seeds_that_agree_are_no_surer_than_as_many_episodes_of_one(counts: tuple[int, ...]) -> None:
    rate, pooled = success_rate(_seeds(*counts)), wilson(sum(counts), 300)
    assert rate.low <= pooled.low <= rate.value <= pooled.high <= rate.high


def test_the_bootstrap_of_one_seed_agrees_with_the_normal_approximation() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    interval = bootstrap_mean(values)
    half = 1.96 * values.std() / 20
    assert interval.value == pytest.approx(values.mean())
    assert (interval.low, interval.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.02
    )


def test_the_bootstrap_sees_luck_between_seeds() -> None:
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(4, 100))
    same, different = noise, noise + np.array([[-2.0], [-1.0], [1.0], [2.0]])
    assert bootstrap_mean(different).half_width > 5 * bootstrap_mean(same).half_width


def test_the_interval_covers_the_truth_about_as_often_as_promised() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        interval = bootstrap_mean(rng.normal(size=60), num_resamples=400, seed=trial)
        hits += interval.low <= 0.0 <= interval.high
    assert 0.89 <= hits / 200 <= 0.99


def test_intervals_are_reproducible() -> None:
    values = np.random.default_rng(3).normal(size=(3, 20))
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values) != bootstrap_mean(values, seed=1)


def test_few_seeds_report_the_mean_and_many_the_iqm() -> None:
    values = np.arange(40.0).reshape(8, 5) ** 2
    for some in (values, values[:5], values[:7]):
        assert bootstrap_iqm(some).value == pytest.approx(trim_mean(some.mean(axis=1), 0.25))
    assert bootstrap_iqm(values[:4]).value == pytest.approx(values[:4].mean())


def test_pairing_removes_the_luck_of_the_episode() -> None:
    rng = np.random.default_rng(4)
    luck = rng.normal(0, 10, (3, 100))
    before, after = luck + rng.normal(0, 0.1, luck.shape), luck + 0.5 + rng.normal(0, 0.1, luck.shape)
    difference = paired_difference(before, after)
    assert difference.excludes_zero and difference.value == pytest.approx(0.5, abs=0.05)
    assert difference.half_width < 0.1
    assert not paired_difference(before, before).excludes_zero


def test_excludes_zero_means_one_side() -> None:
    assert Interval(1, 0.1, 2).excludes_zero and Interval(-1, -2, -0.1).excludes_zero
    assert not Interval(1, 0.0, 2).excludes_zero and not Interval(0, -1, 1).excludes_zero


def test_risk_of_a_known_list() -> None:
    values = np.random.default_rng(5).permutation(np.arange(1.0, 101.0))
    assert value_at_risk(values, 0.1) == 10.0
    assert conditional_value_at_risk(values, 0.1).value == 5.5
    assert conditional_value_at_risk(values, 1.0).value == pytest.approx(values.mean())
    assert value_at_risk(values[:3], 0.1) == values[:3].min(), "of few episodes, the worst"


def test_risk_approaches_the_closed_form_of_a_normal_distribution() -> None:
    values = np.random.default_rng(6).normal(2.0, 3.0, 200_000)
    quantile = norm.ppf(0.1)
    assert value_at_risk(values, 0.1) == pytest.approx(2 + 3 * quantile, abs=0.05)
    worst = conditional_value_at_risk(values, 0.1, num_resamples=20).value
    assert worst == pytest.approx(2 - 3 * norm.pdf(quantile) / 0.1, abs=0.05)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_of_risk_is_that_of_episodes_drawn_again(confidence: float) -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(size=80)
    worst = [np.sort(rng.choice(values, 80))[:8].mean() for _ in range(4000)]
    interval = conditional_value_at_risk(values, 0.1, confidence=confidence, num_resamples=4000)
    low, high = np.quantile(worst, [(1 - confidence) / 2, (1 + confidence) / 2])
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.03)


def test_the_risk_of_several_seeds_covers_the_luck_of_seeds() -> None:
    rng = np.random.default_rng(8)
    values = rng.normal(size=(4, 100)) + np.array([[-3.0], [0.0], [0.0], [0.0]])
    both, pooled = conditional_value_at_risk(values), conditional_value_at_risk(values.flatten())
    assert both.value == pooled.value == np.sort(values, axis=None)[:40].mean()
    assert both.half_width > 2 * pooled.half_width, "a seed that is drawn or not matters most"


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.sampled_from([0.05, 0.1, 0.5, 1.0]))
def test_risk_is_ordered_and_moves_with_the_values(values: list[float], share: float) -> None:
    array = np.array(values)
    worst = conditional_value_at_risk(array, share, num_resamples=50)
    assert array.min() - 1e-9 <= worst.value <= value_at_risk(array, share) + 1e-9
    assert worst.value <= array.mean() + 1e-9
    moved = conditional_value_at_risk(2 * array + 3, share, num_resamples=50)
    assert moved.value == pytest.approx(2 * worst.value + 3, abs=1e-6)


def test_senseless_input_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("wilson 3 2")):
        wilson(3, 2)
    with pytest.raises(ConfigError, match="finite values"):
        bootstrap_mean(np.array([1.0, np.nan]))
    with pytest.raises(ConfigError, match="finite values"):
        bootstrap_mean(np.zeros((2, 0)))
    with pytest.raises(ConfigError, match=mentions("share 0 1")):
        value_at_risk(np.zeros(3), 0.0)
    with pytest.raises(ConfigError, match=mentions("finite")):
        conditional_value_at_risk(np.array([1.0, np.nan]))
    with pytest.raises(ConfigError, match=mentions("success 0 1")):
        success_rate([0.5, 1.0])
    with pytest.raises(ConfigError, match=mentions("wilson 0 1")):
        success_rate(np.zeros((2, 0)))
    with pytest.raises(ConfigError, match=mentions("episodes twice")):
        paired_difference(np.zeros(3), np.zeros(4))
