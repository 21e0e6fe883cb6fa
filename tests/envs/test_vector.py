"""Laws of chunk execution, on a counting environment whose every number is known."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions
from point_env import PointEnv, PointStepper

from envs.engine.serial import SerialStepper, SerialVector
from envs.engine.vector import ChunkVector
from envs.spec import Array, EnvSpec, StepResult
from policies.errors import CapabilityError, CheckpointError, ConfigError, EnvironmentFailure, TrainingError

SPEC = EnvSpec(
    name="counting",
    family="test",
    obs_dim=2,
    action_dim=1,
    action_low=(-0.5,),
    action_high=(0.5,),
    max_episode_steps=50,
    control_hz=1.0,
    obs_names=("seed", "step"),
    action_names=("push",),
    episode_metrics=("push",),
)


class Counting:
    """Observation (seed, step); the reward is the action; ends after `end` steps, succeeding at step 3."""

    def __init__(self, end: int = 10**6) -> None:
        self.end, self.seed, self.step_idx, self.push = end, -1, 0, 0.0

    def reset(self, *, seed: int) -> tuple[list[float], dict[str, Any]]:
        self.seed, self.step_idx = seed, 0
        return [seed, 0], {}

    def step(self, action: np.ndarray) -> tuple[list[float], float, bool, bool, dict[str, Any]]:
        self.step_idx += 1
        self.push = float(action[0])
        info = {"success": self.step_idx == 3, "push": self.push}
        return [self.seed, self.step_idx], self.push, self.step_idx == self.end, False, info

    def close(self) -> None:
        self.closed = True


class Saving(Counting):
    def get_state(self) -> list[float]:
        return [self.seed, self.step_idx]

    def set_state(self, state: list[float]) -> None:
        self.seed, self.step_idx = state


def vector(*ends: int, limit: int = 50, obs_steps: int = 1, kind: type[Counting] = Counting) -> SerialVector:
    return SerialVector(
        replace(SPEC, max_episode_steps=limit), [kind(end) for end in ends], obs_steps=obs_steps
    )


def chunk(n: int, steps: int, value: float = 0.25) -> np.ndarray:
    return np.full((n, steps, 1), value)


def test_a_chunk_stops_where_its_episode_ends_and_pays_only_for_what_was_executed() -> None:
    v = vector(2, 99)
    v.reset([7, 8])
    step = v.step_chunk(chunk(2, 4))
    assert step.length.tolist() == [2, 4]
    assert step.terminated.tolist() == [True, False] and not step.truncated.any()
    np.testing.assert_array_equal(step.rewards, [[0.25, 0.25, 0, 0], [0.25] * 4])
    np.testing.assert_array_equal(step.obs[:, -1], [[7, 2], [8, 4]])
    np.testing.assert_array_equal(step.path[0, :, 1], [1, 2, 0, 0])
    assert step.success.tolist() == [False, True]


def test_a_time_limit_truncates_and_a_real_end_at_the_limit_keeps_both_flags() -> None:
    v = vector(99, 6, limit=6)
    v.reset([0, 1])
    v.step_chunk(chunk(2, 4))
    step = v.step_chunk(chunk(2, 4))
    assert step.length.tolist() == [2, 2]
    assert step.truncated.tolist() == [True, True] and step.terminated.tolist() == [False, True]


def test_a_success_terminates_where_the_task_says_so() -> None:
    spec = replace(SPEC, terminate_on_success=True)
    v = SerialVector(spec, [Counting(), Counting(2)])
    v.reset([7, 8])
    step = v.step_chunk(chunk(2, 5))
    assert step.length.tolist() == [3, 2]
    assert step.terminated.all() and not step.truncated.any() and step.success.tolist() == [True, False]


@pytest.mark.parametrize("ends", [False, True])
def test_whole_chunks_end_as_steps_do(ends: bool) -> None:
    class AtOnce(SerialStepper):
        def step_through(self, rows: np.ndarray, actions: np.ndarray) -> StepResult:
            steps = [self.step(rows, actions[:, j]) for j in range(actions.shape[1])]
            return StepResult(*(np.stack(part, axis=1) for part in zip(*map(astuple, steps), strict=True)))

    spec = replace(SPEC, terminate_on_success=ends)
    results = []
    for kind in (SerialStepper, AtOnce):
        v = ChunkVector(spec, kind([Counting(), Counting(2)]))
        v.reset([7, 8])
        results.append(v.step_chunk(chunk(2, 5)))
    for ours, theirs in zip(*map(astuple, results), strict=True):
        np.testing.assert_equal(ours, theirs)
    assert results[0].length.tolist() == [3 if ends else 5, 2]


def test_resetting_some_rows_leaves_the_others_alone() -> None:
    v = vector(99, 99, 99, obs_steps=2)
    v.reset([0, 1, 2])
    v.step_chunk(chunk(3, 3))
    obs = v.reset([9], np.array([False, True, False]))
    np.testing.assert_array_equal(obs, [[[9, 0], [9, 0]]])
    step = v.step_chunk(chunk(3, 1))
    np.testing.assert_array_equal(step.obs[:, :, 1], [[3, 4], [0, 1], [3, 4]])


def test_inactive_rows_do_not_move() -> None:
    v = vector(99, 99)
    v.reset([0, 1])
    step = v.step_chunk(chunk(2, 3), np.array([True, False]))
    assert step.length.tolist() == [3, 0]
    np.testing.assert_array_equal(step.obs[1, 0], [1, 0])


@settings(max_examples=30)
@given(end=st.integers(1, 12), limit=st.integers(1, 12), steps=st.integers(1, 5), obs_steps=st.integers(1, 4))
def test_chunks_of_any_length_see_the_same_episode(end: int, limit: int, steps: int, obs_steps: int) -> None:
    v = vector(end, limit=limit, obs_steps=obs_steps)
    v.reset([3])
    length, history = 0, []
    while True:
        step = v.step_chunk(chunk(1, steps))
        length += int(step.length[0])
        history = step.obs[0, :, 1].tolist()
        if step.done[0]:
            break
    assert length == min(end, limit)
    assert (bool(step.terminated[0]), bool(step.truncated[0])) == (end <= limit, limit <= end)
    assert history == [max(0, length - i) for i in reversed(range(obs_steps))]


def test_actions_are_clipped_to_the_box_and_metrics_follow_the_episode() -> None:
    v = vector(99)
    v.reset([0])
    assert np.isnan(v.step_chunk(chunk(1, 1), np.array([False])).metrics["push"][0])
    step = v.step_chunk(chunk(1, 2, value=-3.0))
    np.testing.assert_array_equal(step.rewards, [[-0.5, -0.5]])
    assert step.metrics["push"].tolist() == [-0.5]


def test_a_finished_environment_must_be_reset() -> None:
    v = vector(1, 99)
    with pytest.raises(ConfigError, match=mentions("0 1 counting")):
        v.step_chunk(chunk(2, 1))
    v.reset([0, 1])
    v.step_chunk(chunk(2, 1))
    with pytest.raises(ConfigError, match=mentions("counting 0")):
        v.step_chunk(chunk(2, 1))
    v.step_chunk(chunk(2, 1), np.array([False, True]))


def test_bad_actions_are_refused_before_they_reach_the_simulator() -> None:
    v = vector(99, 99)
    v.reset([0, 1])
    with pytest.raises(ConfigError, match=mentions("(2, Ta, 1) (2, 4, 3)")):
        v.step_chunk(np.zeros((2, 4, 3)))
    actions = chunk(2, 2)
    actions[1, 0] = np.nan
    with pytest.raises(TrainingError, match=mentions("finite [1]")):
        v.step_chunk(actions)
    v.step_chunk(actions, np.array([True, False]))


def test_seeds_and_rows_must_agree() -> None:
    with pytest.raises(ConfigError, match=mentions("1 2 seeds rows")):
        vector(99, 99).reset([0])


def test_saved_environments_continue() -> None:
    a, b = vector(9, 99, obs_steps=2, kind=Saving), vector(9, 99, obs_steps=2, kind=Saving)
    a.reset([0, 1])
    a.step_chunk(chunk(2, 4))
    b.load_state_dict(a.state_dict())
    for _ in range(2):
        left, right = a.step_chunk(chunk(2, 3)), b.step_chunk(chunk(2, 3))
        for name in ("obs", "rewards", "length", "terminated", "truncated", "success"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        a.reset([5], left.done) if left.done.any() else None
        b.reset([5], right.done) if right.done.any() else None
    with pytest.raises(CheckpointError, match=mentions("(2, 2, 2) (1, 2, 2)")):
        vector(9, obs_steps=2, kind=Saving).load_state_dict(a.state_dict())


def test_a_simulator_without_states_says_so() -> None:
    v = vector(99)
    assert not v.can_save
    with pytest.raises(CapabilityError, match=mentions("counting")):
        v.state_dict()


# -- environments that fail --------------------------------------------------------------------------------


class Failing(PointStepper):
    """Fails in one way, from the second step on."""

    def __init__(self, num_envs: int, way: str) -> None:
        super().__init__(num_envs)
        self.way, self.steps = way, 0

    def reset(self, row: int, seed: int) -> Array:
        if self.way == "reset":
            raise RuntimeError("the physics\nis unstable")
        found = super().reset(row, seed)
        return found * np.nan if self.way == "first observation" else found

    def step(self, rows: Array, actions: Array) -> StepResult:
        self.steps += 1
        if self.way == "step" and self.steps > 1:
            raise ZeroDivisionError("the physics\nis unstable")
        done = super().step(rows, actions)
        if self.way == "reward" and self.steps > 1:
            done.reward[-1] = np.nan
        if self.way == "observation" and self.steps > 1:
            done.obs[-1] = np.inf
        return done


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("reset", "failed in reset: RuntimeError: the physics is unstable"),
        ("step", "failed in step: ZeroDivisionError: the physics is unstable"),
        ("first observation", r"its observation is not finite in rows \[0\], seeds \[5\]"),
        ("observation", r"its observation is not finite in rows \[1\], seeds \[6\]"),
        ("reward", r"its reward is not finite in rows \[1\], seeds \[6\]"),
    ],
)
def test_an_environment_that_fails_is_named_in_one_line(way: str, said: str) -> None:
    vector = ChunkVector(PointEnv().spec, Failing(2, way))
    with pytest.raises(EnvironmentFailure, match=said) as caught:
        vector.reset([5], rows=[0])
        vector.reset([6], rows=[1])
        for _ in range(2):
            vector.step_chunk(np.zeros((2, 1, 2)))
    assert "'point'" in str(caught.value) and "\n" not in str(caught.value)
