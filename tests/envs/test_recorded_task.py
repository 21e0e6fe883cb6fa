"""Which of our tasks a recorded specification means: the task it names gives what gymnasium's own gives."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import numpy as np
import pytest
import yaml

from envs.datasets.recorded_task import option_text, recorded_task_text
from envs.make import env


def parsed(text: str) -> Any:
    """Build the task that a text of the command line means."""
    (_, name), *options = (part.removeprefix("env.").split("=") for part in text.split())
    return env(name, **{key: yaml.safe_load(value) for key, value in options})


def test_options_are_written_as_they_areoption_text() -> None:
    assert option_text((1, [True, None], "free")) == "[1,[true,null],free]"


MAZE = {"id": "PointMaze_UMaze-v3", "max_episode_steps": 300}


@pytest.mark.parametrize(
    ("spec", "widths", "expected"),
    [
        ({"id": "Hopper-v5", "max_episode_steps": 1000, "kwargs": {}}, (11, 3), "env=hopper"),
        ({"id": "Walker2d-v4"}, (17, 6), "env=walker2d env.version=v4"),
        (
            {"id": "HalfCheetah-v5", "max_episode_steps": 5},
            (17, 6),
            "env=halfcheetah env.max_episode_steps=5",
        ),
        ({"id": "AdroitHandDoor-v1", "max_episode_steps": 200}, (39, 28), "env=adroit-door"),
        (
            MAZE | {"kwargs": {"reward_type": "dense", "continuing_task": False}},
            (4, 2),
            "env=pointmaze-umaze env.goal=separate env.reward=dense",
        ),
        (MAZE, (4, 2), "env=pointmaze-umaze env.goal=separate env.continuing=true"),
    ],
)
def test_a_specification_names_our_task(spec: dict[str, Any], widths: tuple[int, int], expected: str) -> None:
    assert (
        recorded_task_text({"env_spec": spec}, *widths)
        == recorded_task_text({"env_spec": json.dumps(spec)}, *widths)
        == expected
    )
    assert (parsed(expected).spec.obs_dim, parsed(expected).spec.action_dim) == widths


@pytest.mark.parametrize(
    ("spec", "widths"),
    [
        ({"id": "Hopper-v5"}, (12, 3)),  # with the position, which ours does not observe
        ({"id": "Hopper-v3"}, (11, 3)),
        ({"id": "Hopper-v5", "max_episode_steps": -1}, (11, 3)),
        ({"id": "CartPole-v1"}, (4, 1)),
        ("{", (4, 1)),
        (None, (4, 1)),
        ([], (4, 1)),
    ],
)
def test_what_is_no_task_of_ours_is_not_named(spec: Any, widths: tuple[int, int]) -> None:
    assert recorded_task_text({"env_spec": spec}, *widths) is None


def test_the_named_maze_is_the_recorded_one_step_by_step() -> None:
    import gymnasium

    pytest.importorskip("gymnasium_robotics", reason="needs the extra 'mazes'")
    with contextlib.redirect_stderr(io.StringIO()):
        import gymnasium_robotics
    gymnasium.register_envs(gymnasium_robotics)
    peer = gymnasium.make("PointMaze_UMaze-v3", reward_type="dense", disable_env_checker=True)
    assert peer.spec is not None
    text = recorded_task_text({"env_spec": peer.spec.to_json()}, 4, 2)
    assert text is not None
    vector = parsed(text).make_vector(1)
    seen, _ = peer.reset(seed=3)
    np.testing.assert_array_equal(vector.reset([3])[0, -1], seen["observation"])
    np.testing.assert_array_equal(vector.goals()["goal"][0], seen["desired_goal"])
    for action in np.random.default_rng(0).uniform(-1, 1, (10, 2)):
        seen, reward, *_ = peer.step(action)
        step = vector.step_chunk(action[None, None])
        np.testing.assert_array_equal(step.obs[0, -1], seen["observation"])
        assert step.rewards[0, 0] == reward
    peer.close()
    vector.close()
