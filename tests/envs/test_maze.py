"""Mazes against gymnasium-robotics itself, stepped one by one, and what their expert promises."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from messages import mentions
from pairwise import each_value, repeated

from envs.engine.vector import ChunkVector
from envs.evaluation.scores import reference
from envs.make import env
from envs.rollouts.collect import collect
from envs.tasks.mazes.expert import Polyline, distances, simple_paths
from envs.tasks.mazes.layouts import layout
from policies.errors import ConfigError, MissingExtraError

pytest.importorskip("gymnasium_robotics", reason="needs the extra 'mazes'")

MAZES = {"umaze": "UMaze", "medium": "Medium", "large": "Large"}
POINTS, ANTS = [f"pointmaze-{name}" for name in MAZES], [f"antmaze-{name}" for name in MAZES]
SEEDS, CHUNK = [0, 1, 2, 123456789], 5


def official(name: str, **options: object):
    """gymnasium-robotics' own environment; ants of v4 observe no forces of contacts."""
    import gymnasium

    with contextlib.redirect_stderr(io.StringIO()):
        import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    agent, maze = name.split("-")
    version = {"pointmaze": "PointMaze_{}-v3", "antmaze": "AntMaze_{}-v4"}[agent]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # v4 is not the newest
        return gymnasium.make(version.format(MAZES[maze]), disable_env_checker=True, **options)


def flat(obs: dict[str, np.ndarray]) -> np.ndarray:
    """Their observation in our order; that of the ant lacks its position."""
    parts = [obs["observation"], obs["desired_goal"]]
    return np.concatenate(parts if len(obs["observation"]) == 4 else [obs["achieved_goal"], *parts])


def vector_of(name: str, num_envs: int, **options: object) -> ChunkVector:
    vector = env(name, **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def compare(name: str, actions: np.ndarray, *, continuing: bool, reward: str) -> dict[str, float]:
    """Step both with chunks (N, T, Da) and compare everything; counts what happened."""
    vector = vector_of(name, len(SEEDS), continuing=continuing, reward=reward)
    starts = vector.reset(SEEDS)[:, -1]
    peer = official(name, continuing_task=continuing, reward_type=reward)
    steps, alive = [], np.ones(len(SEEDS), bool)
    for first in range(0, actions.shape[1], CHUNK):
        steps.append(vector.step_chunk(actions[:, first : first + CHUNK], alive))
        alive &= ~steps[-1].done
    count = {"success": 0.0, "return": 0.0, "steps": 0.0}
    for row, seed in enumerate(SEEDS):
        np.testing.assert_array_equal(starts[row], flat(peer.reset(seed=seed)[0]))
        for i in range(actions.shape[1]):
            ours, j = steps[i // CHUNK], i % CHUNK
            obs, value, terminated, truncated, info = peer.step(actions[row, i])
            np.testing.assert_array_equal(ours.path[row, j], flat(obs))
            assert ours.rewards[row, j] == value
            count["success"] += info["success"]
            count["return"] += float(value)
            count["steps"] += 1
            if terminated or truncated:
                assert ours.terminated[row] == terminated and ours.length[row] == j + 1
                break
    peer.close()
    return count


def goal_seeking(name: str, steps: int) -> np.ndarray:
    """Forces that push towards the goals of the episodes, walls or not, and now and then anywhere."""
    rng, out = np.random.default_rng(0), []
    for seed in SEEDS:
        start, goal = env(name).layout.draw(np.random.default_rng(seed))  # type: ignore[attr-defined]
        push = np.clip(3 * (goal - start), -0.5, 0.5)
        out.append(push + rng.normal(size=(steps, 2)) * 0.8)
    return np.stack(out)


@pytest.mark.parametrize("reward", ["sparse", "dense"])
@pytest.mark.parametrize("continuing", [True, False])
def test_points_equal_gymnasium_robotics_bit_for_bit(continuing: bool, reward: str) -> None:
    count = compare(
        "pointmaze-umaze", goal_seeking("pointmaze-umaze", 295), continuing=continuing, reward=reward
    )
    assert count["success"] > (10 if continuing else 0), "nobody got to a goal: the rules were not compared"


@pytest.mark.parametrize(("name", "dtype"), each_value(list(POINTS), [np.float32, np.float64]))
def test_all_mazes_of_points_equal_gymnasium_robotics(name: str, dtype: type) -> None:
    actions = np.random.default_rng(1).uniform(-2, 2, (len(SEEDS), 200, 2)).astype(dtype)
    count = compare(name, actions, continuing=True, reward="sparse")
    assert count["steps"] == len(SEEDS) * 200, "every step was compared"


@pytest.mark.parametrize("name", ANTS)
def test_all_mazes_of_ants_equal_gymnasium_robotics(name: str) -> None:
    actions = np.random.default_rng(1).uniform(-1, 1, (len(SEEDS), 60, 8))
    count = compare(name, actions, continuing=False, reward="dense")
    assert count["steps"] == len(SEEDS) * 60, "every step was compared"


def test_the_ants_of_v5_are_the_same_but_for_the_forces_of_contacts() -> None:
    import gymnasium

    official("antmaze-umaze").close()  # registers
    peer = gymnasium.make("AntMaze_UMaze-v5", disable_env_checker=True)
    vector, actions = vector_of("antmaze-umaze", 1), np.random.default_rng(0).uniform(-1, 1, (40, 8))
    vector.reset([5])
    peer.reset(seed=5)
    for action in actions:
        theirs = peer.step(action)[0]
        ours = vector.step_chunk(action[None, None]).obs[0, -1]
        np.testing.assert_array_equal(ours[:2], theirs["achieved_goal"])
        np.testing.assert_array_equal(ours[2:29], theirs["observation"][:27])
    peer.close()


@pytest.mark.parametrize("cells", [{"goal": (1, 1)}, {"start": (7, 1)}, {"start": (1, 1), "goal": (5, 9)}])
def test_chosen_cells_equal_the_options_of_gymnasium_robotics(cells: dict[str, tuple[int, int]]) -> None:
    vector = vector_of("pointmaze-large", 1, **{f"{end}_cell": cell for end, cell in cells.items()})
    peer = official("pointmaze-large")
    names = {"start": "reset_cell", "goal": "goal_cell"}
    options = {names[end]: np.array(cell) for end, cell in cells.items()}
    for seed in range(20):
        ours = vector.reset([seed])[0, -1]
        np.testing.assert_array_equal(ours, flat(peer.reset(seed=seed, options=options)[0]))
    peer.close()


@pytest.mark.parametrize("name", ANTS)
def test_returns_of_ants_have_d4rl_scores_where_they_count_successes(name: str) -> None:
    assert env(name).spec.reference_scores == reference(name).returns == (0.0, 1.0)
    assert env(name).spec.max_episode_steps == (700 if "umaze" in name else 1000)
    for other in ({"reward": "dense"}, {"continuing": True}):
        assert env(name, **other).spec.reference_scores is None


@pytest.mark.parametrize("name", [*POINTS, *ANTS])
def test_the_descriptions_are_those_of_gymnasium_robotics(name: str) -> None:
    spec, peer = env(name).spec, official(name)
    assert spec.max_episode_steps == peer.spec.max_episode_steps
    np.testing.assert_array_equal(spec.action_low, peer.action_space.low)
    inner = peer.unwrapped.point_env if "point" in name else peer.unwrapped.ant_env
    assert spec.control_hz == pytest.approx(1 / inner.dt)
    theirs = [
        "".join(map(str, row)).replace("1", "#").replace("0", ".") for row in peer.unwrapped.maze.maze_map
    ]
    assert list(env(name).layout.rows) == theirs  # type: ignore[attr-defined]
    peer.close()


def test_a_waypoint_is_reached_and_kept() -> None:
    task = env("pointmaze-umaze", control="waypoint", hold=10, continuing=True)
    assert task.spec.control_hz == 10 and task.spec.action_high == (2.5, 2.5)
    vector = task.make_vector(1)
    start = vector.reset([3])[0, -1, :2]
    target = task.layout.center(task.layout.cell(start))  # type: ignore[attr-defined]
    step = vector.step_chunk(np.broadcast_to(target, (1, 15, 2)).copy())
    assert np.linalg.norm(start - target) > 0.1
    np.testing.assert_allclose(step.obs[0, -1, :4], [*target, 0, 0], atol=1e-3)


def test_holding_an_action_is_repeating_it() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (1, 20, 2))
    held, single = (vector_of("pointmaze-umaze", 1, hold=n, continuing=True) for n in (4, 1))
    held.reset([0])
    single.reset([0])
    once, often = held.step_chunk(actions), single.step_chunk(np.repeat(actions, 4, axis=1))
    np.testing.assert_array_equal(once.path[0], often.path[0, 3::4])


# -- the expert -------------------------------------------------------------------------------------


def test_ways_are_all_simple_paths_up_to_a_length() -> None:
    maze = layout("large")
    start, goal = (1, 1), (5, 10)
    shortest = distances(maze, goal)[start]
    for detour in (0, 6):
        found = simple_paths(maze, start, goal, detour=detour)
        assert len(set(found)) == len(found) and found == sorted(found, key=len)
        for path in found:
            assert path[0] == start and path[-1] == goal and len(set(path)) == len(path)
            assert (
                all(b in maze.neighbours(a) for a, b in pairwise(path)) and len(path) - 1 <= shortest + detour
            )
    assert len(simple_paths(maze, start, goal)[0]) - 1 == shortest
    # Around the block in the left, and on the right over the top (two paths around a pillar) or below.
    assert len(simple_paths(maze, start, goal, detour=100)) == 6


def test_distances_are_those_of_another_search() -> None:
    from scipy.sparse.csgraph import shortest_path

    maze = layout("medium")
    adjacent = np.array([[b in maze.neighbours(a) for b in maze.cells] for a in maze.cells], float)
    expected = shortest_path(adjacent, unweighted=True)
    for i, goal in enumerate(maze.cells):
        found = distances(maze, goal)
        assert [found[cell] for cell in maze.cells] == expected[i].tolist()


def test_the_way_of_a_path_has_no_loops_and_misses_no_corner() -> None:
    maze = layout("large")
    a, corner, b, c = (maze.center(cell) for cell in ((1, 3), (1, 4), (2, 4), (3, 4)))
    cut = np.add([a, b, c], [[0.4, 0.1], [0.1, 0.4], [0.0, 0.0]])  # no point lies in the corner's cell
    assert maze.cells_along(cut) == ((1, 3), (1, 4), (2, 4), (3, 4))
    assert maze.cells_along(np.stack([a, corner, b, c, b, corner])) == ((1, 3), (1, 4))
    for seed in range(5):
        episode = env("pointmaze-large").demonstrate(seed)  # type: ignore[attr-defined]
        cells = maze.cells_along(episode.observations[:, :2])
        assert all(later in maze.neighbours(cell) for cell, later in pairwise(cells))


def test_the_carrot_lies_ahead_on_the_way_and_stops_at_its_end() -> None:
    path = Polyline(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]))
    np.testing.assert_allclose(path.ahead(np.array([0.5, 0.1]), 0.2), [0.7, 0.0])
    np.testing.assert_allclose(path.ahead(np.array([0.9, 0.0]), 0.3), [1.0, 0.2])
    np.testing.assert_allclose(path.ahead(np.array([1.0, 0.9]), 0.3), [1.0, 1.0])


@pytest.mark.parametrize(("name", "control"), each_value(list(POINTS), ["force", "waypoint"]))
def test_the_expert_gets_there_in_time(name: str, control: str) -> None:
    hold = 1 if control == "force" else 10
    data = collect(env(name, control=control, hold=hold), episodes=6, first_seed=77)
    assert data.meta["attempts"] <= 7 and data.success is not None and bool(data.success.all())
    spec = env(name, control=control, hold=hold).spec
    assert data.actions.abs().max() <= max(spec.action_high)


@pytest.mark.parametrize("options", [{}, {"control": "waypoint", "hold": 10}])
def test_recorded_actions_repeat_the_episode(options: dict) -> None:
    task = env("pointmaze-medium", **options)
    episode = task.demonstrate(5)  # type: ignore[attr-defined]
    again = task.demonstrate(5)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(episode.actions, again.actions)
    vector = task.make_vector(1)
    vector.reset([5])
    step = vector.step_chunk(episode.actions[None])
    np.testing.assert_array_equal(step.path[0, : len(episode)], episode.observations[1:])
    assert step.terminated[0] and step.success[0] and step.rewards.sum() == 1


def test_a_longer_way_is_taken_where_it_is_allowed() -> None:
    from envs.tasks.mazes.expert import MazeExpert

    def taken(detour: int) -> set[tuple]:
        task = env("pointmaze-large", expert=MazeExpert(detour=detour, noise=0.0))
        maze, found = task.layout, set()  # type: ignore[attr-defined]
        for seed in range(5):
            path = task.demonstrate(seed).observations  # type: ignore[attr-defined]
            start, goal = maze.cell(path[0, :2]), maze.cell(path[0, -2:])
            shortest = distances(maze, goal)[start]
            cells = len({maze.cell(place) for place in path[:, :2]} | {goal}) - 1
            found.add(cells > shortest)
        return found

    assert taken(0) == {False} and taken(8) == {False, True}


def test_play_goes_to_many_places_and_not_only_to_the_goal() -> None:
    from envs.tasks.mazes.expert import MazeExpert

    def cells(visits: int) -> int:
        options = {"continuing": True, "control": "waypoint", "hold": 10, "max_episode_steps": 150}
        task: Any = env("pointmaze-umaze", expert=MazeExpert(visits=visits), **options)
        places = task.demonstrate(1).observations[:, :2]
        assert task.layout.is_free(places).all()
        inside = [task.layout.cell(place) for place in places]
        return sum(one != other for one, other in pairwise(inside))

    assert cells(20) >= 20 > 7 > cells(0)


# -- mistakes and pictures --------------------------------------------------------------------------------


def test_a_goal_in_a_wall_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("env.goal_cell [2, 1]")):
        env("pointmaze-umaze", goal_cell=(2, 1))


def test_a_bad_expert_is_refused() -> None:
    from envs.tasks.mazes.expert import MazeExpert

    with pytest.raises(ConfigError, match=r"env\.expert\.pace must be in \(0, 4\]; got 9"):
        MazeExpert(pace=9)


def test_drawings_have_a_panel_for_every_title() -> None:
    task = env("pointmaze-umaze")
    episode = task.demonstrate(0)  # type: ignore[attr-defined]
    figure = task.figure({"a": ([episode.observations], [True]), "b": ([], [])})  # type: ignore[attr-defined]
    assert [axes.get_title(loc="left").splitlines()[0] for axes in figure.axes] == ["a", "b"]


@pytest.mark.parametrize("name", repeated(["antmaze-umaze", "pointmaze-umaze"]))
def test_a_replayed_episode_is_photographed_with_its_goal(name: str) -> None:
    task = env(name)
    actions = np.zeros((4, task.spec.action_dim), np.float32)
    try:
        small: dict[str, Any] = {"every": 4, "width": 64, "height": 48, "shadows": False}
        frames = [task.render_frames(seed, actions, **small) for seed in (0, 3)]  # type: ignore[attr-defined]
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert frames[0].shape == (2, 48, 64, 3)
    red = [(pictures[..., 0].astype(int) - pictures[..., 1] > 100).any() for pictures in frames]
    assert red == [True, True]


def test_a_variant_keeps_ranges_of_its_base_and_can_be_sent_to_workers() -> None:
    task = env("pointmaze-large", hold=2)
    assert pickle.loads(pickle.dumps(task)) == task and task.spec.max_episode_steps == 800
    with pytest.raises(ConfigError, match=r"env\.max_episode_steps must be at least 1; got 0"):
        replace(task, max_episode_steps=0)  # type: ignore[type-var]
