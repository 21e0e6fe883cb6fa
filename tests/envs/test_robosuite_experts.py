"""The experts of lift, can and square."""

from __future__ import annotations

import numpy as np
import pytest

from envs.make import env
from envs.rollouts.collect import collect
from envs.tasks.robosuite.expert import ArmExpert
from envs.tasks.robosuite.expert_arm import heading, pointing_down, wrap


@pytest.fixture(scope="module")
def simulator() -> None:
    pytest.importorskip("robosuite", reason="needs the extra 'robosuite' (and a C compiler to install it)")


def test_a_hand_that_points_down_is_a_rotation_with_its_heading() -> None:
    for angle in (-3.0, -1.0, 0.0, 0.5, 2.0):
        frame = pointing_down(angle)
        np.testing.assert_allclose(frame @ frame.T, np.eye(3), atol=1e-15)
        assert np.linalg.det(frame) == pytest.approx(1) and frame[2, 2] == -1
        assert heading(frame) == pytest.approx(angle)
    assert wrap(2 * np.pi + 0.1) == pytest.approx(0.1) and wrap(-np.pi - 0.1) == pytest.approx(np.pi - 0.1)


@pytest.mark.parametrize(("name", "least", "length"), [("lift", 10, 60), ("can", 9, 260), ("square", 8, 400)])
def test_demonstrations_succeed_without_being_chosen(
    simulator: None, name: str, least: int, length: int
) -> None:
    data = collect(env(name), episodes=10, first_seed=1000, keep_failures=True)
    assert int(data.success.sum()) >= least
    solved = data.lengths[data.success.bool()]
    assert int(solved.max()) <= length
    assert len(set(solved.tolist())) > 1


def test_success_ends_demonstrations_and_episodes_where_that_is_wanted(simulator: None) -> None:
    config = env("lift", terminate_on_success=True)
    episode, longer = (task.demonstrate(2) for task in (config, env("lift")))  # type: ignore[attr-defined]
    assert episode.success and episode.terminated and not episode.truncated
    assert longer.success and longer.truncated and not longer.terminated
    assert len(longer.actions) == len(episode.actions) + 4 and episode.rewards.tolist()[-2:] == [0, 1]
    vector = config.make_vector(1)
    vector.reset([2])
    step = vector.step_chunk(longer.actions[None])
    assert step.length[0] == len(episode.actions) and step.terminated[0] and not step.truncated[0]


def test_a_demonstration_follows_from_its_seed(simulator: None) -> None:
    config = env("lift")
    one, two, other = (config.demonstrate(seed) for seed in (5, 5, 6))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(one.actions, two.actions)
    np.testing.assert_array_equal(one.observations, two.observations)
    assert not np.array_equal(one.observations[0], other.observations[0])


@pytest.mark.parametrize("name", ["lift", "can", "square"])
def test_a_demonstration_replays_in_robosuite_with_the_same_success(simulator: None, name: str) -> None:
    episode = env(name).demonstrate(2)  # type: ignore[attr-defined]
    vector = env(name, engine="robosuite").make_vector(1)
    vector.reset([2])
    step = vector.step_chunk(episode.actions[None])
    np.testing.assert_array_equal(step.rewards[0], episode.rewards)
    assert bool(step.success[0]) == episode.success


def test_noise_and_pace_are_obeyed(simulator: None) -> None:
    calm, slow = (
        env("lift", expert=ArmExpert(noise=0.0, pace=pace)).demonstrate(0)  # type: ignore[attr-defined]
        for pace in (1.0, 0.4)
    )
    assert np.abs(calm.actions[:, :3]).max() == 1 and np.abs(slow.actions[:, :3]).max() <= np.float32(0.4)
    assert calm.success and slow.success and len(slow) > len(calm)
