"""The choice of an engine: MuJoCo itself, or many worlds at once in mujoco-warp for training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from envs.engine.pixels import HasCameras
from policies.bounds import bounded

AnyEnv = TypeVar("AnyEnv")
ENGINES = ("exact", "warp")


@dataclass(frozen=True, kw_only=True)
class HasEngines(HasCameras):
    """Options of a task that mujoco-warp simulates, too."""

    engine: str = bounded("exact", choices=ENGINES)  # warp: mujoco-warp, float32, for training on a GPU

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("cameras", self.engine == "exact" or not self.cameras, "[] with env.engine=warp")


def exactly(env: AnyEnv) -> AnyEnv:
    """Return a task simulated by MuJoCo itself, as in evaluations and demonstrations."""
    return replace(env, engine="exact") if isinstance(env, HasEngines) else env
