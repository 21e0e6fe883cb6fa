import weakref
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch
from messages import mentions

from envs.datasets import Episode, read_dataset, write_robomimic
from envs.evaluation.policy_episodes import TOGETHER, policy_episodes
from envs.make import env as make_env
from envs.rollouts.collect import collect
from envs.spec import EnvSpec
from policies.build import build_policy
from policies.errors import CapabilityError, ConfigError, DatasetError
from policies.policy import PolicyConfig
from policies.registry import lookup

SPEC = EnvSpec("toy", "toy", 2, 1, (-1.0,), (1.0,), 10, 1.0, ("x", "y"), ("u",), success_rule="even seeds")


@dataclass(frozen=True)
class Wobble:
    noise: float = 0.0


@dataclass(frozen=True)
class Toy:
    """Succeeds on even seeds."""

    successes: bool = True
    expert: Wobble = field(default_factory=Wobble)
    spec = SPEC

    def demonstrate(self, seed):
        rng = np.random.default_rng(seed)
        length = 2 + seed % 3
        actions = self.expert.noise * rng.normal(size=(length, 1))
        success = self.successes and seed % 2 == 0
        obs = rng.normal(size=(length + 1, 2))
        return Episode(obs, actions, np.zeros(length), success, not success, success, seed)


@dataclass(frozen=True)
class NoExpert:
    spec = SPEC


def test_failures_are_dropped_and_counted():
    seen = []
    data = collect(Toy(), episodes=3, first_seed=11, progress=lambda kept, tried: seen.append((kept, tried)))
    assert data.episode_extras["seed"].tolist() == [12, 14, 16]
    assert bool(data.success.all())
    assert data.meta["attempts"] == 6
    assert seen == [(0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]


def test_workers_record_what_this_process_records():
    task = make_env("avoid", cameras=("top",), image_size=(8, 8))
    alone, together = (collect(task, episodes=3, noise=0.3, num_workers=n) for n in (0, 2))
    assert alone.meta == together.meta
    assert torch.equal(alone.observations, together.observations)
    assert torch.equal(alone.actions, together.actions)
    rows = torch.arange(len(alone.actions))
    assert torch.equal(alone.images["top"][rows], together.images["top"][rows])


def test_failures_are_kept_on_request():
    data = collect(Toy(), episodes=4, keep_failures=True)
    assert data.success.tolist() == [True, False, True, False]
    assert data.episode_extras["seed"].tolist() == [0, 1, 2, 3]


def test_episodes_are_let_go_of_one_by_one():
    made, alive = [], []

    class Counted(Toy):
        def demonstrate(self, seed):
            alive.append(sum(one() is not None for one in made))
            episode = super().demonstrate(seed)
            made.append(weakref.ref(episode))
            return episode

    assert collect(Counted(), episodes=6).num_episodes == 6
    assert max(alive) <= 3  # the first, which the others are compared with, the last one kept, a failure


def test_noise_reaches_the_expert():
    assert collect(Toy(), episodes=2).actions.abs().max() == 0
    assert collect(Toy(), episodes=2, noise=0.5).actions.abs().max() > 0


def test_collected_episodes_survive_a_file(tmp_path):
    data = collect(Toy(), episodes=3)
    write_robomimic(tmp_path / "toy.hdf5", data, Toy())
    back = read_dataset(tmp_path / "toy.hdf5")
    assert torch.equal(data.next_observations, back.next_observations)
    assert back.meta["env"] == {"name": "toy", "successes": True, "expert": {"noise": 0.0}}
    assert back.meta["env_args"]["env_name"] == "toy"


def test_what_cannot_be_collected_is_refused():
    with pytest.raises(CapabilityError, match=mentions("env=toy")):
        collect(NoExpert(), episodes=1)
    with pytest.raises(ConfigError, match=mentions("1 0 episodes")):
        collect(Toy(), episodes=0)
    with pytest.raises(DatasetError, match=mentions("toy 0 20 2")):
        collect(Toy(successes=False), episodes=2)


@pytest.mark.parametrize("name", ["avoid", "pointmaze-umaze"])
def test_the_episodes_of_a_policy_are_those_that_happened(name: str) -> None:
    """Replayed from its seed, every recorded action leads to the next recorded observation and reward."""
    options = {} if name == "avoid" else {"goal": "separate"}
    env = lookup("env", name)(max_episode_steps=9, **options)
    policy, first = reaching_out(env), 30
    data = collect(
        env, episodes=TOGETHER + 2, first_seed=first, keep_failures=True,
        played=lambda skip: policy_episodes(policy, env, first_seed=first, skip=skip),
    )  # fmt: skip
    assert data.meta["attempts"] == data.num_episodes == TOGETHER + 2
    assert data.actions.abs().max() == 1  # what was executed, not what was wanted
    step = torch.arange(data.num_frames) - data.episode_start[:-1].repeat_interleave(data.lengths)
    assert torch.equal(data.extras["decision"], step % 4 == 0)
    vector = env.make_vector(1)
    for i in (0, 1, TOGETHER + 1):
        first_frame, end = data.episode_start[i : i + 2].tolist()
        assert data.episode_extras["seed"][i] == first + i
        obs = vector.reset([first + i])[0, -1]
        for t in range(first_frame, end):
            np.testing.assert_allclose(data.observations[t], obs, atol=1e-6)
            for goal in vector.goals().values():
                np.testing.assert_allclose(data.extras["goal"][t], goal[0], atol=1e-6)
            step = vector.step_chunk(data.actions[t][None, None].numpy())
            obs = step.obs[0, -1]
            np.testing.assert_allclose(data.rewards[t], step.rewards[0, 0], atol=1e-6)
        last = end - 1
        assert (data.truncated[last], data.terminated[last]) == (step.truncated[0], step.terminated[0])


def test_episodes_of_a_policy_are_equal_for_any_number_of_processes() -> None:
    env = lookup("env", "avoid")(max_episode_steps=5)
    policy, kept = reaching_out(env), TOGETHER + 5
    parts = [islice(policy_episodes(policy, env, first_seed=7, num_workers=n), kept) for n in (0, 3)]
    for one, other in zip(*parts, strict=True):
        assert one.seed == other.seed
        assert np.array_equal(one.observations, other.observations)
        assert np.array_equal(one.actions, other.actions)


def test_a_policy_that_fails_too_often_is_not_called_an_expert() -> None:
    env = lookup("env", "avoid")(max_episode_steps=2)
    policy = reaching_out(env)
    with pytest.raises(DatasetError, match=mentions("policy 0 of 10 attempts keep_failures=true")):
        collect(env, episodes=1, played=lambda skip: policy_episodes(policy, env, first_seed=0, skip=skip))


def reaching_out(env):
    """Return an untrained policy whose actions exceed the box of the task."""
    one = {"state": torch.ones(env.spec.obs_dim), "action": 50 * torch.ones(env.spec.action_dim)}
    if env.spec.goal_dim:
        one["goal"] = torch.ones(env.spec.goal_dim)
    statistics = {name: {"min": -value, "max": value} for name, value in one.items()}
    return build_policy(
        PolicyConfig(horizon=4, act_steps=4), obs_dim=env.spec.obs_dim, action_dim=env.spec.action_dim,
        goal_dim=env.spec.goal_dim, statistics=statistics,
    )  # fmt: skip
