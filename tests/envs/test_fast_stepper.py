"""The fast engine against robosuite itself: the same resets, physics, rewards and observations."""

from __future__ import annotations

import pickle
from typing import Any

import mujoco
import numpy as np
import pytest
from messages import mentions

from envs.engine.vector import ChunkVector
from envs.make import env
from envs.spec import ChunkStep
from envs.tasks.robosuite.fast_stepper import FastStepper
from envs.tasks.robosuite.reference_stepper import RobosuiteStepper
from policies.errors import CheckpointError

pytest.importorskip("robosuite", reason="needs the extra 'robosuite' (and a C compiler to install it)")

NAMES = ("lift", "can", "square", "transport")
INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


def vector_of(name: str, engine: str = "fast", num_envs: int = 1, **options: object) -> ChunkVector:
    vector = env(name, engine=engine, **options).make_vector(num_envs)
    assert isinstance(vector, ChunkVector)
    return vector


def fast(vector: ChunkVector) -> FastStepper:
    assert isinstance(vector.stepper, FastStepper)
    return vector.stepper


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def robosuite(name: str) -> ChunkVector:
    return vector_of(name, "robosuite")


def wandering(vector: ChunkVector, steps: int, seed: int, down: float = 0.0) -> np.ndarray:
    """Actions (1, steps, Da) that change every few steps; with `down` they press on the table."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (1, steps // 5, vector.spec.action_dim)).repeat(5, axis=1)
    actions[..., 2::7] -= down
    return actions.clip(-1, 1)


@pytest.fixture
def pair(name: str, robosuite: ChunkVector) -> tuple[ChunkVector, ChunkVector, Any, Any]:
    """Both engines, and the states of their simulators."""
    vector, plain = vector_of(name), robosuite.stepper
    assert isinstance(plain, RobosuiteStepper)
    return vector, robosuite, fast(vector).datas[0], plain.datas[0]


def compare(ours: ChunkStep, theirs: ChunkStep) -> None:
    np.testing.assert_array_equal(ours.rewards, theirs.rewards)
    np.testing.assert_array_equal(ours.success, theirs.success)
    np.testing.assert_allclose(ours.path, theirs.path, rtol=0, atol=2e-6)  # robosuite rounds to float32


def test_a_hundred_control_steps_equal_robosuites(
    pair: tuple[ChunkVector, ChunkVector, Any, Any], name: str
) -> None:
    vector, robosuite, ours, theirs = pair
    steps = 100 if name != "transport" else 20  # its many loose parts amplify rounding soon
    np.testing.assert_allclose(vector.reset([0]), robosuite.reset([0]), atol=1e-6)
    actions = wandering(vector, steps, 0)
    for start in range(0, steps, 10):
        compare(*(v.step_chunk(actions[:, start : start + 10]) for v in (vector, robosuite)))
        np.testing.assert_allclose(ours.qpos, theirs.qpos, rtol=0, atol=1e-9)


def test_every_step_of_pressing_on_the_table_equals_robosuites(
    pair: tuple[ChunkVector, ChunkVector, Any, Any],
) -> None:
    """From equal states: rounding may decide when the contact solver stops, and contacts amplify that."""
    vector, robosuite, ours, theirs = pair
    vector.reset([2])
    robosuite.reset([2])
    model, actions = fast(vector).model, wandering(vector, 60, 2, down=0.7)
    state = np.empty(mujoco.mj_stateSize(model, INTEGRATION))
    for k in range(60):
        compare(*(v.step_chunk(actions[:, k : k + 1]) for v in (vector, robosuite)))
        np.testing.assert_allclose(ours.qpos, theirs.qpos, rtol=0, atol=1e-6)
        mujoco.mj_getState(model, ours, state, INTEGRATION)
        mujoco.mj_setState(model, theirs, state, INTEGRATION)


def test_a_second_episode_forgets_the_first(name: str) -> None:
    used, fresh = vector_of(name, num_envs=2), vector_of(name)
    used.reset([5, 6])
    used.step_chunk(np.repeat(wandering(used, 5, 1), 2, axis=0))
    actions = wandering(fresh, 5, 0)
    np.testing.assert_array_equal(used.reset([9], [1]), fresh.reset([9]))
    step = used.step_chunk(np.repeat(actions, 2, axis=0))
    np.testing.assert_array_equal(step.path[1], fresh.step_chunk(actions).path[0])


def test_a_saved_vector_continues_bit_for_bit_from_any_step(name: str) -> None:
    for before in (0, 5):  # the first physics step of an episode is special
        vector, other = vector_of(name), vector_of(name)
        vector.reset([3])
        other.reset([4])
        if before:
            vector.step_chunk(wandering(vector, before, 0))
        other.load_state_dict(pickle.loads(pickle.dumps(vector.state_dict())))
        actions = wandering(vector, 10, 1)
        expected, got = vector.step_chunk(actions), other.step_chunk(actions)
        np.testing.assert_array_equal(got.path, expected.path)
        np.testing.assert_array_equal(got.obs, expected.obs)


def test_a_state_of_another_engine_is_refused() -> None:
    with pytest.raises(CheckpointError, match=mentions("env.engine=fast")):
        fast(vector_of("lift")).set_state(np.zeros(3))  # type: ignore[arg-type]


def test_all_environments_of_a_process_share_a_model() -> None:
    one, two = fast(vector_of("can")), fast(vector_of("can", num_envs=3))
    assert one.model is two.model and len(two.datas) == 3
