"""OGBench's dataset recipes: randomly drawn subtasks in episodes of fixed length.

- `play`: plans through key poses, with temporally correlated noise.
- `noisy`: the Markov oracle, with a noise scale drawn per episode and one random action in ten.

Cube, target and stacking are drawn after every finished subtask. An episode of `scene` whose cube leaves the
camera's view of table and drawer counts as a failure and is not kept. Rewards are those of a task, evaluated
on the state before an action, although no subtask pursues it; they never end an episode. `extras["masks"]`
is 0 where the task is solved, and values do not bootstrap there, as in the task.

Source:
    OGBench (arXiv 2410.20092), datasets of its manipulation worlds; noise and probabilities of their
    generation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.engine.seeding import seeded_globally
from envs.rollouts.recording import Recording
from envs.spec import Array
from envs.tasks.ogbench.plans import record_step
from envs.tasks.ogbench.stepper import OgbenchStepper

if TYPE_CHECKING:
    from envs.datasets.episode import Episode


_STREAM = 2  # separates these draws from those of task and expert noise
_KINDS = {"cube": ("cube",), "scene": ("cube", "button", "drawer", "window"), "puzzle": ("button",)}
_P_STACK = {"cube-single": (0.0, 0.0), "cube-double": (0.0, 0.25), "cube-triple": (0.05, 0.35)}
_P_STACK_DEFAULT = (0.5, 0.5)
_NOISE_SHAPE = np.array([1.0, 1.0, 1.0, 3.0, 10.0])
_MAX_NOISE, _P_RANDOM = 0.1, 0.1
_CUBE_Y, _CUBE_Z = 15, 16  # entries of qpos: the first cube lies behind 14 joints of the arm
_TABLE_Y = (-0.3, 0.29)  # where a cube stays visible [m]
_DRAWER_Z = (0.06, 0.08)  # where it lies inside the drawer [m]


def play(world: str, task: int, seed: int, *, noisy: bool, length: int) -> Episode:
    """Record the episode of a seed; `task`, 1 to 5, determines the recorded rewards."""
    stepper, task_rewards = OgbenchStepper(world, 0, 1), _TaskRewards(world, task, seed)
    record, rng = Recording(stepper, seed), np.random.default_rng((seed, _STREAM))
    p_stack = rng.uniform(*_P_STACK.get(world, _P_STACK_DEFAULT))
    noise = rng.uniform(0, _MAX_NOISE) * _NOISE_SHAPE
    with seeded_globally((seed, _STREAM)):  # the oracles use NumPy's global generator
        env = stepper.bind(0)
        oracles = _oracles(env, world, noisy)
        obs, info = record.observations[0], env.compute_ob_info()
        oracle = oracles[info["privileged/target_task"]]
        oracle.reset(obs, info)
        while len(record) < length:
            action = np.array(oracle.select_action(record.now, info))
            if noisy:
                action = _with_noise(action, noise, rng)
            task_rewards.update(env)
            record_step(stepper, record, np.clip(action, -1, 1))
            info = stepper.bind(0).compute_ob_info()
            if oracle.done:
                obs, info = stepper.draw_target(0, p_stack)
                oracle = oracles[info["privileged/target_task"]]
                oracle.reset(obs, info)
    record.ended, record.rewards = False, task_rewards.rewards
    masks = (np.array(record.rewards) < 0).astype(np.float32)  # 0: solved
    episode = record.episode(truncated=True, success=True, masks=masks)
    visible = world != "scene" or stays_visible(episode.extras["states"][:, 1:])
    return episode if visible else record.episode(truncated=True, success=False)


def stays_visible(qpos: Array) -> bool:
    """Whether the cube of `scene` stays on the visible part of the table or in the drawer, (T, nq)."""
    y, z = qpos[:, _CUBE_Y], qpos[:, _CUBE_Z]
    in_drawer = (z >= _DRAWER_Z[0]) & (z <= _DRAWER_Z[1])
    return not bool(((y >= _TABLE_Y[1]) | ((y <= _TABLE_Y[0]) & ~in_drawer)).any())


class _TaskRewards:
    """Rewards of a task for states of another simulator."""

    def __init__(self, world: str, task: int, seed: int) -> None:
        self._stepper = OgbenchStepper(world, task, 1)
        self._stepper.reset(0, seed)
        self.rewards: list[float] = []

    def update(self, other: Any) -> None:
        env = self._stepper.bind(0)
        env._data.qpos[:] = other._data.qpos
        if hasattr(env, "_cur_button_states"):
            env._cur_button_states = other._cur_button_states.copy()
        self.rewards.append(float(env.compute_reward()))


def _oracles(env: Any, world: str, noisy: bool) -> dict[str, Any]:
    style = "markov" if noisy else "plan"
    options = {"min_norm": 0.4} if noisy else {"noise": 0.1, "noise_smoothing": 0.5}
    found = {}
    for kind in _KINDS[world.partition("-")[0]]:
        module = importlib.import_module(f"ogbench.manipspace.oracles.{style}.{kind}_{style}")
        made = getattr(module, f"{kind.capitalize()}{style.capitalize()}Oracle")
        closed = {"gripper_always_closed": world.startswith("puzzle")} if kind == "button" else {}
        found[kind] = made(env=env, **options, **closed)
    return found


def _with_noise(action: Array, noise: Array, rng: np.random.Generator) -> Array:
    """Add noise (5,), or replace the action by a random one."""
    if rng.uniform() < _P_RANDOM:
        return rng.uniform(-1, 1, len(action))
    return action + noise * rng.standard_normal(len(action))
