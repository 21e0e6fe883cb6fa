"""Pictures as observations: of the moments of the history, the same for every width, harmless to the task."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawing import require_drawing
from messages import mentions
from pairwise import everything

from envs.datasets import Episode, read_dataset, write_robomimic
from envs.engine.pixels import match_cameras
from envs.engine.rendering import OffscreenRenderer
from envs.engine.vector import ChunkVector
from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.make import env
from envs.rollouts.collect import collect
from envs.spec import EnvConfig
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.encoders.vit import VitEncoderConfig
from policies.errors import CapabilityError, ConfigError
from policies.export.export import export_onnx
from policies.export.exported_policy import ExportedPolicy
from policies.policy import Policy, PolicyConfig

SIZE = (24, 32)


@pytest.fixture(autouse=True)
def _needs_drawing() -> None:
    require_drawing()


def task(*cameras: str, **options: object) -> EnvConfig:
    return env("avoid", cameras=cameras or ("top",), image_size=SIZE, **options)


def chunks(num: int, num_envs: int = 1, steps: int = 3) -> np.ndarray:
    up = np.random.default_rng(0).uniform(-0.3, 0.3, (num, num_envs, steps, 2))
    return up + np.array([0.0, 0.6])


def looking(*cameras: str, obs_steps: int = 2, size: tuple[int, int] = SIZE) -> Policy:
    """A small policy whose actions depend on what it sees."""
    unit = {
        name: {"min": -torch.ones(dim), "max": torch.ones(dim)} for name, dim in (("state", 4), ("action", 2))
    }
    config = PolicyConfig(
        encoder=VitEncoderConfig(width=8, heads=2, features=5),
        backbone=MlpConfig(width=13, time_dim=6),
        obs_steps=obs_steps,
    )
    images = {camera: (*size, 3) for camera in cameras or ("top",)}
    return build_policy(config, obs_dim=4, action_dim=2, statistics=unit, images=images, seed=1)


def test_the_history_shows_the_moments_of_the_state_history() -> None:
    """Chunks with a history of three see what single steps show one by one."""
    deep, flat = task().make_vector(1, obs_steps=3), task().make_vector(1)
    deep.reset([5])
    flat.reset([5])
    shown = [flat.images()["top"][0, 0]] * 3
    np.testing.assert_array_equal(deep.images()["top"][0], shown)
    for chunk in chunks(2, steps=2):
        deep.step_chunk(chunk)
        for j in range(2):
            flat.step_chunk(chunk[:, j : j + 1])
            shown.append(flat.images()["top"][0, 0])
        np.testing.assert_array_equal(deep.images()["top"][0], shown[-3:])
    assert len({picture.tobytes() for picture in shown}) == 5
    deep.close()
    flat.close()


def test_a_chunk_that_ends_an_episode_shows_its_end() -> None:
    vector, single = task().make_vector(1, obs_steps=2), task().make_vector(1)
    into_the_wall = np.tile(np.array([-1.0, 0.0]), (1, 40, 1))
    vector.reset([0])
    single.reset([0])
    end = vector.step_chunk(into_the_wall)
    assert end.terminated[0] and end.length[0] < 40
    for j in range(int(end.length[0])):
        before = single.images()["top"][0, 0]
        single.step_chunk(into_the_wall[:, j : j + 1])
    np.testing.assert_array_equal(vector.images()["top"][0], [before, single.images()["top"][0, 0]])
    vector.close()
    single.close()


def test_rows_and_cameras_are_kept_apart() -> None:
    vector, one = task("top", "tilted").make_vector(3), task("tilted").make_vector(1)
    vector.reset([1, 2, 3])
    one.reset([3])
    images = vector.images([2, 0])
    assert list(images) == ["top", "tilted"] and images["top"].shape == (2, 1, *SIZE, 3)
    np.testing.assert_array_equal(images["tilted"][0], one.images()["tilted"][0])
    assert not np.array_equal(images["top"][0], images["top"][1])
    assert not np.array_equal(images["top"], images["tilted"])
    vector.close()
    one.close()


def test_a_saved_vector_goes_on_with_its_pictures() -> None:
    vector, other = task().make_vector(2, obs_steps=2), task().make_vector(2, obs_steps=2)
    vector.reset([1, 2])
    first, second = chunks(2, num_envs=2)
    vector.step_chunk(first)
    other.load_state_dict(pickle.loads(pickle.dumps(vector.state_dict())))
    for _ in range(2):
        np.testing.assert_array_equal(other.images()["top"], vector.images()["top"])
        vector.step_chunk(second)
        other.step_chunk(second)
    vector.close()
    other.close()


@pytest.mark.skipif(not everything, reason="with --all: without it a replay has the states that are drawn")
def test_cubes_look_as_in_the_visual_worlds_of_ogbench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their model, state and camera, drawn by our renderer: theirs is chosen when MuJoCo is imported."""
    pytest.importorskip("ogbench", reason="needs the extra 'ogbench'")
    import gymnasium
    from ogbench.manipspace.envs.manipspace_env import ManipSpaceEnv

    renderers: dict[Any, OffscreenRenderer] = {}

    def drawn(self: Any, *_: object, **__: object) -> np.ndarray:
        if self._model not in renderers:
            renderers[self._model] = OffscreenRenderer(
                self._model, width=32, height=32, camera="front_pixels"
            )
        return renderers[self._model].frame(self._data)

    monkeypatch.setattr(ManipSpaceEnv, "render", drawn)
    config = env("cube-single", task=2, cameras=("front_pixels",), image_size=(32, 32))
    vector = config.make_vector(1)
    vector.reset([5])
    mine = vector.images()["front_pixels"][0, 0]
    vector.close()
    theirs = gymnasium.make("visual-cube-single-singletask-task2-v0", disable_env_checker=True)
    expected, _ = theirs.reset(seed=5)
    theirs.close()
    for renderer in renderers.values():
        renderer.close()
    np.testing.assert_array_equal(mine, expected)


def test_demonstrations_are_recorded_with_what_was_seen(tmp_path: Path) -> None:
    data = collect(task(), episodes=1, first_seed=7)
    blind = collect(env("avoid"), episodes=1, first_seed=7)
    assert torch.equal(data.observations, blind.observations) and torch.equal(data.actions, blind.actions)
    write_robomimic(tmp_path / "demo.hdf5", data, task())
    assert read_dataset(tmp_path / "demo.hdf5").digest() == data.digest() != blind.digest()
    vector = task().make_vector(1)
    vector.reset([7])
    shown = data.images["top"][torch.arange(4)].numpy()
    for t in range(4):
        np.testing.assert_array_equal(vector.images()["top"][0, 0], shown[t])
        vector.step_chunk(data.actions[t].numpy()[None, None])
    vector.close()


def test_an_expert_of_another_world_cannot_be_photographed() -> None:
    class Elsewhere:
        spec = env("avoid").spec
        cameras = ("top",)

        def make_vector(self, num_envs: int, *, obs_steps: int = 1) -> ChunkVector:
            vector = task().make_vector(num_envs, obs_steps=obs_steps)
            assert isinstance(vector, ChunkVector)
            return vector

        def demonstrate(self, seed: int) -> Episode:
            return Episode(np.zeros((3, 4)), np.zeros((2, 2)), np.zeros(2), False, True, True, seed)

    with pytest.raises(CapabilityError, match=r"episode of avoid cannot be recorded.*seed 3, step 0"):
        collect(Elsewhere(), episodes=1, first_seed=3)


def test_an_evaluation_of_a_policy_that_looks_does_not_depend_on_the_width() -> None:
    policy, short = looking(), env("avoid", max_episode_steps=4)
    expected = evaluate(policy, short, Settings(episodes=3, num_envs=1))
    assert expected.protocol["images"] == {"cameras": {"top": [*SIZE, 3]}, "shadows": False}
    for num_envs, num_workers in ((3, 0), (2, 1)):
        got = evaluate(policy, short, Settings(episodes=3, num_envs=num_envs), num_workers=num_workers)
        assert got == expected and got.protocol_hash == expected.protocol_hash
    shown = env("avoid", max_episode_steps=4, cameras=("top",), image_size=SIZE)
    again = evaluate(policy, shown, Settings(episodes=3))
    assert again.protocol == expected.protocol  # cameras are the policy's


def test_an_exported_policy_that_looks_plays_the_same_episode(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    policy, short = looking(), env("avoid", max_episode_steps=4)
    export_onnx(policy, tmp_path / "out", latency_batches=())
    exported = ExportedPolicy(tmp_path / "out")
    assert exported.images == policy.images
    played = [
        evaluate(one, short, Settings(episodes=1), keep_observations=True) for one in (policy, exported)
    ]
    assert played[0].protocol["images"] == played[1].protocol["images"]
    actions = [one.rows[0].actions for one in played]
    assert actions[0] is not None and np.ptp(actions[0]) > 0
    np.testing.assert_allclose(actions[1], actions[0], atol=1e-4)


def test_one_sample_per_pixel_draws_the_same_scene_with_hard_edges() -> None:
    pictures = {}
    for samples in (None, 0):
        vector = task(image_samples=samples).make_vector(1)
        vector.reset([3])
        pictures[samples] = vector.images()["top"][0, 0]
        assert vector.stepper.model.vis.quality.offsamples == 4  # the task's model is as it was
        vector.close()
    colors = {samples: len(np.unique(shown.reshape(-1, 3), axis=0)) for samples, shown in pictures.items()}
    difference = np.abs(pictures[None].astype(int) - pictures[0]).max(axis=2)
    assert colors[0] < colors[None] and 0 < (difference > 8).mean() < 0.3
    rough = evaluate(looking(), env("avoid", max_episode_steps=2, image_samples=0), Settings(episodes=1))
    assert rough.protocol["images"]["samples"] == 0


def test_a_task_has_to_show_what_the_policy_was_trained_on() -> None:
    policy = looking()
    assert match_cameras(env("avoid"), policy.images) == task()
    assert match_cameras(task("tilted", "top"), policy.images) == task()
    assert match_cameras(task(), {}) == env("avoid", image_size=SIZE)
    with pytest.raises(ConfigError, match=r"needs the cameras top; env.cameras has tilted"):
        evaluate(policy, task("tilted"), Settings(episodes=1))
    with pytest.raises(ConfigError, match=mentions("24 32 top env.image_size [96, 96]")):
        evaluate(policy, env("avoid", cameras=("top",)), Settings(episodes=1))
    with pytest.raises(ConfigError, match=mentions("env.cameras front")):
        task("front").make_vector(1)
    with pytest.raises(CapabilityError, match="cannot be drawn"):
        match_cameras(object(), policy.images)


@pytest.mark.parametrize(
    ("size", "message"), [((8,), "height and width.*got \\[8\\]"), ((0, 8), "at least 1; got \\[0, 8\\]")]
)
def test_a_size_is_height_and_width(size: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"env.image_size must be {message}"):
        env("avoid", image_size=size)


def test_a_camera_is_named_once_and_is_no_state() -> None:
    for cameras in (("top", "top"), ("state",)):
        with pytest.raises(ConfigError, match=mentions("env.cameras state")):
            env("avoid", cameras=cameras)
