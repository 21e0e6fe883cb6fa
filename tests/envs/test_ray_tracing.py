"""Images by mujoco-warp: the scene that OpenGL draws, or a refusal."""

from __future__ import annotations

import copy
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from drawing import require_drawing
from messages import mentions

from envs.engine.ray_tracing import RayTracer
from envs.evaluation.protocol import describe_protocol
from envs.evaluation.settings import EvaluationSettings
from envs.fit import require_same_task
from envs.make import env
from envs.spec import EnvConfig
from policies.errors import ConfigError, MissingExtraError

traces = pytest.mark.skipif(find_spec("mujoco_warp") is None, reason="needs the extra warp")
SIZE = 48


def task(renderer: str = "warp", **options: Any) -> EnvConfig:
    shown = {"cameras": ("top",), "image_size": (SIZE, SIZE), "image_renderer": renderer}
    return env("avoid", **{**shown, **options})


@traces
@pytest.mark.slow  # compiles for a minute where the scene was never drawn
def test_it_draws_what_opengl_draws_and_the_state_of_now() -> None:
    require_drawing()
    vectors = {
        "opengl": task("opengl", rows="moved", image_samples=0).make_vector(2),
        "warp": task(rows="moved").make_vector(2),
    }
    shown: dict[str, list[np.ndarray]] = {kind: [] for kind in vectors}
    for kind, vector in vectors.items():
        vector.reset([1, 2])
        for _ in range(2):
            shown[kind].append(vector.images()["top"][:, 0].astype(int))
            vector.step_chunk(np.full((2, 4, 2), [0.3, 0.6]))
        assert not np.array_equal(shown[kind][0], shown[kind][1])  # the disc moved
        assert not np.array_equal(shown[kind][0][0], shown[kind][0][1])  # so did the rows
    opengl, warp = np.stack(shown["opengl"]), np.stack(shown["warp"])
    differs = np.abs(opengl - warp).max(axis=-1)
    assert differs.mean() < 12 and (differs > 40).mean() < 0.02  # they light the sides of things differently

    def greenish(images: np.ndarray) -> np.ndarray:
        return images[..., 1] - images[..., [0, 2]].max(axis=-1) > 20

    line, traced = greenish(opengl), greenish(warp)
    assert line.sum(axis=(2, 3)).min() >= 20 and (line == traced).all()  # the finish line

    again = task(rows="moved").make_vector(1)
    again.reset([2])
    again.step_chunk(np.full((1, 4, 2), [0.3, 0.6]))
    np.testing.assert_array_equal(again.images()["top"][0, 0], warp[1, 1])  # not only the newest of many
    for vector in (*vectors.values(), again):
        vector.close()


@traces
@pytest.mark.slow
def test_colours_follow_the_model_and_what_is_transparent_is_left_out() -> None:
    vector: Any = task().make_vector(1)
    vector.reset([1])
    model, data = copy.copy(vector.stepper.model), vector.stepper.datas[0]
    tracer = RayTracer(model, width=SIZE, height=SIZE, shadows=False)
    tracer.look_through("top")
    plain = tracer.frame(data)
    disc, colour = model.geom("disc").id, model.geom("disc").rgba.copy()
    model.geom_rgba[disc] = (0, 0, 1, 1)
    blue = tracer.frame(data)
    model.geom_rgba[disc] = (0, 0, 1, 0)
    hidden = tracer.frame(data)
    changed = (blue != plain).any(axis=2)
    assert 0 < changed.sum() < 20 and (blue[changed][:, 2] > blue[changed][:, 0]).all()
    np.testing.assert_array_equal((hidden != plain).any(axis=2), changed)
    assert (hidden[changed] > 100).all()  # the floor
    model.geom_rgba[disc] = colour
    np.testing.assert_array_equal(tracer.frame(data), plain)
    assert model.geom_group.max() == 0
    tracer.close()
    vector.close()


def test_a_protocol_names_the_renderer_only_where_it_is_not_opengl() -> None:
    settings = EvaluationSettings()
    plain, traced = (describe_protocol(task(), settings, task(kind)) for kind in ("opengl", "warp"))
    assert "renderer" not in plain["images"] and traced["images"]["renderer"] == "warp"
    assert set(traced["versions"]) - set(plain["versions"]) == {"mujoco-warp", "warp-lang"}
    assert plain["env"] == traced["env"]  # the task is the same
    assert require_same_task("a", task(), "b", task("opengl")) == ["image_renderer"]


def test_what_it_cannot_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=mentions("env.image_samples 4 env.image_renderer=warp")):
        task(image_samples=4)
    with pytest.raises(ConfigError, match=mentions("env.cameras top tilted ahead free")):
        task(cameras=("free",)).make_vector(1)
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(MissingExtraError, match=mentions("env.image_renderer=warp burnish[warp]")):
        task().make_vector(1)
