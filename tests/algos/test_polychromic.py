"""Sets of rollouts in a run: who shares a start, whose advantages change, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from messages import mentions
from point_env import PointEnv, PointStepper
from test_ppo import SMALL, make_init, make_run

from algos.onpolicy.polychromic import Sets, variety
from algos.ppo import PpoConfig
from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvSpec
from policies.errors import ConfigError

POLY = replace(SMALL, num_envs=8, steps_per_iteration=14, set_size=2, reset_each_iteration=True)


class SidedStepper(PointStepper):
    """Its kind is the side on which the point is."""

    def metrics(self) -> dict[str, Array]:
        return {"mode": (self.position[:, 0] > 0).astype(float)}


@dataclass(frozen=True)
class Sided(PointEnv):
    """The point environment with kinds of episodes."""

    @property
    def spec(self) -> EnvSpec:
        """As it is, with a metric."""
        return replace(super().spec, episode_metrics=("mode",))

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        return ChunkVector(self.spec, SidedStepper(num_envs), obs_steps=obs_steps)


def test_rollouts_without_a_kind_add_no_variety() -> None:
    label = torch.tensor([[0, 1, -1, -1], [0, 0, 0, -1], [0, 1, 2, 3], [-1, -1, -1, -1]])
    assert variety(label).tolist() == [0.5, 0.0, 1.0, 0.0]


def test_a_group_shares_its_starts_in_every_iteration() -> None:
    run = make_run(POLY, make_init(), env=Sided())
    for _ in range(2):
        rollout = run.collect()
        state, number = rollout.obs["state"][:, :, 0], rollout.first.long().cumsum(dim=0) - 1
        for episode in range(2):
            began = rollout.first & (number == episode)
            starts = state.transpose(0, 1)[began.T].view(2, 4, 2)
            assert torch.equal(starts, starts[:, :1].expand_as(starts))
            assert not torch.equal(starts[0], starts[1])
    run.close()


def test_whole_groups_take_the_advantage_of_their_sets_and_others_keep_theirs() -> None:
    run = make_run(POLY, make_init(), env=Sided())
    rollout = run.collect()
    sets, own = Sets(2), torch.full(rollout.first.shape, 7.0)
    found = sets(own, rollout.rewards.sum(dim=-1), rollout)
    number, ended = rollout.first.long().cumsum(dim=0) - 1, rollout.terminated | rollout.truncated
    whole = (ended.float().sum(dim=0) - number[-1].float()).long() + number[-1]  # finished episodes
    finished = torch.stack([whole[:4].min().expand(4), whole[4:].min().expand(4)]).flatten()
    assert torch.equal(found == 7.0, number >= finished)
    first = found[0].view(2, 4)
    torch.testing.assert_close(first.sum(dim=1), torch.zeros(2), atol=1e-5, rtol=0)
    run.close()


def test_sets_and_single_steps_have_rewards_of_one_scale() -> None:
    run = make_run(replace(POLY, reward_scaling=False), make_init(), env=Sided())
    rollout = run.collect()
    rollout.metrics["mode"] = torch.arange(8).remainder(4).expand(14, 8)  # every rollout of a group is new
    found = [
        replace(run.estimate_advantages, reward_scale_const=factor)(
            rollout, run.policy, lambda cond: torch.zeros(len(cond)), None
        ).advantage
        for factor in (1.0, 3.0)
    ]
    torch.testing.assert_close(3.0 * found[0], found[1])
    run.close()


def test_an_iteration_learns_from_sets() -> None:
    run = make_run(POLY, make_init(), env=Sided())
    assert torch.isfinite(run.advance()["policy/loss"])
    run.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set_size": 1}, "algo.set_size at least 2"),
        ({"num_envs": 6}, "algo.num_envs a multiple of 4"),
        ({"reset_each_iteration": False}, "algo.reset_each_iteration true"),
    ],
)
def test_what_sets_need_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=mentions(message)):
        PpoConfig(**({"num_envs": 8, "set_size": 2, "reset_each_iteration": True} | options))
    with pytest.raises(ConfigError, match=mentions("algo.set_size 0 point mode")):
        make_run(POLY, make_init())
