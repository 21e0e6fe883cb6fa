"""robomimic's tasks on robosuite's own engine, against robosuite stepped one by one."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from messages import mentions

from envs.engine.vector import ChunkVector
from envs.make import env
from envs.tasks.robosuite.reference_stepper import RobosuiteStepper, make_robosuite
from policies.errors import CapabilityError, MissingExtraError

NAMES = ("lift", "can", "square", "transport")
STEPS = 6


@pytest.fixture(scope="module")
def simulator() -> None:
    """robosuite, or a skip that says why not."""
    pytest.importorskip("robosuite", reason="needs the extra 'robosuite' (and a C compiler to install it)")


@pytest.fixture(scope="module", params=NAMES)
def pair(simulator: None, request: pytest.FixtureRequest) -> tuple[ChunkVector, ChunkVector]:
    """Two vectors of one task; compiling models is what takes the time."""
    return vector_of(request.param), vector_of(request.param)


@pytest.fixture(scope="module")
def lift(simulator: None) -> ChunkVector:
    return vector_of("lift", max_episode_steps=5)


def vector_of(name: str, engine: str = "robosuite", **options: object) -> ChunkVector:
    vector = env(name, engine=engine, **options).make_vector(1)
    assert isinstance(vector, ChunkVector)
    return vector


def stepper_of(vector: ChunkVector) -> RobosuiteStepper:
    assert isinstance(vector.stepper, RobosuiteStepper)
    return vector.stepper


def random_actions(vector: ChunkVector, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (1, steps, vector.spec.action_dim))


@pytest.mark.parametrize(
    ("name", "obs_dim", "action_dim", "limit"),
    [("lift", 19, 7, 300), ("can", 23, 7, 300), ("square", 23, 7, 400), ("transport", 59, 14, 800)],
)
def test_sizes_are_those_of_robomimic_in_both_layouts(
    name: str, obs_dim: int, action_dim: int, limit: int
) -> None:
    for layout in ("v15", "v141"):
        spec = env(name, object_layout=layout).spec
        assert (spec.obs_dim, spec.action_dim, spec.max_episode_steps) == (obs_dim, action_dim, limit)
        assert len(set(spec.obs_names)) == obs_dim


def test_both_layouts_hold_the_same_observations() -> None:
    for name in NAMES:
        v15, v141 = (env(name, object_layout=layout).keys for layout in ("v15", "v141"))
        assert v15 != v141
        assert sorted(v15) == sorted(key.removeprefix("-") for key in v141)


def test_an_episode_follows_from_its_seed_whatever_happened_before(
    pair: tuple[ChunkVector, ChunkVector],
) -> None:
    used, fresh = pair
    used.reset([1])
    used.step_chunk(random_actions(used, STEPS, seed=1))
    before = np.random.get_state()[1].copy()
    np.testing.assert_array_equal(used.reset([9]), fresh.reset([9]))
    actions = random_actions(used, STEPS)
    np.testing.assert_array_equal(used.step_chunk(actions).path, fresh.step_chunk(actions).path)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    assert not np.array_equal(used.reset([10]), fresh.reset([9]))


def test_physics_and_rewards_are_robosuites_own(pair: tuple[ChunkVector, ChunkVector]) -> None:
    vector, other = pair
    actions = random_actions(vector, STEPS)
    vector.reset([3])
    other.reset([3])
    plain = stepper_of(other).envs[0]
    step = vector.step_chunk(actions)
    rewards = [plain.step(action)[1] for action in actions[0]]
    np.testing.assert_array_equal(stepper_of(vector).datas[0].qpos, plain.sim.data.qpos)
    np.testing.assert_array_equal(step.rewards[0], rewards)


def test_observations_describe_the_present_state(pair: tuple[ChunkVector, ChunkVector]) -> None:
    vector, _ = pair
    vector.reset([4])
    step = vector.step_chunk(random_actions(vector, STEPS))
    robosuite = stepper_of(vector).envs[0]
    robosuite.sim.forward()
    for _ in range(2):
        now = robosuite._get_observations(force_update=True)
    width = 9 * (vector.spec.action_dim // 7)
    arms = [
        now[f"robot{arm}_{key}"]
        for arm in range(width // 9)
        for key in ("eef_pos", "eef_quat", "gripper_qpos")
    ]
    np.testing.assert_allclose(step.obs[0, 0, :width], np.concatenate(arms), atol=1e-7)
    np.testing.assert_allclose(step.obs[0, 0, width:], now["object-state"], atol=1e-7)


def test_relative_poses_are_true_from_the_first_observation(simulator: None) -> None:
    names = env("can").spec.obs_names
    obs = dict(zip(names, vector_of("can").reset([0])[0, 0], strict=True))
    offset = [obs[f"can {axis} [m]"] - obs[f"robot0 eef {axis} [m]"] for axis in "xyz"]
    relative = [obs[f"can to robot0 eef {axis} [m]"] for axis in "xyz"]
    assert np.linalg.norm(relative) == pytest.approx(np.linalg.norm(offset), abs=1e-6)


def test_the_older_layout_turns_lifts_offset_around(simulator: None) -> None:
    new, old = vector_of("lift").reset([0])[0, 0], vector_of("lift", object_layout="v141").reset([0])[0, 0]
    np.testing.assert_array_equal(new[:16], old[:16])
    np.testing.assert_array_equal(new[16:], -old[16:])
    np.testing.assert_allclose(old[16:], old[:3] - old[9:12], atol=1e-12)


def test_both_arms_of_transport_move_along_the_axes_of_the_world(simulator: None) -> None:
    vector = vector_of("transport")
    for axis in range(3):
        first = vector.reset([0])[0, 0]
        action = np.zeros((1, 4, 14))
        action[..., [axis, 7 + axis]] = 1.0
        moved = vector.step_chunk(action).obs[0, 0] - first
        for arm in (moved[:3], moved[9:12]):
            assert np.abs(arm).argmax() == axis and arm[axis] > 0.03


def test_a_solved_task_pays_on_every_step_and_only_the_limit_ends_it(lift: ChunkVector) -> None:
    lift.reset([0])
    assert not lift.step_chunk(random_actions(lift, 1)).success[0]
    stepper_of(lift).envs[0].sim.data.set_joint_qpos("cube_joint0", [0.0, 0.25, 1.2, 1.0, 0.0, 0.0, 0.0])
    step = lift.step_chunk(random_actions(lift, 3))
    assert step.rewards[0].tolist() == [1, 1, 1] and step.success[0] and not step.done[0]
    step = lift.step_chunk(random_actions(lift, 3))
    assert step.length[0] == 1 and step.truncated[0] and not step.terminated[0]


def test_the_cube_has_one_size_in_all_environments(lift: ChunkVector) -> None:
    np.random.seed(1)
    other = make_robosuite("Lift", 1)
    np.testing.assert_array_equal(other.sim.model.geom_size, stepper_of(lift).envs[0].sim.model.geom_size)
    other.close()


def test_it_says_that_it_cannot_save(lift: ChunkVector) -> None:
    lift.reset([0])
    assert not lift.can_save
    with pytest.raises(CapabilityError, match=mentions("lift save")):
        lift.state_dict()
    with pytest.raises(CapabilityError, match=mentions("env.engine=fast")):
        stepper_of(lift).get_state()


def test_a_missing_simulator_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "robosuite", None)
    with pytest.raises(MissingExtraError, match=mentions("robosuite burnish[robosuite]")):
        vector_of("lift")
