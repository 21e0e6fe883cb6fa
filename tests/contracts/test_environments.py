"""Laws of every registered environment, however it is simulated."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions
from pairwise import Shared, representatives

from burnish.config.saved import describe_part, restore_part
from envs.engine.pixels import FREE, HasCameras
from envs.make import env
from envs.spec import EnvConfig, VectorEnv
from policies.errors import ConfigError, MissingExtraError
from policies.registry import parts

CHUNK = 3
NAMES = [name for name, part in parts("env").items() if not hasattr(part, "needs")]
every_task = Shared("name", NAMES, lambda name: type(env(name)).__module__)
pytest_generate_tests = every_task.generate
UNIT = re.compile(r"\w.* \[[^\[\]]+\]$")


def vector_of(config: EnvConfig, num_envs: int, obs_steps: int = 1) -> VectorEnv:
    try:
        return config.make_vector(num_envs, obs_steps=obs_steps)
    except MissingExtraError as error:
        pytest.skip(str(error))


def short(name: str, steps: int) -> EnvConfig:
    """The task with a short limit."""
    config = env(name)
    if "max_episode_steps" not in {f.name for f in dataclasses.fields(config)}:  # type: ignore[arg-type]
        pytest.skip(f"{name} has a fixed limit")
    return env(name, max_episode_steps=steps)


def actions(config: EnvConfig, num_envs: int, num_chunks: int, *, scale: float = 1.0) -> np.ndarray:
    """Draw chunks (num_chunks, N, CHUNK, Da) from the action box, scaled."""
    spec = config.spec
    unit = np.random.default_rng(0).uniform(-scale, scale, (num_chunks, num_envs, CHUNK, spec.action_dim))
    low, high = np.asarray(spec.action_low), np.asarray(spec.action_high)
    return (low + high) / 2 + unit * (high - low) / 2


@pytest.mark.parametrize("name", NAMES)
def test_the_description_is_complete_and_needs_no_simulator(name: str) -> None:
    config = env(name)
    spec = config.spec
    assert spec.name == name
    assert len(spec.obs_names) == spec.obs_dim and len(spec.action_names) == spec.action_dim
    assert len(spec.action_low) == len(spec.action_high) == spec.action_dim
    assert all(low < high for low, high in zip(spec.action_low, spec.action_high, strict=True))
    without_unit = [text for text in (*spec.obs_names, *spec.action_names) if not UNIT.search(text)]
    assert not without_unit, "a name ends with its unit in brackets, e.g. 'hand x [m]'"
    assert spec.max_episode_steps > 0 and spec.control_hz > 0 and spec.family
    assert pickle.loads(pickle.dumps(config)) == config
    assert restore_part("env", json.loads(json.dumps(describe_part("env", config)))) == config


@every_task
def test_an_episode_follows_from_its_seed_and_actions_in_any_vector(name: str) -> None:
    config = env(name)
    wide, single = vector_of(config, 2, obs_steps=2), vector_of(config, 1, obs_steps=2)
    chunks, seeds = actions(config, 2, 2), [11, 12]
    first = wide.reset(seeds)
    assert first.shape == (2, 2, config.spec.obs_dim) and np.isfinite(first).all()
    assert (first[:, 0] == first[:, 1]).all() and not (first[0] == first[1]).all()
    steps = [wide.step_chunk(chunks[0])]
    while len(steps) < len(chunks) and not steps[-1].done.any():
        steps.append(wide.step_chunk(chunks[len(steps)]))
    for row, seed in enumerate(seeds):
        np.testing.assert_array_equal(single.reset([seed])[0], first[row])
        for expected, chunk in zip(steps, chunks, strict=False):
            got = single.step_chunk(chunk[row : row + 1])
            for field in ("obs", "rewards", "length", "terminated", "truncated", "success", "path"):
                np.testing.assert_array_equal(
                    getattr(got, field)[0], getattr(expected, field)[row], err_msg=field
                )
            for key, values in expected.metrics.items():
                np.testing.assert_array_equal(got.metrics[key][0], values[row], err_msg=key)
    wide.close()
    single.close()


@every_task
def test_actions_outside_the_box_act_like_the_nearest_inside(name: str) -> None:
    config = env(name)
    vector = vector_of(config, 2)
    wild = actions(config, 1, 1, scale=3.0)[0]
    tame = np.clip(wild, np.float32(config.spec.action_low), np.float32(config.spec.action_high))
    vector.reset([3, 3])
    step = vector.step_chunk(np.concatenate([wild, tame]))
    np.testing.assert_array_equal(step.obs[0], step.obs[1])
    np.testing.assert_array_equal(step.rewards[0], step.rewards[1])
    vector.close()


@every_task
def test_the_time_limit_truncates_and_a_reset_touches_its_rows_only(name: str) -> None:
    config = short(name, CHUNK + 1)
    vector = vector_of(config, 2)
    chunks = actions(config, 2, 2, scale=0.1)
    vector.reset([0, 1])
    assert vector.step_chunk(chunks[0]).length.tolist() == [CHUNK, CHUNK]
    step = vector.step_chunk(chunks[1], np.array([True, False]))
    assert step.length.tolist() == [1, 0] and step.truncated.tolist() == [True, False]
    assert (step.rewards[0, 1:] == 0).all()
    fresh = vector.reset([0], [0])
    step = vector.step_chunk(chunks[0])
    assert step.length.tolist() == [CHUNK, 1] and step.truncated.tolist() == [False, True]
    assert fresh.shape == (1, 1, config.spec.obs_dim)
    vector.close()


@every_task
def test_an_episode_that_the_limit_ends_hands_out_its_own_last_observation(name: str) -> None:
    """The one that the same episode has without the limit; the next episode begins when it is asked to."""
    limited, free = vector_of(short(name, CHUNK + 1), 1, obs_steps=2), vector_of(env(name), 1, obs_steps=2)
    chunks = actions(env(name), 1, 2, scale=0.1)
    for vector in (limited, free):
        vector.reset([5])
        vector.step_chunk(chunks[0])
    last, onwards = limited.step_chunk(chunks[1]), free.step_chunk(chunks[1, :, :1])
    assert last.truncated[0] and last.length[0] == 1 and not onwards.done[0]
    np.testing.assert_array_equal(last.obs, onwards.obs)
    np.testing.assert_array_equal(last.path[0, 0], last.obs[0, -1])
    resting = limited.step_chunk(chunks[1], np.array([False]))
    np.testing.assert_array_equal(resting.obs, last.obs)
    assert not np.array_equal(limited.reset([6])[0, -1], last.obs[0, -1])
    for vector in (limited, free):
        vector.close()


@every_task
def test_a_chunk_that_no_row_takes_part_in_does_nothing(name: str) -> None:
    config = env(name)
    vector = vector_of(config, 1)
    first = vector.reset([4])
    step = vector.step_chunk(actions(config, 1, 1)[0], np.array([False]))
    assert step.length.tolist() == [0] and not step.done.any() and not step.rewards.any()
    np.testing.assert_array_equal(step.obs, first)
    vector.close()


@every_task
def test_metrics_are_the_announced_ones(name: str) -> None:
    config = env(name)
    vector = vector_of(config, 2)
    vector.reset([0, 1])
    metrics = vector.step_chunk(actions(config, 2, 1)[0]).metrics
    assert sorted(metrics) == sorted(config.spec.episode_metrics)
    assert all(values.shape == (2,) for values in metrics.values())
    vector.close()


@every_task
def test_a_saved_state_continues_bit_exactly(name: str) -> None:
    config = env(name)
    vector = vector_of(config, 2, obs_steps=2)
    if not vector.can_save:
        pytest.skip(f"{name} cannot save its state")
    chunks = actions(config, 2, 4, scale=0.3)
    vector.reset([0, 1])
    vector.step_chunk(chunks[0])
    state = pickle.loads(pickle.dumps(vector.state_dict()))
    other = config.make_vector(2, obs_steps=2)
    other.load_state_dict(state)
    for chunk in chunks[1:]:
        expected, got = vector.step_chunk(chunk), other.step_chunk(chunk)
        for field in ("obs", "rewards", "length", "terminated", "truncated", "success"):
            np.testing.assert_array_equal(getattr(got, field), getattr(expected, field), err_msg=field)
        if expected.done.any():
            break
    vector.close()
    other.close()


@pytest.mark.parametrize("name", representatives(NAMES, lambda name: [env(name).spec.family]))
def test_a_scene_that_is_drawn_follows_from_the_seed_and_drawing_changes_no_number(name: str) -> None:
    require_drawing()
    config = env(name)
    if not isinstance(config, HasCameras):
        pytest.skip(f"{name} cannot be drawn")
    plain = vector_of(config, 2)
    camera = a_camera_of(plain)
    seen = {"cameras": (camera,), "image_size": (32, 40), "image_shadows": False}
    wide, chunk = vector_of(env(name, **seen), 2), actions(config, 2, 1)[0]
    np.testing.assert_array_equal(wide.reset([11, 12]), plain.reset([11, 12]))
    first = wide.images([1])[camera]
    got, expected = wide.step_chunk(chunk), plain.step_chunk(chunk)
    for quantity in ("obs", "rewards", "length", "terminated", "path"):
        np.testing.assert_array_equal(getattr(got, quantity), getattr(expected, quantity), err_msg=quantity)
    later = wide.images([1])[camera]
    assert later.shape == (1, 1, 32, 40, 3) and later.dtype == np.uint8 and np.ptp(later) > 0
    wide.reset([12], [0])  # in the other row, beside another environment
    np.testing.assert_array_equal(wide.images([0])[camera], first)
    wide.step_chunk(chunk[::-1], np.array([True, False]))
    np.testing.assert_array_equal(wide.images([0])[camera], later)
    for vector in (plain, wide):
        vector.close()


def a_camera_of(vector: VectorEnv) -> str:
    """Name the model's first camera, or the free one."""
    model = vector.stepper.model  # type: ignore[attr-defined]
    return model.camera(0).name if model.ncam else FREE


def test_unknown_names_and_options_list_the_choices() -> None:
    with pytest.raises(ConfigError, match=mentions("hoper")):
        env("hoper")
    with pytest.raises(ConfigError, match=mentions("env=hopper ['speed'] max_episode_steps")):
        env("hopper", speed=2)
