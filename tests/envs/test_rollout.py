"""Collection: the same numbers however the work is divided, whole episodes, exact resume."""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from torch import Tensor

from envs.make import env
from envs.rollouts.rollout import Rollout, RolloutPool
from policies.errors import CheckpointError, ConfigError, WorkerError

NUM_ENVS, STEPS, CHUNK = 3, 12, 4
TASK = env("hopper", max_episode_steps=22)
CPU = torch.device("cpu")


@dataclass
class Noisy:
    """Random actions, recorded; `scale` 0 makes it independent of the generator."""

    scale: float = 0.3

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        state = obs["state"]
        noise = torch.randn(len(state), CHUNK, 3, generator=generator)
        actions = 0.1 * state[:, -1, None, :3] + self.scale * noise
        return actions, {"actions": actions, "state": state}


class Broken:
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        raise RuntimeError("the actor is broken")


def pool(num_workers: int = 0, **options: Any) -> RolloutPool:
    options = {"num_envs": NUM_ENVS, "obs_steps": 2, "seed": 5, **options}
    return RolloutPool(options.pop("env", TASK), num_workers=num_workers, **options)


def assert_equal(a: Rollout, b: Rollout) -> None:
    assert a.episodes == b.episodes
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, dict):
            assert value.keys() == other.keys()
            assert all(torch.equal(value[key], other[key]) for key in value), name
        elif isinstance(value, Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), name


def test_one_worker_process_gives_the_numbers_of_none() -> None:
    here, there = pool(0), pool(1)
    for _ in range(2):
        assert_equal(here.collect(Noisy(), STEPS), there.collect(Noisy(), STEPS))
    there.close()


def test_one_decision_for_all_environments_gives_the_numbers_of_one_worker() -> None:
    here, there = pool(0), pool(2, acts_on=CPU)
    for reset in (False, True):
        done: list[int] = []
        told = there.collect(Noisy(), STEPS, reset=reset, on_progress=done.append)
        expected = here.collect(Noisy(), STEPS, reset=reset)
        assert done == [NUM_ENVS * (t + 1) for t in range(STEPS)]
        order = attrgetter("seed", "episode")
        assert sorted(told.episodes, key=order) == sorted(expected.episodes, key=order)
        told.episodes = expected.episodes = []
        at = torch.argsort(told.final_index[:, 0] * NUM_ENVS + told.final_index[:, 1])
        told.final_index, told.final_obs = told.final_index[at], {"state": told.final_obs["state"][at]}
        assert_equal(told, expected)
    there.close()


def test_environments_do_not_depend_on_how_they_are_divided() -> None:
    whole, parts = pool(0), pool(2)
    for reset in (False, False, True):
        a, b = (p.collect(Noisy(scale=0.0), STEPS, reset=reset) for p in (whole, parts))
        order = attrgetter("seed", "episode")
        assert sorted(a.episodes, key=order) == sorted(b.episodes, key=order)
        a.episodes = b.episodes = []
        where = torch.argsort(b.final_index[:, 0] * NUM_ENVS + b.final_index[:, 1])
        b.final_index = b.final_index[where]
        b.final_obs = {name: part[where] for name, part in b.final_obs.items()}
        assert_equal(a, b)
    parts.close()


def test_shapes_types_and_flags_agree_with_each_other() -> None:
    rollout = pool().collect(Noisy(), STEPS)
    state = rollout.obs["state"]
    assert state.shape == (STEPS, NUM_ENVS, 2, 11) and state.dtype == torch.float32
    assert rollout.rewards.shape == (STEPS, NUM_ENVS, CHUNK) and rollout.rewards.dtype == torch.float32
    assert rollout.length.dtype == torch.int64 and rollout.first.dtype == torch.bool
    assert rollout.next_obs_last["state"].shape == (NUM_ENVS, 2, 11)
    assert torch.equal(rollout.record["state"], state)
    done = rollout.terminated | rollout.truncated
    assert rollout.first[0].all() and torch.equal(rollout.first[1:], done[:-1])
    assert (rollout.length[~done] == CHUNK).all() and (rollout.length >= 1).all()
    past = torch.arange(CHUNK) >= rollout.length[..., None]
    assert (rollout.rewards[past] == 0).all()
    assert len(rollout.episodes) == int(done.sum()) > 0
    assert torch.equal(rollout.final_index, rollout.truncated.nonzero())


def test_final_observations_are_those_before_the_reset() -> None:
    """Replaying the recorded actions from the episode's seed leads to the final observation."""
    rollout = pool(env=env("halfcheetah", max_episode_steps=10), obs_steps=1).collect(Cheetah(), STEPS)
    assert len(rollout.final_index) == NUM_ENVS * (STEPS // 3)
    by_row = {(row.seed, row.episode): row for row in rollout.episodes}
    vector = env("halfcheetah", max_episode_steps=10).make_vector(1)
    for (t, n), final in zip(rollout.final_index.tolist(), rollout.final_obs["state"], strict=True):
        matches = [row for row in by_row.values() if row.episode == t // 3]
        reached = []
        for row in matches:
            vector.reset([row.seed])
            for s in range(t - 2, t + 1):
                step = vector.step_chunk(rollout.record["actions"][s, n][None].numpy())
            reached.append(step.obs[0].astype(np.float32))
        assert any((obs == final.numpy()).all() for obs in reached)
    last = rollout.final_obs["state"][rollout.final_index[:, 0] == STEPS - 1]
    assert torch.equal(rollout.next_obs_last["state"], last)


class Cheetah:
    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        actions = torch.rand(len(obs["state"]), CHUNK, 6, generator=generator) * 2 - 1
        return actions, {"actions": actions}


def test_episode_rows_count_rewards_and_steps_of_whole_episodes_across_collections() -> None:
    collector = pool(env=env("halfcheetah", max_episode_steps=10), num_envs=1)
    parts = [collector.collect(Cheetah(), 2) for _ in range(6)]
    rows = [row for part in parts for row in part.episodes]
    assert [row.length for row in rows] == [10] * 4 and [row.episode for row in rows] == [0, 1, 2, 3]
    rewards = torch.cat([part.rewards for part in parts])[:, 0].sum(dim=1).double()
    for k, row in enumerate(rows):
        assert row.return_ == pytest.approx(float(rewards[3 * k : 3 * k + 3].sum()), rel=1e-5)
        assert row.truncated and not row.terminated


def test_reset_begins_new_episodes_everywhere() -> None:
    collector = pool()
    collector.collect(Noisy(), 2)
    rollout = collector.collect(Noisy(), 1, reset=True)
    assert rollout.first.all()
    assert not collector.collect(Noisy(), 1).first.all()


@pytest.mark.parametrize(("num_workers", "acts_on"), [(0, None), (2, None), (0, CPU)])
def test_a_restored_pool_continues_bit_exactly(num_workers: int, acts_on: torch.device | None) -> None:
    source = pool(num_workers, acts_on=acts_on)
    source.collect(Noisy(), 7)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    expected = source.collect(Noisy(), STEPS)
    file.seek(0)
    restored = pool(num_workers, acts_on=acts_on)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(restored.collect(Noisy(), STEPS), expected)
    source.close()
    restored.close()


def test_a_state_of_another_division_is_refused() -> None:
    state = pool().state_dict()
    with pytest.raises(CheckpointError, match=mentions("(3, 1) (4, 1)")):
        pool(num_envs=4).load_state_dict(state)


def test_a_simulator_that_cannot_save_begins_new_episodes() -> None:
    source, restored = pool(), pool()
    for p in (source, restored):
        worker = p._workers._objects[0]  # type: ignore[attr-defined]
        worker._vector.stepper.can_save = False
    source.collect(Noisy(), 5)
    restored.load_state_dict(source.state_dict())
    assert restored.collect(Noisy(), 1).first.all()


def test_errors_of_the_actor_come_back_with_their_traceback() -> None:
    workers = pool(1)
    with pytest.raises(WorkerError, match=mentions("worker 0 actor broken")):
        workers.collect(Broken(), 1)


@dataclass(frozen=True)
class Explosive:
    """Builds, and fails when an episode begins."""

    spec: Any

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> Any:
        return self

    def reset(self, seeds: Any, rows: Any = None) -> None:
        raise RuntimeError("the scene cannot be loaded")

    def close(self) -> None:
        """Nothing to release."""


def test_errors_of_a_reset_come_back_with_their_traceback_and_end_the_pool() -> None:
    workers = RolloutPool(Explosive(env("hopper").spec), num_envs=2, num_workers=2)
    with pytest.raises(WorkerError, match=mentions("worker reset scene")):
        workers.collect(Noisy(), 1)
    with pytest.raises(WorkerError, match=mentions("closed")):
        workers.collect(Noisy(), 1)
    workers.close()


def test_a_worker_that_is_killed_while_it_rests_is_named() -> None:
    workers = pool(2)
    workers.collect(Noisy(), 1)
    os.kill(workers._workers.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match=mentions("1 2 killed 9")):
        workers.collect(Noisy(), 1)
    workers.close()


@pytest.mark.parametrize("options", [{"num_envs": 1, "num_workers": 2}, {"num_workers": -1}, {"num_envs": 0}])
def test_impossible_divisions_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=mentions("num_envs num_workers")):
        pool(**options)


def test_the_task_and_the_actor_travel_as_small_pickles() -> None:
    assert len(pickle.dumps(TASK)) < 1000
