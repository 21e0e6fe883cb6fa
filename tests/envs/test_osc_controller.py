"""The control law against its textbook form with dense inverses, and against MuJoCo's own Jacobians."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from envs.tasks.robosuite import osc_controller as law

AXES = ("0 0 1", "0 1 0", "1 0 0", "0 1 0", "1 0 0", "0 1 0", "0 0 1")


def chain(axes: tuple[str, ...]) -> str:
    """An arm of hinges in a row, with a site at its end."""
    xml = '<site name="hand" pos="0.1 0.02 0.05"/>'
    for axis in reversed(axes):
        xml = (
            f'<body pos="0.05 0.02 0.2"><joint axis="{axis}"/>'
            f'<geom size="0.04 0.1" type="capsule" mass="1"/>{xml}</body>'
        )
    return f"<mujoco><worldbody>{xml}</worldbody></mujoco>"


@pytest.fixture
def arm() -> tuple[mujoco.MjModel, mujoco.MjData]:
    """A seven-joint arm in some moving state."""
    model = mujoco.MjModel.from_xml_string(chain(AXES))
    data = mujoco.MjData(model)
    rng = np.random.default_rng(0)
    data.qpos[:], data.qvel[:] = rng.uniform(-1, 1, 7), rng.uniform(-1, 1, 7)
    mujoco.mj_forward(model, data)
    return model, data


def dense(model: mujoco.MjModel, data: mujoco.MjData) -> tuple[np.ndarray, np.ndarray]:
    """Mass matrix (7, 7) and Jacobian of the hand (6, 7), by MuJoCo."""
    mass, jac = np.empty((7, 7)), np.empty((6, 7))
    mujoco.mj_fullM(model, mass, data.qM)
    mujoco.mj_jacSite(model, data, jac[:3], jac[3:], 0)
    return mass, jac


def drive(
    model: mujoco.MjModel, data: mujoco.MjData, goal: tuple[np.ndarray, np.ndarray], **changes: object
) -> np.ndarray:
    """Torques of the law for the state in `data`."""
    from envs.tasks.robosuite.fast_stepper import _inertia_entries

    options = {"rest": np.zeros(7), "limits": np.tile([-1e9, 1e9], (7, 1))} | changes
    torque = np.empty(7)
    law.drive(
        *(data.qpos, data.qvel, data.qfrc_bias, data.cdof, data.qM, data.subtree_com[1]),
        *(data.site_xpos[0], data.site_xmat[0].reshape(3, 3), _inertia_entries(model, range(7))),
        *(options["limits"], options["rest"], *goal, torque),
    )
    return torque


def test_the_jacobian_is_mujocos(arm: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    data, jac = arm[1], np.empty((6, 7))
    law.jacobian(data.cdof, data.site_xpos[0] - data.subtree_com[1], jac)
    np.testing.assert_allclose(jac, dense(*arm)[1], atol=1e-14)


def test_torques_are_those_of_the_textbook(arm: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    model, data = arm
    mass, jac = dense(model, data)
    position, frame = data.site_xpos[0], data.site_xmat[0].reshape(3, 3)
    turn, rest = np.array([0.02, -0.01, 0.03]), np.full(7, 0.3)
    goal = position + np.array([0.03, -0.02, 0.01]), Rotation.from_rotvec(turn).as_matrix() @ frame
    inverse = np.linalg.inv(mass)
    lam, lam_p, lam_r = (np.linalg.pinv(j @ inverse @ j.T) for j in (jac, jac[:3], jac[3:]))
    speed = jac @ data.qvel
    force = lam_p @ (150 * (goal[0] - position) - 2 * np.sqrt(150) * speed[:3])
    sine = turn / np.linalg.norm(turn) * np.sin(np.linalg.norm(turn))  # the error of rotation is its sine
    moment = lam_r @ (150 * sine - 2 * np.sqrt(150) * speed[3:])
    null = np.eye(7) - inverse @ jac.T @ lam @ jac
    posture = mass @ (10 * (rest - data.qpos) - 2 * np.sqrt(10) * data.qvel)
    expected = jac.T @ np.concatenate([force, moment]) + null.T @ posture + data.qfrc_bias
    np.testing.assert_allclose(drive(model, data, goal, rest=rest), expected, rtol=1e-9, atol=1e-9)


def test_the_hand_does_not_feel_the_posture(arm: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    model, data = arm
    mass, jac = dense(model, data)
    goal = data.site_xpos[0].copy(), data.site_xmat[0].reshape(3, 3).copy()
    one, two = (drive(model, data, goal, rest=np.full(7, angle)) for angle in (0.0, 1.0))
    assert np.abs(one - two).max() > 0.1
    np.testing.assert_allclose(jac @ np.linalg.solve(mass, one - two), 0, atol=1e-9)


def test_torques_stay_within_the_motors_limits(arm: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    goal = arm[1].site_xpos[0] + 5.0, np.eye(3)
    limits = np.tile([-2.0, 3.0], (7, 1))
    torque = drive(*arm, goal, limits=limits)
    assert torque.min() == -2.0 and torque.max() == 3.0


def test_a_goal_lies_a_command_away_from_the_hand() -> None:
    frame = Rotation.from_rotvec([0.3, 0.2, -0.5]).as_matrix()
    position, goal, wanted = np.array([0.1, 0.2, 0.3]), np.empty(3), np.empty((3, 3))
    action = np.array([1.0, -0.5, 0.0, 0.2, -0.4, 1.0])
    law.set_goal(action, position, frame, goal, wanted)
    np.testing.assert_allclose(goal, position + np.array([0.05, -0.025, 0.0]), rtol=1e-15)
    turned = Rotation.from_rotvec(0.5 * action[3:]).as_matrix()
    np.testing.assert_allclose(wanted, turned @ frame, atol=2e-7)  # the rotation is rounded to float32


def test_no_rotation_is_exactly_none() -> None:
    out = np.empty((3, 3))
    law.rotation(np.zeros(3), out)
    np.testing.assert_array_equal(out, np.eye(3))


def test_compiled_and_plain_laws_agree(arm: tuple[mujoco.MjModel, mujoco.MjData]) -> None:
    pytest.importorskip("numba", reason="comes with the extra 'robosuite'")
    model, data = arm
    goal = data.site_xpos[0] + 0.02, np.eye(3)
    plain = drive(model, data, goal)
    torque, limits = np.empty(7), np.tile([-1e9, 1e9], (7, 1))
    from envs.tasks.robosuite.fast_stepper import _inertia_entries

    _, fast = law.compiled()
    fast(
        *(data.qpos, data.qvel, data.qfrc_bias, data.cdof, data.qM, data.subtree_com[1]),
        *(data.site_xpos[0], data.site_xmat[0].reshape(3, 3), _inertia_entries(model, range(7)), limits),
        *(np.zeros(7), *goal, torque),
    )
    np.testing.assert_allclose(torque, plain, rtol=1e-12, atol=1e-12)
