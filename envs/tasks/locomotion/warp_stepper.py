"""The robots in mujoco-warp: many at once in float32, on a GPU where there is one; `env.engine=warp`.

Starts, observations, rewards and falls are those of the exact engine, computed from copies of warp's memory.

Legend: N environments, M of them addressed, Ta executed steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from envs.engine.warp_worlds import WarpWorlds
from envs.spec import Array, StepResult
from envs.tasks.locomotion.stepper import Judge, Robot, draw_start, load_model


class WarpRobotStepper:
    """Steps N copies of one robot whose rules need positions and velocities alone."""

    can_save = True

    def __init__(self, robot: Robot, num_envs: int) -> None:
        self.num_envs = num_envs
        self._judge = Judge(robot, load_model(robot.xml_file), num_envs)
        self._worlds = WarpWorlds(self._judge.model, num_envs)

    def reset(self, row: int, seed: int) -> Array:
        """Start an episode where the exact engine does for this seed; returns (Do,)."""
        qpos, qvel = draw_start(self._judge.robot, self._judge.model, seed)
        self._worlds.put(row, qpos, qvel)
        return self._judge.begin(row, [qpos[None], qvel[None]])

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, Da) for one control step."""
        return self.step_through(rows, actions[:, None]).at(0)

    def step_through(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by whole chunks (M, Ta, Da), past falls; all others keep their state."""
        worlds, device = self._worlds, self._worlds.qpos.device
        index = torch.as_tensor(rows, device=device)
        controls = torch.as_tensor(actions, dtype=torch.float32).to(device)
        idle = torch.ones(self.num_envs, dtype=torch.bool, device=device).index_fill_(0, index, False)
        seen = []
        with worlds.kept(idle):
            for j in range(actions.shape[1]):
                worlds.ctrl[index] = controls[:, j]
                for _ in range(self._judge.robot.frame_skip):
                    worlds.step()
                seen.append([part[index] for part in (worlds.qpos, worlds.qvel)])
            worlds.require_room()
        parts = [torch.stack(part, dim=1).cpu().double().numpy() for part in zip(*seen, strict=True)]
        return self._judge.results(rows, parts, actions)

    def metrics(self) -> dict[str, Array]:
        return {}

    def get_state(self) -> dict[str, Any]:
        return {"worlds": self._worlds.get_state(), "x": self._judge.x.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._worlds.set_state(state["worlds"])
        self._judge.x = np.array(state["x"], np.float64)

    def close(self) -> None:
        pass
