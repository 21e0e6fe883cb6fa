"""Weights of a composition: the search plays by its rules, the estimate finds known errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import pairwise

from algos.gpc import (
    EstimateSettings,
    SearchSettings,
    Trial,
    best_weights,
    error_products,
    estimate_weights,
    search_weights,
)
from algos.training.gpc_settings import simplex
from envs.datasets.episodes import EpisodeDataset
from envs.evaluation.evaluate import Evaluation
from envs.rollouts.episodes import EpisodeRow
from policies.composition.compose import compose
from policies.composition.policy import ComposedPolicy
from policies.errors import CapabilityError, ConfigError
from policies.policy import Policy
from policies.processes import RectifiedFlow, VPDiffusion
from policies.samplers.ode import Euler
from tests.gaussian_field import gaussian_policy

STD = 0.4


def gaussian_data(mean: tuple[float, ...], episodes: int = 30, length: int = 20) -> EpisodeDataset:
    """Chunks whose rows are all drawn from N(mean, STD^2)."""
    frames = episodes * length
    generator = torch.Generator().manual_seed(0)
    actions = torch.tensor(mean) + STD * torch.randn(frames, len(mean), generator=generator)
    return episodes_of(actions, length)


def episodes_of(actions: torch.Tensor, length: int) -> EpisodeDataset:
    """Cut actions (N, Da) into episodes of equal length."""
    frames = len(actions)
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    return EpisodeDataset(
        observations=torch.zeros(frames, 1),
        actions=actions,
        rewards=torch.zeros(frames),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        episode_start=torch.arange(0, frames + 1, length),
        meta={"source": "gaussian"},
    )


def members(*means: tuple[float, float], lead: Any = None, **units: float) -> ComposedPolicy:
    """Policies that know the data but for their mean; the second one in other units and of another kind."""
    first = gaussian_policy(lead or VPDiffusion(50), means[0], STD, sampler=Euler(clip_action=None))
    rest = [
        gaussian_policy(RectifiedFlow(), mean, STD, sampler=Euler(clip_action=None), **units)
        for mean in means[1:]
    ]
    return compose([first, *rest], [1 / len(means)] * len(means))


# -- estimate -------------------------------------------------------------------------------------------


ERRORS = [
    ((0.3, 0.0), (-0.1, 0.0)), ((0.2, 0.0), (0.0, 0.2)), ((0.1, 0.0), (0.3, 0.0)), ((0.0, 0.0), (0.5, 0.5))
]  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "units", "lead"),
    pairwise(ERRORS, [{}, {"scale": 0.5, "offset": 0.3}], [VPDiffusion(50), RectifiedFlow()]),
)
def test_known_errors_give_the_known_weight(
    errors: tuple[tuple[float, float], tuple[float, float]], units: dict[str, float], lead: Any
) -> None:
    one, two = errors
    policy = members(one, two, lead=lead, **units)
    settings = EstimateSettings(windows=600, levels=6)
    pooled, *levels = estimate_weights(policy, gaussian_data((0.0, 0.0)), settings)
    a, b, c = (float(np.dot(p, q)) for p, q in ((one, one), (two, two), (one, two)))
    expected = min(max((b - c) / (a + b - 2 * c), 0.0), 1.0)
    assert len(levels) == 6
    assert pooled.weights == pytest.approx((expected, 1 - expected), abs=0.12)
    assert pooled.low[0] - 1e-9 <= pooled.weights[0] <= pooled.high[0] + 1e-9
    assert pooled.low[0] - 0.02 <= expected <= pooled.high[0] + 0.02
    for level in levels:  # members that are wrong by a constant err alike at all levels
        assert level.low[0] - 0.05 <= expected <= level.high[0] + 0.05


def test_the_products_are_those_of_the_errors_and_of_the_noise_that_cannot_be_known() -> None:
    one, two, t = (0.3, 0.0), (-0.1, 0.2), 0.5
    settings = EstimateSettings(windows=600)
    policy, level = members(one, two), torch.tensor([t], dtype=torch.float64)
    products, episode = error_products(policy, gaussian_data((0.0, 0.0)), level, settings)
    alpha, sigma = (float(a[0]) for a in policy.process.alpha_sigma(level))
    var = alpha**2 * STD**2 + sigma**2
    shift = alpha / sigma * (1 - alpha**2 * STD**2 / var)  # of eps per error of the mean
    unknown = alpha**2 * STD**2 / var
    expected = [[np.dot(p, q) / 2 * shift**2 + unknown for q in (one, two)] for p in (one, two)]
    np.testing.assert_allclose(products[0].mean(axis=0), expected, atol=0.05)
    assert len(episode) == 600 and set(episode) == set(range(30))


def test_rows_that_no_one_recorded_do_not_count() -> None:
    """Episodes of one frame fill the first of two rows."""
    settings, level = EstimateSettings(windows=30), torch.tensor([0.5], dtype=torch.float64)
    right, wrong = (members((0.3, 0.0), (-0.1, 0.2)) for _ in range(2))
    for member in wrong.fields:
        known = member.field.config
        member.field.config = replace(known, mean=(known.mean, tuple(m + 9.0 for m in known.mean)))
    for length, is_same in ((1, True), (2, False)):
        data = gaussian_data((0.0, 0.0), length=length)
        ours, theirs = (error_products(policy, data, level, settings)[0] for policy in (right, wrong))
        assert np.array_equal(ours, theirs) is is_same and ours.all()


def test_intervals_count_episodes_and_not_their_windows() -> None:
    """Every other episode is of the one member, the rest are of the other."""
    policy, length = members((2.0, 0.0), (-2.0, 0.0)), 20
    actions = gaussian_data((0.0, 0.0), episodes=12, length=length).actions
    actions[:, 0] += torch.tensor([2.0, -2.0]).repeat(6).repeat_interleave(length)
    whole, cut = (estimate_weights(policy, episodes_of(actions, n))[0] for n in (length, 2))
    assert whole.weights[0] == pytest.approx(0.5, abs=0.05)
    assert whole.high[0] - whole.low[0] > 2 * (cut.high[0] - cut.low[0])


def test_the_best_weights_of_many_members_are_those_of_a_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        root = rng.normal(size=(3, 3))
        error = root @ root.T
        grid = np.array(simplex(3, 60))
        least = np.einsum("ki,ij,kj->k", grid, error, grid).min()
        found = best_weights(error)
        assert found.min() >= 0 and found.sum() == pytest.approx(1.0)
        assert found @ error @ found <= least + 1e-12
        assert found @ error @ found == pytest.approx(least, abs=5e-3 * error.max())


def test_equal_members_leave_the_weight_open() -> None:
    pooled, differing = (
        estimate_weights(members((0.1, 0.0), other), gaussian_data((0.0, 0.0)))[0]
        for other in ((0.1, 0.0), (0.4, 0.0))
    )
    assert pooled.high[0] - pooled.low[0] > 0.5 > differing.high[0] - differing.low[0]


def test_only_convex_weights_are_estimated() -> None:
    policy = members((0.1, 0.0), (0.2, 0.0))
    product = compose(policy.fields, [0.5, 0.5], operator="product")
    with pytest.raises(CapabilityError, match=mentions("operator=convex")):
        estimate_weights(product, gaussian_data((0.0, 0.0)))


# -- search ---------------------------------------------------------------------------------------------


class Arena:
    """Plays episodes whose success depends on the weight and on the seed, and takes notes."""

    def __init__(self) -> None:
        self.played: list[tuple[float, int, int]] = []

    def __call__(self, policy: Policy, first_seed: int, episodes: int) -> Evaluation:
        assert isinstance(policy, ComposedPolicy)
        weight = float(policy.composition.weights[0])  # type: ignore[arg-type]
        self.played.append((weight, first_seed, episodes))
        rows = []
        for episode in range(episodes):
            luck = np.random.default_rng(first_seed + episode).random()
            success = luck < 0.9 - 2 * abs(weight - 0.6)
            rows.append(EpisodeRow(first_seed + episode, episode, float(success), 1, success, True, False))
        protocol = {"env": {"name": "arena", "options": {}, "success_rule": "x", "reference_scores": None}}
        return Evaluation(tuple(rows), protocol)


def test_the_search_halves_on_common_and_then_fresh_episodes() -> None:
    arena, seen = Arena(), []
    settings = SearchSettings(episodes=(20, 60, 200), keep=(4, 2), first_seed=1000)
    found = search_weights(members((0.1, 0.0), (0.2, 0.0)), settings, arena, on_trial=seen.append)
    assert arena.played[:11] == [(n / 10, 1000, 20) for n in range(10, -1, -1)]
    assert [p[1:] for p in arena.played[11:]] == [(1020, 60)] * 4 + [(1080, 200)] * 2
    assert found.best[0] == pytest.approx(0.6) and tuple(seen) == found.trials
    assert [trial.round for trial in found.final] == [2, 2] and found.final[0].weights == found.best
    runner_up = found.compare_with_best(found.final[1])
    assert runner_up.episodes == 200 and runner_up.difference.value > 0


def test_candidates_that_do_not_fit_are_refused_before_anything_is_played() -> None:
    arena, settings = Arena(), SearchSettings(candidates=[[0.5, 0.5], [0.5, 0.6]])
    with pytest.raises(ConfigError, match=mentions("operator=convex 0.6")):
        search_weights(members((0.1, 0.0), (0.2, 0.0)), settings, arena)
    assert not arena.played


def test_of_equal_weights_the_balanced_one_wins() -> None:
    def play(policy: Policy, first_seed: int, episodes: int) -> Evaluation:
        return replace(Arena()(policy, first_seed, 0), rows=(EpisodeRow(0, 0, 1.0, 1, True, True, False),))

    settings = SearchSettings(episodes=(1,), keep=())
    assert search_weights(members((0.1, 0.0), (0.2, 0.0)), settings, play).best == (0.5, 0.5)


def test_tasks_without_success_are_ranked_by_return() -> None:
    rows = tuple(EpisodeRow(i, i, float(i), 1, False, True, False) for i in range(3))
    evaluation = Evaluation(rows, {"env": {"success_rule": None}})
    assert Trial(0, (1.0,), evaluation).sort_key == (0.0, 1.0)


def test_grids() -> None:
    assert len(SearchSettings().weights(2, "convex")) == 11
    assert len(SearchSettings().weights(3, "or")) == 21 and len(SearchSettings().weights(4, "convex")) == 35
    assert SearchSettings(candidates=[[1, 2]]).weights(2, "cfg_sum") == [(1.0, 2.0)]
    with pytest.raises(ConfigError, match=mentions("operator=product")):
        SearchSettings().weights(2, "product")
    for candidates in ([[1, 2]], [0.2, 0.3, 0.5], [["a", "b", "c"]], []):
        with pytest.raises(ConfigError, match=mentions("search.candidates 3")):
            SearchSettings(candidates=candidates).weights(3, "product")
    with pytest.raises(ConfigError, match=mentions("estimate.seed 0 -1")):
        EstimateSettings(seed=-1)
    with pytest.raises(ConfigError, match=r"search\.keep must be one entry fewer.*; got"):
        SearchSettings(episodes=(20,), keep=(3,))


def test_overlapping_episodes_are_noticed() -> None:
    settings = SearchSettings(episodes=(20, 100), first_seed=100)
    assert not settings.overlaps(0, 100) and settings.overlaps(0, 101)
    assert settings.overlaps(219, 1) and not settings.overlaps(220, 100)
