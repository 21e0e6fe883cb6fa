"""Demonstrations of robosuite's tasks, replayed by our engine and by robosuite's own `step`.

    OMP_NUM_THREADS=1 python -m benchmarks.simulators.replay [lift can square] [--episodes 10]

From equal states, one control step earns the same reward and ends in the same positions. Left alone, the two
are equally successful, and drift apart no further than robosuite does from itself after a nudge.

A nudge moves one position by one unit in the last place, the smallest change there is. Contacts may make
many micrometres of it within one control step, so what differs by more than `CLOSE` is compared with that: a
step, with the largest effect of all nudges on it in our engine; a drift, with nudges of the arm's joints
after the first step of robosuite, one by one until one of them explains it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mujoco
import numpy as np

from benchmarks.options import parser
from envs.engine.vector import ChunkVector
from envs.make import env

Array = np.ndarray

TASKS = ("lift", "can", "square")
FIRST_SEED = 10
FREE_STEPS = 100  # of a drift
ARM_JOINTS = 7  # the first positions
CLOSE = 1e-6  # a difference of positions that counts as none [m, rad]
CHAOS = 10.0  # what is allowed beyond that, in units of the effect of a nudge
INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


@dataclass(frozen=True)
class Replay:
    """How far two engines are apart on one demonstration; differences are of positions [m, rad]."""

    env: str
    seed: int
    steps: int
    success: bool  # of robosuite
    is_judged_alike: bool  # rewards of all steps from equal states, and success of the free episodes
    shifted: int  # steps of the free episodes whose rewards differ
    one_step: float  # largest over the episode, from equal states
    nudged_step: float  # what a nudge does to that step; 0 where it was not needed
    drift: float  # largest over the first `FREE_STEPS`, left alone
    nudged_drift: float  # the same of robosuite against itself, nudged; 0 where it was not needed

    @property
    def is_lawful(self) -> bool:
        """Whether the engines agree as far as two simulators can."""
        is_near = excess(self.one_step, self.nudged_step) <= 1 and excess(self.drift, self.nudged_drift) <= 1
        return self.is_judged_alike and is_near and (not self.shifted or self.drift > CLOSE)

    def line(self) -> str:
        """Format the row."""
        return (
            f"{self.env:<8}{self.seed:>6}{self.steps:>7}{self.success!s:>9}{self.is_judged_alike!s:>8}"
            f"{self.shifted:>9}{self.one_step:>10.1e}{self.nudged_step:>10.1e}{self.drift:>10.1e}"
            f"{self.nudged_drift:>10.1e}{self.is_lawful!s:>8}"
        )


HEADER = "{:<8}{:>6}{:>7}{:>9}{:>8}{:>9}{:>10}{:>10}{:>10}{:>10}{:>8}".format(
    *("env", "seed", "steps", "success", "judged", "shifted"),
    *("one step", "nudged", "drift", "nudged", "lawful"),
)


def excess(difference: float, nudged: float) -> float:
    """Return a difference as a share of what is allowed."""
    return difference / max(CLOSE, CHAOS * nudged)


@dataclass(frozen=True)
class Walk:
    """An episode of an engine.

    Shapes:
        states: (T, nstate) integration states before every step. path: (T, nq) positions after it.
        rewards: (T,).
    """

    states: Array
    path: Array
    rewards: Array
    success: bool


class Pair:
    """Both engines of a task.

    Args:
        name: `lift`, `can` or `square`.

    Raises:
        MissingExtraError: If robosuite is not installed.
    """

    def __init__(self, name: str) -> None:
        self._name, self._task = name, env(name)
        self._robosuite = _vector(env(name, engine="robosuite"))
        self._free, self._led, self._shaken = (_vector(self._task) for _ in range(3))

    def replay(self, seed: int) -> Replay:
        """Replay the demonstration of a seed."""
        episode: Any = self._task.demonstrate(seed)  # type: ignore[attr-defined]
        actions = np.asarray(episode.actions)[:, None, None]
        theirs, ours = (_walk(vector, seed, actions) for vector in (self._robosuite, self._free))
        rewards, steps = self._lead(seed, actions, theirs)
        one_step, nudged_step = max(steps, key=lambda step: excess(*step))
        drift = _apart(ours.path[:FREE_STEPS], theirs.path[:FREE_STEPS])
        is_judged_alike = (rewards == theirs.rewards).all() and ours.success == theirs.success
        return Replay(
            *(self._name, seed, len(actions), theirs.success, bool(is_judged_alike)),
            shifted=int((ours.rewards != theirs.rewards).sum()),
            one_step=one_step,
            nudged_step=nudged_step,
            drift=drift,
            nudged_drift=self._nudge_until(drift, seed, actions[:FREE_STEPS], theirs),
        )

    def _nudge_until(self, drift: float, seed: int, actions: Array, theirs: Walk) -> float:
        """Return how far nudges take robosuite from itself; they end where one explains the drift."""
        worst = 0.0
        for nudge in product(range(ARM_JOINTS), (np.inf, -np.inf)):
            if excess(drift, worst) <= 1:
                break
            nudged = _walk(self._robosuite, seed, actions, nudge=nudge)
            worst = max(worst, _apart(nudged.path, theirs.path[: len(actions)]))
        return worst

    def _lead(self, seed: int, actions: Array, theirs: Walk) -> tuple[Array, list[tuple[float, float]]]:
        """Execute every step from where robosuite was.

        Returns:
            Rewards (T,), and for every step the difference and what a nudge does; 0 where that is not needed.
        """
        vector, rewards, steps = self._led, np.empty(len(actions)), []
        for other in (vector, self._shaken):
            other.reset([seed])
        for k, action in enumerate(actions):
            _put(vector, theirs.states[k])
            before = vector.state_dict()
            rewards[k] = vector.step_chunk(action).rewards[0, 0]
            apart, nudged = _apart(_data(vector).qpos, theirs.path[k]), 0.0
            if apart > CLOSE:
                nudged = self._shake(before, action, np.array(_data(vector).qpos))
            steps.append((apart, nudged))
        return rewards, steps

    def _shake(self, before: dict[str, Any], action: Array, expected: Array) -> float:
        """Return how far one step from a state ends from `expected` (nq,) at most, one position nudged."""
        vector, worst = self._shaken, 0.0
        for joint, side in product(range(len(expected)), (np.inf, -np.inf)):
            vector.load_state_dict(before)
            _nudge(vector, joint, side)
            vector.step_chunk(action)
            worst = max(worst, _apart(_data(vector).qpos, expected))
        return worst


def _walk(vector: ChunkVector, seed: int, actions: Array, *, nudge: tuple[int, float] | None = None) -> Walk:
    """Execute actions (T, 1, 1, Da) one by one; `nudge` is a joint to move after the first, and where to."""
    vector.reset([seed])
    states, path, rewards, success = [], [], [], False
    for k, action in enumerate(actions):
        states.append(_integration_state(vector))
        step = vector.step_chunk(action)
        if nudge and k == 0:
            _nudge(vector, *nudge)
        path.append(np.array(_data(vector).qpos))
        rewards.append(step.rewards[0, 0])
        success |= bool(step.success[0])
    return Walk(np.stack(states), np.stack(path), np.array(rewards), success)


def _nudge(vector: ChunkVector, joint: int, side: float) -> None:
    """Move a position by one unit in the last place."""
    qpos = _data(vector).qpos
    qpos[joint] = np.nextafter(qpos[joint], side)


def _integration_state(vector: ChunkVector) -> Array:
    """Return what physics continues from, (nstate,)."""
    model = _model(vector)
    state = np.empty(mujoco.mj_stateSize(model, INTEGRATION))
    mujoco.mj_getState(model, _data(vector), state, INTEGRATION)
    return state


def _put(vector: ChunkVector, state: Array) -> None:
    """Continue from a state (nstate,)."""
    mujoco.mj_setState(_model(vector), _data(vector), state, INTEGRATION)


def _vector(config: Any) -> ChunkVector:
    vector: ChunkVector = config.make_vector(1)
    return vector


def _model(vector: Any) -> mujoco.MjModel:
    return vector.stepper.model


def _data(vector: Any) -> mujoco.MjData:
    return vector.stepper.datas[0]


def _apart(one: Array, other: Array) -> float:
    return float(np.nan_to_num(np.abs(one - other).max(), nan=np.inf))


def replays(name: str, seeds: Sequence[int]) -> Iterator[Replay]:
    """Replay the demonstrations of some seeds."""
    pair = Pair(name)
    yield from (pair.replay(seed) for seed in seeds)


def main() -> int:
    """Print a row per demonstration; 1 if one breaks a law."""
    asked = parser(__doc__)
    asked.add_argument("envs", nargs="*", help=f"of {', '.join(TASKS)}; default: all")
    asked.add_argument("--episodes", type=int, default=10)
    options = asked.parse_args()
    if unknown := set(options.envs) - set(TASKS):
        asked.error(f"unknown env {', '.join(sorted(unknown))}; choose among {', '.join(TASKS)}")
    print(HEADER, flush=True)
    is_lawful = True
    for name in options.envs or TASKS:
        for row in replays(name, range(FIRST_SEED, FIRST_SEED + options.episodes)):
            print(row.line(), flush=True)
            is_lawful &= row.is_lawful
    return int(not is_lawful)


if __name__ == "__main__":
    sys.exit(main())
