"""The plug-in for LeRobot: its mapping always; LeRobot's own loop on an arm where LeRobot is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drawing import require_drawing
from messages import mentions
from small_policies import observations, small_policy

from envs.datasets import EpisodeDataset, write_lerobot
from envs.datasets.interface import interface_of_task
from envs.tasks.mjcf import Mjcf
from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.encoders.resnet import ResNetEncoderConfig
from policies.errors import BurnishError, CapabilityError, ConfigError
from policies.execution.history import ChunkActor
from policies.export.folder import Surroundings
from policies.policy import Policy, PolicyConfig
from policies.runner import draw_noise
from policies.serving.served_policy import ServedPolicy
from policies.storage.policy_folder import save_policy

HOME = Path(__file__).resolve().parents[2] / "integrations" / "lerobot_policy_burnish"
ARM, SIZE, CAMERAS = HOME / "arm.py", (40, 48), ("front", "wrist")
JOINTS = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"]
STEPS, TO, TA = 7, 2, 3
has_lerobot = importlib.util.find_spec("lerobot") is not None
needs_lerobot = pytest.mark.skipif(not has_lerobot, reason="needs lerobot")


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    """The part of the plug-in that does not import LeRobot."""
    path = HOME / "lerobot_policy_burnish" / "sources.py"
    spec = importlib.util.spec_from_file_location("plug_in_sources", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["plug_in_sources"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HOME))
    return importlib.import_module("lerobot_policy_burnish")


def arm(cameras: tuple[str, ...] = CAMERAS) -> Mjcf:
    return Mjcf(file=str(ARM), cameras=cameras, image_size=SIZE)


def arm_policy(env: Mjcf) -> Policy:
    """A policy with random weights for the arm, on two observations and two cameras."""
    spec = env.spec
    ones = {name: {key: torch.full((n,), value) for key, value in (("min", -1.0), ("max", 1.0))}
            for name, n in (("state", spec.obs_dim), ("action", spec.action_dim))}  # fmt: skip
    images = {camera: (*SIZE, 3) for camera in env.cameras}
    encoder = ResNetEncoderConfig(width=16, keypoints=4, features=4) if images else None
    config = PolicyConfig(
        encoder=encoder, backbone=MlpConfig(width=16, time_dim=8), obs_steps=TO, horizon=4, act_steps=TA
    )
    sizes = {"obs_dim": spec.obs_dim, "action_dim": spec.action_dim, "images": images}
    policy = build_policy(config, **sizes, statistics=ones, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return policy.eval()


def saved(policy: Policy, folder: Path, env: Mjcf | None = None) -> Path:
    interface = {} if env is None else interface_of_task(env.spec)
    return save_policy(policy, folder, provenance={"algo": "bc", "interface": interface})


# -- the mapping ----------------------------------------------------------------------------------------


def test_features_have_lerobots_names_and_shapes(sources: ModuleType, tmp_path: Path) -> None:
    schema = ServedPolicy(arm_policy(arm())).schema
    found = sources.features_of(schema)
    assert found == {
        "observation.state": ("STATE", (9,)),
        "observation.images.front": ("VISUAL", (3, *SIZE)),
        "observation.images.wrist": ("VISUAL", (3, *SIZE)),
        "action": ("ACTION", (6,)),
    }
    from policies.serving.messages import Feature, Schema

    single = Schema(
        {"observation": Feature((1, 2)), "image": Feature((1, 4, 6, 3), "uint8")}, Feature((1, 2))
    )
    assert "observation.image" in sources.features_of(single, single_camera=True)
    assert "observation.images.image" in sources.features_of(single)
    pixels = np.arange(72, dtype=np.uint8).reshape(1, 4, 6, 3)
    batch = {
        "observation.state": torch.zeros(1, 2),
        "observation.image": torch.from_numpy(pixels).movedim(-1, 1),
    }
    assert np.array_equal(sources.inputs_of(batch, single)["image"], pixels)


def test_images_and_states_come_back_as_they_were(sources: ModuleType) -> None:
    """LeRobot gives floats in [0, 1], channels first; every level of a pixel survives."""
    schema = ServedPolicy(arm_policy(arm(("front",)))).schema
    pixels = np.resize(np.arange(256, dtype=np.uint8), (2, TO, *SIZE, 3))
    state = torch.randn(2, TO, 9)
    image = torch.from_numpy(pixels).movedim(-1, -3).float() / 255
    batch = {"b": state[..., 6:], "a": state[..., :6], "observation.images.front": image, "task": "reach"}
    found = sources.inputs_of(batch, schema, ["a", "b"])
    assert np.array_equal(found["front"], pixels)
    assert np.array_equal(found["observation"], state.numpy())
    with pytest.raises(ConfigError, match=mentions("observation (9,) (2, 2, 6) state_keys")):
        sources.inputs_of(batch, schema, ["a"])
    with pytest.raises(ConfigError, match=mentions("'observation.state' 'task'")):
        sources.inputs_of(batch, schema)


def test_decisions_are_the_policys_within_the_limits_of_the_robot(
    sources: ModuleType, tmp_path: Path
) -> None:
    policy = small_policy()
    limits = {"action_low": [2.5, 1.0], "action_high": [3.5, 9.0], "action_names": ["a [deg]", "b.pos"]}
    save_policy(policy, tmp_path / "one", provenance={"interface": {**limits, "control_hz": 30.0}})
    opened = sources.open_source(str(tmp_path / "one"))
    assert opened.action_names == ("a", "b.pos") and opened.schema.control_hz == 30
    obs = observations(2).numpy()
    noise = np.stack([draw_noise((5, 1, row), policy.noise_shape) for row in (4, 5)])
    expected = policy.act(obs, noise=torch.from_numpy(noise)).numpy().clip([2.5, 1.0], [3.5, 9.0])
    found = opened.decide({"observation": obs}, (5, 1, 2))
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert len(np.unique(found)) < found.size, "the limits bind somewhere"


def test_limits_are_those_of_the_policy_that_the_server_has_by_now(
    sources: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedPolicy(small_policy(), Surroundings(action_low=[-9.0, -9.0], action_high=[9.0, 9.0]))
    other = Surroundings(action_low=[-0.1, -0.1], action_high=[0.1, 0.1])
    client = SimpleNamespace(schema=served.schema, decide=lambda inputs, key: np.ones((TA, 2), np.float32))
    monkeypatch.setattr(sources, "Client", lambda place, timeout_s: client)
    source, obs = sources.open_source("tcp://127.0.0.1:1"), {"observation": observations(1).numpy()}
    assert source.decide(obs, (0, 0, 0)).max() == 1.0
    client.schema = ServedPolicy(small_policy(), other).schema
    assert source.decide(obs, (0, 0, 1)).max() == np.float32(0.1)


def test_a_run_is_its_last_policy_and_goals_are_refused(sources: ModuleType, tmp_path: Path) -> None:
    save_policy(small_policy(), tmp_path / "run" / "checkpoints" / "last" / "policy")
    assert sources.open_source(str(tmp_path / "run")).policy is not None
    save_policy(small_policy(goal_dim=3), tmp_path / "goals")
    with pytest.raises(CapabilityError, match=mentions("goals goal LeRobot")):
        sources.open_source(str(tmp_path / "goals"))
    with pytest.raises(BurnishError, match="nowhere"):
        sources.open_source(str(tmp_path / "nowhere"))


def test_lerobot_finds_the_distribution_by_its_name() -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())
    name = project["project"]["name"]
    assert name.startswith("lerobot_policy_") and (HOME / name / "__init__.py").is_file()
    assert project["tool"]["setuptools"]["packages"] == [name]


def test_the_arm_has_the_joints_of_an_so101_and_an_expert_that_reaches() -> None:
    env = arm(())
    assert [name.partition(" ")[0] for name in env.spec.action_names] == [f"{name}.pos" for name in JOINTS]
    episodes = [env.demonstrate(seed) for seed in range(3)]
    assert all(episode.success for episode in episodes)
    assert all(np.abs(episode.actions).max() < 1 for episode in episodes), "no joint reaches its end"


# -- in LeRobot -----------------------------------------------------------------------------------------


@contextmanager
def served(policy: Policy) -> Iterator[str]:
    from policies.serving.server import Server, ServerSettings

    with Server(ServedPolicy(policy), ServerSettings(port=0)) as server:
        thread = Thread(target=server.run)
        thread.start()
        try:
            yield server.endpoint
        finally:
            server.stop()
            thread.join(60)


def recorded(env: Mjcf, folder: Path) -> Path:
    """A LeRobot dataset of the arm, whose metadata LeRobot takes for the robot's."""
    rng, spec = np.random.default_rng(0), env.spec
    obs, actions = rng.normal(size=(10, spec.obs_dim)), rng.uniform(-1, 1, (10, spec.action_dim))
    images = {camera: rng.integers(0, 256, (10, *SIZE, 3), np.uint8) for camera in env.cameras}
    none = np.zeros(10, bool)
    data = EpisodeDataset.from_arrays(obs, actions, np.zeros(10), none, None, [0, 6, 10], images=images)
    write_lerobot(folder, data, env)
    return folder


def driven(env: Mjcf, act: Any, seed: int = 3) -> np.ndarray:
    """Drive the arm: `act` takes a LeRobot observation and returns targets by joint; returns the commands."""
    vector, names = env.make_vector(1), [name.partition(" ")[0] for name in env.spec.action_names]
    obs, commands = vector.reset([seed])[0, -1], []
    for _ in range(STEPS):
        images = vector.images() if env.cameras else {}
        seen = {f"observation.images.{camera}": one[0, -1] for camera, one in images.items()}
        goal = act({"observation.state": obs.astype(np.float32), **seen})
        commands.append(np.array([goal[name] for name in names], np.float32))
        obs = vector.step_chunk(commands[-1][None, None]).obs[0, -1]
    vector.close()
    return np.stack(commands)


def own_loop(policy: Policy, env: Mjcf) -> Any:
    """burnish's own way from observation to command."""
    actor = ChunkActor(
        lambda obs, key: ServedPolicy(policy).decide(
            {name: value[None] for name, value in obs.items()}, draw_noise(key, policy.noise_shape)[None]
        )[0],
        TO, low=env.spec.action_low, high=env.spec.action_high,
    )  # fmt: skip
    names = [name.partition(" ")[0] for name in env.spec.action_names]

    def act(seen: dict[str, np.ndarray]) -> dict[str, float]:
        inputs = {name.removeprefix("observation.images."): value for name, value in seen.items()}
        inputs["observation"] = inputs.pop("observation.state")
        return dict(zip(names, actor.act(inputs).tolist(), strict=True))

    return act


def lerobot_loop(place: Path, meta: Any) -> Any:
    """What LeRobot's commands do with `--policy.path`."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import make_policy, make_pre_post_processors
    from lerobot.policies.utils import make_robot_action

    try:
        from lerobot.common.control_utils import predict_action
    except ImportError:
        from lerobot.utils.control_utils import predict_action

    config = PreTrainedConfig.from_pretrained(place, cli_overrides=["--device=cpu"])
    config.pretrained_path = place
    policy = make_policy(config, ds_meta=meta)
    before, after = make_pre_post_processors(
        config, pretrained_path=str(place), preprocessor_overrides={"device_processor": {"device": "cpu"}}
    )
    policy.reset()

    def act(seen: dict[str, np.ndarray]) -> dict[str, float]:
        arguments = (policy, torch.device("cpu"), before, after, False)
        action = predict_action(seen, *arguments, task="reach", robot_type="arm")
        goal: dict[str, float] = make_robot_action(action, meta.features)
        return goal

    return act


@needs_lerobot
@pytest.mark.parametrize("kind", ["policy", "export", "server"])
def test_lerobots_loop_on_the_arm_is_burnishs_own(plug_in: ModuleType, tmp_path: Path, kind: str) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata

    cameras = CAMERAS if kind != "export" else ()
    if cameras:
        require_drawing()
    env = arm(cameras)
    policy = arm_policy(env)
    meta = LeRobotDatasetMetadata("ours/arm", root=recorded(env, tmp_path / "data"))
    own = driven(env, own_loop(policy, env))
    assert np.abs(np.diff(own, axis=0)).max() > 1e-3
    if kind == "policy":
        source = saved(policy, tmp_path / "policy", env)
        place = plug_in.prepare(str(source), tmp_path / "ready")
        source.rename(tmp_path / "away")  # the directory is complete
        np.testing.assert_array_equal(driven(env, lerobot_loop(place, meta)), own)
    elif kind == "export":
        pytest.importorskip("onnxscript", reason="needs the extra 'export'")
        from policies.export.export import export_onnx
        from policies.export.folder import Surroundings

        facts = interface_of_task(env.spec)
        export_onnx(policy, tmp_path / "exported", surroundings=Surroundings("arm", **facts))
        place = plug_in.prepare(str(tmp_path / "exported"), tmp_path / "ready")
        np.testing.assert_allclose(driven(env, lerobot_loop(place, meta)), own, atol=1e-4)
    else:
        with served(policy) as address:
            place = plug_in.prepare(address, tmp_path / "ready", timeout_s=30.0)
            assert not (place / plug_in.INSIDE).exists()
            np.testing.assert_array_equal(driven(env, lerobot_loop(place, meta)).clip(-1, 1), own)
    names = json.loads((place / "config.json").read_text())["action_feature_names"]
    assert names == (None if kind == "server" else [f"{joint}.pos" for joint in JOINTS])


@needs_lerobot
def test_a_robot_with_other_joints_is_refused(plug_in: ModuleType, tmp_path: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata

    env = arm(())
    saved(arm_policy(env), tmp_path / "policy", env)
    meta = LeRobotDatasetMetadata("ours/arm", root=recorded(env, tmp_path / "data"))
    names = meta.features["action"]["names"]
    names[0], names[1] = names[1], names[0]
    config = plug_in.BurnishConfig(source=str(tmp_path / "policy"), device="cpu")
    with pytest.raises(ConfigError, match=mentions("shoulder_pan.pos shoulder_lift.pos order")):
        plug_in.BurnishPolicy(config, dataset_meta=meta)
    with pytest.raises(ConfigError, match=mentions("policy.source")):
        plug_in.BurnishPolicy(plug_in.BurnishConfig(device="cpu"))


@needs_lerobot
def test_lerobot_trains_the_policy_and_it_comes_back(plug_in: ModuleType, tmp_path: Path) -> None:
    from lerobot.datasets.factory import resolve_delta_timestamps
    from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata
    from lerobot.policies.factory import make_policy, make_pre_post_processors

    env = arm(("front",))
    saved(arm_policy(env), tmp_path / "policy", env)
    data = recorded(env, tmp_path / "data")
    meta = LeRobotDatasetMetadata("ours/arm", root=data)
    config = plug_in.BurnishConfig(source=str(tmp_path / "policy"), device="cpu", push_to_hub=False)
    policy = make_policy(config, ds_meta=meta)
    before, _ = make_pre_post_processors(config, dataset_stats=meta.stats)
    times = resolve_delta_timestamps(config, meta)
    assert np.allclose(times["observation.state"], [-0.05, 0.0])
    frames = LeRobotDataset("ours/arm", root=data, delta_timestamps=times)
    batch = before(next(iter(torch.utils.data.DataLoader(frames, batch_size=10))))
    assert batch["action"].shape == (10, 4, 6) and bool(batch["action_is_pad"].any())

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        found: torch.Tensor = policy.forward(batch)[0]
        return found

    optimizer = config.get_optimizer_preset().build(policy.get_optim_params())
    first = loss()
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert float(loss()) < float(first)
    policy.save_pretrained(tmp_path / "trained")
    again = plug_in.BurnishPolicy.from_pretrained(tmp_path / "trained")
    seen = {name: value[:2, -1] if value.ndim > 2 else value[:2] for name, value in batch.items()
            if name in config.input_features}  # fmt: skip
    policy.reset()
    torch.testing.assert_close(policy.select_action(seen), again.select_action(seen), rtol=0, atol=0)
    with pytest.raises(CapabilityError, match="cannot be trained"):
        again.policy = None
        again.forward(batch)
