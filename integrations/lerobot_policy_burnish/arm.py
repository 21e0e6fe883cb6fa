"""An arm with the joints of an SO-101 that reaches for a ball; a task file for `env=mjcf`.

Sizes are round numbers near those of the SO-101, shapes are capsules. State and action share LeRobot's order
of joints; 1 is the end of a joint's range (LeRobot: 100).
"""

from __future__ import annotations

import numpy as np

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
RANGES = (1.9, 1.7, 1.7, 1.65, 2.7, 1.0)  # rad, to both sides


def _servo(name, limit):
    return f'<position name="{name}.pos" joint="{name}" kp="60" kv="3" ctrlrange="-{limit} {limit}"/>'


MODEL = f"""
<mujoco model="arm">
  <compiler angle="radian"/><option timestep="0.005" integrator="implicitfast"/>
  <visual><global offwidth="320" offheight="240"/></visual>
  <default>
    <geom type="capsule" size="0.015" mass="0.08" contype="0" conaffinity="0" rgba="0.9 0.8 0.2 1"/>
    <joint damping="0.6" armature="0.02"/>
  </default>
  <worldbody>
    <light pos="0 0 1.5"/>
    <geom type="plane" size="1 1 0.1" rgba="0.3 0.3 0.35 1"/>
    <camera name="front" pos="0.75 0 0.45" xyaxes="0 1 0 -0.45 0 0.89"/>
    <body mocap="true" name="ball"><geom type="sphere" size="0.02" rgba="0.9 0.1 0.1 1"/></body>
    <body pos="0 0 0.06"><joint name="shoulder_pan" axis="0 0 1" range="-{RANGES[0]} {RANGES[0]}"/>
      <geom fromto="0 0 -0.05 0 0 0"/>
      <body><joint name="shoulder_lift" axis="0 1 0" range="-{RANGES[1]} {RANGES[1]}"/>
        <geom fromto="0 0 0 0 0 0.12"/>
        <body pos="0 0 0.12"><joint name="elbow_flex" axis="0 1 0" range="-{RANGES[2]} {RANGES[2]}"/>
          <geom fromto="0 0 0 0.135 0 0"/>
          <body pos="0.135 0 0"><joint name="wrist_flex" axis="0 1 0" range="-{RANGES[3]} {RANGES[3]}"/>
            <geom fromto="0 0 0 0.06 0 0"/>
            <body pos="0.06 0 0"><joint name="wrist_roll" axis="1 0 0" range="-{RANGES[4]} {RANGES[4]}"/>
              <camera name="wrist" pos="0 0 0.05" xyaxes="0 -1 0 0.3 0 0.95"/>
              <geom fromto="0 0 0 0.05 0 0" size="0.01"/>
              <site name="tip" pos="0.09 0 0"/>
              <body pos="0.05 0.01 0"><joint name="gripper" axis="0 0 1" range="-{RANGES[5]} {RANGES[5]}"/>
                <geom fromto="0 0 0 0.04 0 0" size="0.006"/></body></body></body></body></body></body>
  </worldbody>
  <actuator>
    {"".join(map(_servo, JOINTS, RANGES))}
  </actuator>
</mujoco>
"""

CONTROL_HZ, MAX_EPISODE_STEPS = 20.0, 60
ACTIONS = tuple(f"{name}.pos [of range]" for name in JOINTS)
OBSERVATIONS = (*ACTIONS, "ball.x [m]", "ball.y [m]", "ball.z [m]")
NEAR = 0.03  # m
_SPEED = 0.12  # of the range, per control step


def reset(model, data, rng):
    """Draw a posture, and place the ball where another posture has its tip."""
    import mujoco

    data.qpos[:] = np.array(RANGES) * _posture(rng)
    mujoco.mj_kinematics(model, data)
    data.mocap_pos[0] = data.site("tip").xpos
    data.qpos[:] = np.array(RANGES) * rng.uniform(-0.1, 0.1, len(JOINTS))
    data.ctrl[:] = data.qpos


def _posture(rng):
    low, high = np.array([-0.6, 0.1, -0.3, -0.3, 0.0, 0.0]), np.array([0.6, 0.5, 0.3, 0.3, 0.0, 0.0])
    return rng.uniform(low, high)


def observe(model, data):
    """Joint positions of their ranges, and the ball's position."""
    return {"joints": data.qpos / np.array(RANGES), "ball": data.mocap_pos[0]}


def _distance(data):
    return float(np.linalg.norm(data.site("tip").xpos - data.mocap_pos[0]))


def reward(model, data, action):
    """Minus the distance between tip and ball [m]."""
    return -_distance(data)


def success(model, data):
    """Tip within 3 cm of the ball."""
    return _distance(data) < NEAR


def expert(model, data, rng):
    """Move the joints along the gradient of the distance."""
    import mujoco

    jacobian = np.zeros((3, model.nv))
    mujoco.mj_jacSite(model, data, jacobian, None, model.site("tip").id)
    error = data.mocap_pos[0] - data.site("tip").xpos
    step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-3 * np.eye(3), error) / np.array(RANGES)
    step *= min(1.0, _SPEED / max(np.abs(step).max(), 1e-9))
    return data.ctrl / np.array(RANGES) + step
