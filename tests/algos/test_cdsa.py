"""The correction of actions: towards the data, not far, and nothing where the data are."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from point_env import PointEnv
from torch import Tensor

from algos.base import Setup
from algos.cdsa import CdsaConfig
from algos.offline.loop import OfflineRun
from envs.datasets.episodes import EpisodeDataset
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.policy import Policy, PolicyConfig
from policies.processes.deterministic import DeterministicProcess
from policies.wrappers.score_correction import CorrectedPolicy, Correction, corrected_path

SPREAD = 0.05  # of the actions around the rule


def rule(state: Tensor) -> Tensor:
    """Return the action (B, 2) that the data take in states (B, 2)."""
    return torch.stack([0.5 * torch.sin(2 * state[:, 0]), 0.4 * state[:, 1]], dim=1)


def data(frames: int = 2000, length: int = 10) -> EpisodeDataset:
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(frames, 2, generator=generator) * 2 - 1
    ends = torch.zeros(frames, dtype=torch.bool)
    ends[length - 1 :: length] = True
    action = rule(state) + SPREAD * torch.randn(frames, 2, generator=generator)
    return EpisodeDataset(
        observations=state, actions=action, rewards=torch.zeros(frames), terminated=ends,
        truncated=torch.zeros_like(ends), episode_start=torch.arange(0, frames + 1, length),
        next_observations=(state + 0.2 * action), meta={"source": "rule"},
    )  # fmt: skip


def base() -> Policy:
    one = torch.ones(2)
    limits = {"min": -one, "max": one, "mean": 0 * one, "std": one}
    config = PolicyConfig(
        process=DeterministicProcess(), backbone=MlpConfig(residual=False, hidden_dims=(8,)), horizon=1,
        act_steps=1, normalizer={"state": "identity", "action": "limits"},
    )  # fmt: skip
    return build_policy(config, obs_dim=2, action_dim=2, statistics={"state": limits, "action": limits})


@functools.cache
def trainable() -> OfflineRun:
    correction = Correction(
        hidden_dims=(64, 64), dynamics_dims=(64,), sigmas=(0.1,), steps=10, eta=0.3, gate_quantile=0.9
    )
    config = CdsaConfig(steps=400, batch_size=128, log_every=200, lr=3e-3, correction=correction)
    run = config.build(Setup(dataset=data(), init=base(), seed=0))
    while run.progress < run.total:
        run.advance()
    return run


def corrected(state: Tensor, action: Tensor, **changes: Any) -> Tensor:
    policy = trainable().snapshot()
    assert isinstance(policy, CorrectedPolicy)
    if changes:
        policy.wrapper = replace(policy.wrapper, **changes)
    with torch.no_grad():
        return policy.corrected(policy.standardized(state), action)


def test_most_actions_of_the_data_are_left_alone_and_the_others_hardly_move() -> None:
    """The gate opens for the strangest tenth of the data, as it was told to."""
    known = data()
    moved = corrected(known.observations, known.actions)
    changed = (moved != known.actions).any(1)
    assert float(changed.float().mean()) == pytest.approx(0.1, abs=0.03)
    assert float((moved - known.actions).abs().mean()) < 0.3 * SPREAD


def test_disturbed_actions_come_back_towards_the_data() -> None:
    """Of noise 0.5 much is taken back, and the data are denser where actions end than where they were."""
    generator = torch.Generator().manual_seed(1)
    state = torch.rand(500, 2, generator=generator) * 1.6 - 0.8
    bad = (rule(state) + 0.5 * torch.randn(500, 2, generator=generator)).clamp(-1, 1)
    better = corrected(state, bad, radius=None)
    misses = [(one - rule(state)).square().sum(1).mean().sqrt() for one in (bad, better)]
    assert float(misses[1]) < 0.6 * float(misses[0])
    before, after = (log_density(state, one) for one in (bad, better))
    assert float((after - before).mean()) > 0.5 and float((after < before - 0.1).float().mean()) < 0.2


def log_density(state: Tensor, action: Tensor, width: float = 0.2) -> Tensor:
    """Return the log of a Parzen window over the data at states and actions (B, 2)."""
    known = data()
    rows, query = (torch.cat(pair, 1) for pair in ((known.observations, known.actions), (state, action)))
    return (-torch.cdist(query, rows).square() / (2 * width**2)).logsumexp(1) - math.log(len(rows))


def test_nothing_moves_further_than_the_radius() -> None:
    generator = torch.Generator().manual_seed(2)
    state, wild = torch.zeros(100, 2), torch.rand(100, 2, generator=generator) * 2 - 1
    distance = (corrected(state, wild, radius=0.1) - wild).square().mean(1).sqrt()
    assert float(distance.max()) <= 0.1 + 1e-6 and float(distance.max()) > 0.09


def test_the_auxiliary_action_is_where_inverse_dynamics_lead_along_the_score_of_the_state() -> None:
    """With a score of known blocks and linear inverse dynamics, by hand."""
    state, action = torch.randn(5, 3), torch.rand(5, 2) - 0.5
    by_state, by_action = torch.randn(5, 3), torch.randn(5, 2)
    matrix = torch.randn(3, 2)
    asked: list[Tensor] = []

    def inverse(one: Tensor, other: Tensor) -> Tensor:
        asked.append(other)
        return (other - one) @ matrix + one.sum(1, keepdim=True)  # what it says of staying is taken off

    config = Correction(sigmas=(0.3,), steps=1, eta=0.2, eta_state=0.5, kappa=2.0)
    path = corrected_path(state, action, lambda *_: (by_state, by_action), config, inverse)
    towards = 2.0 * 0.3**2 * by_state
    expected = action + 0.2 * 0.3**2 * by_action + 0.5 * (towards @ matrix)
    torch.testing.assert_close(path[1], expected.clamp(-1, 1))
    torch.testing.assert_close(asked[0], state + towards)
    still = corrected_path(state, action, lambda *_: (by_state, by_action), replace(config, eta_state=0.0))
    torch.testing.assert_close(still[1], (action + 0.2 * 0.3**2 * by_action).clamp(-1, 1))


def test_every_step_has_its_noise_and_the_last_one_is_repeated() -> None:
    asked: list[float] = []

    def score(state: Tensor, action: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        asked.append(sigma)
        return torch.zeros_like(state), torch.zeros_like(action)

    corrected_path(torch.zeros(1, 2), torch.zeros(1, 2), score, Correction(sigmas=(1.0, 0.3), steps=4))
    assert asked == [1.0, 0.3, 0.3, 0.3]


def test_inverse_dynamics_find_the_action_between_two_states() -> None:
    known, policy = data(), trainable().snapshot()
    assert isinstance(policy, CorrectedPolicy) and known.next_observations is not None
    states = [policy.standardized(one) for one in (known.observations, known.next_observations)]
    with torch.no_grad():
        error = (policy.dynamics(*states) - known.actions).square().mean().sqrt()
    assert float(error) < 2 * SPREAD < 0.4 * float(known.actions.std())


def test_actions_outside_the_box_of_the_task_are_clipped_and_counted(caplog: Any) -> None:
    known = data(40)
    wild = replace(known, actions=torch.where(torch.arange(40)[:, None] < 3, 9.0, known.actions))
    setup = Setup(dataset=wild, init=base(), env=PointEnv(), seed=0)
    with caplog.at_level(logging.WARNING):
        run = CdsaConfig(steps=1).build(setup)
    assert "6 action entries" in caplog.text and "clipped" in caplog.text
    assert float(run.table.action.max()) <= float(max(PointEnv().spec.action_high)) + 1e-6
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run = CdsaConfig(steps=1).build(replace(setup, env=None))
    assert "6 action entries" in caplog.text and "the box of the policy of init" in caplog.text
    assert float(run.table.action.max()) == pytest.approx(1.0, abs=1e-4)
