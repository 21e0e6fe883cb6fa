"""Where training episodes begin: inside recorded episodes, or after a guide."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from point_env import PointEnv, PointStepper
from torch import Tensor

from algos.base import Setup
from algos.ppo import PpoConfig
from algos.sac import SacConfig
from envs.datasets.episodes import EpisodeDataset
from envs.rollouts.episodes import EpisodeRow
from envs.rollouts.recording import Recording
from envs.rollouts.rollout import RolloutPool
from envs.rollouts.starts import CLUSTERS, DISCOUNT, LED, Leader, Recorded, Starts, StartSettings
from envs.rollouts.value_clusters import even_shares, value_clusters
from policies.backbones.mlp import MlpConfig
from policies.errors import ConfigError
from policies.policy_config import PolicyConfig
from policies.processes.gaussian import GaussianProcess
from policies.processes.squashed import TanhGaussianProcess

LIMIT = 11


class Homing:
    """Drives to the goal of the point at full speed, two steps at a time."""

    chunk = SimpleNamespace(obs_steps=1, act_steps=2)

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> Any:
        offset = torch.tensor([0.5, 0.0]) - obs["state"][:, -1]
        return (5.0 * offset).clamp(-1, 1)[:, None].repeat(1, 2, 1)


class Learner(Homing):
    """The same as an actor that records nothing but what it saw."""

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        return super().act(obs, generator), {"seen": obs["state"]}


def episode(seed: int, length: int = LIMIT) -> Any:
    record = Recording(PointStepper(1), seed)
    generator = np.random.default_rng(seed)
    for _ in range(length):
        record.step(generator.uniform(-0.5, 0.5, 2))
    return record.episode(truncated=True, success=True)


def dataset(*seeds: int) -> EpisodeDataset:
    return EpisodeDataset.from_episodes([episode(seed) for seed in seeds], meta={"source": "points"})


def settings(**options: Any) -> StartSettings:
    which = {"guide": "g"} if options.pop("guided", False) else {"dataset": "d"}
    return StartSettings(**which, **options)


def recorded(*seeds: int, **options: Any) -> Starts:
    return Starts(settings(**options), recorded=Recorded.from_dataset(dataset(*seeds)))


def leader(starts: Starts, num_envs: int = 4) -> Leader:
    return Leader(starts, PointEnv(LIMIT).make_vector(num_envs))


def test_an_episode_begins_where_a_recorded_one_was() -> None:
    """At first one step before its end; the time limit counts what was repeated."""
    data = dataset(7)
    one = leader(recorded(7))
    obs = one.lead(np.array([0, 2]), [100, 101])
    np.testing.assert_allclose(obs[:, -1], data.observations[[LIMIT - 1] * 2].numpy(), atol=1e-6)
    assert one.led[[0, 2]].tolist() == [LIMIT - 1] * 2 and one.led[1] == 0
    step = one.vector.step_chunk(np.zeros((4, 3, 2)), np.array([True, False, True, False]))
    assert step.length[[0, 2]].tolist() == [1, 1] and step.truncated[[0, 2]].all()


def test_the_last_stage_is_the_task_s_own_start() -> None:
    one = leader(recorded(7))
    one.hand_over.stage = one.hand_over.last
    seeds = [100, 101, 102, 103]
    expected = PointEnv(LIMIT).make_vector(4).reset(seeds)
    assert np.array_equal(one.lead(np.arange(4), seeds), expected) and not one.led.any()


def test_the_way_back_follows_the_returns_of_whole_episodes() -> None:
    """A learner as good as what leads it goes back a stage with every mean after the first."""
    one = leader(recorded(7, stages=3, episodes=2))
    row = SimpleNamespace(return_=1.0)
    stages = []
    for _ in range(10):
        one.lead(np.array([0]), [100])
        one.reward[0] = 0.0
        one.returns += [row.return_]
        if len(one.returns) == 2:
            one.hand_over.note(float(np.mean(one.returns)))
            one.returns = []
        stages.append(one.hand_over.stage)
    assert stages == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_starts_by_value_follow_from_the_seeds_and_reach_every_value_alike() -> None:
    """The reward of a point falls with its distance from the goal."""
    one = leader(recorded(7, 8, 9, order="values", stages=LIMIT - 1), 60)
    obs, seeds = one.lead(np.arange(60), range(60)), list(range(60))
    assert np.array_equal(obs, leader(one.starts, 60).lead(np.arange(60), seeds))
    assert one._shares is not None and one._shares.sum() == pytest.approx(1.0)
    data = dataset(7, 8, 9)
    values = data.returns_to_go(DISCOUNT).numpy()
    np.testing.assert_allclose(np.array(one._snapshots)[:, 1], np.tile(np.arange(LIMIT), 3))
    labels = value_clusters(values, CLUSTERS)
    np.testing.assert_allclose(one._shares, even_shares(labels))
    begun = [np.abs(data.observations.numpy() - seen).sum(axis=1).argmin() for seen in obs[one.led > 0, -1]]
    assert set(labels[begun]) == set(range(CLUSTERS))


def test_starts_by_value_need_records() -> None:
    with pytest.raises(ConfigError, match=mentions("start.order back random start.dataset")):
        settings(guided=True, order="values")


def test_random_starts_follow_from_the_seeds_and_reach_both_ends() -> None:
    one, other = (leader(recorded(7, 8, order="random", stages=5), 60) for _ in range(2))
    seeds = list(range(60))
    first = one.lead(np.arange(60), seeds)
    second = np.concatenate([other.lead(np.array([row]), [row]) for row in seeds])
    assert np.array_equal(first, second)
    assert set(one.led.tolist()) == {parts * (LIMIT - 1) // 5 for parts in range(6)}


def test_a_guide_acts_for_whole_chunks_up_to_the_hand_over() -> None:
    one = leader(Starts(settings(guided=True, steps=5, stages=5), guide=Homing()))
    obs, rows = one.lead(np.arange(4), [1, 2, 3, 4]), np.arange(4)
    assert one.led.tolist() == [6] * 4  # 5 steps are 3 chunks of 2
    vector = PointEnv(LIMIT).make_vector(4)
    seen = vector.reset([1, 2, 3, 4])
    for _ in range(3):
        actions = Homing().act({"state": torch.from_numpy(seen).float()}, torch.Generator())
        seen = vector.step_chunk(actions.numpy()).obs
    np.testing.assert_allclose(obs, seen, atol=1e-6)
    one.hand_over.stage = 4
    one.lead(rows, [1, 2, 3, 4])
    assert one.led.tolist() == [2] * 4


class Leaving(Homing):
    """Drives out of bounds."""

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> Any:
        return torch.ones(len(obs["state"]), 2, 2)


def test_a_guide_whose_episode_ends_leads_half_as_far() -> None:
    one = leader(Starts(settings(guided=True), guide=Leaving()))
    one.lead(np.arange(4), [1, 2, 3, 4])
    ways = 0.5 * (1.6 - PointEnv(LIMIT).make_vector(4).reset([1, 2, 3, 4])[:, -1].max(axis=1)) / 0.2
    assert one.led.max() > 0 and (one.led < 2 * np.ceil(ways)).all()
    assert set(one.led.tolist()) <= {0, 2, 4, 10}


def test_the_first_episodes_that_a_guide_ends_are_the_measure() -> None:
    rows, seeds, vector = np.arange(4), [1, 2, 3, 4], PointEnv(LIMIT).make_vector(4)
    vector.reset(seeds)
    returns, ended = np.zeros(4), np.zeros(4, bool)
    for _ in range(LIMIT // 2):
        step = vector.step_chunk(np.ones((4, 2, 2), np.float32), ~ended)
        returns, ended = returns + step.rewards.sum(axis=1), ended | step.done
    wanted, count = returns[ended].mean(), int(ended.sum())
    assert count > 1
    one = leader(Starts(settings(guided=True, episodes=count, stages=3, tolerance=0.5), guide=Leaving()))
    one.lead(rows, seeds)
    assert one.hand_over.best == pytest.approx(wanted)
    for offset, stage in ((-10.0, 0), (0.0, 1)):  # of the learner's returns from the guide's
        own = wanted - one.reward[:count] + offset
        one.finished(rows[:count], [EpisodeRow(0, 0, float(r), 1, False, False, True) for r in own])
        assert one.hand_over.stage == stage


def pool(**options: Any) -> RolloutPool:
    starts = Starts(settings(guided=True, steps=6, stages=3, episodes=4, tolerance=0.9), guide=Homing())
    return RolloutPool(PointEnv(LIMIT), num_envs=4, num_workers=0, seed=3, starts=starts, **options)


def test_a_rollout_holds_what_the_learner_did_and_goes_on_exactly() -> None:
    first, second = pool(), pool()
    rollout = first.collect(Learner(), 12)
    led = [row.metrics[LED] for row in rollout.episodes]
    assert led and all(row.length + row.metrics[LED] == LIMIT for row in rollout.episodes)
    assert max(led) == 6 and min(led) < 6  # it has moved back
    second.load_state_dict(first.state_dict())
    after, again = first.collect(Learner(), 6), second.collect(Learner(), 6)
    assert torch.equal(after.record["seen"], again.record["seen"]) and after.episodes == again.episodes
    first.close()
    second.close()


def test_an_episode_of_another_task_is_refused_where_it_differs() -> None:
    data = Recorded.from_dataset(dataset(7))
    moved = Recorded(data.source, [8], data.actions, data.observations, data.values)
    with pytest.raises(ConfigError, match=mentions("start.dataset points point 8 10 steps start.guide")):
        leader(Starts(settings(), recorded=moved)).lead(np.array([0]), [1])


def test_episodes_without_seeds_or_success_are_refused() -> None:
    data = dataset(7)
    del data.episode_extras["seed"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=mentions("start.dataset points seeds burnish collect")):
        Recorded.from_dataset(data)
    data = dataset(7)
    data.episode_extras["success"][:] = False
    with pytest.raises(ConfigError, match=mentions("start.dataset points success")):
        Recorded.from_dataset(data)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("start.guide empty beside start.dataset")):
        StartSettings(guide="a", dataset="b")
    starts = Starts(settings(guided=True), guide=Homing())
    with pytest.raises(ConfigError, match=mentions("start.guide 1 2 policy.obs_steps")):
        Leader(starts, PointEnv(LIMIT).make_vector(1, obs_steps=2))


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_algorithms_of_both_kinds_learn_from_led_episodes(name: str) -> None:
    shape = PolicyConfig(
        process=TanhGaussianProcess() if name == "sac" else GaussianProcess(),
        backbone=MlpConfig(residual=False, hidden_dims=(8,), time_dim=4),
        horizon=2,
        act_steps=2,
        normalizer={"state": "identity", "action": "limits"},
    )
    small: Any = {
        "ppo": PpoConfig(num_envs=4, steps_per_iteration=8, batch_size=16, update_epochs=1),
        "sac": SacConfig(total_steps=200, warmup_steps=50, log_every=60, num_envs=2, critic_dims=(8,)),
    }
    lent: Any = lambda: recorded(7, order="random", stages=2)  # noqa: E731
    setup = Setup(env=PointEnv(LIMIT), policy=shape, starts=lent, num_workers=0, num_threads=1)
    assert setup.has_unused_starts
    run = small[name].build(setup)
    assert not setup.has_unused_starts
    assert 0 < float(run.advance()[f"rollout/{LED}"]) < LIMIT
    run.close()
