"""Laws of the `avoid` task, its exact engine, its expert and its picture."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from messages import mentions
from pairwise import everything

from envs.engine.vector import ChunkVector
from envs.rollouts.collect import collect
from envs.tasks.avoid.expert import AvoidExpert
from envs.tasks.avoid.scene import SHIFT_M, load_scene
from envs.tasks.avoid.task import MAX_SPEED, Avoid, AvoidStepper, row_shifts, start_position
from policies.errors import ConfigError, MissingExtraError

SCENE = load_scene()


def place(vector: ChunkVector, row: int, x: float, y: float) -> None:
    """Move a disc, at rest, without stepping."""
    stepper = vector.stepper
    assert isinstance(stepper, AvoidStepper)
    stepper.datas[row].qpos[:] = stepper.rules.position[row] = (x, y)


def steer(vector: ChunkVector, actions: np.ndarray) -> list[np.ndarray]:
    """Execute the same (steps, 2) actions one by one in every environment; returns their paths (L, 4)."""
    paths: list[list[np.ndarray]] = [[] for _ in range(vector.num_envs)]
    active = np.ones(vector.num_envs, bool)
    for action in actions:
        step = vector.step_chunk(np.broadcast_to(action, (vector.num_envs, 1, 2)), active)
        for i in np.flatnonzero(active):
            paths[i].append(step.path[i, 0])
        active &= ~step.done
        if not active.any():
            break
    return [np.array(path) for path in paths]


def test_the_scene_offers_at_least_eight_direct_ways_and_each_has_its_own_id() -> None:
    assert SCENE.num_direct >= 8
    assert len(set(SCENE.modes)) == len(SCENE.modes) == np.prod([len(row) for row in SCENE.gap_x])
    names = Avoid().mode_names()
    assert len(set(names)) == len(SCENE.modes)
    for way in SCENE.modes[: SCENE.num_direct]:
        xs = [row[gap] for row, gap in zip(SCENE.gap_x, way, strict=True)]
        assert np.abs(np.diff(xs)).max() < 0.1


def test_only_the_gaps_let_the_disc_through() -> None:
    diameter = 2 * SCENE.disc_radius
    for y, row in zip(SCENE.row_y, SCENE.pillar_x, strict=True):
        solids = sorted(row + tuple(x for x, bump_y in SCENE.bumps if bump_y == y))
        free = np.diff(solids) - 2 * SCENE.pillar_radius
        assert (free > diameter).sum() == len(row) - 1
        assert solids[0] == pytest.approx(-SCENE.half_width)
        assert solids[-1] == pytest.approx(SCENE.half_width)


def test_touching_a_pillar_ends_the_episode_as_a_failure_at_the_contact() -> None:
    vector = Avoid().make_vector(1)
    vector.reset([0])
    x, y = SCENE.pillar_x[0][1], SCENE.row_y[0]
    place(vector, 0, x, y - 0.1)
    step = vector.step_chunk(np.tile([0.0, 1.0], (1, 30, 1)))
    assert step.terminated[0] and not step.truncated[0] and not step.success[0]
    assert step.length[0] < 30 and step.rewards.sum() == 0
    assert step.metrics["mode"][0] == -1
    reach = SCENE.pillar_radius + SCENE.disc_radius
    overlap = reach - np.hypot(step.obs[0, -1, 0] - x, step.obs[0, -1, 1] - y)
    assert 0 < overlap < MAX_SPEED * 0.005 * 2  # caught within two physics steps


@pytest.mark.parametrize("action", [(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0)])
def test_leaving_through_a_wall_fails(action: tuple[float, float]) -> None:
    vector = Avoid().make_vector(1)
    vector.reset([0])
    step = vector.step_chunk(np.tile(action, (1, 40, 1)))
    assert step.terminated[0] and not step.success[0]
    assert abs(step.obs[0, -1, 0]) < SCENE.half_width and step.obs[0, -1, 1] > SCENE.back_y


def test_crossing_the_finish_line_succeeds_with_reward_one_once() -> None:
    vector = Avoid().make_vector(1)
    vector.reset([0])
    place(vector, 0, SCENE.gap_x[-1][0], SCENE.row_y[-1])
    step = vector.step_chunk(np.tile([0.0, 1.0], (1, 30, 1)))
    assert step.terminated[0] and step.success[0] and not step.truncated[0]
    last = step.length[0] - 1
    assert step.rewards[0, last] == 1 and step.rewards.sum() == 1
    assert step.path[0, last, 1] >= SCENE.finish_y > step.path[0, last - 1, 1]


def test_standing_still_is_truncated_at_the_limit() -> None:
    vector = Avoid(max_episode_steps=7).make_vector(2)
    vector.reset([0, 1])
    step = vector.step_chunk(np.zeros((2, 10, 2)))
    assert step.truncated.all() and not step.terminated.any() and not step.success.any()
    assert step.length.tolist() == [7, 7]


def test_the_disc_reaches_the_speed_an_action_asks_for() -> None:
    vector = Avoid().make_vector(1)
    vector.reset([0])
    place(vector, 0, 0.0, -0.05)
    step = vector.step_chunk(np.tile([0.0, 0.5], (1, 6, 1)))
    assert step.obs[0, -1, 3] == pytest.approx(0.5 * MAX_SPEED, rel=0.05)
    assert step.obs[0, -1, 2] == pytest.approx(0.0, abs=1e-9)


def test_actions_beyond_the_box_are_clipped() -> None:
    ends = []
    for size in (1.0, 50.0):
        vector = Avoid().make_vector(1)
        vector.reset([0])
        ends.append(vector.step_chunk(np.full((1, 4, 2), -size)).obs)
    np.testing.assert_array_equal(*ends)


def test_a_seed_fixes_the_start_and_seeds_differ() -> None:
    starts = np.array([start_position(seed) for seed in range(50)])
    assert len(np.unique(starts, axis=0)) == 50
    vector = Avoid().make_vector(3, obs_steps=2)
    obs = vector.reset([4, 5, 4])
    np.testing.assert_array_equal(obs[0], obs[2])
    np.testing.assert_array_equal(obs[:, 0], obs[:, 1])
    np.testing.assert_array_equal(obs[1, 0], [*starts[5], 0, 0])


def test_episodes_do_not_depend_on_the_width_or_on_what_ran_before(rng: np.random.Generator) -> None:
    actions = np.clip(rng.normal([0, 0.7], 0.4, (100, 2)), -1, 1)
    wide = Avoid().make_vector(5)
    wide.reset(range(5))
    steer(wide, actions[::-1])
    wide.reset(range(5))
    together = steer(wide, actions)
    narrow = Avoid().make_vector(1)
    for seed in range(5):
        narrow.reset([seed])
        np.testing.assert_array_equal(steer(narrow, actions)[0], together[seed])


def test_a_chunk_equals_its_steps_one_by_one(rng: np.random.Generator) -> None:
    actions = np.clip(rng.normal([0, 0.7], 0.3, (40, 2)), -1, 1)
    vector = Avoid().make_vector(4)
    vector.reset(range(4))
    single = steer(vector, actions)
    vector.reset(range(4))
    chunk = vector.step_chunk(np.broadcast_to(actions, (4, 40, 2)))
    for i in range(4):
        np.testing.assert_array_equal(chunk.path[i, : chunk.length[i]], single[i])


def test_a_saved_state_continues_bit_exactly_in_other_simulators(rng: np.random.Generator) -> None:
    actions = np.clip(rng.normal([0, 0.7], 0.3, (6, 4, 40, 2)), -1, 1)[:, :, :4]
    vector = Avoid().make_vector(4)
    vector.reset(range(4))
    for chunk in actions[:3]:
        vector.step_chunk(chunk, ~vector._finished)
    state = vector.state_dict()
    other = Avoid().make_vector(4)
    other.reset(range(10, 14))
    other.step_chunk(actions[0])
    other.load_state_dict(state)
    for chunk in actions[3:]:
        steps = [v.step_chunk(chunk, ~v._finished) for v in (vector, other)]
        for name in ("obs", "path", "rewards", "length", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(steps[0], name), getattr(steps[1], name))
        np.testing.assert_array_equal(steps[0].metrics["mode"], steps[1].metrics["mode"])


def test_the_expert_takes_the_way_it_is_told_and_reaches_every_way() -> None:
    for mode in range(SCENE.num_direct):
        episode = Avoid(expert=AvoidExpert(modes=(mode,))).demonstrate(mode)
        assert episode.success and episode.terminated and not episode.truncated
        assert set(episode.extras["mode"]) == {mode}
        assert 25 <= len(episode) <= 100


def test_the_expert_spreads_over_its_modes_and_nearly_always_succeeds() -> None:
    dataset = collect(Avoid(), episodes=40, keep_failures=True)
    assert dataset.success is not None and dataset.success.float().mean() >= 0.98
    first = dataset.extras["mode"][dataset.episode_start[:-1]]
    assert len(set(first.tolist())) >= 8
    few = collect(Avoid(expert=AvoidExpert(num_modes=2)), episodes=8)
    assert set(few.extras["mode"].tolist()) == {0, 1}


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it fewer episodes are judged")
def test_the_expert_succeeds_in_99_percent_of_250_episodes_over_all_ways() -> None:
    episodes = [Avoid().demonstrate(seed) for seed in range(250)]
    assert np.mean([episode.success for episode in episodes]) >= 0.99
    counts = np.bincount([int(e.extras["mode"][0]) for e in episodes if e.success])
    assert len(counts) == SCENE.num_direct and counts.min() >= 5
    lengths = [len(episode) for episode in episodes]
    assert 35 <= np.mean(lengths) <= 70 and max(lengths) < 100


def test_a_demonstration_is_decided_by_its_seed_and_is_what_replaying_it_gives() -> None:
    first, again, other = (Avoid().demonstrate(seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.actions, again.actions)
    assert not np.array_equal(first.actions[:10], other.actions[:10])
    vector = Avoid().make_vector(1)
    vector.reset([3])
    replay = vector.step_chunk(first.actions[None])
    np.testing.assert_array_equal(replay.path[0], first.observations[1:])
    assert replay.success[0] and replay.metrics["mode"][0] == first.extras["mode"][0]


def test_demonstrations_without_noise_are_calmer() -> None:
    def roughness(noise: float) -> float:
        env = Avoid(expert=AvoidExpert(noise=noise, modes=(4,)))
        return float(np.mean([np.abs(np.diff(env.demonstrate(s).actions[:, 0])).mean() for s in range(4)]))

    assert roughness(0.0) < 0.5 * roughness(1.0)


def test_modes_of_the_expert_are_given_once() -> None:
    with pytest.raises(ConfigError, match=r"env\.expert\.modes must be left out beside num_modes; got \[1\]"):
        AvoidExpert(num_modes=3, modes=(1,))


@pytest.mark.parametrize("options", [{"num_modes": 99}, {"modes": (99,)}])
def test_ways_that_do_not_exist_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=mentions("env.expert.modes 0")):
        Avoid(expert=AvoidExpert(**options)).demonstrate(0)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("num_envs")):
        Avoid().make_vector(0)
    with pytest.raises(ConfigError, match=mentions("max_episode_steps")):
        _ = replace(Avoid(), max_episode_steps=0).spec


def test_the_picture_shows_every_episode_in_the_colour_of_its_outcome() -> None:
    from matplotlib.colors import to_hex

    from envs.tasks.avoid.figures import FAILURE, SUCCESS

    episodes = [Avoid().demonstrate(seed) for seed in range(3)]
    paths = [episode.observations for episode in episodes]
    figure = Avoid().figure({"before": (paths, [True, False, True]), "after": (paths[:1], [True])})
    before, after = figure.axes
    drawn = [to_hex(line.get_color()) for line in before.lines if len(line.get_xdata()) > 10]
    assert sorted(drawn) == sorted([SUCCESS, SUCCESS, FAILURE])
    assert before.get_title(loc="left") == "67% succeed (2 of 3)"
    assert after.get_title(loc="left") == "100% succeed (1 of 1)"


def test_an_episode_can_be_photographed_from_its_first_moment() -> None:
    actions = np.tile([0.0, 1.0], (6, 1))
    try:
        frames = Avoid().render_frames(0, actions, every=3, width=64, height=64)
    except MissingExtraError as reason:
        pytest.skip(str(reason))
    assert frames.shape == (3, 64, 64, 3)
    assert all(np.abs(a.astype(int) - b).max() > 30 for a, b in pairwise(frames))
    orange = (frames[..., 0].astype(int) - frames[..., 2] > 80).sum(axis=(1, 2))
    assert (orange > 0).all()


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(0)


SIGHT = {"rows": "moved", "observation": "position"}


def test_rows_move_by_their_seed_and_by_nothing_else() -> None:
    a, b = (Avoid(**SIGHT).stepper(2) for _ in range(2))
    for row, seed in ((0, 7), (1, 8)):
        assert a.reset(row, seed).tolist() == b.reset(1 - row, seed).tolist() == start_position(seed).tolist()
        assert np.array_equal(a.scene_of(row).gap_x[0], b.scene_of(1 - row).gap_x[0])
    shift = np.array([row_shifts(seed, 4) for seed in range(200)])
    assert np.abs(shift).max() <= SHIFT_M and np.abs(shift).max() > 0.9 * SHIFT_M
    moved = a.scene_of(0)
    for before, after, dx in zip(SCENE.gap_x, moved.gap_x, row_shifts(7, 4), strict=True):
        np.testing.assert_allclose(np.subtract(after, before), dx, atol=1e-12)
    assert len(moved.obstacles) == len(SCENE.obstacles)


def test_no_gap_opens_beside_a_wall_however_far_a_row_moves() -> None:
    for side in (-SHIFT_M, SHIFT_M):
        scene = SCENE.moved([side] * 4)
        for y in scene.row_y:
            xs = sorted(x for x, at in scene.obstacles if abs(at - y) < 1e-9)
            left, right = xs[0] - scene.pillar_radius, xs[-1] + scene.pillar_radius
            opening = max(left + scene.half_width, scene.half_width - right)
            assert opening < 2 * scene.disc_radius


def test_a_contact_is_with_the_moved_pillar() -> None:
    stepper = Avoid(**SIGHT).stepper(1)
    stepper.reset(0, 3)
    pillar = stepper.scene_of(0).pillar_x[0][1]
    straight = np.array([[0.0, 1.0]])
    stepper._qpos[0][:] = stepper.rules.position[0] = (pillar, 0.05)
    for _ in range(6):
        step = stepper.step(np.array([0]), straight)
        if step.terminated[0]:
            break
    assert step.terminated[0] and not step.success[0]
    assert abs(step.obs[0, 1] - (SCENE.row_y[0] - SCENE.pillar_radius - SCENE.disc_radius)) < 0.01


def test_moved_rows_continue_after_saving() -> None:
    a, b = (Avoid(**SIGHT).make_vector(2) for _ in range(2))
    a.reset([4, 5]), b.reset([6, 7])
    b.load_state_dict(a.state_dict())
    actions = np.tile([0.1, 0.9], (2, 4, 1))
    for _ in range(6):
        left, right = a.step_chunk(actions), b.step_chunk(actions)
        assert np.array_equal(left.path, right.path) and np.array_equal(left.done, right.done)
        if left.done.any():
            break
    assert np.array_equal(a.simulator()["simulator"], b.simulator()["simulator"])


def test_the_expert_sees_the_moved_rows_and_the_actions_of_another_episode_fail() -> None:
    task = Avoid(**SIGHT)
    episodes = [task.demonstrate(seed) for seed in range(20)]
    assert sum(bool(episode.success) for episode in episodes) >= 18
    assert episodes[0].observations.shape[1] == task.spec.obs_dim == 2
    vector, passed = task.make_vector(1), 0
    for seed, episode in enumerate(episodes):
        vector.reset([1000 + seed])
        for action in episode.actions:
            step = vector.step_chunk(action[None, None])
            if step.done.any():
                break
        passed += int(step.success[0])
    assert passed <= 3


def test_the_simulator_s_state_is_told_where_something_is_hidden() -> None:
    assert Avoid().spec.simulator_dim == 0 and Avoid().make_vector(1).simulator() == {}
    vector = Avoid(**SIGHT).make_vector(3)
    vector.reset([1, 2, 3])
    told = vector.simulator([0, 2])["simulator"]
    assert told.shape == (2, Avoid(**SIGHT).spec.simulator_dim) and np.abs(told).max() <= 1
    np.testing.assert_allclose(told[1, -4:] * SHIFT_M, row_shifts(3, 4))
