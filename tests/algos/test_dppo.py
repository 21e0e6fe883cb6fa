"""DPPO on a toy environment: what an iteration does, and the policy that comes out of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import mentions
from point_dppo import SMALL, draws, make_init, make_run
from point_env import PointEnv

from algos.onpolicy.advantages import evaluate_rows
from algos.training.observations import encode
from policies.backbones.switched import SwitchedField
from policies.errors import ConfigError
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import load_policy, save_policy


def test_advance_counts_executed_steps_and_keeps_the_frozen_network() -> None:
    run = make_run(init=make_init())
    field = run.policy.field
    before = [weight.clone() for weight in field.base.parameters()]
    tuned = [weight.clone() for weight in field.tuned.parameters()]
    assert run.total == 4 * 4 * 8 * 2
    rollouts = []
    collect = run.collect
    run.collect = lambda: rollouts.append(collect()) or rollouts[-1]  # type: ignore[method-assign]
    metrics = run.advance()
    assert run.progress == int(rollouts[0].length.sum()) < 4 * 8 * 2  # episodes of 11 steps end inside chunks
    for name in (
        "policy/loss",
        "value/loss",
        "policy/approx_kl",
        "value/explained_variance",
        "rollout/return",
    ):
        assert np.isfinite(float(metrics[name])), name
    assert float(metrics["policy/updates"]) == 2  # floor(96 / 50) = 1 per epoch
    assert all(torch.equal(a, b) for a, b in zip(before, field.base.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(tuned, field.tuned.parameters(), strict=True))
    while run.progress < run.total:
        run.advance()
    assert run.iteration == 4
    run.close()


def test_a_run_names_the_budget_that_lengthens_it() -> None:
    for config, budget in ((SMALL, "algo.iterations"), (replace(SMALL, env_steps=500), "algo.env_steps")):
        run = make_run(config)
        assert run.budget == budget
        run.close()


def test_minibatches_drop_the_rest_and_are_at_least_one() -> None:
    run = make_run()
    sizes = [len(index) for index in run.learner.minibatches(96, draws())]
    assert sizes == [50, 50]
    assert [len(index) for index in run.learner.minibatches(30, draws())] == [30, 30]
    first, second = run.learner.minibatches(96, draws())
    assert len(set(first.tolist())) == 50
    assert first.tolist() != second.tolist()


def test_compat_takes_the_next_episode_s_value_inside_a_rollout_and_the_true_one_at_its_end() -> None:
    run = make_run(replace(SMALL, steps_per_iteration=6), env=PointEnv(limit=6))  # 3 chunks per episode
    rollout = run.collect()
    assert rollout.truncated[[2, 5]].all()
    critic, value = run.learner.critic, torch.rand(6, 4, dtype=torch.float64)
    true, compat = (
        replace(run.estimate_advantages, paper_compat=flag).successors(rollout, run.policy, critic, value)
        for flag in (False, True)
    )
    final = evaluate_rows(critic, encode(run.policy, rollout.final_obs)).view(2, 4)
    torch.testing.assert_close(true[[2, 5]], final, rtol=1e-5, atol=1e-6)
    assert torch.equal(compat[2], value[3])
    torch.testing.assert_close(compat[5], final[1], rtol=1e-5, atol=1e-6)
    run.close()


def test_critic_warmup_leaves_the_actor_alone() -> None:
    run = make_run(replace(SMALL, critic_warmup_iterations=1))
    before = [weight.clone() for weight in run.learner.actor]
    critic = [weight.clone() for weight in run.learner.critic_params]
    metrics = run.advance()
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.actor, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(critic, run.learner.critic_params, strict=True))
    assert float(metrics["policy/ratio_mean"]) == 1.0
    run.advance()
    assert not all(torch.equal(a, b) for a, b in zip(before, run.learner.actor, strict=True))


@pytest.mark.parametrize(("count", "warns"), [(1, True), (2, False)])
def test_a_run_that_ends_with_the_warm_up_of_its_critic_warns(
    count: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(replace(SMALL, critic_warmup_iterations=1, iterations=count)).close()
    told = [line for line in caplog.messages if "will not learn" in line]
    assert len(told) == warns and all("algo.critic_warmup_iterations=1" in line for line in told)


def test_a_budget_that_lasts_longer_where_episodes_end_early_is_not_called_too_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Episodes of one step in chunks of two: a budget of one full iteration is two."""
    config = replace(SMALL, critic_warmup_iterations=1, env_steps=4 * 8 * 2)
    run = make_run(config, env=PointEnv(limit=1))
    (told,) = [line for line in caplog.messages if "not learn" in line]
    assert "may not learn" in told and "more where episodes end within chunks" in told
    before = [weight.clone() for weight in run.learner.actor]
    while run.progress < run.total:
        run.advance()
    assert not all(torch.equal(a, b) for a, b in zip(before, run.learner.actor, strict=True))
    run.close()


def test_target_kl_stops_all_epochs() -> None:
    run = make_run(replace(SMALL, target_kl=1e-12, update_epochs=5, actor_lr=1e-2))
    assert float(run.advance()["policy/updates"]) == 2  # the first minibatch still has ratio one
    free = make_run(replace(SMALL, target_kl=None, update_epochs=5, actor_lr=1e-2))
    assert float(free.advance()["policy/updates"]) == 5


def test_saturated_fraction_counts_clamped_densities() -> None:
    wide = make_run(replace(SMALL, log_prob_range=None))
    narrow = make_run(replace(SMALL, log_prob_range=(0.5, 0.6)))
    assert float(wide.advance()["policy/saturated_fraction"]) == 0.0
    assert float(narrow.advance()["policy/saturated_fraction"]) > 0.5


def test_a_snapshot_acts_without_noise_at_its_end_and_is_tuned_again(tmp_path: Path) -> None:
    run = make_run()
    run.advance()
    policy = run.snapshot()
    loaded = load_policy(save_policy(policy, tmp_path / "policy"))
    assert policy.table.std[-1].item() == 0.0
    assert run.policy.table.std.min().item() == pytest.approx(0.1)
    again = make_run(init=loaded)  # fine-tuning goes on from a fine-tuned policy
    assert torch.equal(
        torch.cat([w.flatten() for w in again.learner.actor]),
        torch.cat([w.detach().flatten() for w in loaded.field.tuned.parameters()]),
    )
    with pytest.raises(ConfigError, match=mentions("algo.tuned_steps=2")):
        make_run(replace(SMALL, tuned_steps=2), init=loaded)


def test_ddim_explores_with_noise_and_evaluates_without() -> None:
    run = make_run(replace(SMALL, sampler="ddim", denoising_steps=3), init=make_init(levels=9))
    assert not isinstance(run.policy.field, SwitchedField)  # all steps tuned: the frozen network is unused
    assert run.snapshot().is_deterministic
    assert float(run.advance()["policy/updates"]) == 2


def test_a_run_explores_with_the_noise_that_it_is_told() -> None:
    ddim = replace(SMALL, sampler="ddim", eta=0.4, noise_clip=2.0, min_sampling_std=0.2)
    explored = make_run(ddim).policy.sampler
    assert (explored.eta, explored.noise_clip, explored.min_std) == (0.4, 2.0, 0.2)
    explored = make_run(replace(SMALL, noise_clip=2.0, min_sampling_std=0.2)).policy.sampler
    assert (explored.noise_clip, explored.min_std) == (2.0, 0.2)
    with pytest.raises(ConfigError, match=mentions("algo.eta=0.4 no effect sampler=ddpm")):
        make_run(replace(SMALL, eta=0.4))


@pytest.mark.parametrize("resets", [False, True])
def test_iterations_begin_new_episodes_where_asked_to(resets: bool) -> None:
    run = make_run(replace(SMALL, reset_each_iteration=resets))
    first, second = run.collect(), run.collect()  # 8 chunks of episodes of 6
    assert first.first[0].all() and bool(second.first[0].all()) is resets
    run.close()


def test_ddim_steps_default_to_the_initial_policy() -> None:
    run = make_run(replace(SMALL, sampler="ddim"), init=make_init(levels=8, sampler=DDIM(steps=4)))
    assert run.policy.table.num_steps == 4


def test_worker_processes_report_what_one_process_does() -> None:
    reports = []
    for workers in (0, 2):
        run = make_run(num_workers=workers, num_threads=2)
        reports.append(run.advance())
        run.close()
    alone, shared = reports
    assert set(alone) == set(shared) and shared["rollout/episodes"] == alone["rollout/episodes"] > 0
    assert np.isfinite(float(shared["policy/loss"]))
