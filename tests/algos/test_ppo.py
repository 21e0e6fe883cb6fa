"""Gaussian PPO on the shared core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import everything
from point_env import PointEnv

from algos.base import Setup
from algos.onpolicy.advantages import AdvantageEstimator
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ppo_update import GeneratorDraws
from algos.onpolicy.ratios import Rows, reduce_log_prob
from algos.ppo import PpoConfig
from algos.training.experience import summary
from envs.rollouts.rollout import Rollout
from envs.spec import EnvSpec
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError
from policies.networks.heads import CriticConfig
from policies.policy import Policy, PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.gaussian import GaussianProcess

SMALL = PpoConfig(
    num_envs=4,
    steps_per_iteration=16,
    iterations=3,
    batch_size=32,
    update_epochs=2,
    critic=CriticConfig(width=8),
    microbatch_size=10,
)


def make_init(process: Any = None, **changes: Any) -> Policy:
    config = PolicyConfig(
        process=process or GaussianProcess(**changes),
        backbone=MlpConfig(width=8, activation="mish", time_dim=4),
        horizon=3,
        act_steps=2,
    )
    limits = {"min": torch.full((2,), -1.0), "max": torch.full((2,), 1.0)}
    statistics = {
        name: limits | {"mean": torch.zeros(2), "std": torch.ones(2)} for name in ("state", "action")
    }
    return build_policy(config, obs_dim=2, action_dim=2, statistics=statistics, seed=3)


def make_run(config: PpoConfig = SMALL, init: Policy | None = None, **setup: Any) -> OnPolicy:
    values = {
        "num_workers": 0,
        "num_threads": 1,
        "env": PointEnv(),
        "init": init or make_init(),
        "seed": 5,
    } | setup
    return config.build(Setup(**values))


@dataclass(frozen=True)
class WithRule(PointEnv):
    """The point environment with a rule of success."""

    @property
    def spec(self) -> EnvSpec:
        """As it is, and a rule."""
        return replace(super().spec, success_rule="is near")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
@pytest.mark.parametrize("reduction", ["mean", "per_step", "joint"])
def test_ratio_is_one_on_fresh_data(dtype: torch.dtype, limit: float, reduction: str) -> None:
    run = make_run(replace(SMALL, log_prob_reduction=reduction), make_init().to(dtype))
    experience = run.estimate_advantages(run.collect(), run.policy, run.learner.critic, run.scaler)
    with torch.no_grad():
        score = run.ratio.score(experience, Rows.sorted_from(torch.arange(len(experience)), 1))
    assert score.log_ratio.abs().max().item() <= limit
    assert score.log_ratio.exp().mean().item() == pytest.approx(1.0, abs=1e-6)


def test_reductions_differ_by_their_counts() -> None:
    log_prob = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    mean, step, joint = (reduce_log_prob(log_prob, how) for how in ("mean", "per_step", "joint"))
    torch.testing.assert_close(joint, 6 * mean)
    torch.testing.assert_close(joint, 3 * step)


@pytest.mark.skipif(not everything, reason="with --all: without it a policy with a running scale learns")
def test_run_learns_to_stay_near_the_goal() -> None:
    config = replace(
        SMALL,
        num_envs=16,
        iterations=25,
        batch_size=64,
        microbatch_size=64,
        update_epochs=5,
        actor_lr=3e-3,
        clip_range=0.2,
    )
    run = make_run(config)
    returns = [float(run.advance()["rollout/return"]) for _ in range(25)]
    run.close()
    assert sum(returns[-3:]) / 3 > sum(returns[:3]) / 3 + 2.0


def test_success_is_told_of_tasks_that_have_a_rule_of_it() -> None:
    for env in (PointEnv(), WithRule()):
        run = make_run(env=env)
        assert ("rollout/success" in run.advance()) == bool(env.spec.success_rule)
        run.close()
        rows: Any = [SimpleNamespace(return_=1.0, success=True, length=3, metrics={})]
        assert summary(rows, bool(env.spec.success_rule)).get("rollout/success") == (
            1.0 if env.spec.success_rule else None
        )


def test_fixed_deviation_stays_and_learned_one_moves() -> None:
    for learn in (True, False):
        run = make_run(init=make_init(learn_std=learn))
        before = run.policy.head.log_var.clone()
        run.advance()
        assert torch.equal(before, run.policy.head.log_var) is not learn


def test_entropy_bonus_widens_the_policy() -> None:
    run = make_run(replace(SMALL, entropy_coef=10.0, actor_lr=1e-2))
    before = run.policy.head.log_var.detach().clone()
    run.advance()
    assert (run.policy.head.log_var > before).all()


def test_snapshot_acts_with_the_mean_and_is_independent() -> None:
    run = make_run(replace(SMALL, actor_lr=1e-2))
    policy, obs = run.snapshot(), torch.zeros(2, 1, 2)
    before = policy.act(obs)
    assert torch.equal(before[0], before[1])
    run.advance()
    assert torch.equal(policy.act(obs), before)


def test_budget_in_environment_steps_replaces_iterations(caplog: pytest.LogCaptureFixture) -> None:
    """It is rounded up to whole iterations, and the log says so."""
    caplog.set_level(logging.INFO, "algos.onpolicy.loop")
    run = make_run(replace(SMALL, env_steps=150))
    assert run.total == 150 and run.expected == 256
    assert caplog.messages == [
        "the run ends with the iteration that reaches algo.env_steps=150; an iteration has up to 128 control "
        "steps."
    ]
    while run.progress < run.total:
        run.advance()
    assert run.iteration == 2 and 150 <= run.progress <= 256
    assert run.expected == run.progress


def test_a_budget_below_one_iteration_shortens_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "algos.onpolicy.loop")
    assert make_run(replace(SMALL, env_steps=128)).steps_per_iteration == SMALL.steps_per_iteration
    assert not caplog.messages
    run = make_run(replace(SMALL, env_steps=20))
    act_steps = run.policy.chunk.act_steps
    assert (run.steps_per_iteration - 1) * SMALL.num_envs * act_steps < 20
    run.advance()
    assert 20 <= run.progress < 20 + SMALL.num_envs * act_steps
    (line,) = caplog.messages
    assert f"algo.steps_per_iteration is {run.steps_per_iteration}: algo.env_steps=20 is less than" in line


def test_an_iteration_says_where_it_is() -> None:
    run, seen = make_run(SMALL), []
    collect, step = run.pool.collect, run.learner.step

    def watched(*args: object, on_progress: Callable[[int], None], **rest: object) -> object:
        def told(chunks: int) -> None:
            on_progress(chunks)
            seen.append(run.stage)

        return collect(*args, on_progress=told, **rest)

    def stepped(*args: object, **rest: object) -> object:
        seen.append(run.stage)
        return step(*args, **rest)

    run.pool.collect, run.learner.step = watched, stepped  # type: ignore[method-assign]
    run.advance()
    chunks = SMALL.num_envs * SMALL.steps_per_iteration
    collected = [text for text in seen if text.endswith(f" of {chunks:,} chunks")]
    assert [int(text.split()[0]) for text in collected] == sorted(
        SMALL.num_envs * (t + 1) for t in range(SMALL.steps_per_iteration - 1)
    )
    assert seen[len(collected) :][:2] == [seen[-1].replace(seen[-1].split()[0], n, 1) for n in ("0", "1")]


def test_values_bootstrap_through_truncation_from_the_true_final_observation() -> None:
    """Two steps of one environment: the first is cut, the second belongs to another episode."""

    def critic(obs: torch.Tensor) -> torch.Tensor:
        return obs[:, 0]

    init = build_policy(
        PolicyConfig(
            process=GaussianProcess(),
            backbone=MlpConfig(width=8, time_dim=4),
            act_steps=2,
            normalizer=dict.fromkeys(("state", "goal", "action"), "identity"),
        ),
        obs_dim=1,
        action_dim=1,
    )
    false = torch.zeros(2, 1, dtype=torch.bool)
    rollout = Rollout(
        obs={"state": torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)},
        rewards=torch.tensor([[10.0, 20.0], [30.0, 0.0]]).view(2, 1, 2),
        length=torch.tensor([[2], [1]]),
        terminated=false,
        truncated=torch.tensor([[True], [False]]),
        first=torch.tensor([[False], [True]]),
        next_obs_last={"state": torch.tensor([5.0]).view(1, 1, 1)},
        final_obs={"state": torch.tensor([7.0]).view(1, 1, 1)},
        final_index=torch.tensor([[0, 0]]),
        record={},
        episodes=[],
    )
    correct = AdvantageEstimator(0.5, 0.9, 1.0, False)(rollout, init, critic, None)
    second = 30.0 + 0.5 * 5.0 - 2.0
    assert correct.advantage.tolist() == pytest.approx([30.0 + 0.5 * 7.0 - 1.0, second])
    compat = AdvantageEstimator(0.5, 0.9, 1.0, True)(rollout, init, critic, None)
    assert compat.advantage.tolist() == pytest.approx([30.0 + 0.5 * 2.0 - 1.0 + 0.45 * second, second])


def test_cloning_term_works_for_a_gaussian() -> None:
    run = make_run(replace(SMALL, bc_weight=0.5))
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    experience = run.estimate_advantages(run.collect(), run.policy, run.learner.critic, run.scaler)
    _, metrics = run.learner.actor_gradient(experience, torch.arange(64), draws=draws)
    # Near -E[log N] of a deviation of 0.1: 0.5 log(2 pi e 0.01) per element.
    assert float(metrics["policy/cloning_loss"]) == pytest.approx(-0.88, abs=0.1)


def test_the_cloning_term_draws_the_noise_that_it_scores() -> None:
    """At the initial policy, a minimum of the term, no gradient moves a deviation, correlated or not."""
    config = replace(SMALL, noise_correlation=0.9, bc_weight=1.0, log_prob_range=None)
    run = make_run(config, make_init(init_std=0.1))
    cond = run.policy.encode(run.policy.observation({"state": torch.zeros(4000, 1, 2)}))
    term = run._bc_term
    assert term is not None
    noise = torch.randn(4000, *term.noise_shape, generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(term.losses(cond, noise).mean(), run.policy.head.log_var)
    assert float(slope.abs().max()) < 0.02


def test_unfit_policies_are_refused() -> None:
    diffusion = make_init(VPDiffusion(4))
    with pytest.raises(CapabilityError, match=mentions("algo=ppo DenoisingPolicy VPDiffusion")):
        make_run(init=diffusion)
