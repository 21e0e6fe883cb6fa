"""A task of your own, in one file: a MuJoCo model, observations, rewards, and where an episode begins.

    python -m examples.own_task

A planar arm with two joints reaches for targets; a scripted expert is recorded, a diffusion policy is cloned.
With `@register("env", "reach")` above `Reach` the command line knows the task as well.
Legend: N environments, M of them addressed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import mujoco
import numpy as np
import torch

from envs.datasets.episode import Episode
from envs.engine.physics import get_physics, set_physics
from envs.engine.vector import ChunkVector
from envs.rollouts.collect import collect
from envs.rollouts.recording import Recording
from envs.spec import EnvSpec, StepResult
from examples.bc import clone, success_rate

Array = np.ndarray

MJCF = """
<mujoco model="reach">
  <option timestep="0.01" gravity="0 0 0"/>
  <default><geom type="capsule" size="0.01" mass="0.1" contype="0" conaffinity="0"/></default>
  <worldbody>
    <body><joint name="shoulder" axis="0 0 1" damping="0.01"/><geom fromto="0 0 0 0.1 0 0"/>
      <body pos="0.1 0 0"><joint name="elbow" axis="0 0 1" damping="0.01"/><geom fromto="0 0 0 0.1 0 0"/>
        <site name="hand" pos="0.1 0 0"/></body></body>
    <body mocap="true"><geom type="sphere" size="0.015"/></body>
  </worldbody>
  <actuator>
    <velocity joint="shoulder" kv="0.05"/><velocity joint="elbow" kv="0.05"/>
  </actuator>
</mujoco>
"""
OBSERVED = ("cos q1", "cos q2", "sin q1", "sin q2", "hand x [m]", "hand y [m]", "to go x [m]", "to go y [m]")
SUBSTEPS, MAX_SPEED, NEAR = 5, 4.0, 0.015  # physics steps per action; rad/s; m


class ReachStepper:
    """N arms, each in its own simulator state; see `envs.spec.Stepper`."""

    can_save = True

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.model = num_envs, mujoco.MjModel.from_xml_string(MJCF)
        self.datas = [mujoco.MjData(self.model) for _ in range(num_envs)]

    def reset(self, row: int, seed: int) -> Array:
        """Begin an episode: everything is drawn from its seed."""
        rng, data = np.random.default_rng(seed), self.datas[row]
        mujoco.mj_resetData(self.model, data)
        data.qpos[:] = rng.uniform([-np.pi, 0.5], [np.pi, 2.5])
        angle, radius = rng.uniform(-np.pi, np.pi), rng.uniform(0.08, 0.18)
        data.mocap_pos[0] = [radius * np.cos(angle), radius * np.sin(angle), 0]
        mujoco.mj_forward(self.model, data)
        return self.observe(row)

    def observe(self, row: int) -> Array:
        """Return what the policy sees, (8,)."""
        data = self.datas[row]
        hand = data.site("hand").xpos[:2]
        return np.concatenate([np.cos(data.qpos), np.sin(data.qpos), hand, data.mocap_pos[0, :2] - hand])

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance some arms by actions (M, 2), shares of the largest joint speeds."""
        for row, action in zip(rows.tolist(), actions, strict=True):
            self.datas[row].ctrl[:] = MAX_SPEED * action
            mujoco.mj_step(self.model, self.datas[row], SUBSTEPS)
        obs = np.stack([self.observe(row) for row in rows.tolist()])
        distance = np.linalg.norm(obs[:, 6:], axis=1)
        return StepResult(obs, -distance, distance < NEAR, np.zeros(len(rows), bool), distance < NEAR)

    def metrics(self) -> dict[str, Array]:
        return {}

    def get_state(self) -> Array:
        return get_physics(self.model, self.datas)

    def set_state(self, state: Array) -> None:
        set_physics(self.model, self.datas, state)

    def close(self) -> None:
        self.datas.clear()


@dataclass(frozen=True)
class Reach:
    """Facts, engine and expert of the task; see `envs.spec.EnvConfig`."""

    max_episode_steps: int = 60  # control steps of 50 ms

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="reach",
            family="reach",
            obs_dim=8,
            action_dim=2,
            action_low=(-1.0, -1.0),
            action_high=(1.0, 1.0),
            max_episode_steps=self.max_episode_steps,
            control_hz=20.0,
            obs_names=OBSERVED,
            action_names=("shoulder speed [4 rad/s]", "elbow speed [4 rad/s]"),
            success_rule=f"the hand is within {NEAR} m of the target",
        )

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
        """History, chunks, time limit and saving are the vector's."""
        return ChunkVector(self.spec, ReachStepper(num_envs), obs_steps=obs_steps)

    def demonstrate(self, seed: int) -> Episode:
        """Reach by damped least squares: dq = J' (J J' + l I)^-1 dx."""
        stepper, rng = ReachStepper(1), np.random.default_rng([seed, 1])
        record, data, jacobian = Recording(stepper, seed), stepper.datas[0], np.zeros((3, 2))
        while not record.ended and len(record) < self.max_episode_steps:
            mujoco.mj_jacSite(stepper.model, data, jacobian, None, 0)
            j = jacobian[:2]
            speed = j.T @ np.linalg.solve(j @ j.T + 1e-3 * np.eye(2), 5.0 * record.now[6:])
            record.step(np.clip(speed / MAX_SPEED + 0.1 * rng.standard_normal(2), -1, 1))
        return record.episode(truncated=not record.ended, success=record.is_solved)


def main() -> None:
    """Record, clone, evaluate."""
    parser = argparse.ArgumentParser(prog="python -m examples.own_task")
    parser.add_argument("--demonstrations", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4000, help="gradient steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dataset = collect(Reach(), episodes=args.demonstrations)
    print(f"recorded {dataset.num_episodes} episodes in {dataset.meta['attempts']} attempts")
    for steps in (10, args.steps):
        policy = clone(dataset, steps=steps)
        print(f"{steps:5d} gradient steps: {success_rate(policy, Reach()):.0%} success")


if __name__ == "__main__":
    main()
