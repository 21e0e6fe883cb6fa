"""The locomotion engine equals gymnasium, stepped one by one, bit for bit."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import gymnasium
import numpy as np
import pytest
from messages import mentions
from pairwise import each_value, everything, repeated

from envs.engine.vector import ChunkVector
from envs.make import env
from policies.errors import ConfigError, MissingExtraError

IDS = {
    "hopper": "Hopper",
    "walker2d": "Walker2d",
    "halfcheetah": "HalfCheetah",
    "swimmer": "Swimmer",
    "ant": "Ant",
    "humanoid": "Humanoid",
}
VERSIONED = ("hopper", "walker2d", "ant", "humanoid")
NEVER_ENDS = ("halfcheetah", "swimmer")
CHUNK, NUM_ENVS, HISTORY = 4, 4, 2


def peer_of(name: str, version: str = "v5", **options: Any) -> Any:
    """Make gymnasium's environment, which warns of elder versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return gymnasium.make(f"{IDS[name]}-{version}", **options)


def play(
    name: str, *, num_chunks: int, limit: int, scale: float, dtype: type, version: str = "v5"
) -> dict[str, int]:
    """Step both sides with the same clipped actions and compare everything; counts what happened."""
    options = {"version": version} if name in VERSIONED else {}
    vector = env(name, max_episode_steps=limit, **options).make_vector(NUM_ENVS, obs_steps=HISTORY)
    peers = [peer_of(name, version, max_episode_steps=limit) for _ in range(NUM_ENVS)]
    low, high = peers[0].action_space.low, peers[0].action_space.high
    rng = np.random.default_rng(0)
    seeds = iter(range(10**6))
    history = np.zeros((NUM_ENVS, HISTORY, vector.spec.obs_dim))
    count = {"terminated": 0, "truncated": 0, "both": 0}

    def restart(rows: np.ndarray) -> None:
        chosen = [next(seeds) for _ in rows]
        obs = vector.reset(chosen, rows)
        for row, seed in zip(rows.tolist(), chosen, strict=True):
            history[row] = peers[row].reset(seed=seed)[0]
        assert (obs == history[rows]).all()

    restart(np.arange(NUM_ENVS))
    for _ in range(num_chunks // NUM_ENVS):
        actions = (rng.normal(size=(NUM_ENVS, CHUNK, len(high))) * scale * high).astype(dtype)
        step = vector.step_chunk(actions)
        for row, peer in enumerate(peers):
            for j in range(CHUNK):
                obs, reward, terminated, truncated, _ = peer.step(np.clip(actions[row, j], low, high))
                history[row] = [*history[row, 1:], obs]
                assert step.rewards[row, j] == reward
                if terminated or truncated:
                    break
            assert step.length[row] == j + 1
            assert (step.terminated[row], step.truncated[row]) == (terminated, truncated)
        assert (step.obs == history).all()
        count["terminated"] += int(step.terminated.sum())
        count["truncated"] += int(step.truncated.sum())
        count["both"] += int((step.terminated & step.truncated).sum())
        restart(np.flatnonzero(step.done))
    return count


@pytest.mark.skipif(not everything, reason="with --all: without it every robot is compared for fewer")
@pytest.mark.parametrize("dtype", repeated([np.float64, np.float32]))
def test_five_hundred_hopper_chunks_equal_gymnasium(dtype: type) -> None:
    assert play("hopper", num_chunks=500, limit=1000, scale=1.5, dtype=dtype)["terminated"] > 50


@pytest.mark.parametrize(("name", "version"), each_value(sorted(IDS), ["v4", "v5"]))
def test_both_versions_and_time_limits_equal_gymnasium(name: str, version: str) -> None:
    """Robots without versions of their own are the same in both."""
    limit, scale, chunks = LIMITS[name]
    count = play(name, num_chunks=chunks, limit=limit, scale=scale, dtype=np.float32, version=version)
    assert count["truncated"] > 3
    if name not in NEVER_ENDS:
        assert count["terminated"] > 3 and count["both"] > 0


# Episode limit, scale of the actions and number of chunks at which some episodes end in each of the ways.
LIMITS = {
    "hopper": (24, 0.3, 120),
    "walker2d": (32, 0.3, 160),
    "halfcheetah": (37, 0.3, 80),
    "swimmer": (37, 0.3, 80),
    "ant": (20, 1.0, 160),
    "humanoid": (23, 0.3, 120),
}


@pytest.mark.parametrize(("name", "obs_steps"), each_value(sorted(IDS), [1, 3]))
def test_whole_chunks_equal_single_steps(name: str, obs_steps: int) -> None:
    """What a robot does past the end of its episode, and rows that rest, leave no trace."""

    class OneByOne:
        def __init__(self, stepper: Any) -> None:
            self.step, self.reset, self.num_envs = stepper.step, stepper.reset, stepper.num_envs
            self.metrics = stepper.metrics

    task = env(name, max_episode_steps=13)
    whole, single = (task.make_vector(NUM_ENVS, obs_steps=obs_steps) for _ in range(2))
    single.stepper = OneByOne(single.stepper)
    rng, ends = np.random.default_rng(0), 0
    for vector in (whole, single):
        vector.reset(range(NUM_ENVS))
    for i in range(30):
        actions = rng.normal(size=(NUM_ENVS, 5, whole.spec.action_dim)) * 2
        active = rng.random(NUM_ENVS) < 0.8
        steps = [vector.step_chunk(actions, active) for vector in (whole, single)]
        for part in fields(steps[0]):
            if part.name != "metrics":
                ours, theirs = (getattr(step, part.name) for step in steps)
                np.testing.assert_array_equal(ours, theirs, err_msg=part.name)
        done = np.flatnonzero(steps[0].done)
        ends += done.size
        for vector in (whole, single):
            vector.reset((1000 * i + done).tolist(), done)
    assert ends > 20


@pytest.mark.parametrize(
    ("name", "ends", "chunks"), [("walker2d", "terminated", 200), ("halfcheetah", "truncated", 1020)]
)
def test_whole_episodes_equal_gymnasium(name: str, ends: str, chunks: int) -> None:
    assert play(name, num_chunks=chunks, limit=1000, scale=1.0, dtype=np.float32)[ends] >= NUM_ENVS


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in sorted(IDS)] + [(name, {"version": "v4"}) for name in VERSIONED],
)
def test_the_description_fits_the_simulator(name: str, options: dict[str, str]) -> None:
    spec, peer = env(name, **options).spec, peer_of(name, **options)
    assert (spec.obs_dim,) == peer.observation_space.shape
    np.testing.assert_array_equal(np.float32(spec.action_low), peer.action_space.low)
    np.testing.assert_array_equal(np.float32(spec.action_high), peer.action_space.high)
    assert spec.max_episode_steps == peer.spec.max_episode_steps
    assert spec.control_hz == pytest.approx(1 / peer.unwrapped.dt)


@pytest.mark.parametrize("name", sorted(IDS))
def test_a_restored_simulator_continues_bit_exactly(name: str) -> None:
    rng = np.random.default_rng(1)
    actions = rng.uniform(-1, 1, (12, 3, CHUNK, env(name).spec.action_dim))

    def run(vector: ChunkVector, chunks: np.ndarray) -> list[np.ndarray]:
        out = []
        for chunk in chunks:
            step = vector.step_chunk(chunk)
            out.append(np.concatenate([step.obs.ravel(), step.rewards.ravel()]))
            if step.done.any():
                vector.reset([7] * int(step.done.sum()), step.done)
        return out

    config = env(name, max_episode_steps=30)
    whole, resumed = config.make_vector(3), config.make_vector(3)
    whole.reset([0, 1, 2])
    run(whole, actions[:5])
    saved = whole.state_dict()
    expected = run(whole, actions[5:])
    resumed.load_state_dict(saved)
    np.testing.assert_array_equal(run(resumed, actions[5:]), expected)


def test_options_change_the_task_and_bad_ones_are_refused() -> None:
    actions = np.full((1, 1, 3), 0.5)
    rewards = []
    for weight in (0.0, 1.0):
        vector = env("hopper", ctrl_cost_weight=weight).make_vector(1)
        vector.reset([0])
        rewards.append(vector.step_chunk(actions).rewards[0, 0])
    assert rewards[0] - rewards[1] == pytest.approx(0.75)
    with pytest.raises(ConfigError, match=mentions("env=hopper")):
        env("hopper", gravity=1.0)
    with pytest.raises(ConfigError, match=mentions("max_episode_steps 1 0")):
        _ = env("hopper", max_episode_steps=0).spec
    with pytest.raises(ConfigError, match=mentions("num_envs 1 0")):
        env("hopper").make_vector(0)


def test_a_replayed_episode_is_photographed() -> None:
    actions = np.zeros((6, 3), np.float32)
    try:
        frames = env("hopper").render_frames(0, actions, every=4, width=64, height=48)  # type: ignore[attr-defined]
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert frames.shape == (3, 48, 64, 3)
    assert frames.std(axis=(1, 2, 3)).min() > 5  # something is in the picture
