"""Observations and success of robosuite scenes, read from MuJoCo's memory.

Every entry has the name of robosuite's observation and describes the poses of the last kinematics pass.
robosuite rounds relative poses to single precision; here they are not. Quaternions are x, y, z, w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envs.spec import Array

Read = Callable[[Any], Array]
"""Reads one entry of an observation out of an `MjData`."""

_LIFTED_M = 0.04  # of the cube's centre above the table
_RELEASED = 0.6  # nearness, 1 - tanh(10 distance), above which the gripper has not left an object
_BIN_M = 0.1  # height of what counts as inside a bin
_PEG_M = (0.03, 0.05)  # largest offset from the peg's axis, and height above the table


def reader(env: Any, keys: Sequence[str]) -> Read:
    """Return a function that concatenates named entries; a leading minus sign negates one."""
    entries = _entries(env)
    parts = [(entries[key.removeprefix("-")], -1.0 if key.startswith("-") else 1.0) for key in keys]
    return lambda data: np.concatenate([sign * read(data) for read, sign in parts])


def success_rule(env: Any) -> Callable[[Any], bool]:
    """Return the environment's success rule as a function of an `MjData`."""
    return _RULES[type(env).__name__](env)


def relative_pose(data: Any, hand: tuple[int, int], body: int) -> tuple[Array, Array]:
    """Return position (3,) and quaternion (4,) of a body in the frame of a gripper (site, body)."""
    import mujoco

    site, wrist = hand
    turn, position, quat = np.empty(4), np.empty(3), np.empty(4)
    mujoco.mju_negQuat(turn, data.xquat[wrist])
    mujoco.mju_rotVecQuat(position, data.xpos[body] - data.site_xpos[site], turn)
    mujoco.mju_mulQuat(quat, turn, data.xquat[body])
    return position, _upper(quat[[1, 2, 3, 0]])


def _upper(quat: Array) -> Array:
    """Of the two quaternions (4,) of a rotation return the one with w >= 0."""
    return -quat if quat[3] < 0 else quat


def _position(body: int) -> Read:
    return lambda data: np.array(data.xpos[body])


def _quaternion(body: int) -> Read:
    return lambda data: np.array(data.xquat[body][[1, 2, 3, 0]])


def _upper_quaternion(body: int) -> Read:
    return lambda data: _upper(data.xquat[body][[1, 2, 3, 0]])


def _entries(env: Any) -> dict[str, Read]:
    entries: dict[str, Read] = {}
    for robot in env.robots:
        entries |= _gripper_entries(env, robot)
    return entries | _OBJECTS[type(env).__name__](env)


def _gripper(env: Any, robot: Any) -> tuple[int, int]:
    """Return the gripper of a robot: site of its position, body of its orientation."""
    return robot.eef_site_id["right"], env.sim.model.body_name2id(robot.robot_model.eef_name["right"])


def _gripper_entries(env: Any, robot: Any) -> dict[str, Read]:
    site, wrist = _gripper(env, robot)
    prefix, fingers = robot.robot_model.naming_prefix, list(robot._ref_gripper_joint_pos_indexes["right"])
    return {
        f"{prefix}eef_pos": lambda data: np.array(data.site_xpos[site]),
        f"{prefix}eef_quat": _quaternion(wrist),
        f"{prefix}gripper_qpos": lambda data: data.qpos[fingers],
    }


def _offset(site: int, position: Read) -> Read:
    """Offset from the gripper to a point, in world axes."""
    return lambda data: position(data) - data.site_xpos[site]


def _lift_entries(env: Any) -> dict[str, Read]:
    cube, (site, _) = env.cube_body_id, _gripper(env, env.robots[0])
    position = _position(cube)
    return {
        "cube_pos": position,
        "cube_quat": _quaternion(cube),
        "gripper_to_cube_pos": _offset(site, position),
    }


def _object_entries(env: Any) -> dict[str, Read]:
    """Pose of the object in use, in the world and in the hand; can and square."""
    name, body, hand = env.obj_to_use, env.obj_body_id[env.obj_to_use], _gripper(env, env.robots[0])
    return {
        f"{name}_pos": _position(body),
        f"{name}_quat": _quaternion(body),
        f"{name}_to_robot0_eef_pos": lambda data: relative_pose(data, hand, body)[0],
        f"{name}_to_robot0_eef_quat": lambda data: relative_pose(data, hand, body)[1],
    }


def _transport_entries(env: Any) -> dict[str, Read]:
    group, model = env.transport, env.sim.model
    payload, trash = group.payload_body_id, group.trash_body_id
    handle = group.lid_handle_geom_ids[0]
    sites = [_gripper(env, robot)[0] for robot in env.robots]
    bins = [ids[0] for ids in (group.target_bin_base_geom_ids, group.trash_bin_base_geom_ids)]
    flags = _contacts_of_transport(group, model)
    at_payload, at_trash, at_handle = _position(payload), _position(trash), _geom_position(handle)
    return {
        "payload_pos": at_payload,
        "payload_quat": _upper_quaternion(payload),
        "trash_pos": at_trash,
        "trash_quat": _upper_quaternion(trash),
        "lid_handle_pos": at_handle,
        "lid_handle_quat": _geom_quaternion(handle),
        "target_bin_pos": _geom_position(bins[0]),
        "trash_bin_pos": _geom_position(bins[1]),
        "payload_in_target_bin": lambda data: np.array([float(flags[0](data))]),
        "trash_in_trash_bin": lambda data: np.array([float(flags[1](data))]),
        "gripper0_to_payload": _offset(sites[0], at_payload),
        "gripper0_to_lid_handle": _offset(sites[0], at_handle),
        "gripper1_to_payload": _offset(sites[1], at_payload),
        "gripper1_to_trash": _offset(sites[1], at_trash),
    }


def _geom_position(geom: int) -> Read:
    return lambda data: np.array(data.geom_xpos[geom])


def _geom_quaternion(geom: int) -> Read:
    import mujoco

    def read(data: Any) -> Array:
        quat = np.empty(4)
        mujoco.mju_mat2Quat(quat, data.geom_xmat[geom])
        return _upper(quat[[1, 2, 3, 0]])

    return read


def _touching(model: Any, these: Sequence[str], those: Sequence[str]) -> Callable[[Any], bool]:
    """Whether any geom of one set touches any of another, in the contacts of the last position stage."""
    first, second = (np.array([model.geom_name2id(name) for name in names]) for names in (these, those))

    def touch(data: Any) -> bool:
        a, b = data.contact.geom1, data.contact.geom2
        pairs = (np.isin(a, first) & np.isin(b, second)) | (np.isin(b, first) & np.isin(a, second))
        return bool(pairs.any())

    return touch


def _contacts_of_transport(group: Any, model: Any) -> tuple[Callable[[Any], bool], Callable[[Any], bool]]:
    """Whether the payload lies in the target bin, and the trash in the trash bin."""
    return (
        _touching(model, group.target_bin.base_geoms, group.payload.contact_geoms),
        _touching(model, group.trash_bin.base_geoms, group.trash.contact_geoms),
    )


def _is_released(data: Any, site: int, body: int) -> bool:
    """Whether the gripper is away from an object, by robosuite's measure of nearness."""
    distance = np.linalg.norm(data.site_xpos[site] - data.xpos[body])
    return bool(1 - np.tanh(10.0 * distance) < _RELEASED)


def _is_lifted(env: Any) -> Callable[[Any], bool]:
    cube, height = env.cube_body_id, env.model.mujoco_arena.table_offset[2] + _LIFTED_M
    return lambda data: bool(data.xpos[cube, 2] > height)


def _is_in_bin(env: Any) -> Callable[[Any], bool]:
    """The object in use lies in its quarter of the second bin."""
    body, (site, _) = env.obj_body_id[env.obj_to_use], _gripper(env, env.robots[0])
    quarter = np.array(env.bin_size[:2]) / 2
    right, upper = env.object_id % 2, env.object_id // 2  # quarters: milk, bread, cereal, can
    low = np.array([*(env.bin2_pos[:2] + quarter * [right - 1, upper - 1]), env.bin2_pos[2]])
    high = low + np.array([*quarter, _BIN_M])

    def solved(data: Any) -> bool:
        position = data.xpos[body]
        return bool(((low < position) & (position < high)).all()) and _is_released(data, site, body)

    return solved


def _is_on_peg(env: Any) -> Callable[[Any], bool]:
    body, (site, _) = env.obj_body_id[env.obj_to_use], _gripper(env, env.robots[0])
    peg, height = (env.peg1_body_id, env.peg2_body_id)[env.nut_id], env.table_offset[2] + _PEG_M[1]

    def solved(data: Any) -> bool:
        offset = np.abs(data.xpos[body] - data.xpos[peg])[:2]
        low = data.xpos[body, 2] < height
        return bool(low and (offset < _PEG_M[0]).all()) and _is_released(data, site, body)

    return solved


def _is_transported(env: Any) -> Callable[[Any], bool]:
    payload, trash = _contacts_of_transport(env.transport, env.sim.model)
    return lambda data: payload(data) and trash(data)


_OBJECTS: dict[str, Callable[[Any], dict[str, Read]]] = {
    "Lift": _lift_entries,
    "PickPlaceCan": _object_entries,
    "NutAssemblySquare": _object_entries,
    "TwoArmTransport": _transport_entries,
}
_RULES: dict[str, Callable[[Any], Callable[[Any], bool]]] = {
    "Lift": _is_lifted,
    "PickPlaceCan": _is_in_bin,
    "NutAssemblySquare": _is_on_peg,
    "TwoArmTransport": _is_transported,
}
