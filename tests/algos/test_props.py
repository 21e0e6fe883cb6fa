"""PROPS: who collects, what is recorded, and that the rows of an iteration look more on-policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import point_dppo
import pytest
import test_ppo
import torch
from messages import mentions

from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.props import AdaptiveSampling
from policies.errors import ConfigError

PARTS = replace(test_ppo.SMALL, props_every=5)


@pytest.mark.parametrize("small", [test_ppo, point_dppo], ids=["ppo", "dppo"])
def test_in_parts_the_policy_collects_what_it_collects_at_once(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveSampling, "corrected", lambda self, *_: self.ratio)
    runs = [small.make_run(replace(small.SMALL, props_every=every)) for every in (0, 5)]
    for _ in range(2):
        whole, parts = (run.collect() for run in runs)
        for name in ("rewards", "length", "terminated", "truncated", "first"):
            assert torch.equal(getattr(whole, name), getattr(parts, name)), name
        assert torch.equal(whole.obs["state"], parts.obs["state"])
        assert torch.equal(whole.next_obs_last["state"], parts.next_obs_last["state"])
        order = (whole.final_index * torch.tensor([100, 1])).sum(dim=1).argsort()
        again = (parts.final_index * torch.tensor([100, 1])).sum(dim=1).argsort()
        assert torch.equal(whole.final_index[order], parts.final_index[again])
        assert torch.equal(whole.final_obs["state"][order], parts.final_obs["state"][again])
        assert sorted(map(repr, whole.episodes)) == sorted(map(repr, parts.episodes))
        assert torch.equal(whole.record["chain"], parts.record["chain"])
        torch.testing.assert_close(parts.record["log_prob"], whole.record["log_prob"], atol=2e-6, rtol=1e-5)
    for run in runs:
        run.close()


@pytest.mark.parametrize("small", [test_ppo, point_dppo], ids=["ppo", "dppo"])
def test_recorded_densities_are_those_of_the_policy_in_training(small: Any) -> None:
    run: OnPolicy = small.make_run(replace(small.SMALL, props_every=5, update_epochs=1))
    before = {name: value.clone() for name, value in run.policy.state_dict().items()}
    experience = run.experience(run.collect())
    assert all(torch.equal(value, before[name]) for name, value in run.policy.state_dict().items())
    rows = torch.arange(len(experience) * run.ratio.inner_steps)
    _, metrics = run.learner.actor_gradient(experience, rows, draws=run.draws)
    assert float(metrics["policy/ratio_mean"]) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics["policy/approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert all(torch.isfinite(value) for value in run.advance().values() if isinstance(value, torch.Tensor))
    run.close()


def sampling_error(run: OnPolicy) -> float:
    """Return N times the squared mean of the noise of N chunks, per entry: 1 on average if drawn freely."""
    rollout = run.collect()
    policy, states = run.policy, {"state": rollout.obs["state"].flatten(0, 1)}
    with torch.no_grad():
        density = policy.density(policy.encode(policy.observation(states)))
        noise = (rollout.record["chain"].flatten(0, 1)[:, 1] - density.mean) / density.std
        noise = noise[:, policy.chunk.executed]
    return float(len(noise) * noise.mean(dim=0).square().mean())


def test_the_rows_of_an_iteration_look_more_on_policy() -> None:
    config = replace(PARTS, num_envs=4, steps_per_iteration=60)
    errors = {}
    for every in (0, 5):
        found = []
        for seed in range(3):
            run = test_ppo.make_run(replace(config, props_every=every), seed=seed)
            found.append(sampling_error(run))
            run.close()
        errors[every] = sum(found) / len(found)
    assert 0.5 < errors[0] < 2.0
    assert errors[5] < 0.5 * errors[0]


def test_a_part_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("props_every -1")):
        replace(PARTS, props_every=-1)
