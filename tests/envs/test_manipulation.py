"""OGBench's manipulation tasks against OGBench itself, stepped one by one."""

import dataclasses
import functools
import itertools
import warnings

import gymnasium
import numpy as np
import pytest
from messages import mentions
from pairwise import everything, repeated

pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")

from envs.datasets import read_dataset, write_robomimic
from envs.datasets.convert import as_dataset
from envs.make import env as make_env
from envs.rollouts.collect import collect
from envs.tasks.ogbench.expert import OracleExpert
from envs.tasks.ogbench.plans import fewest_presses, next_move
from envs.tasks.ogbench.tasks import CubeSingle
from policies.errors import CheckpointError, ConfigError

WORLDS = {"cube-double": (37, 500), "cube-triple": (46, 1000), "scene": (40, 750)}
WORLDS |= {"puzzle-3x3": (55, 500), "puzzle-4x4": (83, 500)}
REPLAYED = [("scene", 1, 0.1), ("puzzle-3x3", 1, 0.0)]
"""Worlds, tasks and noise: a cube, a drawer, a window and locks; lights. With `--all` every task."""
if everything:
    REPLAYED = list(itertools.product(WORLDS, range(1, 6), [0.0, 0.1]))


@functools.cache
def official_world(world):
    """OGBench's own environment of a world, with all its wrappers; its model takes over a second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ogbench

        return ogbench.make_env_and_datasets(f"{world}-play-singletask-task1-v0", env_only=True)


def make_official(task, world="cube-single"):
    """One of OGBench's single tasks; its environments differ in the number of the task alone."""
    official = official_world(world)
    one, other = (gymnasium.spec(f"{world}-singletask-task{number}-v0") for number in (1, task))
    assert {**other.kwargs, "reward_task_id": 1} == one.kwargs and other.kwargs["reward_task_id"] == task
    assert (other.entry_point, other.max_episode_steps) == (one.entry_point, one.max_episode_steps)
    official.unwrapped._reward_task_id = task
    return official


def seed_settling(official, monkeypatch):
    """Let OGBench draw the settling actions of a reset from the episode's seed, as we do."""
    from gymnasium.spaces import Box

    box = Box(np.float32(-1), np.float32(1), (5,), np.float32)
    monkeypatch.setattr(type(official.unwrapped), "action_space", box)
    return box


@pytest.fixture
def official():
    """OGBench's first task of `cube-single`."""
    return make_official(1)


@pytest.fixture
def seeded_settling(official, monkeypatch):
    """OGBench's `cube-single` with settling actions from the seed."""
    return seed_settling(official, monkeypatch)


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
    episode = CubeSingle(expert=OracleExpert(noise=0.1)).demonstrate(5)
    obs, rewards, ends = run_official(official, seeded_settling, 5, episode.actions)
    np.testing.assert_array_equal(episode.observations, obs)
    np.testing.assert_array_equal(episode.rewards, rewards)
    assert ends[-1].tolist() == [True, False, True]
    assert not ends[:-1].any()
    assert episode.terminated
    assert episode.success
    assert not episode.truncated


@pytest.mark.slow
@pytest.mark.parametrize("task", repeated([3, 2, 4, 5]))
def test_the_other_tasks_equal_ogbench_too(task, monkeypatch):
    official = make_official(task)
    box = seed_settling(official, monkeypatch)
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
    with pytest.raises(CheckpointError, match=mentions("num_envs")):
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


@pytest.mark.parametrize("task", repeated([4, 1]))
def test_the_oracle_always_succeeds(task):
    config = CubeSingle(task=task, expert=OracleExpert(noise=0.2))
    data = collect(config, episodes=3, keep_failures=True)
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
    with pytest.raises(ConfigError, match=r"env\.task must be in \[1, 5\]; got 6"):
        CubeSingle(task=6)
    with pytest.raises(ConfigError, match=r"env\.expert\.noise must be at least 0; got -1"):
        OracleExpert(noise=-1.0)


def test_a_missing_package_names_the_extra(monkeypatch):
    import sys

    from envs.tasks.ogbench.stepper import load_world
    from policies.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "ogbench", None)
    with pytest.raises(MissingExtraError, match=mentions("burnish[ogbench]")):
        load_world.__wrapped__("cube-single")


# -- the other worlds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "task", "noise"), REPLAYED)
def test_a_demonstration_in_another_world_replays_bit_for_bit_in_ogbench(world, task, noise, monkeypatch):
    official, config = make_official(task, world), make_env(world, task=task)
    episode = dataclasses.replace(config, expert=OracleExpert(noise=noise)).demonstrate(7)
    obs, rewards, ends = run_official(official, seed_settling(official, monkeypatch), 7, episode.actions)
    assert (config.spec.obs_dim, config.spec.max_episode_steps) == WORLDS[world]
    assert official.spec.max_episode_steps == WORLDS[world][1]
    np.testing.assert_array_equal(episode.observations, obs)
    np.testing.assert_array_equal(episode.rewards, rewards)
    assert ends[-1].tolist() == [True, False, True] and not ends[:-1].any()
    parts = 2 if task == 1 and world.startswith("cube") else 3  # task 1 of cubes moves one of them
    assert episode.success and rewards[-1] == 0 and len(set(rewards.tolist())) >= parts


@pytest.mark.parametrize("world", repeated(["scene", "puzzle-3x3"]))
def test_locks_and_lights_of_rows_do_not_disturb_each_other(world):
    """Row 0 is played by the expert beside rows in which other buttons are pressed."""
    config = make_env(world, task=2)
    episode = config.demonstrate(0)
    together = config.make_vector(3)
    together.reset([0, 1, 2])
    steps = min(60, len(episode.actions))
    chunk = np.stack([episode.actions[:steps], -episode.actions[:steps], random_actions(1, steps)[0]])
    path = together.step_chunk(chunk).path
    np.testing.assert_array_equal(path[0], episode.observations[1 : steps + 1])


@pytest.mark.parametrize("world", repeated(["puzzle-3x3", "scene"]))
def test_a_world_saved_amid_a_demonstration_continues_bit_for_bit(world):
    config = make_env(world, task=2)
    episode = config.demonstrate(0)
    half = len(episode.actions) // 2
    vector, other = config.make_vector(1), config.make_vector(1)
    vector.reset([0])
    vector.step_chunk(episode.actions[None, :half])
    state = vector.state_dict()
    other.reset([5])
    other.load_state_dict(state)
    vector.reset([9])  # a world of the same process goes elsewhere meanwhile
    step = other.step_chunk(episode.actions[None, half:])
    np.testing.assert_array_equal(step.path[0], episode.observations[half + 1 :])
    assert bool(step.terminated[0] & step.success[0])


def test_fewest_presses_turn_exactly_the_wrong_lights_and_are_fewest():
    rng = np.random.default_rng(0)
    neighbours = [[j for j in range(9) if abs(i // 3 - j // 3) + abs(i % 3 - j % 3) <= 1] for i in range(9)]
    for wrong in rng.integers(0, 2, (20, 9)).astype(bool):
        found = fewest_presses(wrong, 3)
        turned = np.zeros(9, bool)
        for press in found:
            turned[neighbours[press]] ^= True
        np.testing.assert_array_equal(turned, wrong)
    assert len(fewest_presses(np.ones(16, bool), 4)) == 4  # of sixteen solutions
    with pytest.raises(ValueError, match=mentions("presses")):
        fewest_presses(np.eye(16, dtype=bool)[0], 4)


def test_moves_take_the_upper_cube_first_and_make_room_for_a_swap():
    low, high, beside = [0.4, 0.0, 0.02], [0.4, 0.0, 0.06], [0.4, 0.2, 0.02]
    places = np.array([low, high])
    cube, spot = next_move(places, np.array([beside, low]))
    assert cube == 1 and np.linalg.norm(spot[:2] - low[:2]) > 0.06  # its target is under the other cube
    cube, spot = next_move(places, np.array([low, beside]))
    assert cube == 1 and spot.tolist() == beside
    swap = np.array([low, beside])
    cube, spot = next_move(swap, swap[::-1])
    assert min(np.linalg.norm(swap[:, :2] - spot[:2], axis=1)) > 0.06
    cube, _ = next_move(np.array([beside, [0.3, -0.2, 0.02]]), np.array([high, low]))
    assert cube == 1  # what a cube shall lie on comes first
    assert next_move(swap, swap) is None


# -- play --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", repeated(["noisy", "play"]))
def test_play_follows_from_its_seed_and_reaches_drawn_targets(mode):
    config = make_env("puzzle-3x3", expert=OracleExpert(mode=mode, length=120))
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    short = make_env("puzzle-3x3", expert=OracleExpert(mode=mode, length=20))
    one, same, other = config.demonstrate(3), short.demonstrate(3), short.demonstrate(4)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.testing.assert_array_equal(one.actions[:20], same.actions)
    assert not np.array_equal(same.actions, other.actions)
    assert len(one.actions) == 120 and one.truncated and one.success and not one.terminated
    buttons = one.extras["button_states"]
    assert (np.abs(np.diff(buttons, axis=0)).sum(axis=1) > 0).sum() >= 2
    wanted = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1]]).reshape(-1)  # of OGBench's first task
    np.testing.assert_array_equal(one.rewards, (buttons == wanted).sum(axis=1) - 9.0)
    np.testing.assert_array_equal(one.extras["masks"], np.ones(120))


def test_values_end_where_play_solves_the_task_by_chance(monkeypatch):
    from envs.tasks.ogbench import play

    rewards = iter([-1.0, 0.0, -1.0, 0.0, 0.0])
    monkeypatch.setattr(play._TaskRewards, "update", lambda self, other: self.rewards.append(next(rewards)))
    episode = make_env("cube-single", expert=OracleExpert(mode="play", length=5)).demonstrate(0)
    np.testing.assert_array_equal(episode.extras["masks"], [1, 0, 1, 0, 0])
    assert as_dataset([episode]).over.tolist() == [False, True, False, True, True]


def test_scenes_whose_cube_leaves_the_view_are_not_kept():
    from envs.tasks.ogbench.play import stays_visible

    qpos = np.zeros((3, 30))
    qpos[:, 15], qpos[:, 16] = 0.1, 0.02
    assert stays_visible(qpos)
    qpos[1, 15] = -0.35
    assert not stays_visible(qpos)
    qpos[1, 16] = 0.07  # inside the drawer
    assert stays_visible(qpos)
    qpos[2, 15] = 0.3
    assert not stays_visible(qpos)


def test_options_of_the_expert_are_checked():
    with pytest.raises(ConfigError, match="mode must be one of task, play, noisy; got 'plan'"):
        OracleExpert(mode="plan")
    with pytest.raises(ConfigError, match=r"noise must be 0 with mode=play.*got 0\.1"):
        OracleExpert(mode="play", noise=0.1)
    with pytest.raises(ConfigError, match="length must be at least 1"):
        OracleExpert(mode="play", length=0)
