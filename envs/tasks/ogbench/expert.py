"""OGBench's oracles as experts: approach, grasp, lift, carry, lower; press; pull and push.

In mode `task` its Markov oracles execute the subtasks of a plan one after the other. They depend only on the
current state, so they correct for noise on the executed actions, which widens the state distribution.
Modes `play` and `noisy` follow OGBench's dataset recipes, independent of the task: `envs.tasks.ogbench.play`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from envs.rollouts.recording import Recording, expert_rng
from envs.spec import Array
from envs.tasks.ogbench.plans import Subtask, next_subtask, record_step
from envs.tasks.ogbench.stepper import OgbenchStepper
from policies.bounds import Checked, bounded

if TYPE_CHECKING:
    from envs.datasets.episode import Episode

MODES = ("task", "play", "noisy")
_FREE_HEIGHT_M = {"cube": 0.16, "button": 0.16, "drawer": 0.18, "window": 0.28}  # of a free gripper
_TOLERANCE_M = {"cube": 0.02, "drawer": 0.01, "window": 0.01}  # tolerance of finished subtasks [m]


@dataclass(frozen=True)
class OracleExpert(Checked):
    """Options of the expert, `env.expert.*`."""

    key: ClassVar = "env.expert"

    mode: str = bounded("task", choices=MODES)  # play, noisy: OGBench's dataset recipes
    noise: float = bounded(0.0, ge=0)  # std of Gaussian noise on every executed action entry, box is [-1, 1]
    min_norm: float = bounded(0.4, ge=0)  # lower bound on the oracle's distances [m]; sets its pace
    length: int = bounded(1001, ge=1)  # control steps of an episode in modes play and noisy

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "noise", self.mode == "task" or self.noise == 0, f"0 with mode={self.mode}, which has its own"
        )

    def unused(self) -> dict[str, str]:
        return {"length" if self.mode == "task" else "min_norm": f"with env.expert.mode={self.mode}"}


def demonstrate(world: str, task: int, seed: int, options: OracleExpert, *, max_steps: int) -> Episode:
    """Record the episode of a seed in a world of OGBench's name with task 1 to 5.

    Recorded are the executed actions, noise included, the physics state before each (`states`: time,
    positions, velocities), and the button states if any (`button_states`).
    """
    if options.mode != "task":
        from envs.tasks.ogbench.play import play

        return play(world, task, seed, noisy=options.mode == "noisy", length=options.length)
    stepper, rng = OgbenchStepper(world, task, 1), expert_rng(seed)
    record = Recording(stepper, seed)
    runner: SubtaskRunner | None = None
    while not record.ended and len(record) < max_steps:
        env = stepper.bind(0)
        if runner is None or runner.is_done(env):
            runner = SubtaskRunner(_subtask(env), options.min_norm, always_closed=world.startswith("puzzle"))
        action_mean = runner.act(env, record.now)
        action = np.clip(action_mean + options.noise * rng.standard_normal(len(action_mean)), -1, 1)
        record_step(stepper, record, action)
    return record.episode(truncated=len(record) >= max_steps, success=record.ended)


class SubtaskRunner:
    """Execution of one subtask by its oracle."""

    def __init__(self, subtask: Subtask, min_norm: float, *, always_closed: bool) -> None:
        name = f"{subtask.kind.capitalize()}MarkovOracle"
        module = importlib.import_module(f"ogbench.manipspace.oracles.markov.{subtask.kind}_markov")
        closed = {"gripper_always_closed": always_closed} if subtask.kind == "button" else {}
        self._oracle = getattr(module, name)(env=None, min_norm=min_norm, **closed)
        # The oracle's own reset draws the retreat position from global state.
        self._oracle._final_pos, self._oracle._final_yaw = np.array([0.425, 0.0, 0.3]), 0.0
        self._oracle._done, self._oracle._step = False, 0
        self._subtask = subtask

    def act(self, env: Any, obs: Array) -> Array:
        action: Array = self._oracle.select_action(obs, {**env.compute_ob_info(), **self._target_info(env)})
        return action

    def is_done(self, env: Any) -> bool:
        """Whether the subtask is done and the gripper free above it, or the oracle has finished."""
        if self._oracle.done:
            return True
        info, task = env.compute_ob_info(), self._subtask
        if task.kind == "button":
            is_reached = info[f"privileged/button_{task.index}_state"] == task.target
        elif task.kind == "cube":
            off = np.linalg.norm(info[f"privileged/block_{task.index}_pos"] - task.target)
            is_reached = off <= _TOLERANCE_M["cube"] and info["proprio/gripper_contact"][0] < 0.1
        else:
            is_reached = abs(info[f"privileged/{task.kind}_pos"][0] - task.target) <= _TOLERANCE_M[task.kind]
        return bool(is_reached and info["proprio/effector_pos"][2] > _FREE_HEIGHT_M[task.kind])

    def _target_info(self, env: Any) -> dict[str, Any]:
        task, data = self._subtask, env._data
        if task.kind == "cube":
            values = {"block": task.index, "block_pos": task.target, "block_yaw": np.zeros(1)}
        elif task.kind == "button":
            top = data.site_xpos[env._button_site_ids[task.index]]
            values = {"button": task.index, "button_state": task.target, "button_top_pos": top.copy()}
        else:
            joint = env._model.joint(f"{task.kind}_slide").id
            handle = data.site_xpos[getattr(env, f"_{task.kind}_site_id")]
            offset = (task.target - data.joint(joint).qpos[0]) * data.xaxis[joint]
            values = {f"{task.kind}_pos": np.array([task.target]), f"{task.kind}_handle_pos": handle + offset}
        return {f"privileged/target_{name}": value for name, value in values.items()}


def _subtask(env: Any) -> Subtask:
    """Return the next subtask; if none is left, hold the first object at its target."""
    planned = next_subtask(env)
    if planned is not None:
        return planned
    if hasattr(env, "_num_cubes"):
        return Subtask("cube", 0, env._data.mocap_pos[env._cube_target_mocap_ids[0]].copy())
    return Subtask("button", 0, int(env._cur_button_states[0]))
