"""PPO without demonstrations: a fresh policy, and a normaliser that is learned on the way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions
from point_env import PointEnv

from algos.base import Setup
from algos.fpo import FpoConfig
from algos.onpolicy.loop import OnPolicy
from algos.onpolicy.ratios import Rows
from algos.onpolicy.running_normalizer import RunningMeanStd
from algos.policyflow import PolicyFlowConfig
from algos.ppo import PpoConfig
from algos.training.serialization import from_plain, to_plain
from policies.backbones.mlp import MlpConfig
from policies.errors import CapabilityError, ConfigError
from policies.networks.heads import CriticConfig
from policies.normalizer import Normalizer
from policies.policy import PolicyConfig
from policies.processes.diffusion import VPDiffusion
from policies.processes.flow import RectifiedFlow
from policies.processes.gaussian import GaussianProcess

SMALL = PpoConfig(
    num_envs=8, steps_per_iteration=16, batch_size=64, critic=CriticConfig(width=8), clip_range=0.2
)


def shape(**changes: Any) -> PolicyConfig:
    modes = {"state": "gaussian", "goal": "limits", "action": "limits"}
    process = GaussianProcess(init_std=0.5, max_std=1.0)
    backbone = MlpConfig(width=16, time_dim=4)
    values = {"process": process, "backbone": backbone, "horizon": 1, "act_steps": 1, "normalizer": modes}
    return PolicyConfig(**(values | changes))


def make_run(config: Any = SMALL, policy: PolicyConfig | None = None) -> OnPolicy:
    return config.build(Setup(policy=policy or shape(), env=PointEnv(), num_workers=0, num_threads=1, seed=2))


@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_moments_do_not_depend_on_how_the_data_arrive(cuts: list[int], seed: int) -> None:
    data = 1e4 + torch.randn(40, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    moments, edges = RunningMeanStd(3), [0, *sorted(cuts), 40]
    for start, end in pairwise(edges):
        moments.update(data[start:end].view(-1, 1, 3))
    torch.testing.assert_close(moments.mean, data.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.std, data.std(0), rtol=1e-8, atol=0)


def test_moments_become_mean_zero_and_deviation_one() -> None:
    data = torch.randn(500, 2) * torch.tensor([3.0, 0.1]) + 7
    normalizer, moments = Normalizer({"state": "gaussian"}, {"state": 2}), RunningMeanStd(2)
    moments.apply(normalizer, "state")  # nothing was seen: stays as it is
    assert torch.equal(normalizer.encode("state", data), data)
    moments.update(data)
    moments.apply(normalizer, "state")
    encoded = normalizer.encode("state", data)
    torch.testing.assert_close(encoded.mean(0), torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(encoded.std(0), torch.ones(2), rtol=1e-4, atol=0)


SIZES: Any = {
    "num_envs": 8, "steps_per_iteration": 16, "batch_size": 64, "num_draws": 3,
    "critic": CriticConfig(width=8),
}  # fmt: skip
FLOWS = (
    FpoConfig(**SIZES),
    FpoConfig(**SIZES, per_draw=True, times="density", prediction="velocity"),
    PolicyFlowConfig(**SIZES),
)


@pytest.mark.parametrize("config", [SMALL, *FLOWS], ids=["ppo", "fpo", "fpo++", "policyflow"])
def test_observations_mean_the_same_numbers_throughout_an_iteration(config: Any) -> None:
    """The ratio is one on data collected after the maps have changed; and they do change."""
    run = make_run(config, None if config is SMALL else shape(process=RectifiedFlow()))
    before = run.policy.normalizer.get_buffer("state_offset").clone()
    run.advance()
    after = run.policy.normalizer.get_buffer("state_offset").clone()
    assert not torch.equal(before, after)
    experience = run.estimate_advantages(run.collect(), run.policy, run.learner.critic, run.scaler)
    assert torch.equal(run.policy.normalizer.get_buffer("state_offset"), after)
    with torch.no_grad():
        steps = run.ratio.inner_steps
        score = run.ratio.score(experience, Rows.sorted_from(torch.arange(len(experience) * steps), steps))
    assert score.log_ratio.abs().max().item() < 1e-4


def test_an_observation_is_counted_once_however_long_the_history_is() -> None:
    run, rollouts = make_run(policy=shape(obs_steps=2)), []
    collect = run.collect
    run.collect = lambda: rollouts.append(collect()) or rollouts[-1]  # type: ignore[method-assign,func-returns-value]
    run.advance()
    newest = rollouts[0].obs["state"][:, :, -1].flatten(0, 1).double()
    assert run.moments is not None
    moments = run.moments["state"]
    assert moments.count == len(newest)
    torch.testing.assert_close(moments.mean, newest.mean(0))
    torch.testing.assert_close(moments.std, newest.std(0))


def test_a_fresh_policy_learns_and_ships_its_scale() -> None:
    run = make_run(replace(SMALL, num_envs=16, actor_lr=3e-3, log_prob_reduction="joint"))
    returns = [float(run.advance()["rollout/return"]) for _ in range(14)]
    assert sum(returns[-3:]) / 3 > sum(returns[:3]) / 3 + 2.0
    export_policy = run.snapshot()
    assert torch.equal(export_policy.normalizer.state_scale, run.policy.normalizer.state_scale)
    assert (export_policy.normalizer.state_scale != 1).all() and (
        export_policy.normalizer.action_scale == 1
    ).all()


def test_a_resumed_run_continues_bit_for_bit() -> None:
    straight, resumed = make_run(), make_run()
    straight.advance()
    resumed.load_state_dict(from_plain(to_plain(straight.state_dict())))
    for run in (straight, resumed):
        run.advance()
    ours, theirs = resumed.policy.state_dict(), straight.policy.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_identity_is_left_alone() -> None:
    modes = {"state": "identity", "goal": "limits", "action": "limits"}
    run = make_run(policy=shape(normalizer=modes))
    run.advance()
    assert (run.policy.normalizer.state_scale == 1).all()


def test_what_cannot_start_from_scratch_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("normalizer.state=limits")):
        make_run(policy=shape(normalizer=PolicyConfig().normalizer))
    with pytest.raises(ConfigError, match=mentions("bc_weight=0.1")):
        make_run(replace(SMALL, bc_weight=0.1))
    with pytest.raises(CapabilityError, match=mentions("process=gaussian")):
        make_run(policy=shape(process=VPDiffusion(4)))
    with pytest.raises(ConfigError, match=mentions("algo=ppo env=")):
        SMALL.build(Setup(policy=shape()))
