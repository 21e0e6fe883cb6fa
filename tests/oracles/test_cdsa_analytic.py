"""The correction of actions with the exact score of smoothed data, and a trained score against it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from algos.base import Setup
from algos.cdsa import CdsaConfig, CorrectionLearner
from algos.transitions import TransitionTable
from policies.backbones.mlp import MlpConfig
from policies.correction import Correction, corrected_path
from policies.deterministic import DeterministicProcess
from policies.policy import PolicyConfig, build_policy

CASE = re.compile(r"corrected_sigma([\d.]+)_eta([\d.]+)_K(\d+)$")


def read(path: Path) -> dict[str, Tensor]:
    with np.load(path) as file:
        return {name: torch.from_numpy(np.asarray(file[name], dtype=np.float64)) for name in file.files}


def exact_score(data: Tensor, x: Tensor, sigma: float) -> Tensor:
    """Return the gradient of the log of a Parzen window at x (B, D)."""
    difference = data[None] - x[:, None]
    share = (-difference.square().sum(2) / (2 * sigma**2)).softmax(dim=1)
    return (share[..., None] * difference).sum(1) / sigma**2


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
    state, action = arrays["queries"][:, :3], arrays["queries"][:, 3:]
    cases = {name: CASE.match(name) for name in arrays if name.startswith("corrected_")}
    assert cases and all(cases.values())
    for name, match in cases.items():
        assert match is not None
        sigma, eta, steps = float(match[1]), float(match[2]), int(match[3])

        def score(s: Tensor, a: Tensor, at: float) -> tuple[Tensor, Tensor]:
            both = exact_score(arrays["data"], torch.cat([s, a], dim=1), at)
            return both[:, :3], both[:, 3:]

        config = Correction(sigmas=(sigma,), steps=steps, eta=eta)
        path = torch.stack(corrected_path(state, action, score, config))
        torch.testing.assert_close(path, arrays[name], rtol=1e-6, atol=1e-9)


@pytest.mark.golden("cdsa_analytic*.npz")
def test_a_trained_score_points_where_the_exact_one_does(golden_path: Path) -> None:
    """On queries near the data: where there are none, no network knows the score."""
    arrays = read(golden_path)
    data, sigma = arrays["data"], 0.5
    state, action = data[:, :3].float(), data[:, 3:].float()
    one = torch.ones(3)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    base = build_policy(
        PolicyConfig(
            process=DeterministicProcess(), horizon=1, act_steps=1, observation_clip=None,
            backbone=MlpConfig(residual=False, hidden_dims=(8,)),
            normalizer={"state": "identity", "action": "identity"},
        ),
        obs_dim=3, action_dim=2,
        statistics={"state": limits, "action": {k: v[:2] for k, v in limits.items()}},
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Correction(sigmas=(sigma,), hidden_dims=(128, 128, 128)).wrap(base)
    zero = torch.zeros(len(data))
    table = TransitionTable(cond=state, action=action, reward=zero, next_cond=state, discount=zero)
    config = CdsaConfig(steps=3000, correction=policy.wrapper)
    learner, generator = CorrectionLearner(policy, table, config), torch.Generator().manual_seed(1)
    policy.mean.zero_()
    policy.std.fill_(1.0)
    for _ in range(config.steps):
        row = torch.randint(len(data), (256,), generator=generator)
        learner.step(table.gather(row), learner.draw(256, generator))
    near = data[torch.arange(0, len(data), 3)] + 0.3 * torch.randn(
        32, 5, generator=generator, dtype=torch.float64
    )
    expected = exact_score(data, near, sigma)
    with torch.no_grad():
        parts = policy.scores(near[:, :3].float(), near[:, 3:].float(), sigma)
    found = torch.cat(parts, dim=1).double()
    correlation = torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]
    assert float(correlation) > 0.95


def test_a_policy_or_data_that_are_missing_are_asked_for() -> None:
    with pytest.raises(Exception, match="init="):
        CdsaConfig().build(Setup())
