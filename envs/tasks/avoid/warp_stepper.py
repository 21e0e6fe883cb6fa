"""`avoid` in mujoco-warp: many discs at once in float32, on a GPU where there is one; `env.engine=warp`.

Legend: N environments, M of them addressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from envs.engine.warp_worlds import WarpWorlds
from envs.spec import Array, StepResult
from envs.tasks.avoid.rules import CONTROL_HZ, MAX_SPEED, AvoidRules, start_position
from envs.tasks.avoid.scene import load_model

_CONTACTS = 8  # room per world: a disc touches a few pillars and walls at most


class WarpAvoidStepper:
    """Steps N discs among fixed rows; a disc stops at the step of physics of its first contact."""

    can_save = True

    def __init__(self, num_envs: int) -> None:
        self.num_envs, model = num_envs, load_model()
        self.rules = AvoidRules(num_envs, keeps_speed=True)
        self._worlds = WarpWorlds(model, num_envs, contacts=_CONTACTS)
        self._substeps = round(1.0 / CONTROL_HZ / model.opt.timestep)

    def reset(self, row: int, seed: int) -> Array:
        """Put the disc of one row at the seed's start, at rest; returns (Do,)."""
        start = start_position(seed)
        self._worlds.put(row, start, 0.0)
        return self.rules.begin(row, start)

    def step(self, rows: Array, actions: Array) -> StepResult:
        """Advance rows (M,) by actions (M, 2) for one control step, or until contact; others rest."""
        worlds, device = self._worlds, self._worlds.qpos.device
        index = torch.as_tensor(rows, device=device)
        speeds = torch.as_tensor(MAX_SPEED * np.asarray(actions, np.float64), dtype=torch.float32)
        worlds.ctrl[index] = speeds.to(device)
        rests = torch.ones(self.num_envs, dtype=torch.bool, device=device).index_fill_(0, index, False)
        hit = torch.zeros_like(rests)
        for _ in range(self._substeps):
            with worlds.kept(rests | hit):
                worlds.step()
            hit |= worlds.touching()
        worlds.require_room()
        position, velocity = (part[index].cpu().double().numpy() for part in (worlds.qpos, worlds.qvel))
        return self.rules.results(rows, hit[index].cpu().numpy(), position, velocity)

    def metrics(self) -> dict[str, Array]:
        return self.rules.metrics()

    def get_state(self) -> dict[str, Any]:
        rules = {"position": self.rules.position.copy(), "gaps": self.rules.gaps.copy()}
        return {"worlds": self._worlds.get_state(), **rules}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._worlds.set_state(state["worlds"])
        self.rules.position, self.rules.gaps = np.array(state["position"]), np.array(state["gaps"])

    def close(self) -> None:
        pass
