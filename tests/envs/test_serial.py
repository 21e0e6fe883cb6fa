"""The plain engine over gymnasium environments."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from messages import mentions

from envs.make import env
from envs.tasks.gym.task import Gym
from policies.errors import ConfigError


def test_it_equals_the_fast_engine() -> None:
    plain, fast = Gym(id="Hopper-v5", max_episode_steps=21), env("hopper", max_episode_steps=21)
    a, b = plain.make_vector(3, obs_steps=2), fast.make_vector(3, obs_steps=2)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(a.reset([0, 1, 2]), b.reset([0, 1, 2]))
    for _ in range(40):
        actions = rng.normal(size=(3, 4, 3))
        left, right = a.step_chunk(actions), b.step_chunk(actions)
        for field in ("obs", "rewards", "length", "terminated", "truncated", "path"):
            np.testing.assert_array_equal(getattr(left, field), getattr(right, field))
        if left.done.any():
            seeds = list(range(int(left.done.sum())))
            np.testing.assert_array_equal(a.reset(seeds, left.done), b.reset(seeds, left.done))
    a.close()


def test_it_describes_what_gymnasium_says() -> None:
    config = Gym(id="Pendulum-v1")
    assert (config.spec.obs_dim, config.spec.action_dim, config.spec.max_episode_steps) == (3, 1, 200)
    assert config.spec.action_low == (-2.0,) and config.spec.control_hz == pytest.approx(20.0)
    assert pickle.loads(pickle.dumps(config)) == config
    assert not config.make_vector(1).can_save


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1"])
def test_discrete_tasks_are_refused(env_id: str) -> None:
    with pytest.raises(ConfigError, match=mentions("Box Discrete")):
        _ = Gym(id=env_id).spec
