"""Meta-World's tasks against Meta-World itself."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from messages import mentions

from envs.engine.vector import ChunkVector
from envs.make import env
from envs.rollouts.collector import map_leaves
from envs.rollouts.rollout import _to_array, _to_tensor
from envs.tasks.metaworld.expert import ScriptedExpert
from envs.tasks.metaworld.tasks import TASKS, MetaworldStepper, load_metaworld
from policies.errors import ConfigError, MissingExtraError

SOME = ("reach", "pick-place", "lever-pull", "door-lock")
"""Tasks of different kinds: without an object, with one, with places in the model, with two objects."""


@pytest.fixture(scope="module")
def simulator() -> None:
    """Meta-World, or a skip that says why not."""
    pytest.importorskip("metaworld", reason="needs the extra 'metaworld' and one more step, see the README")


def vector_of(task: str, num_envs: int = 1, **options: object) -> ChunkVector:
    vector = env("metaworld", task=task, **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def random_actions(num_envs: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (num_envs, steps, 4)).astype(np.float32)


def make_official(task: str):
    """Meta-World's own environment of a multi-task benchmark, with a place of its choice."""
    import metaworld

    benchmark = metaworld.MT1(f"{task}-v3", seed=3)
    official = benchmark.train_classes[f"{task}-v3"]()
    official.set_task(benchmark.train_tasks[0])
    return official


@pytest.mark.parametrize("task", SOME)
def test_steps_equal_those_of_meta_world_at_the_same_place(task: str, simulator: None) -> None:
    stepper = MetaworldStepper(task, 2)
    starts = [stepper.reset(row, seed) for row, seed in enumerate((4, 5))]
    official, actions = make_official(task), random_actions(2, 20)
    for row in (0, 1):
        official._last_rand_vec = np.array(stepper._variables[row]["_last_rand_vec"])
        obs, _ = official.reset()
        np.testing.assert_array_equal(starts[row], obs)
    paths: list[list[np.ndarray]] = [[], []]
    rewards: list[list[float]] = [[], []]
    for j in range(20):
        step = stepper.step(np.arange(2), actions[:, j])
        for row in (0, 1):
            paths[row].append(step.obs[row])
            rewards[row].append(step.reward[row])
    for j, action in enumerate(actions[1]):  # its last reset was to the place of row 1
        obs, reward, _, _, info = official.step(action)
        np.testing.assert_array_equal(paths[1][j], obs)
        assert rewards[1][j] == reward and not info["success"]


@pytest.mark.parametrize("task", SOME)
def test_an_episode_follows_from_its_seed_whatever_happened_before(task: str, simulator: None) -> None:
    used, fresh, actions = vector_of(task, 2), vector_of(task), random_actions(1, 6)
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    used.reset([1, 2])
    used.step_chunk(random_actions(2, 30, seed=1))
    np.testing.assert_array_equal(used.reset([9], [0]), fresh.reset([9]))
    both = np.concatenate([actions, random_actions(1, 6, seed=2)])
    np.testing.assert_array_equal(used.step_chunk(both).path[0], fresh.step_chunk(actions).path[0])
    assert not np.array_equal(used.reset([9], [0]), used.reset([10], [1]))
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("task", SOME)
def test_a_saved_vector_continues_bit_for_bit(task: str, simulator: None) -> None:
    vector, other, actions = vector_of(task, 2), vector_of(task, 2), random_actions(2, 16)
    vector.reset([1, 2])
    vector.step_chunk(actions[:, :8])
    state = vector.state_dict()
    expected = vector.step_chunk(actions[:, 8:])
    other.reset([7, 8])
    other.load_state_dict(map_leaves(map_leaves(state, _to_tensor), _to_array))  # as a run saves it
    got = other.step_chunk(actions[:, 8:])
    np.testing.assert_array_equal(got.path, expected.path)
    np.testing.assert_array_equal(got.rewards, expected.rewards)


def test_the_goal_is_observed(simulator: None) -> None:
    vector = vector_of("reach")
    obs = vector.reset([0])[0, -1]
    np.testing.assert_array_equal(obs[-3:], vector.stepper._variables[0]["_target_pos"])
    assert np.abs(obs[-3:]).min() > 0
    np.testing.assert_array_equal(obs[:18], obs[18:36])  # the frame before the first is the first


@pytest.mark.parametrize("task", ["reach", "drawer-open", "button-press-topdown"])
def test_the_scripted_policy_succeeds_despite_noise(task: str, simulator: None) -> None:
    config = env("metaworld", task=task, expert=ScriptedExpert(noise=0.1, hold=5))
    episode = config.demonstrate(3)
    assert episode.success and episode.truncated and not episode.terminated
    vector = vector_of(task)
    vector.reset([3])
    step = vector.step_chunk(episode.actions[None])
    np.testing.assert_array_equal(step.path[0], episode.observations[1:])
    first = vector_of(task)
    first.reset([3])
    assert not first.step_chunk(episode.actions[None, :-6]).success[0]  # it ends 5 steps after success
    ended = replace(config, terminate_on_success=True).demonstrate(3)  # type: ignore[type-var]
    assert ended.terminated and not ended.truncated and len(ended.actions) == len(episode.actions) - 5


def test_the_list_of_tasks_is_meta_worlds(simulator: None) -> None:
    from metaworld.policies import ENV_POLICY_MAP

    assert sorted(f"{task}-v3" for task in TASKS) == sorted(ENV_POLICY_MAP)


def test_sizes_and_limit_are_meta_worlds(simulator: None) -> None:
    spec, official = env("metaworld", task="push").spec, make_official("push")
    assert (spec.obs_dim, spec.action_dim) == (
        *official.observation_space.shape,
        *official.action_space.shape,
    )
    assert spec.max_episode_steps == official.max_path_length
    assert spec.control_hz == pytest.approx(1 / official.dt)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("50 pick_place")):
        env("metaworld", task="pick_place")


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load_metaworld.cache_clear()
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(MissingExtraError, match=mentions("burnish[metaworld]")):
        vector_of("reach")
