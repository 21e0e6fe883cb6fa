"""Evaluating a policy that remembers its plan: the protocol says so, and nothing else changes a number."""

from __future__ import annotations

import pytest
from messages import mentions
from pairwise import each_value

from envs.evaluation.evaluate import Evaluation, evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.make import env
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError
from policies.execution.replanning import WarmStart
from policies.policy import Policy, PolicyConfig
from policies.processes import RectifiedFlow, VPDiffusion
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.ode import Euler

TASK = env("hopper", max_episode_steps=23)
EPISODES, K = 7, 5
PROCESSES = {
    "ddpm": (VPDiffusion(num_levels=K), DDPM(min_std=0.1)),
    "ddim": (VPDiffusion(num_levels=K), DDIM(steps=K)),
    "flow": (RectifiedFlow(), Euler(steps=K)),
}


def policy_of(name: str = "ddpm") -> Policy:
    """A real policy with an awkward width that executes two of five rows."""
    process, sampler = PROCESSES[name]
    config = PolicyConfig(
        process=process,
        sampler=sampler,
        backbone=MlpConfig(width=13, time_dim=6),
        horizon=5,
        act_steps=2,
        normalizer={"state": "identity", "action": "identity"},
    )
    return build_policy(config, obs_dim=TASK.spec.obs_dim, action_dim=TASK.spec.action_dim, seed=3)


@pytest.mark.parametrize(
    ("name", "warm_start"),
    each_value(list(PROCESSES), [WarmStart(steps=2), WarmStart(steps=1, renoise=True, gripper=(1,))]),
)
def test_rows_do_not_depend_on_the_number_of_environments_or_workers(
    name: str, warm_start: WarmStart
) -> None:
    policy = policy_of(name)
    expected = evaluate(policy, TASK, Settings(episodes=EPISODES, num_envs=1, warm_start=warm_start))
    assert len({row.return_ for row in expected.rows}) == EPISODES
    for num_envs, num_workers in ((3, 0), (64, 0), (5, 2)):
        settings = Settings(episodes=EPISODES, num_envs=num_envs, warm_start=warm_start)
        got = evaluate(policy, TASK, settings, num_workers=num_workers)
        assert got == expected and got.protocol_hash == expected.protocol_hash
    assert (
        evaluate(policy, TASK, Settings(episodes=3, num_envs=2, warm_start=warm_start)).rows
        == expected.rows[:3]
    )


@pytest.mark.parametrize("name", PROCESSES)
def test_only_the_first_decision_of_an_episode_is_the_policy_itself(name: str) -> None:
    own, warm = (
        evaluate(policy_of(name), TASK, Settings(episodes=4, warm_start=w), keep_observations=True)
        for w in (WarmStart(), WarmStart(steps=2))
    )
    for a, b in zip(own.rows, warm.rows, strict=True):
        assert a.actions is not None and b.actions is not None
        assert (a.actions[:2] == b.actions[:2]).all()
        assert (a.actions[2:4] != b.actions[2:4]).any()


def test_a_warm_start_that_is_off_changes_nothing() -> None:
    off = evaluate(policy_of(), TASK, Settings(episodes=3, warm_start=WarmStart()))
    assert off == evaluate(policy_of(), TASK, Settings(episodes=3))
    assert not off.rows[0].metrics and "network_calls" not in off.summary()


def test_the_protocol_tells_how_decisions_begin() -> None:
    plain, warm, again = (
        evaluate(policy_of(), TASK, Settings(episodes=2, warm_start=w))
        for w in (WarmStart(), WarmStart(levels=(3, 0), renoise=True), WarmStart(levels=(3, 0)))
    )
    assert len({one.protocol_hash for one in (plain, warm, again)}) == 3
    assert warm.protocol["warm_start"] == {
        "steps": None, "start": None, "levels": [3, 0], "renoise": True, "gripper": [], "gripper_guess": 1.0,
    }  # fmt: skip
    assert Evaluation.from_json(warm.to_json()) == warm


def test_calls_of_the_network_are_counted() -> None:
    evaluation = evaluate(policy_of(), TASK, Settings(episodes=3, warm_start=WarmStart(levels=(2, 1, 0))))
    for row in evaluation.rows:
        decisions = (row.length + 1) // 2
        assert row.metrics["network_calls"] == pytest.approx((K + (decisions - 1) * 3) / decisions)
    mean = evaluation.summary()["network_calls"]["value"]
    assert mean == pytest.approx(evaluation.values("network_calls").mean())


def test_executed_steps_are_a_switch_of_the_evaluation() -> None:
    policy = policy_of()
    one = evaluate(policy, TASK, Settings(episodes=2, act_steps=1, warm_start=WarmStart(steps=2)))
    assert policy.chunk.act_steps == 2 and one.protocol["act_steps"] == 1
    assert [row.metrics["network_calls"] for row in one.rows] == [
        pytest.approx((K + (row.length - 1) * 2) / row.length) for row in one.rows
    ]
    assert (
        evaluate(policy, TASK, Settings(episodes=2, act_steps=2)).rows
        == evaluate(policy, TASK, Settings(episodes=2)).rows
    )
    assert (
        evaluate(policy, TASK, Settings(episodes=2, act_steps=4)).rows
        != evaluate(policy, TASK, Settings(episodes=2)).rows
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"act_steps": 0}, ConfigError, "act_steps 1 0"),
        ({"act_steps": 6}, ConfigError, "policy.horizon=5"),
        ({"warm_start": WarmStart(steps=6)}, ConfigError, "warm_start.steps 5 6"),
        ({"warm_start": WarmStart(steps=3), "steps": 2}, ConfigError, "warm_start.steps 2 3"),
        ({"warm_start": WarmStart(steps=2), "act_steps": 5}, ConfigError, "warm_start horizon=5"),
    ],
)
def test_switches_that_do_not_fit_are_refused_before_anything_starts(options, error, message: str) -> None:
    with pytest.raises(error, match=mentions(message)):
        evaluate(policy_of(), TASK, Settings(episodes=1, **options))


def test_a_policy_without_a_plan_is_refused() -> None:
    class Scripted:
        chunk = policy_of().chunk
        noise_shape = (5, 3)

    for options in ({"act_steps": 1}, {"warm_start": WarmStart(steps=1)}):
        with pytest.raises(CapabilityError, match=mentions("Scripted")):
            evaluate(Scripted(), TASK, Settings(episodes=1, **options))  # type: ignore[arg-type]
