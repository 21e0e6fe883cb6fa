"""A watched policy plays the episodes of its evaluation, in real time, until the window is closed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions

from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.evaluation.watching import watch
from envs.rollouts.episodes import EpisodeRow
from envs.tasks.avoid.task import Avoid
from envs.tasks.gym.task import Gym
from policies.build import build_policy
from policies.errors import CapabilityError
from policies.policy import Policy, PolicyConfig
from policies.registry import lookup

TASKS = [Avoid(max_episode_steps=12), lookup("env", "pointmaze-umaze")(max_episode_steps=7)]


class Window:
    """A viewer that is closed after some frames; keeps the time of every frame and the simulated time."""

    def __init__(self, frames: int) -> None:
        self.left, self.seconds, self.shown, self.model = frames, 0.0, [], None

    def __call__(self, model: Any, data: Any) -> Any:
        self.model, self.data = model, data
        return nullcontext(self)

    def is_running(self) -> bool:
        return self.left > 0

    def sync(self) -> None:
        self.left -= 1
        self.shown.append((self.seconds, self.data.time))

    def lock(self) -> Any:
        return nullcontext()

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def policy_of(env: Any) -> Policy:
    one = {name: torch.ones(d) for name, d in (("state", env.spec.obs_dim), ("action", env.spec.action_dim))}
    statistics = {name: {"min": -value, "max": value} for name, value in one.items()}
    config = PolicyConfig(horizon=4, act_steps=4, obs_steps=2)
    return build_policy(
        config, obs_dim=env.spec.obs_dim, action_dim=env.spec.action_dim, statistics=statistics
    )


@pytest.mark.parametrize("env", TASKS)
def test_a_watched_policy_plays_the_episodes_of_its_evaluation(env: Any) -> None:
    policy, rows = policy_of(env), list[EpisodeRow]()
    window = Window(frames=3 * (env.spec.max_episode_steps + 1))
    watch(
        policy, env, open_viewer=window, first_seed=5, on_episode=rows.append,
        clock=lambda: window.seconds, sleep=window.sleep,
    )  # fmt: skip
    assert len(rows) >= 2
    assert list(evaluate(policy, env, Settings(episodes=len(rows), first_seed=5)).rows) == rows


def test_frames_follow_each_other_at_the_rate_of_the_task() -> None:
    env, window = TASKS[0], Window(frames=6)
    watch(policy_of(env), env, open_viewer=window, clock=lambda: window.seconds, sleep=window.sleep)
    (shown, simulated) = np.diff(np.array(window.shown), axis=0).T
    np.testing.assert_allclose(simulated, 1 / env.spec.control_hz)
    np.testing.assert_allclose(shown[1:], 1 / env.spec.control_hz)


def test_a_maze_shows_where_its_goal_is() -> None:
    env, window = TASKS[1], Window(frames=2)
    watch(policy_of(env), env, open_viewer=window, clock=lambda: window.seconds, sleep=window.sleep)
    vector = env.make_vector(1)
    goal = vector.reset([0])[0, -1, -2:]
    kind = vector.stepper.target_kind
    np.testing.assert_allclose(getattr(window.model, kind)("target").pos[:2], goal)


def test_an_environment_of_gymnasium_is_shown_where_mujoco_simulates_it() -> None:
    env, window = Gym(id="Reacher-v5"), Window(frames=5)
    watch(policy_of(env), env, open_viewer=window, clock=lambda: window.seconds, sleep=window.sleep)
    assert window.model.nq == 4 and len(window.shown) == 5 and window.shown[-1][1] > 0


class Bare(Gym):
    """A task whose vector of environments is not made of steppers."""

    def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> Any:
        return SimpleNamespace(close=lambda: None)


@pytest.mark.parametrize("kind", [Gym, Bare])
def test_a_task_without_a_scene_is_refused(kind: type[Gym]) -> None:
    env = kind(id="MountainCarContinuous-v0")
    with pytest.raises(CapabilityError, match=mentions("env MuJoCo scene")):
        watch(policy_of(env), env, open_viewer=Window(frames=1))
