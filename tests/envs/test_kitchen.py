"""The kitchen against gymnasium-robotics itself, stepped one by one."""

from __future__ import annotations

import contextlib
import io
import sys

import numpy as np
import pytest
import torch
from messages import mentions
from pairwise import everything

pytest.importorskip("gymnasium_robotics", reason="needs the extra 'kitchen'")

from envs.engine.vector import ChunkVector
from envs.make import env
from envs.tasks.kitchen import load_kitchen
from policies.errors import MissingExtraError

STEPS = 12
GOALS = {  # where the sub-tasks want the positions of their objects
    "microwave": (22, [-0.75]),
    "kettle": (23, [-0.23, 0.75, 1.62, 0.99, 0.0, 0.0, -0.06]),
    "bottom burner": (11, [-0.88, -0.01]),
    "light switch": (17, [-0.69, -0.05]),
    "slide cabinet": (19, [0.37]),
}
POSITIONS = np.r_[0:9, 18:39]  # of the robot and of the objects, in the official observation


@pytest.fixture(scope="module")
def official():
    """gymnasium-robotics' own environment with the sub-tasks of `kitchen-mixed`."""
    import gymnasium

    with contextlib.redirect_stderr(io.StringIO()):
        import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    tasks = ["microwave", "kettle", "bottom burner", "light switch"]
    made = gymnasium.make("FrankaKitchen-v1", tasks_to_complete=tasks, disable_env_checker=True)
    yield made
    made.close()


def vector_of(num_envs: int = 1, name: str = "kitchen-mixed", **options: object) -> ChunkVector:
    vector = env(name, **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def random_actions(num_envs: int, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (num_envs, steps, 9))


def place(data, task: str) -> None:
    """Put the objects of a sub-task where it wants them."""
    first, goal = GOALS[task]
    data.qpos[first : first + len(goal)] = goal


def test_random_chunks_equal_gymnasium_robotics_bit_for_bit(official) -> None:
    seeds, actions = [5, 123456789], random_actions(2, STEPS)
    vector = vector_of(2)
    starts = vector.reset(seeds)[:, -1]
    chunks = [vector.step_chunk(actions[:, i : i + 4]) for i in range(0, STEPS, 4)]
    path = np.concatenate([chunk.path for chunk in chunks], axis=1)
    for row, seed in enumerate(seeds):
        expected = official.reset(seed=seed)[0]["observation"][POSITIONS]
        np.testing.assert_array_equal(starts[row, :30], expected)
        for i, action in enumerate(actions[row]):
            expected = official.step(action)[0]["observation"][POSITIONS]
            np.testing.assert_array_equal(path[row, i, :30], expected)


def test_subtasks_count_once_and_as_gymnasium_robotics_counts_them(official) -> None:
    vector, robot = vector_of(), official.unwrapped.robot_env
    vector.reset([0])
    official.reset(seed=0)
    stages = (["microwave", "kettle"], [], ["bottom burner"], ["light switch"])
    for stage, done, action in zip(stages, (2, 2, 3, 4), random_actions(4, 1), strict=True):
        for task in stage:
            place(vector.stepper.datas[0], task)
            place(robot.data, task)
        step = vector.step_chunk(action[None])
        _, reward, terminated, truncated, _ = official.step(action[0])
        assert step.rewards[0, 0] == reward == len(stage)
        assert step.metrics["subtasks"].tolist() == [done]
        assert step.terminated[0] == step.success[0] == terminated == (done == 4)
        assert not step.truncated[0] and not truncated


def test_the_wanted_positions_are_the_second_half_of_the_observation() -> None:
    for name, tasks in (
        ("kitchen-complete", ("microwave", "kettle", "light switch", "slide cabinet")),
        ("kitchen-partial", ("microwave", "kettle", "light switch", "slide cabinet")),
        ("kitchen-mixed", ("microwave", "kettle", "bottom burner", "light switch")),
    ):
        wanted = np.zeros(30)
        for task in tasks:
            first, goal = GOALS[task]
            wanted[first : first + len(goal)] = goal
        obs = vector_of(name=name).reset([0])
        assert obs.shape == (1, 1, 60)
        np.testing.assert_array_equal(obs[0, 0, 30:], wanted)
        spec = env(name).spec
        assert (spec.action_dim, spec.max_episode_steps, spec.reference_scores) == (9, 280, (0.0, 4.0))
        assert all(task in spec.success_rule for task in tasks)


def test_observations_are_copies() -> None:
    vector = vector_of()
    first = vector.reset([0])
    before = first.copy()
    vector.step_chunk(random_actions(1, 4))
    np.testing.assert_array_equal(first, before)


def test_the_limit_truncates_and_the_last_subtask_terminates() -> None:
    vector = vector_of(2, max_episode_steps=2)
    vector.reset([0, 0])
    for task in ("microwave", "kettle", "bottom burner"):
        place(vector.stepper.datas[0], task)
    vector.step_chunk(np.zeros((2, 1, 9)))
    place(vector.stepper.datas[0], "light switch")
    step = vector.step_chunk(np.zeros((2, 3, 9)))
    assert step.length.tolist() == [1, 1] and step.truncated.all()
    assert step.terminated.tolist() == step.success.tolist() == [True, False]
    assert step.rewards.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert step.metrics["subtasks"].tolist() == [4, 0]


def test_an_episode_follows_from_its_seed_whatever_happened_before() -> None:
    used, fresh, actions = vector_of(), vector_of(), random_actions(1, 4)
    used.reset([1])
    place(used.stepper.datas[0], "kettle")
    used.step_chunk(random_actions(1, 8, seed=1))
    before = np.random.get_state()[1].copy()
    np.testing.assert_array_equal(used.reset([9]), fresh.reset([9]))
    left, right = used.step_chunk(actions), fresh.step_chunk(actions)
    np.testing.assert_array_equal(left.path, right.path)
    assert left.metrics["subtasks"] == right.metrics["subtasks"]
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_a_state_saved_as_plain_values_continues_with_the_same_noise() -> None:
    vector, other = vector_of(), vector_of()
    vector.reset([4])
    place(vector.stepper.datas[0], "microwave")
    vector.step_chunk(random_actions(1, 4))
    state = vector.stepper.get_state()
    file = io.BytesIO()
    torch.save({**state, **{k: torch.from_numpy(v) for k, v in state.items() if k != "noise"}}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other.load_state_dict({**vector.state_dict(), "simulator": {k: _array(v) for k, v in loaded.items()}})
    for seed in range(2):
        chunk = random_actions(1, 4, seed)
        left, right = vector.step_chunk(chunk), other.step_chunk(chunk)
        np.testing.assert_array_equal(left.path, right.path)
        assert left.metrics["subtasks"] == right.metrics["subtasks"] == 1


def _array(value):
    return value.numpy() if isinstance(value, torch.Tensor) else value


def test_without_noise_every_episode_starts_alike() -> None:
    vector = vector_of(2, robot_noise_ratio=0.0, object_noise_ratio=0.0)
    obs = vector.reset([0, 1])[:, -1]
    np.testing.assert_array_equal(obs[0], obs[1])
    np.testing.assert_array_equal(obs[0, :30], vector.stepper.datas[0].qpos)


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kitchen.cache_clear()
    monkeypatch.setitem(sys.modules, "gymnasium_robotics.envs.franka_kitchen", None)
    with pytest.raises(MissingExtraError, match=mentions("gymnasium_robotics burnish[kitchen]")):
        vector_of()


@pytest.mark.skipif(not everything, reason="with --all: without it the contracts end episodes earlier")
@pytest.mark.slow
def test_a_random_policy_plays_to_the_limit() -> None:
    vector, rng = vector_of(), np.random.default_rng(0)
    vector.reset([0])
    length, done = 0, False
    while not done:
        step = vector.step_chunk(rng.uniform(-1, 1, (1, 4, 9)))
        length, done = length + int(step.length[0]), bool(step.done[0])
        assert np.isfinite(step.obs).all()
    assert length == 280 and step.truncated[0] and not step.terminated[0]
