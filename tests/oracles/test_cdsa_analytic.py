"""The correction of actions with the exact score of smoothed data, and a trained score against it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything
from small_tables import single_steps
from torch import Tensor

from algos.base import Setup
from algos.cdsa import CdsaConfig, CorrectionLearner
from algos.transitions import TransitionTable
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import ConfigError
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.wrappers.score_correction import Correction, Score, corrected_path

CASE = re.compile(r"corrected_sigma([\d.]+)_eta([\d.]+)_K(\d+)$")


def read(path: Path) -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(np.asarray(file[name], dtype=np.float64)) for name in file.files}


def exact_score(data: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Return the gradient of the log of a Parzen window at x (B, D)."""
    difference = data[None] - x[:, None]
    share = (-difference.square().sum(2) / (2 * sigma**2)).softmax(dim=1)
    return (share[..., None] * difference).sum(1) / sigma**2


def log_density(data: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Return the log of a Parzen window at x (B, D)."""
    square = (data[None] - x[:, None]).square().sum(2) / (2 * sigma**2)
    scale = 0.5 * data.shape[1] * math.log(2 * math.pi * sigma**2) + math.log(len(data))
    return (-square).logsumexp(dim=1) - scale


def split(arrays: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return states and actions of x (B, D)."""
    width = int(arrays["state_dim"])
    return x[:, :width], x[:, width:]


def parzen(arrays: dict[str, Tensor]) -> Score:
    """Return the exact score of the smoothed data, in its two blocks."""

    def score(state: Tensor, action: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        return split(arrays, exact_score(arrays["data"], torch.cat([state, action], dim=1), sigma))

    return score


@pytest.mark.golden("cdsa_analytic*.npz")
def test_the_stated_scores_are_those_of_a_parzen_window(golden_path: Path) -> None:
    arrays = read(golden_path)
    for sigma in arrays["sigmas"].tolist():
        stated = next(v for k, v in arrays.items() if k == f"score_{sigma}")
        own = exact_score(arrays["data"], arrays["queries"], sigma)
        torch.testing.assert_close(own, stated, rtol=1e-9, atol=1e-9)


@pytest.mark.golden("cdsa_analytic*.npz")
def test_corrections_with_the_exact_score(golden_path: Path) -> None:
    arrays = read(golden_path)
    state, action = split(arrays, arrays["queries"])
    cases = {name: CASE.match(name) for name in arrays if name.startswith("corrected_")}
    assert cases and all(cases.values())
    for name, match in cases.items():
        assert match is not None
        sigma, eta, steps = float(match[1]), float(match[2]), int(match[3])
        config = Correction(sigmas=(sigma,), steps=steps, eta=eta)
        path = torch.stack(corrected_path(state, action, parzen(arrays), config))
        torch.testing.assert_close(path, arrays[name], rtol=1e-6, atol=1e-9)


@pytest.mark.golden("cdsa_analytic*.npz")
@pytest.mark.parametrize("eta", [0.2, 0.5, 1.0])
def test_no_step_with_the_exact_score_makes_an_action_less_likely(golden_path: Path, eta: float) -> None:
    """A share of a step is a share of the way of mean shift, which never goes down."""
    arrays = read(golden_path)
    state, action = split(arrays, arrays["queries"])
    action = action.clamp(-1, 1)
    for sigma in arrays["sigmas"].tolist():
        torch.testing.assert_close(
            log_density(arrays["data"], arrays["queries"], sigma),
            arrays[f"logp_{sigma}"],
            rtol=1e-9,
            atol=1e-9,
        )
        path = corrected_path(state, action, parzen(arrays), Correction(sigmas=(sigma,), steps=6, eta=eta))
        heights = [log_density(arrays["data"], torch.cat([state, a], dim=1), sigma) for a in path]
        for before, after in pairwise(heights):
            assert (after >= before - 1e-9).all()
        assert (heights[-1] > heights[0] + 1e-3).any()


@pytest.mark.skipif(not everything, reason="with --all: without it the score of normal data is learned")
@pytest.mark.golden("cdsa_analytic*.npz")
def test_a_trained_score_points_where_the_exact_one_does(golden_path: Path) -> None:
    """On queries near the data: where there are none, no network knows the score."""
    arrays = read(golden_path)
    data, sigma = arrays["data"], 0.7
    noise = torch.randn(len(data), data.shape[1], generator=generator(2), dtype=torch.float64)
    near = data + 0.3 * noise
    score = trained_score(arrays, data, sigma, steps=600, lr=3e-3)
    correlation, slope = agreement(score(near), exact_score(data, near, sigma))
    assert correlation > 0.95 and 0.85 < slope < 1.15


@pytest.mark.skipif(not everything, reason="with --all: without it the score of normal data is learned")
@pytest.mark.golden("cdsa_analytic*.npz")
def test_a_trained_score_is_the_stated_one_where_much_noise_covers_the_queries(golden_path: Path) -> None:
    arrays = read(golden_path)
    sigma = float(arrays["sigmas"].max())
    near = covered(arrays["queries"], arrays["data"], sigma)
    score = trained_score(arrays, arrays["data"], sigma, steps=400, lr=3e-3)
    correlation, slope = agreement(score(arrays["queries"][near]), arrays[f"score_{sigma}"][near])
    assert correlation > 0.95 and 0.85 < slope < 1.15


@pytest.mark.golden("cdsa_analytic*.npz")
def test_a_score_that_is_trained_on_normal_data_is_the_stated_one(golden_path: Path) -> None:
    arrays = read(golden_path)
    mean, root = arrays["gauss_mu"], torch.linalg.cholesky(arrays["gauss_cov"])
    draws = torch.randn(4096, len(mean), generator=generator(3), dtype=torch.float64)
    sigma = float(arrays["sigmas"].max())
    data = mean + draws @ root.T
    near = covered(arrays["queries"], data, sigma)
    score = trained_score(arrays, data, sigma, steps=300)
    correlation, slope = agreement(score(arrays["queries"][near]), arrays[f"gauss_score_{sigma}"][near])
    assert correlation > 0.95 and 0.85 < slope < 1.15


def covered(queries: Tensor, data: Tensor, sigma: float) -> Tensor:
    """Return which queries (Q,) lie where noise carries the data; skips where hardly any does."""
    near = torch.cdist(queries, data).amin(dim=1) <= sigma * math.sqrt(data.shape[1])
    if near.sum() < 4:
        pytest.skip("the file asks about no place near the data")
    return near


def trained_score(
    arrays: dict[str, Tensor], data: Tensor, sigma: float, *, steps: int, lr: float = 1e-3
) -> Callable[[Tensor], Tensor]:
    """Return the score (B, D) that a network of ours learns from data (M, D), in units of the data."""
    state, action = (part.float() for part in split(arrays, data))
    torch.manual_seed(0)
    widths = {"hidden_dims": (64, 64, 64), "dynamics_dims": (8,)}
    policy = Correction(sigmas=(sigma,), **widths).wrap(any_policy(state.shape[1], action.shape[1]))
    table = TransitionTable([single_steps(state, action)], len(data))
    learner = CorrectionLearner(policy, table, CdsaConfig(steps=steps, lr=lr, correction=policy.wrapper))
    policy.mean.zero_()
    policy.std.fill_(1.0)
    random = generator(1)
    for _ in range(steps):
        row = torch.randint(len(data), (128,), generator=random)
        learner.step(table.gather(row), learner.draw(128, random))

    @torch.no_grad()
    def score(x: Tensor) -> Tensor:
        parts = policy.scores(*(part.float() for part in split(arrays, x)), sigma)
        return torch.cat(parts, dim=1).double()

    return score


def any_policy(obs_dim: int, action_dim: int) -> Policy:
    """Return a policy that sees states as they are."""
    one = torch.ones(max(obs_dim, action_dim))
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    widths = {"state": obs_dim, "action": action_dim}
    return build_policy(
        PolicyConfig(
            process=DeterministicProcess(), horizon=1, act_steps=1, observation_clip=None,
            backbone=MlpConfig(residual=False, hidden_dims=(8,)),
            normalizer={"state": "identity", "action": "identity"},
        ),
        obs_dim=obs_dim, action_dim=action_dim,
        statistics={name: {k: v[:d] for k, v in limits.items()} for name, d in widths.items()},
    )  # fmt: skip


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def agreement(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return how well scores (B, D) agree: in direction, by correlation, and in size, by least squares."""
    correlation = float(torch.corrcoef(torch.stack([found.flatten(), exact.flatten()]))[0, 1])
    slope = float((found * exact).sum() / exact.square().sum())
    return correlation, slope


def test_a_policy_or_data_that_are_missing_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=mentions("init=")):
        CdsaConfig().build(Setup())
