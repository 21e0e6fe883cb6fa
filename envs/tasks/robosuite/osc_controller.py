"""The control law of robosuite's `OSC_POSE`: operational-space control of a 7-joint arm, in plain loops.

A command sets a goal relative to the present pose of the hand. At every physics step the law maps the
distance to that goal to joint torques:

    torque = Jᵀ [Λp F; Λr T] + Nᵀ M (10 (rest - q) - 2 √10 q̇) + bias
    F = 150 (goal - x) - 2 √150 ẋ,   T likewise for the rotation,
    A = J M⁻¹ Jᵀ,   Λp = A[:3, :3]⁻¹,   Λr = A[3:, 3:]⁻¹,   Nᵀ = 1 - Jᵀ A⁻¹ J M⁻¹

The second term moves the joints to the posture `rest` in the null space of the hand; written out,
Nᵀ M p is M p - Jᵀ A⁻¹ (J p), so no inverse of a matrix is formed.

The functions use scalars and small arrays, which numba compiles (`compiled`). They read MuJoCo's memory after
its position and velocity stage.

Source:
    Khatib, "A unified approach for motion and force control of robot manipulators", 1987; gains, decoupling
    of translation and rotation, and the rounding of commanded rotations as in robosuite 1.5.1.

Legend: 7 joints of one arm; a twist is (6,), translation first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from envs.spec import Array
from policies.extras import require

STIFFNESS = 150.0  # of the hand [1/s²], both of translation and rotation
DAMPING = 2.0 * np.sqrt(STIFFNESS)  # [1/s], critical
POSTURE_STIFFNESS = 10.0  # of the joints, in the null space of the hand [1/s²]
POSTURE_DAMPING = 2.0 * np.sqrt(POSTURE_STIFFNESS)
STEP_M = 0.05  # change of position at a command of 1 [m]
TURN_RAD = 0.5  # rotation vector at a command of 1 [rad]
FINGER_RATE = 0.2  # change of the target finger opening per command, full range is 2


def rotation(turn: Array, out: Array) -> None:
    """Write the matrix (3, 3) of a rotation vector (3,) [rad], through a quaternion in single precision.

    robosuite rounds here; a goal without that rounding differs by 3e-8 rad.
    """
    angle = np.sqrt(turn[0] * turn[0] + turn[1] * turn[1] + turn[2] * turn[2])
    q = np.zeros(4, np.float32)  # w, x, y, z
    q[0] = 1.0
    if angle > 1e-9:
        q[0] = np.cos(angle / 2.0)
        for i in range(3):
            q[i + 1] = turn[i] / angle * np.sin(angle / 2.0)
    scale = np.sqrt(2.0 / np.float64(np.dot(q, q)))
    for i in range(4):
        q[i] = np.float64(q[i]) * scale
    out[0, 0] = 1.0 - np.float64(q[2] * q[2]) - np.float64(q[3] * q[3])
    out[1, 1] = 1.0 - np.float64(q[1] * q[1]) - np.float64(q[3] * q[3])
    out[2, 2] = 1.0 - np.float64(q[1] * q[1]) - np.float64(q[2] * q[2])
    out[0, 1], out[1, 0] = q[1] * q[2] - q[3] * q[0], q[1] * q[2] + q[3] * q[0]
    out[0, 2], out[2, 0] = q[1] * q[3] + q[2] * q[0], q[1] * q[3] - q[2] * q[0]
    out[1, 2], out[2, 1] = q[2] * q[3] - q[1] * q[0], q[2] * q[3] + q[1] * q[0]


def set_goal(action: Array, position: Array, frame: Array, goal_position: Array, goal_frame: Array) -> None:
    """Write the goal (3,), (3, 3) of a command (6,) in [-1, 1] from the hand's position and orientation."""
    turned = np.empty((3, 3))
    rotation(action[3:] * TURN_RAD, turned)
    for i in range(3):
        goal_position[i] = position[i] + action[i] * STEP_M
        for j in range(3):
            goal_frame[i, j] = (
                turned[i, 0] * frame[0, j] + turned[i, 1] * frame[1, j] + turned[i, 2] * frame[2, j]
            )


def rotation_error(goal: Array, frame: Array, out: Array) -> None:
    """Write half the summed cross products of the axes (3, 3), a rotation vector (3,) for small angles."""
    for i in range(3):
        a, b = (i + 1) % 3, (i + 2) % 3
        out[i] = 0.0
        for axis in range(3):
            out[i] += 0.5 * (frame[a, axis] * goal[b, axis] - frame[b, axis] * goal[a, axis])


def jacobian(axes: Array, offset: Array, out: Array) -> None:
    """Write the Jacobian (6, 7) of a point at an offset (3,) from MuJoCo's reference point.

    `axes` (7, 6) are the motion axes of the joints about that reference, rotation first.
    """
    for joint in range(axes.shape[0]):
        for i in range(3):
            a, b = (i + 1) % 3, (i + 2) % 3
            out[i, joint] = axes[joint, 3 + i] + axes[joint, a] * offset[b] - axes[joint, b] * offset[a]
            out[3 + i, joint] = axes[joint, i]


def factor(matrix: Array) -> None:
    """Overwrite the lower triangle of a positive definite matrix (n, n) with its Cholesky factor."""
    for j in range(matrix.shape[0]):
        for i in range(j, matrix.shape[0]):
            value = matrix[i, j]
            for k in range(j):
                value -= matrix[i, k] * matrix[j, k]
            matrix[i, j] = np.sqrt(value) if i == j else value / matrix[j, j]


def forward(lower: Array, vector: Array) -> None:
    """Overwrite a vector (n,) with L⁻¹ of it."""
    for i in range(vector.shape[0]):
        for k in range(i):
            vector[i] -= lower[i, k] * vector[k]
        vector[i] /= lower[i, i]


def backward(lower: Array, vector: Array) -> None:
    """Overwrite a vector (n,) with L⁻ᵀ of it."""
    for i in range(vector.shape[0] - 1, -1, -1):
        for k in range(i + 1, vector.shape[0]):
            vector[i] -= lower[k, i] * vector[k]
        vector[i] /= lower[i, i]


def solve(matrix: Array, vector: Array) -> None:
    """Overwrite a vector (n,) with A⁻¹ of it, and the lower triangle of A (n, n) with its factor."""
    factor(matrix)
    forward(matrix, vector)
    backward(matrix, vector)


def admittance(mass: Array, jac: Array, out: Array) -> None:
    """Write J M⁻¹ Jᵀ (6, 6), the mobility of the hand, from M (7, 7) and J (6, 7)."""
    lower, rows = mass.copy(), jac.copy()
    factor(lower)
    for i in range(6):
        forward(lower, rows[i])
        for j in range(i + 1):
            out[i, j] = out[j, i] = np.dot(rows[i], rows[j])


def joint_torques(jac: Array, mass: Array, wrench: Array, posture: Array, out: Array) -> None:
    """Write the torques (7,) of target accelerations, without gravity.

    `wrench` (6,) is the hand's and is overwritten; `posture` (7,) is the joints', in the null space of the
    hand.
    """
    mobility, null_wrench = np.empty((6, 6)), np.zeros(6)
    admittance(mass, jac, mobility)
    solve(mobility[:3, :3].copy(), wrench[:3])
    solve(mobility[3:, 3:].copy(), wrench[3:])
    for i in range(6):
        for joint in range(7):
            null_wrench[i] += jac[i, joint] * posture[joint]
    solve(mobility, null_wrench)
    for joint in range(7):
        out[joint] = 0.0
        for other in range(7):
            out[joint] += mass[joint, other] * posture[other]
        for i in range(6):
            out[joint] += jac[i, joint] * (wrench[i] - null_wrench[i])


def drive(
    q: Array,  # (7,) joint positions
    velocity: Array,  # (7,) joint velocities
    bias: Array,  # (7,) gravity and Coriolis torques
    axes: Array,  # (7, 6) motion axes of the joints (`cdof`)
    inertia: Array,  # non-zero entries of the mass matrix of the whole model (`qM`)
    reference: Array,  # (3,) reference point of `axes` (`subtree_com` of the robot)
    position: Array,  # (3,) of the hand
    frame: Array,  # (3, 3) orientation of the hand
    entries: Array,  # (7, 7) indices of the arm's entries in `inertia`
    limits: Array,  # (7, 2) smallest and largest torque
    rest: Array,  # (7,) posture target in the null space of the hand
    goal_position: Array,  # (3,)
    goal_frame: Array,  # (3, 3)
    torque: Array,  # (7,), written
) -> None:
    """Write the motor torques for the present state of one arm."""
    jac, mass, wrench, posture = np.empty((6, 7)), np.empty((7, 7)), np.empty(6), np.empty(7)
    jacobian(axes, position - reference, jac)
    rotation_error(goal_frame, frame, wrench[3:])
    for i in range(3):
        wrench[i] = goal_position[i] - position[i]
    for i in range(6):
        speed = 0.0
        for joint in range(7):
            speed += jac[i, joint] * velocity[joint]
        wrench[i] = STIFFNESS * wrench[i] - DAMPING * speed
    for joint in range(7):
        posture[joint] = POSTURE_STIFFNESS * (rest[joint] - q[joint]) - POSTURE_DAMPING * velocity[joint]
        for other in range(7):
            mass[joint, other] = inertia[entries[joint, other]]
    joint_torques(jac, mass, wrench, posture, torque)
    for joint in range(7):
        torque[joint] = min(max(torque[joint] + bias[joint], limits[joint, 0]), limits[joint, 1])


_PARTS = (rotation, rotation_error, jacobian, factor, forward, backward, solve, admittance, joint_torques)


@cache
def compiled() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return `set_goal` and `drive` as machine code, which numba caches on disk.

    Raises:
        MissingExtraError: If numba is not installed; robosuite brings it.
    """
    require("numba", extra="robosuite")
    import numba
    from numba.extending import register_jitable

    for part in _PARTS:
        register_jitable(part)
    jit: Any = numba.njit(cache=True)
    return jit(set_goal), jit(drive)
