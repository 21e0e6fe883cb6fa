"""OGBench's mazes against OGBench itself, stepped one by one."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions
from pairwise import each_value, everything, repeated

pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")

from envs.datasets import read_dataset
from envs.engine.vector import ChunkVector
from envs.fit import require_fit
from envs.make import env, list_envs
from envs.spec import ChunkStep
from envs.tasks.mazes.ogbench_stepper import global_generator, load_maze
from policies.errors import ConfigError

NAMES = [name for name in list_envs() if name.startswith("og-")]
GUIDED = [f"og-pointmaze-{maze}" for maze in ("medium", "large", "giant")]
AGENTS = ["og-pointmaze-large", "og-antmaze-medium", "og-humanoidmaze-medium"]


def official(name: str, task: int = 0) -> Any:
    """OGBench's own environment: one of its single tasks, or with goals that differ (0)."""
    import gymnasium

    world = name.removeprefix("og-")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the viewer complains about a missing display
        import ogbench  # noqa: F401

        made = f"{world}-singletask-task{task}-v0" if task else f"{world}-v0"
        return gymnasium.make(made, disable_env_checker=True)


def begin(peer: Any, seed: int, **options: int) -> np.ndarray:
    """Reset OGBench's environment, whose own draws come from the global generator."""
    before = np.random.get_state()
    np.random.seed(seed)
    first: np.ndarray = peer.reset(seed=seed, options=options)[0]
    peer.draws = np.random.get_state()
    np.random.set_state(before)
    return first


def follow(peer: Any, action: np.ndarray) -> tuple[Any, ...]:
    """Step OGBench's environment; its draws go on where they were."""
    before = np.random.get_state()
    np.random.set_state(peer.draws)
    outcome: tuple[Any, ...] = peer.step(action)
    peer.draws = np.random.get_state()
    np.random.set_state(before)
    return outcome


def vector_of(name: str, num_envs: int = 1, **options: Any) -> ChunkVector:
    vector = env(name, **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def random_actions(vector: ChunkVector, steps: int, seed: int = 0) -> np.ndarray:
    shape = (vector.num_envs, steps, vector.spec.action_dim)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def require_the_same(ours: ChunkStep, row: int, peer: Any, actions: np.ndarray) -> tuple[bool, bool]:
    """Compare a chunk (T, Da), executed as `ours`, with OGBench; returns whether it ended, and by success."""
    for i, action in enumerate(actions):
        obs, reward, terminated, truncated, info = follow(peer, action)
        np.testing.assert_array_equal(ours.path[row, i, : len(obs)], obs)
        assert ours.rewards[row, i] == reward
        if terminated or truncated:
            assert (ours.terminated[row], ours.truncated[row]) == (terminated, truncated)
            assert (ours.length[row], ours.success[row]) == (i + 1, bool(info["success"]))
            np.testing.assert_array_equal(ours.obs[row, -1, : len(obs)], obs)
            return True, bool(info["success"])
    assert ours.length[row] == len(actions) and not ours.done[row]
    return False, bool(ours.success[row])


@pytest.mark.parametrize(
    ("robot", "goal"),
    each_value(
        [("og-pointmaze-giant", 1000), ("og-antmaze-large", 150), ("og-humanoidmaze-large", 150)],
        ["appended", "fixed"],
    ),
)
def test_random_actions_equal_ogbench_bit_for_bit(robot: tuple[str, int], goal: str) -> None:
    name, steps = robot
    seeds = [3, 123456789]
    vector = vector_of(name, 2, goal=goal, task=0 if goal == "appended" else 4)
    first, actions = vector.reset(seeds)[:, -1], random_actions(vector, steps)
    step, peer = vector.step_chunk(actions), official(name, 0 if goal == "appended" else 4)
    for row, seed in enumerate(seeds):
        obs = begin(peer, seed)
        wanted = [obs, peer.unwrapped.cur_goal_xy] if goal == "appended" else [obs]
        np.testing.assert_array_equal(first[row], np.concatenate(wanted))
        ended, _ = require_the_same(step, row, peer, actions[row])
        assert ended == (steps == 1000), "the point runs into the limit, both at the same step"


@pytest.mark.parametrize(
    ("name", "goal"), each_value(GUIDED if everything else GUIDED[:2], ["fixed", "appended"])
)
def test_a_demonstration_succeeds_in_ogbench_at_the_same_step(name: str, goal: str) -> None:
    task = env(name, goal=goal, task=2)
    episode = task.demonstrate(7)  # type: ignore[attr-defined]
    vector = task.make_vector(1)
    vector.reset([7])
    step, peer = vector.step_chunk(episode.actions[None]), official(name, 2 if goal == "fixed" else 0)
    begin(peer, 7, task_id=2)
    np.testing.assert_array_equal(episode.observations[1:], step.path[0])
    assert require_the_same(step, 0, peer, episode.actions) == (True, True)
    assert episode.success and episode.terminated and not episode.truncated


@pytest.mark.parametrize(("name", "goal"), each_value(list(AGENTS), ["fixed", "appended"]))
def test_success_is_judged_where_and_when_ogbench_does(name: str, goal: str) -> None:
    """Agents are put at the edge of the goal, on both sides of it, and do something."""
    import mujoco

    vector, peer = vector_of(name, goal=goal), official(name, 1 if goal == "fixed" else 0)
    stepper: Any = vector.stepper
    radius, outcomes = peer.unwrapped._goal_tol, []
    for distance in (radius - 0.3, radius - 1e-6, radius + 1e-6, radius + 0.3):
        vector.reset([5])
        begin(peer, 5)
        goal_xy = stepper.goals()[0]
        peer.unwrapped.cur_goal_xy = goal_xy
        place = goal_xy - [distance, 0.0]
        peer.unwrapped.set_xy(place)
        stepper.datas[0].qpos[:2] = place
        mujoco.mj_forward(stepper.model, stepper.datas[0])
        actions = np.zeros((3, vector.spec.action_dim), np.float32)
        outcomes.append(require_the_same(vector.step_chunk(actions[None]), 0, peer, actions))
    assert outcomes[0] == (True, True) and outcomes[-1] == (False, False)


@pytest.mark.parametrize(
    ("name", "task"), each_value(["og-pointmaze-teleport", "og-antmaze-teleport"], [0, 5])
)
def test_teleports_equal_ogbench_and_are_saved(name: str, task: int) -> None:
    vector, other = (vector_of(name, 2, task=5, goal="separate" if task == 0 else "fixed") for _ in range(2))
    stepper: Any = vector.stepper
    seeds, actions = [1, 2], random_actions(vector, 60)
    actions[:, :30] = 0
    hole, peer = env(name).layout.center((4, 6)), official(name, task)  # type: ignore[attr-defined]
    vector.reset(seeds)
    other.reset([8, 9])
    for data in stepper.datas:  # two metres below the hole, moving there with the first actions
        data.qpos[:2] = hole + np.array([0.0, 1.7])
        data.qvel[1] = -5.0
    if "point" in name:
        actions[:, :30, 1] = -1.0
    other.load_state_dict(vector.state_dict())
    step, again = vector.step_chunk(actions), other.step_chunk(actions)
    np.testing.assert_array_equal(again.path, step.path)
    assert (np.abs(np.diff(step.path[:, :, :2], axis=1)).max(axis=(1, 2)) > 4).all(), "nobody was teleported"
    for row, seed in enumerate(seeds):
        begin(peer, seed, task_id=5)
        agent = peer.unwrapped
        agent.data.qpos[:2], agent.data.qvel[1] = hole + np.array([0.0, 1.7]), -5.0
        assert require_the_same(step, row, peer, actions[row])[0] == bool(step.done[row])


@pytest.mark.parametrize("name", NAMES)
def test_the_descriptions_are_ogbenchs(name: str) -> None:
    peer, task = official(name), env(name)
    spec, inner = task.spec, peer.unwrapped
    assert spec.max_episode_steps == peer.spec.max_episode_steps
    assert (spec.obs_dim,) == inner.observation_space.shape
    np.testing.assert_array_equal(spec.action_low, peer.action_space.low)
    np.testing.assert_array_equal(spec.action_high, peer.action_space.high)
    assert spec.control_hz == pytest.approx(1 / inner.dt)
    assert spec.success_rule == f"within {inner._goal_tol:g} m of the goal"
    maze = task.layout  # type: ignore[attr-defined]
    np.testing.assert_array_equal([[c == "#" for c in row] for row in maze.rows], inner.maze_map == 1)
    for cell in maze.cells:
        np.testing.assert_array_equal(maze.center(cell), inner.ij_to_xy(cell))
        assert inner.xy_to_ij(maze.center(cell)) == maze.cell(maze.center(cell) + 0.4) == cell
    floor = inner.model.geom("floor")
    np.testing.assert_array_equal(maze.middle, floor.pos[:2])
    np.testing.assert_array_equal(maze.half_size, floor.size[:2])


def joined(name: str) -> str:
    """A name as far as a model's and ours agree, e.g. `left_shoulder1` and `left shoulder 1`."""
    return re.sub(r"[ _]", "", name)


@pytest.mark.parametrize("name", ["og-antmaze-medium", "og-humanoidmaze-medium"])
def test_names_of_joints_and_motors_are_in_the_order_of_the_model(name: str) -> None:
    spec, model = env(name).spec, load_maze(name.removeprefix("og-")).model
    legs = {"1": "front left", "2": "front right", "3": "back left", "4": "back right"}

    def ours(joint: str) -> str:
        return f"{legs[joint[-1]]} {joint[:-2]}" if "ant" in name else joint

    joints = [ours(model.joint(i).name) for i in range(1, model.njnt)]
    for unit in ("angle [rad]", "rate [rad/s]"):
        told = [n.removesuffix(unit) for n in spec.obs_names if n.endswith(unit) and "torso" not in n]
        assert [joined(n) for n in told] == [joined(n) for n in joints]
    motors = [model.actuator(i) for i in range(model.nu)]
    expected = [f"{ours(model.joint(m.trnid[0]).name)} torque [{m.gear[0]:g} Nm]" for m in motors]
    assert [joined(n) for n in spec.action_names] == [joined(n) for n in expected]


def test_the_humanoids_hands_feet_and_head_are_where_their_names_say() -> None:
    vector = vector_of("og-humanoidmaze-medium")
    obs = vector.reset([4])[0, -1]
    stepper: Any = vector.stepper
    model, data = stepper.model, stepper.datas[0]
    told = dict(zip(vector.spec.obs_names, obs, strict=True))
    torso = data.body("torso")
    for limb in ("left hand", "left foot", "right hand", "right foot"):
        seen = (data.body(limb.replace(" ", "_")).xpos - torso.xpos) @ torso.xmat.reshape(3, 3)
        got = [told[f"{limb} {axis} seen from the torso [m]"] for axis in "xyz"]
        np.testing.assert_allclose(got, seen, atol=1e-12)
    assert told["head height [m]"] == data.body("head").xpos[2]
    upwards = [told[f"torso {axis} axis upwards [1]"] for axis in "xyz"]
    np.testing.assert_allclose(upwards, torso.xmat.reshape(3, 3)[2], atol=1e-12)
    assert model.sensor(0).name == "torso_subtreelinvel"


# -- tasks and seeds --------------------------------------------------------------------------------------


def test_tasks_are_drawn_from_seeds_and_goals_lie_inside_of_their_cells() -> None:
    name = "og-pointmaze-medium"
    vector = vector_of(name, task=0, goal="separate")
    infos = load_maze("pointmaze-medium").task_infos
    maze, ends = env(name).layout, set()  # type: ignore[attr-defined]
    for seed in range(60):
        start = vector.reset([seed])[0, -1]
        goal = vector.goals()["goal"][0]
        ends.add((maze.cell(start), maze.cell(goal)))
        assert np.abs(goal - maze.center(maze.cell(goal))).max() <= 1
    assert ends == {(info["init_ij"], info["goal_ij"]) for info in infos}
    for task, info in enumerate(infos, start=1):
        stepper: Any = vector_of(name, task=task).stepper
        stepper.reset(0, 3)
        np.testing.assert_array_equal(stepper.goals()[0], info["goal_xy"])


def test_an_episodes_generator_is_the_global_one_after_its_seed() -> None:
    before = np.random.get_state()
    for seed in (0, 1, 2**32 - 1):
        np.random.seed(seed)
        expected = np.random.uniform(size=3), np.random.randint(1, 6)
        rng = global_generator(seed)
        np.testing.assert_array_equal(rng.uniform(size=3), expected[0])
        assert rng.randint(1, 6) == expected[1]
    np.random.set_state(before)
    drawn = [global_generator(seed).uniform() for seed in (2**32, 2**32 + 1, 2**40, 2**63)]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("name", ["og-pointmaze-teleport", "og-humanoidmaze-medium"])
def test_global_random_state_is_neither_read_nor_changed(name: str) -> None:
    paths = []
    for seed in (1, 2):
        np.random.seed(seed)
        before = np.random.get_state()[1].copy()  # type: ignore[index]
        vector = vector_of(name, task=0, goal="appended")
        vector.reset([6])
        paths.append(vector.step_chunk(random_actions(vector, 20)).path)
        np.testing.assert_array_equal(np.random.get_state()[1], before)  # type: ignore[index]
    np.testing.assert_array_equal(*paths)


def test_tasks_share_one_model_and_leave_no_file_behind() -> None:
    one, two = (vector_of("og-antmaze-large", 20, task=task).stepper for task in (1, 2))
    assert one.model is two.model  # type: ignore[attr-defined]
    assert not os.path.exists(load_maze("antmaze-large").fullpath)


# -- the expert, and datasets -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), each_value(list(GUIDED), [1, 2, 3, 4, 5]))
def test_the_expert_gets_there_in_time_on_all_tasks(name: str, task: int) -> None:
    for seed in repeated([10, 11]):
        episode = env(name, task=task).demonstrate(seed)  # type: ignore[attr-defined]
        assert episode.success and episode.terminated
        assert np.abs(episode.actions).max() <= 1 and episode.rewards.sum() == 1 - len(episode)


def test_goals_that_are_told_are_recorded() -> None:
    apart, joint = (
        env("og-pointmaze-medium", goal=goal, task=3).demonstrate(2)  # type: ignore[attr-defined]
        for goal in ("separate", "appended")
    )
    goal = np.broadcast_to(apart.extras["goal"][0], (len(joint) + 1, 2))
    np.testing.assert_array_equal(np.concatenate([apart.observations, goal], axis=1), joint.observations)


def write_official(path: Path, name: str, steps: int) -> np.ndarray:
    """Write an episode in the layout of OGBench's files; returns its rewards (T,)."""
    vector = vector_of(name)
    first = vector.reset([0])[0]
    actions = random_actions(vector, steps)
    if hasattr(env(name), "demonstrate"):
        actions = env(name).demonstrate(0).actions[None]  # type: ignore[attr-defined]
    step = vector.step_chunk(actions)
    obs = np.concatenate([first, step.path[0]])
    terminals = np.zeros(len(obs), bool)
    terminals[-1] = True
    padded = np.concatenate([actions[0], actions[0, -1:]])
    arrays = {"observations": obs.astype(np.float32), "actions": padded, "terminals": terminals}
    np.savez(path, **arrays, qpos=obs[:, :15].astype(np.float32))
    return step.rewards[0]


@pytest.mark.parametrize("name", AGENTS)
def test_ogbenchs_datasets_fit_and_their_single_task_rewards_are_the_tasks(name: str, tmp_path: Path) -> None:
    rewards = write_official(tmp_path / "data.npz", name, 5)
    single = f"{name.removeprefix('og-')}-navigate-singletask-task1-v0"
    data = read_dataset(tmp_path / "data.npz", task=single)
    require_fit("a", env(name).spec, "b", data, advice="")
    np.testing.assert_array_equal(data.rewards, rewards)
    assert (rewards[-1] == 0) == ("point" in name), "the demonstration ends at the goal"
    other = "og-antmaze-giant" if "point" in name else "og-pointmaze-giant"
    with pytest.raises(ConfigError, match=mentions("width")):
        require_fit("a", env(other).spec, "b", data, advice="")


# -- mistakes and pictures --------------------------------------------------------------------------------


def test_drawn_tasks_need_a_goal_that_is_seen() -> None:
    with pytest.raises(ConfigError, match=mentions("env.task 1 5 env.goal=fixed 0")):
        env("og-pointmaze-medium", task=0)


def test_a_drawing_shows_the_whole_maze_and_paths_stay_off_its_walls() -> None:
    task: Any = env("og-pointmaze-giant", goal="appended")
    episode = task.demonstrate(0)
    axes = task.figure({"": ([episode.observations], [True])}).axes[0]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    corners = np.array([wall.get_xy() for wall in axes.patches])
    np.testing.assert_array_equal([left, bottom, right, top], [-6, -6, 58, 42])
    np.testing.assert_array_equal([*corners.min(axis=0), *(corners.max(axis=0) + 4)], [-6, -6, 58, 42])
    places = episode.observations[:, None, :2]
    assert not ((places > corners) & (places < corners + 4)).all(axis=2).any()


@pytest.mark.parametrize("name", repeated(list(AGENTS)))
def test_a_photograph_shows_the_goal_where_it_is(name: str) -> None:
    require_drawing()
    task: Any = env(name)
    frame = task.render_frames(0, np.zeros((1, task.spec.action_dim), np.float32), width=240, height=240)[0]
    red = (frame[..., 0].astype(int) - frame[..., 1] > 60) & (frame[..., 0].astype(int) - frame[..., 2] > 40)
    row, column = np.argwhere(red).mean(axis=0)
    goal = task.layout.center(task.layout.cell(vector_goal(task))) - task.layout.middle
    assert red.sum() > 3 and (goal > 0).tolist() == [column > 120, row < 120]


def vector_goal(task: Any) -> np.ndarray:
    stepper = task.stepper(1)
    stepper.reset(0, 0)
    goal: np.ndarray = stepper.goals()[0]
    return goal
