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
from algos.onpolicy.ppo_update import GeneratorDraws
from algos.onpolicy.props import AdaptiveSampling, move_away
from algos.onpolicy.ratios import Rows
from algos.reinflow import ReinFlowConfig
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


def sampling_error(corrects: bool, seed: int, parts: int = 20, size: int = 10) -> float:
    """Return N times the squared mean of N draws of standard normal numbers: 1 on average if free."""
    generator = torch.Generator().manual_seed(seed)
    drawn, mean = torch.zeros(0, 2), torch.zeros(2)
    for _ in range(parts):
        drawn = torch.cat([drawn, mean + torch.randn(size, 2, generator=generator)])
        mean, seen = torch.zeros(2, requires_grad=corrects), drawn
        if corrects:

            def log_ratio(
                index: torch.Tensor, mean: torch.Tensor = mean, x: torch.Tensor = seen
            ) -> torch.Tensor:
                return (x[index].square() - (x[index] - mean).square()).sum(dim=1) / 2

            unread = torch.zeros(1, requires_grad=True)
            move_away(
                log_ratio, [mean, unread], len(seen), GeneratorDraws(generator), bound=0.1, lr=0.02, epochs=3
            )
            assert not unread.any()
            mean = mean.detach()
    return float(len(drawn) * drawn.mean(dim=0).square().mean())


def test_draws_of_the_moved_policy_look_like_those_of_the_other() -> None:
    free, corrected = (sum(sampling_error(corrects, k) for k in range(6)) / 6 for corrects in (False, True))
    assert 0.4 < free < 2.5
    assert corrected < 0.3 * free


def test_the_collecting_policy_takes_what_was_taken_less_often() -> None:
    run = test_ppo.make_run(replace(PARTS, actor_lr=1e-3))
    sampling = run.sampling
    assert sampling is not None
    seen = sampling.scored(run.pool.collect(run.ratio, 16), sampling._joint)
    moved = sampling.corrected([seen], run.draws)
    rows = Rows.sorted_from(torch.arange(len(seen)), 1)
    with torch.no_grad():
        assert float(moved.score(seen, rows).log_ratio.mean()) < -0.01
        assert float(sampling._joint.score(seen, rows).log_ratio.abs().max()) < 1e-5
    run.close()


def test_progress_is_the_number_of_chunks_of_all_parts() -> None:
    run = test_ppo.make_run(PARTS)
    assert run.sampling is not None
    steps, every, seen = run.config.steps_per_iteration, run.config.props_every, []
    run.sampling.collect(run.pool, steps, run.draws, reset=False, on_progress=seen.append)
    ends_part = [t % every == 0 or t == steps for t in range(1, steps + 1)]
    assert seen == [run.config.num_envs * t for t, end in enumerate(ends_part, start=1) if not end]
    run.close()


def test_a_part_of_no_steps_and_learned_noise_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("props_every -1")):
        replace(PARTS, props_every=-1)
    with pytest.raises(ConfigError, match=mentions("props_every 0 noise")):
        ReinFlowConfig(props_every=5)
