"""Play a policy in real time in front of a viewer, one control step after the other."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Protocol

import numpy as np

from envs.engine.pixels import HasAppearance
from envs.evaluation.protocol import prepare_eval, with_settings
from envs.evaluation.settings import EvaluationSettings
from envs.rollouts.episodes import EpisodeRow, EpisodeTracker
from envs.rollouts.observations import observe
from envs.rollouts.player import EpisodeRunner, EvaluatedPolicy, Memory
from envs.spec import EnvConfig
from policies.errors import CapabilityError

_ROW = np.zeros(1, np.int64)


class Viewer(Protocol):
    """What is used of MuJoCo's passive viewer."""

    def is_running(self) -> bool: ...

    def sync(self) -> None: ...

    def lock(self) -> AbstractContextManager[Any]: ...


OpenViewer = Callable[[Any, Any], AbstractContextManager[Viewer]]
"""(model, data) -> viewer, such as `mujoco.viewer.launch_passive`."""


def watch(
    policy: EvaluatedPolicy,
    env: EnvConfig,
    *,
    open_viewer: OpenViewer,
    first_seed: int = EvaluationSettings.first_seed,
    on_episode: Callable[[EpisodeRow], None] = lambda row: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Play the episodes of an evaluation until the viewer is closed.

    Args:
        policy: The policy; unchanged.
        env: The task, simulated by MuJoCo.
        open_viewer: Opens a viewer of a model and its data.
        first_seed: Seed of the first episode; the next ones follow.
        on_episode: Called with every finished episode.
        clock: Time [s].
        sleep: Waits for a duration [s].

    Raises:
        ConfigError: If policy and task do not fit.
        CapabilityError: If the task has no MuJoCo scene.
    """
    task, settings = prepare_eval(env, policy), EvaluationSettings(first_seed=first_seed)
    runner = EpisodeRunner(
        with_settings(policy, settings), first_seed, settings.noise_seed,
        settings.start_noise, settings.sampling_noise, keep=False,
    )  # fmt: skip
    vector: Any = task.make_vector(1, obs_steps=policy.chunk.obs_steps)
    try:
        model, data = _scene_of(getattr(vector, "stepper", None), env.spec.name)
        with open_viewer(model, data) as viewer:
            watched = _Watched(runner, vector, model, viewer, clock, sleep)
            for episode in count():
                row = watched.play(episode)
                if row is None:
                    return
                on_episode(row)
    finally:
        vector.close()


def _scene_of(stepper: Any, name: str) -> tuple[Any, Any]:
    """Return a copy of the model, whose looks may change, and the data of the first environment."""
    model, datas = getattr(stepper, "model", None), getattr(stepper, "datas", None)
    if model is None or datas is None:
        raise CapabilityError(f"env={name} has no MuJoCo scene to show.")
    return copy.copy(model), datas[0]


class _Watched:
    """One environment in front of a viewer."""

    def __init__(
        self,
        runner: EpisodeRunner,
        vector: Any,
        model: Any,
        viewer: Viewer,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._runner, self._vector, self._model, self._viewer = runner, vector, model, viewer
        self._clock, self._sleep = clock, sleep
        self._tracker = EpisodeTracker(1)

    def play(self, episode: int) -> EpisodeRow | None:
        """Play one episode; None if the viewer was closed meanwhile."""
        runner, vector, tracker = self._runner, self._vector, self._tracker
        seed = runner.first_seed + episode
        obs, generator, memory = self._reset(seed), runner.generator(episode), Memory()
        tracker.reset(_ROW)
        tracker.begin(_ROW, [seed], [episode])
        due, period = self._clock(), 1.0 / vector.spec.control_hz
        while True:
            chunk = runner.act(
                observe(vector, obs), [runner.noise(generator)], [runner.lane(episode)], [memory]
            )
            for action in chunk[0]:
                if not self._viewer.is_running():
                    return None
                with self._viewer.lock():
                    step = vector.step_chunk(action[None, None])
                self._show()
                tracker.add(step)
                due += period
                self._sleep(max(due - self._clock(), 0.0))
                if step.done[0]:
                    return tracker.rows(_ROW, step)[0]
            obs, due = step.obs, max(due, self._clock() - period)

    def _reset(self, seed: int) -> Any:
        with self._viewer.lock():
            obs = self._vector.reset([seed])
        self._show()
        return obs

    def _show(self) -> None:
        stepper = self._vector.stepper
        if isinstance(stepper, HasAppearance):
            with self._viewer.lock():
                stepper.set_appearance(self._model, stepper.get_appearance(0))
        self._viewer.sync()
