"""Tasks in mujoco-warp: the episodes of MuJoCo to float32; evaluations and demonstrations are MuJoCo's."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from messages import mentions

from envs.engine.engines import exactly
from envs.evaluation.protocol import describe_task
from envs.make import env
from policies.errors import ConfigError, EnvironmentFailure

simulates = pytest.mark.skipif(find_spec("mujoco_warp") is None, reason="needs the extra warp")
WIDTH = 3


def chunks(dim: int, count: int) -> np.ndarray:
    drawn = np.random.default_rng(0).uniform(-0.5, 0.5, (count, WIDTH, 4, dim))
    return drawn + (np.array([0.0, 0.5]) if dim == 2 else 0.0)  # forwards in avoid


@simulates
@pytest.mark.slow  # compiles for minutes where the model was never simulated
@pytest.mark.parametrize(
    ("name", "tolerance"), [("avoid", 1e-6), ("hopper", 2e-5), ("walker2d", 2e-4), ("halfcheetah", 2e-4)]
)
def test_it_steps_as_mujoco_does_and_continues_from_its_state(name: str, tolerance: float) -> None:
    exact, warp = (env(name, engine=engine).make_vector(WIDTH) for engine in ("exact", "warp"))
    seeds, active = list(range(WIDTH)), np.ones(WIDTH, bool)
    np.testing.assert_array_equal(warp.reset(seeds), exact.reset(seeds))
    other: Any = None
    compared = 0
    for i, chunk in enumerate(chunks(exact.spec.action_dim, 6)):
        turn = active & (np.arange(WIDTH) != i)  # one rests
        expected, got = exact.step_chunk(chunk, turn), warp.step_chunk(chunk, turn)
        if other is not None:
            np.testing.assert_array_equal(other.step_chunk(chunk, turn).path, got.path)
        before = np.arange(4) < (expected.length - expected.terminated)[:, None]
        np.testing.assert_allclose(got.path[before], expected.path[before], atol=tolerance, rtol=0)
        np.testing.assert_allclose(got.path, expected.path, atol=5e-3, rtol=0)  # a depth of contact: 0.1 mm
        np.testing.assert_allclose(got.rewards, expected.rewards, atol=tolerance, rtol=0)
        for field in ("length", "terminated", "success"):
            np.testing.assert_array_equal(getattr(got, field), getattr(expected, field), err_msg=field)
        for metric, values in expected.metrics.items():
            np.testing.assert_array_equal(got.metrics[metric], values)
        active &= ~expected.done
        compared += int(before.sum())
        if i == 2:
            other = env(name, engine="warp").make_vector(WIDTH)
            other.load_state_dict(pickle.loads(pickle.dumps(warp.state_dict())))
    assert compared > 6
    for vector in (exact, warp, other):
        vector.close()


@simulates
@pytest.mark.slow
def test_more_contacts_than_there_is_room_for_are_an_error() -> None:
    from envs.engine.warp_worlds import WarpWorlds
    from envs.tasks.avoid.scene import load_model, load_scene

    scene, worlds = load_scene(), WarpWorlds(load_model(), 2, contacts=1)
    corner = [-scene.half_width + 0.9 * scene.disc_radius, scene.back_y + 0.9 * scene.disc_radius]
    worlds.put(0, corner, 0.0)
    worlds.put(1, [0.0, 0.0], 0.0)
    worlds.step()
    worlds.require_room()
    assert worlds.touching().tolist() == [True, False]
    worlds.put(1, corner, 0.0)
    worlds.step()
    worlds.put(1, [0.0, 0.0], 0.0)
    worlds.step()  # what was lost before the last step counts
    with pytest.raises(EnvironmentFailure, match=mentions("2 contacts 4 env.engine=exact")):
        worlds.require_room()


def test_evaluations_and_demonstrations_are_mujocos() -> None:
    for name in ("avoid", "hopper"):
        assert describe_task(env(name, engine="warp")) == describe_task(env(name))
        assert "engine" not in describe_task(env(name))["options"]
        assert exactly(env(name, engine="warp")) == env(name)


def test_what_it_does_not_simulate_is_refused() -> None:
    with pytest.raises(ConfigError, match=mentions("env.cameras top env.engine=warp")):
        env("avoid", engine="warp", cameras=("top",))
    with pytest.raises(ConfigError, match=mentions("env.engine exact env.rows=moved warp")):
        env("avoid", engine="warp", rows="moved")
