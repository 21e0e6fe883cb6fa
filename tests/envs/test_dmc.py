"""Tasks of the DeepMind Control Suite against the suite itself."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions

from envs.engine.vector import ChunkVector
from envs.make import env
from envs.tasks.dmc import TASKS, load_suite
from policies.errors import ConfigError, MissingExtraError

SOME = ("cheetah-run", "reacher-easy", "manipulator-bring_peg")
"""One integrator of each kind; starts that write places and sizes into the model; parts of several axes."""


@pytest.fixture(scope="module")
def suite() -> Any:
    """The suite, or a skip that says why not."""
    return pytest.importorskip("dm_control.suite", reason="needs the extra 'dmc'")


def vector_of(task: str, num_envs: int = 2, **options: Any) -> ChunkVector:
    vector = env("dmc", task=task, **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def seen(step: Any) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in step.observation.values()])


@pytest.mark.parametrize("task", SOME)
def test_steps_equal_those_of_the_suite_and_go_on_from_a_saved_state(task: str, suite: Any) -> None:
    official, vector = suite.load(*task.split("-")), vector_of(task)
    actions = np.random.default_rng(0).uniform(-1, 1, (10, official.action_spec().shape[0]))
    official.task.random.seed(5)
    start = vector.reset([5, 6])
    np.testing.assert_array_equal(start[0, -1], seen(official.reset()))
    for i, action in enumerate(np.float32(actions)):
        if i == 6:
            state, vector = vector.state_dict(), vector_of(task)
            vector.load_state_dict(state)
        expected, step = official.step(action), vector.step_chunk(np.stack([action, -action])[:, None])
        np.testing.assert_array_equal(step.obs[0, -1], seen(expected))
        assert step.rewards[0, 0] == expected.reward and not step.done.any()
    assert not np.array_equal(step.obs[0], step.obs[1])


def test_the_description_is_that_of_the_suite(suite: Any) -> None:
    spec = env("dmc", task="hopper-stand").spec
    assert (spec.obs_dim, spec.action_dim, spec.max_episode_steps, spec.control_hz) == (15, 4, 1000, 50.0)
    assert spec.obs_names[5:8] == ("position 5", "velocity 0", "velocity 1") and spec.quantity == "return"
    assert spec.action_names == ("waist", "hip", "knee", "ankle")
    left_out = {"lqr-lqr_2_1", "lqr-lqr_6_2", "quadruped-escape"}
    assert set(TASKS) == {"-".join(names) for names in suite.ALL_TASKS} - left_out


def test_every_row_is_drawn_with_its_own_target(suite: Any) -> None:
    require_drawing()
    vector = vector_of("reacher-easy", cameras=("fixed",), image_size=(32, 32))
    vector.reset([3, 4])
    first, second = vector.images()["fixed"][:, 0].astype(int)
    vector.reset([4], [0])
    np.testing.assert_array_equal(vector.images()["fixed"][0, 0], second)
    assert abs(first - second).max() > 50
    vector.close()


def test_a_task_that_is_not_there_is_refused_with_what_is_near() -> None:
    with pytest.raises(ConfigError, match=mentions("env.task hopper-stand")):
        env("dmc", task="hoper-stand")
    with pytest.raises(ConfigError, match=mentions("env.task cheetah-run")):
        _ = env("dmc").spec


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_suite.cache_clear()
    monkeypatch.setitem(sys.modules, "dm_control.suite", None)
    with pytest.raises(MissingExtraError, match=mentions("burnish[dmc]")):
        vector_of("cheetah-run")
