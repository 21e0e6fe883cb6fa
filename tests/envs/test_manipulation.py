"""`cube-single` against OGBench itself, stepped one by one."""

import warnings

import numpy as np
import pytest

pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")

from envs.collect import collect
from envs.datasets import read_dataset, write_robomimic
from envs.experts.ogbench import CubeDemonstrator
from envs.make import env as make_env
from envs.manipulation import CubeSingle
from policies.errors import CheckpointError, ConfigError


def make_official(task):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ogbench

        return ogbench.make_env_and_datasets(f"cube-single-play-singletask-task{task}-v0", env_only=True)


@pytest.fixture(scope="module")
def official():
    """OGBench's own environment, with all its wrappers."""
    return make_official(1)


@pytest.fixture
def seeded_settling(official, monkeypatch):
    """Let OGBench draw the two settling actions of a reset from the episode's seed, as we do."""
    from gymnasium.spaces import Box

    box = Box(np.float32(-1), np.float32(1), (5,), np.float32)
    monkeypatch.setattr(type(official.unwrapped), "action_space", box)
    return box


def random_actions(num_envs, steps, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (num_envs, steps, 5)).astype(np.float32)


def run_official(official, box, seed, actions):
    box.seed(seed)
    obs, rewards, ends = [official.reset(seed=seed)[0]], [], []
    for action in actions:
        o, reward, terminated, truncated, info = official.step(action)
        obs.append(o)
        rewards.append(reward)
        ends.append((terminated, truncated, info["success"]))
        if terminated or truncated:
            break
    return np.array(obs), np.array(rewards), np.array(ends)


def test_random_chunks_equal_ogbench_bit_for_bit(official, seeded_settling):
    seeds, actions = [3, 8], random_actions(2, 24)
    vector = CubeSingle().make_vector(2)
    first = vector.reset(seeds)
    steps = [vector.step_chunk(actions[:, i : i + 4]) for i in range(0, 24, 4)]
    path = np.concatenate([step.path for step in steps], axis=1)
    rewards = np.concatenate([step.rewards for step in steps], axis=1)
    for row, seed in enumerate(seeds):
        obs, reward, _ = run_official(official, seeded_settling, seed, actions[row])
        np.testing.assert_array_equal(first[row, 0], obs[0])
        np.testing.assert_array_equal(path[row], obs[1:])
        np.testing.assert_array_equal(rewards[row], reward)


def test_a_demonstration_replays_bit_for_bit_in_ogbench_up_to_its_success(official, seeded_settling):
    episode = CubeSingle(demonstrator=CubeDemonstrator(noise=0.1)).demonstrate(5)
    obs, rewards, ends = run_official(official, seeded_settling, 5, episode.actions)
    np.testing.assert_array_equal(episode.observations, obs)
    np.testing.assert_array_equal(episode.rewards, rewards)
    assert ends[-1].tolist() == [True, False, True]
    assert not ends[:-1].any()
    assert episode.terminated
    assert episode.success
    assert not episode.truncated


@pytest.mark.slow
@pytest.mark.parametrize("task", [2, 3, 4, 5])
def test_the_other_tasks_equal_ogbench_too(task, monkeypatch):
    from gymnasium.spaces import Box

    official, box = make_official(task), Box(np.float32(-1), np.float32(1), (5,), np.float32)
    monkeypatch.setattr(type(official.unwrapped), "action_space", box)
    episode = CubeSingle(task=task).demonstrate(7)
    obs, rewards, _ = run_official(official, box, 7, episode.actions)
    np.testing.assert_array_equal(episode.observations, obs)
    np.testing.assert_array_equal(episode.rewards, rewards)


def test_the_time_limit_is_ogbenchs(official):
    assert CubeSingle().spec.max_episode_steps == official.spec.max_episode_steps
    vector = CubeSingle(max_episode_steps=6).make_vector(1)
    vector.reset([0])
    step = vector.step_chunk(np.zeros((1, 8, 5), np.float32))
    assert (step.length[0], step.terminated[0], step.truncated[0]) == (6, False, True)


def test_an_episode_depends_on_its_seed_alone():
    config, actions = CubeSingle(), random_actions(1, 6)

    def episode(vector, row):
        first = vector.reset([21], rows=[row])
        chunk = np.repeat(actions, vector.num_envs, axis=0)
        active = np.arange(vector.num_envs) == row
        return np.concatenate([first[0], vector.step_chunk(chunk, active).path[row]])

    fresh = episode(config.make_vector(1), 0)
    used = config.make_vector(3)
    used.reset([1, 2, 3])
    used.step_chunk(random_actions(3, 8, seed=1))
    np.testing.assert_array_equal(episode(used, 1), fresh)
    assert not np.array_equal(used.reset([22], rows=[0])[0], fresh[:1])


def test_global_random_state_is_neither_read_nor_changed():
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    one = CubeSingle().demonstrate(2)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.seed(2)
    two = CubeSingle().demonstrate(2)
    np.testing.assert_array_equal(one.actions, two.actions)


def test_rows_do_not_disturb_each_other():
    actions = random_actions(3, 5)
    together = CubeSingle().make_vector(3)
    together.reset([4, 5, 6])
    path = together.step_chunk(actions).path
    alone = CubeSingle().make_vector(1)
    for row in range(3):
        alone.reset([4 + row])
        np.testing.assert_array_equal(alone.step_chunk(actions[row : row + 1]).path[0], path[row])


def test_a_saved_vector_continues_bit_for_bit():
    config, actions = CubeSingle(), random_actions(2, 16)
    vector = config.make_vector(2, obs_steps=2)
    vector.reset([1, 2])
    vector.step_chunk(actions[:, :8])
    state = vector.state_dict()
    expected = vector.step_chunk(actions[:, 8:])
    other = config.make_vector(2, obs_steps=2)
    other.reset([7, 8])
    other.step_chunk(actions[:, :3])
    other.load_state_dict(state)
    got = other.step_chunk(actions[:, 8:])
    np.testing.assert_array_equal(got.path, expected.path)
    np.testing.assert_array_equal(got.obs, expected.obs)
    with pytest.raises(CheckpointError, match="num_envs"):
        config.make_vector(1).load_state_dict(state)


def test_a_vector_saved_between_success_and_end_still_ends():
    episode = CubeSingle().demonstrate(0)
    vector = CubeSingle().make_vector(1)
    vector.reset([0])
    step = vector.step_chunk(episode.actions[None, :-1])
    assert not step.done[0]
    other = CubeSingle().make_vector(1)
    other.load_state_dict(vector.state_dict())
    last = other.step_chunk(episode.actions[None, -1:])
    assert bool(last.terminated[0] & last.success[0])
    assert last.rewards[0, 0] == 0.0


def test_environments_share_one_compiled_model(monkeypatch):
    import mujoco

    CubeSingle().make_vector(1)
    monkeypatch.setattr(mujoco.MjModel, "from_xml_string", None)  # compiling again would now fail
    vectors = [CubeSingle(task=task).make_vector(40) for task in (1, 2)]
    assert vectors[0].stepper.model is vectors[1].stepper.model


@pytest.mark.parametrize("task", [1, 4])
def test_the_oracle_always_succeeds(task):
    config = CubeSingle(task=task, demonstrator=CubeDemonstrator(noise=0.2))
    data = collect(config, episodes=5, keep_failures=True)
    assert bool(data.success.all())
    assert bool((data.lengths < 120).all())
    assert data.returns.tolist() == (1.0 - data.lengths.double()).tolist()


def test_demonstrations_survive_a_file_and_replay_from_it(tmp_path):
    config = CubeSingle()
    write_robomimic(tmp_path / "cube.hdf5", collect(config, episodes=2, first_seed=9), config)
    data = read_dataset(tmp_path / "cube.hdf5")
    vector = config.make_vector(1)
    vector.reset([int(data.episode_extras["seed"][1])])
    first, end = data.episode_start[1:].tolist()
    step = vector.step_chunk(data.actions[None, first:end].numpy())
    np.testing.assert_array_equal(step.path[0].astype(np.float32), data.next_observations[first:end])
    assert bool(step.success[0])


def test_the_configuration_is_registered_and_checked():
    config = make_env("cube-single", task=2)
    assert isinstance(config, CubeSingle)
    spec = config.spec
    assert len(spec.obs_names) == spec.obs_dim == 28
    assert len(spec.action_names) == spec.action_dim == len(spec.action_low) == 5
    assert config.make_vector(1).reset([0]).shape == (1, 1, 28)
    with pytest.raises(ConfigError, match="task of cube-single must be 1 to 5; got 6"):
        CubeSingle(task=6)
    with pytest.raises(ConfigError, match="noise >= 0"):
        CubeDemonstrator(noise=-1.0)


def test_a_missing_package_names_the_extra(monkeypatch):
    import sys

    from envs import manipulation
    from policies.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "ogbench", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'burnish\[ogbench\]'"):
        manipulation._cube_class.__wrapped__()
