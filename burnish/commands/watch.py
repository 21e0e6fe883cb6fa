"""`burnish watch`: a policy in MuJoCo's viewer, in real time."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from burnish.config.overrides import RunContext
from burnish.console import output
from burnish.runs.locate import locate_actor
from burnish.runs.tasks import require_task_of, task_of
from envs.evaluation.watching import watch
from envs.rollouts.episodes import EpisodeRow
from policies.bounds import Checked, bounded
from policies.errors import CapabilityError, ConfigError
from policies.paths import path_field


@dataclass(frozen=True)
class WatchConfig(Checked):
    """Configuration of `burnish watch`."""

    policy: str | None = path_field()  # a run (last checkpoint), a policy directory, or an exported folder
    env: Any = None  # null: the policy's own task
    allow_other_task: bool = False  # show a policy in another task than the one that it was made for
    first_seed: int = bounded(0, ge=0)  # seed of the first episode; the next ones follow, as in `eval`


def run(config: WatchConfig, context: RunContext) -> None:
    """Play episodes until the window is closed; prints a line for each.

    Raises:
        ConfigError: If there is no policy or no task, or they do not fit.
        CapabilityError: If there is no display, or the task has no MuJoCo scene.
    """
    if config.policy is None:
        raise ConfigError("watch needs policy=<run or policy directory>.")
    found = locate_actor(config.policy)
    env = config.env if config.env is not None else task_of(found, " Give env=<name>.")
    require_task_of(found, env, "policy", allow_other_task=config.allow_other_task)
    try:
        require_display()
        tell = partial(_tell, bool(env.spec.success_rule))
        watch(found.load(), env, open_viewer=open_viewer, first_seed=config.first_seed, on_episode=tell)
    except CapabilityError as error:
        raise CapabilityError(
            f"{error} burnish eval policy={config.policy} videos=3 writes moving pictures."
        ) from error


def require_display() -> None:
    """Refuse a machine whose display does not open (CapabilityError); MuJoCo would end the process."""
    if sys.platform != "linux":
        return
    names = [f"{key}={os.environ[key]}" for key in ("DISPLAY", "WAYLAND_DISPLAY") if os.environ.get(key)]
    if not names:
        raise CapabilityError("watch opens a window, and there is no display here.")
    import glfw

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GLFW reports its reason as a warning
        if not glfw.init():
            raise CapabilityError(f"watch opens a window; the display ({', '.join(names)}) does not open.")
        glfw.terminate()


def open_viewer(model: Any, data: Any) -> AbstractContextManager[Any]:
    """Open MuJoCo's passive viewer.

    Raises:
        CapabilityError: If it cannot be opened, as on macOS without `mjpython`.
    """
    try:
        import mujoco.viewer

        viewer: AbstractContextManager[Any] = mujoco.viewer.launch_passive(model, data)
    except Exception as error:  # MuJoCo's FatalError, GLFW's, or RuntimeError on macOS
        raise CapabilityError(f"MuJoCo's viewer does not open: {error}.") from error
    return viewer


def _tell(has_success: bool, row: EpisodeRow) -> None:
    end = (", success" if row.success else ", no success") if has_success else ""
    output().print(f"seed {row.seed}: {row.length} steps, return {row.return_:.4g}{end}")
