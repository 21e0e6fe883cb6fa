"""The actors that come with the package walk, each as well as its name says, and the same way every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import mentions
from pairwise import repeated

from burnish.commands.collect import record
from burnish.config.schema import compose_config
from envs.datasets import read_dataset
from envs.make import env
from envs.rollouts.collect import collect
from envs.tasks.locomotion.expert import EXPERTS, actor
from policies.errors import ConfigError

TASKS = ("hopper", "walker2d", "halfcheetah")
SCORES = {"expert": 50.0, "medium": 10.0}
"""Least D4RL score of the mean of two episodes."""


def walking(name: str, expert: str = "expert", **options: Any) -> Any:
    config: Any = env(name, **{k: v for k, v in options.items() if k == "max_episode_steps"})
    return replace(config, expert=replace(config.expert, tier=expert))


@pytest.mark.parametrize("name", repeated(TASKS))
def test_returns_are_ordered_as_the_names_are(name: str) -> None:
    low, high = env(name).spec.reference_scores or (0.0, 1.0)
    scores = {}
    for tier in ("expert", "medium", "random"):
        returns = collect(walking(name, tier), episodes=1, first_seed=10**6).returns
        scores[tier] = 100 * (float(returns.mean()) - low) / (high - low)
    assert scores["expert"] > SCORES["expert"], scores
    assert SCORES["medium"] < scores["medium"] < 0.7 * scores["expert"], scores
    assert abs(scores["random"]) < 5, scores


@pytest.mark.parametrize("expert", ["expert", "random", "mixed"])
def test_an_episode_follows_from_its_seed(expert: str) -> None:
    task = walking("hopper", expert, max_episode_steps=40)
    first, again, other = (task.demonstrate(seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.observations, again.observations)
    np.testing.assert_array_equal(first.actions, again.actions)
    assert first.observations[0].tolist() != other.observations[0].tolist()


def test_the_recorded_episode_is_what_the_simulator_does() -> None:
    """Its actions, noise included, lead to its observations and rewards in the exact engine."""
    task = replace(walking("hopper", max_episode_steps=60))
    noisy = replace(task, expert=replace(task.expert, noise=0.2))
    episode = noisy.demonstrate(5)
    assert np.abs(episode.actions).max() <= 1 and episode.actions.dtype == np.float32
    vector = task.make_vector(1)
    np.testing.assert_array_equal(vector.reset([5])[0, 0], episode.observations[0])
    step = vector.step_chunk(episode.actions[None])
    np.testing.assert_array_equal(step.path[0], episode.observations[1:])
    np.testing.assert_array_equal(step.rewards[0], episode.rewards)
    assert (bool(step.terminated[0]), bool(step.truncated[0])) == (episode.terminated, episode.truncated)


def test_mixed_episodes_are_walked_by_several() -> None:
    task = walking("halfcheetah", "mixed", max_episode_steps=100)
    returns = collect(task, episodes=12).returns
    assert returns.min() < 50 < 200 < returns.max()


@pytest.mark.parametrize(("first", "count"), [(0, 4), (7, 4), (10**6, 5), (10**6 + 1, 1)])
def test_medium_and_expert_take_turns(first: int, count: int) -> None:
    """Every episode is that of one of the two and its seed, and half of them are each's."""
    tiers = ("medium", "expert")
    both = collect(walking("hopper", "medium-expert", max_episode_steps=5), episodes=count, first_seed=first)
    walked = {tier: walking("hopper", tier, max_episode_steps=5) for tier in tiers}
    found = []
    for number, seed in enumerate(range(first, first + count)):
        actions = {tier: walked[tier].demonstrate(seed).actions for tier in tiers}
        same = [tier for tier in tiers if np.array_equal(actions[tier], both.select([number]).actions)]
        found += same
    assert found == [tiers[seed % 2] for seed in range(first, first + count)]
    assert abs(found.count("medium") - found.count("expert")) == count % 2


def test_a_dataset_is_recorded_with_its_returns(tmp_path: Path) -> None:
    asked = ["env=halfcheetah", "expert=medium", "noise=0.1", "episodes=2", "env.max_episode_steps=20"]
    files = [tmp_path / name for name in ("a.hdf5", "b.hdf5")]
    for file in files:
        record(compose_config("collect", [*asked, f"out={file}"]))
    data, again = (read_dataset(file) for file in files)
    assert data.num_episodes == 2 and data.truncated.sum() == 2
    np.testing.assert_array_equal(data.actions, again.actions)
    task = walking("halfcheetah", "medium", max_episode_steps=20)
    task = replace(task, expert=replace(task.expert, noise=0.1))
    expected = [task.demonstrate(1_000_000 + i).rewards.sum() for i in range(2)]
    np.testing.assert_allclose(data.returns, expected, rtol=1e-5)


def test_actors_carry_their_origin_and_are_small() -> None:
    import assets

    folder = Path(assets.__file__).parent / "actors"
    for name in TASKS:
        for tier in ("expert", "medium"):
            assert actor(name, tier).obs_dim == env(name).spec.obs_dim
            assert "mean_return" in (folder / name / tier / "config.json").read_text()
    assert sum(file.stat().st_size for file in folder.rglob("*")) < 2e6


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"env.expert.tier must be one of {', '.join(EXPERTS)}; got 'best'"):
        compose_config("collect", ["env=hopper", "env.expert.tier=best"])
    with pytest.raises(ConfigError, match=f"env.expert.tier must be one of {', '.join(EXPERTS)}; got 'best'"):
        collect(env("hopper"), episodes=1, expert="best")
    with pytest.raises(ConfigError, match=mentions("expert=medium")):
        collect(env("avoid"), episodes=1, expert="medium")
