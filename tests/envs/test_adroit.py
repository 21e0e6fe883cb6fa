"""Adroit's tasks against gymnasium-robotics itself, stepped one by one."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from messages import mentions
from pairwise import repeated

pytest.importorskip("gymnasium_robotics", reason="needs the extra 'adroit'")

from envs.datasets import read_dataset
from envs.engine.vector import ChunkVector
from envs.make import env
from envs.tasks.adroit.tasks import AdroitDoor, load_adroit
from policies.errors import DatasetError, MissingExtraError

TASKS = ("door", "hammer", "pen", "relocate")
STEPS = 24


def make_official(task: str, suffix: str = ""):
    import gymnasium

    with contextlib.redirect_stderr(io.StringIO()):
        import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return gymnasium.make(f"AdroitHand{task.capitalize()}{suffix}-v1", disable_env_checker=True)


def vector_of(task: str, num_envs: int = 1, **options: object) -> ChunkVector:
    vector = env(f"adroit-{task}", **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def random_actions(vector: ChunkVector, steps: int, seed: int = 0) -> np.ndarray:
    shape = (vector.num_envs, steps, vector.spec.action_dim)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.parametrize("task", TASKS)
def test_random_chunks_equal_gymnasium_robotics_bit_for_bit(task: str) -> None:
    official, vector, seeds = make_official(task), vector_of(task, 2), [5, 123456789]
    actions = random_actions(vector, STEPS)
    starts = vector.reset(seeds)[:, -1]
    chunks = [vector.step_chunk(actions[:, i : i + 4]) for i in range(0, STEPS, 4)]
    path = np.concatenate([chunk.path for chunk in chunks], axis=1)
    rewards = np.concatenate([chunk.rewards for chunk in chunks], axis=1)
    for row, seed in enumerate(seeds):
        np.testing.assert_array_equal(starts[row], official.reset(seed=seed)[0])
        for i, action in enumerate(actions[row]):
            obs, reward, _, _, info = official.step(action)
            np.testing.assert_array_equal(path[row, i], obs)
            assert rewards[row, i] == reward
            assert not info["success"] and not chunks[i // 4].success[row]
    official.close()


def solve(task: str, env) -> None:
    """Put the object of a task where it is wanted; gymnasium-robotics' environment, or the shared one."""
    data, model = env.data, env.model
    if task == "door":
        data.joint("door_hinge").qpos[:] = 1.45
    elif task == "hammer":
        data.joint("nail_dir").qpos[:] = data.qpos[26] + np.linalg.norm(
            data.site("nail_goal").xpos - data.site("S_target").xpos
        )
    elif task == "pen":
        # The wish is turned to the pen: its joints would need Euler angles.
        model.body("target").quat[:] = data.body("Object").xquat
    else:
        data.qpos[30:33] += data.site("target").xpos - data.body("Object").xpos


@pytest.mark.parametrize("task", TASKS)
def test_success_and_rewards_near_it_are_those_of_gymnasium_robotics(task: str) -> None:
    official, vector = make_official(task).unwrapped, vector_of(task)
    vector.reset([3])
    official.reset(seed=3)
    ours = vector.stepper._bind(0)
    for simulator in (ours, official):
        solve(task, simulator)
    vector.stepper._places = [view[None].copy() for view in vector.stepper._views]
    action = np.zeros((1, 1, vector.spec.action_dim), np.float32)
    step = vector.step_chunk(action)
    _, reward, _, _, info = official.step(action[0, 0])
    assert bool(step.success[0]) and bool(info["success"])
    assert step.rewards[0, 0] == reward and not step.done[0]


@pytest.mark.parametrize("task", TASKS)
def test_sparse_rewards_equal_those_of_the_sparse_ids(task: str) -> None:
    official, vector = make_official(task, "Sparse"), vector_of(task, reward="sparse")
    vector.reset([1])
    official.reset(seed=1)
    actions = random_actions(vector, 3)
    assert vector.step_chunk(actions).rewards[0].tolist() == [official.step(a)[1] for a in actions[0]]
    assert vector_of(task).spec.max_episode_steps == official.spec.max_episode_steps
    official.close()


@pytest.mark.parametrize("task", repeated(list(TASKS)))
def test_rows_with_different_scenes_do_not_disturb_each_other(task: str) -> None:
    together, alone = vector_of(task, 3), vector_of(task)
    actions = random_actions(together, 5)
    together.reset([4, 5, 6])
    path = together.step_chunk(actions).path
    for row in (2, 0, 1):
        alone.reset([4 + row])
        np.testing.assert_array_equal(alone.step_chunk(actions[row : row + 1]).path[0], path[row])


@pytest.mark.parametrize("task", repeated(list(TASKS)))
def test_a_saved_vector_continues_bit_for_bit_with_its_scene(task: str) -> None:
    vector, other = vector_of(task, 2), vector_of(task, 2)
    actions = random_actions(vector, 16)
    vector.reset([1, 2])
    vector.step_chunk(actions[:, :8])
    state = vector.state_dict()
    other.reset([7, 8])
    other.load_state_dict(state)
    expected, got = vector.step_chunk(actions[:, 8:]), other.step_chunk(actions[:, 8:])
    np.testing.assert_array_equal(got.path, expected.path)
    np.testing.assert_array_equal(got.rewards, expected.rewards)


def test_entries_of_the_observation_are_what_their_names_say() -> None:
    vector = vector_of("door")
    vector.reset([2])
    obs, data = vector.step_chunk(random_actions(vector, 6)).path[0, -1], vector.stepper.datas[0]
    at = {name: i for i, name in enumerate(vector.spec.obs_names)}
    assert obs[at["wrist joint 0 angle [rad]"]] == data.joint("WRJ0").qpos[0]
    assert obs[at["thumb joint 0 angle [rad]"]] == data.joint("THJ0").qpos[0]
    assert obs[at["latch angle [rad]"]] == data.joint("latch").qpos[0]
    assert obs[at["handle y [m]"]] == data.site("S_handle").xpos[1]


# -- recorded starts ---------------------------------------------------------------------------------------


def write_demonstrations(path: Path, seeds: list[int]) -> np.ndarray:
    """Write a short episode per seed, each from a pose of its own; returns the first observations (E, 39)."""
    official, rng = make_official("door").unwrapped, np.random.default_rng(0)
    obs, doors = [], []
    for seed in seeds:
        official.reset(seed=seed)
        state = official.get_env_state()
        state["qpos"][:28] += rng.uniform(0, 0.1, 28)
        official.set_env_state(state)
        doors.append(state["door_body_pos"])
        obs += [official._get_obs(), official.step(np.zeros(28))[0]]
    ends = np.tile([False, True], len(seeds))
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = np.float32(obs), np.zeros((len(obs), 28), np.float32)
        file["rewards"], file["terminals"] = np.zeros(len(obs), np.float32), np.zeros(len(obs), bool)
        file["timeouts"], file["infos/door_body_pos"] = ends, np.array(doors)
        file["infos/init_qpos"] = file["infos/init_qvel"] = np.zeros((len(seeds), 30))
    return np.array(obs[::2])


def test_episodes_begin_where_demonstrations_did_the_unobserved_slide_included(tmp_path: Path) -> None:
    path = tmp_path / "door.hdf5"
    expected = write_demonstrations(path, [0, 1, 2])
    vector = vector_of("door", 2, starts=str(path))
    got = np.concatenate([vector.reset([0, 1]), vector.reset([2, 3])])[:, -1]
    np.testing.assert_allclose(got[:3], expected, rtol=0, atol=1e-6)  # the file holds float32
    np.testing.assert_array_equal(got[3], got[0])  # seeds go round
    assert read_dataset(path).num_episodes == 3
    step = vector.step_chunk(random_actions(vector, 4))
    assert not np.array_equal(step.path[0], step.path[1])


def test_a_file_without_starts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "door.hdf5"
    write_demonstrations(path, [0, 1])
    with h5py.File(path, "a") as file:
        del file["infos/init_qpos"]
    with pytest.raises(DatasetError, match=mentions("infos/init_qpos shape (2, 30)")):
        AdroitDoor(starts=str(path)).make_vector(1)
    with h5py.File(path, "a") as file:
        del file["observations"]
        file["observations"] = np.zeros((4, 45), np.float32)
    with pytest.raises(DatasetError, match=mentions("39 (45,)")):
        AdroitDoor(starts=str(path)).make_vector(1)


def test_scores_are_those_of_the_reward_that_data_have() -> None:
    assert env("adroit-pen").spec.reference_scores is not None
    for other in ({"reward": "sparse"}, {"terminate_on_success": True}):
        assert env("adroit-pen", **other).spec.reference_scores is None


# -- mistakes ----------------------------------------------------------------------------------------------


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load_adroit.cache_clear()
    monkeypatch.setitem(sys.modules, "gymnasium_robotics.envs.adroit_hand.adroit_pen", None)
    with pytest.raises(MissingExtraError, match=mentions("gymnasium_robotics burnish[adroit]")):
        vector_of("pen")
