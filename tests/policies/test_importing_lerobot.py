"""LeRobot's diffusion policy: imported whole and equal; reference files were recorded with lerobot 0.4.4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from messages import mentions
from pairwise import each_value, everything
from released import recorded, weights_of
from safetensors.torch import save_file
from torch import Tensor

from envs.evaluation.evaluate import evaluate
from envs.evaluation.settings import EvaluationSettings as Settings
from envs.tasks.gym.factories import local_factory
from envs.tasks.gym.task import Gym
from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.importing import import_policy
from policies.importing.lerobot import LerobotSource
from policies.samplers.ddpm import DDPM
from policies.storage.policy_folder import load_policy, save_policy

EXAMPLES = ("lerobot_images", "lerobot_cameras", "lerobot_states")
CAMERAS = {"observation.images.top": "top", "observation.images.wrist": "wrist"}


def written(
    name: str, folder: Path, *, among: bool = False, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Write the files of a LeRobot policy; `among`: statistics among the weights, as before 0.4."""
    facts, arrays = recorded(name)
    (folder / "config.json").write_text(json.dumps(facts["config"] | changes))
    weights = weights_of(facts["shapes"])
    stats = {key.removeprefix("stats."): value for key, value in arrays.items() if key.startswith("stats.")}
    if among:
        for key, value in stats.items():
            feature, _, kind = key.rpartition(".")
            places = (
                ("unnormalize_outputs", "normalize_targets") if feature == "action" else ("normalize_inputs",)
            )
            weights |= {
                f"{place}.buffer_{feature.replace('.', '_')}.{kind}": value.clone() for place in places
            }
    else:
        for file, kind in (("policy_preprocessor", "normalizer"), ("policy_postprocessor", "unnormalizer")):
            step = {"registry_name": f"{kind}_processor", "state_file": f"{file}_step.safetensors"}
            others = [{"registry_name": "to_batch_processor", "config": {}}, step]
            (folder / f"{file}.json").write_text(json.dumps({"name": file, "steps": others}))
            save_file(stats, folder / f"{file}_step.safetensors")
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors", arrays


def observation(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    states = [f"in.observation.{part}" for part in ("state", "environment_state")]
    obs = {"state": torch.cat([arrays[key] for key in states if key in arrays], dim=-1)}
    images = {camera: arrays[f"in.{key}"] for key, camera in CAMERAS.items() if f"in.{key}" in arrays}
    return obs | {camera: image.movedim(2, -1) for camera, image in images.items()}


@pytest.mark.parametrize(
    ("name", "among"), each_value(EXAMPLES if everything else EXAMPLES[1:], [False, True])
)
def test_an_import_acts_as_the_program(name: str, among: bool, tmp_path: Path) -> None:
    path, arrays = written(name, tmp_path, among=among)
    policy, conversion = import_policy(path, LerobotSource())
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    actions = loaded.act(observation(arrays), noise=arrays["noise"])
    torch.testing.assert_close(actions, arrays["out"], rtol=1e-4, atol=2e-5)
    assert conversion.normalizer == {"state": "checkpoint", "action": "checkpoint"}


def test_an_import_can_be_fine_tuned(tmp_path: Path) -> None:
    path, arrays = written("lerobot_images", tmp_path)
    policy, _ = import_policy(path, LerobotSource())
    assert isinstance(policy, DenoisingPolicy)
    generator = torch.Generator().manual_seed(0)
    cond = policy.encode(observation(arrays), generator=generator)
    policy.matching_loss(cond, arrays["noise"], policy.sample_te(2, generator=generator)).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


class Tabletop(gymnasium.Env[Any, Any]):
    """Names and shapes as in gym_pusht: pictures, and the place of the robot; an episode has 5 steps."""

    observation_space = Dict(
        agent_pos=Box(-9, 9, (3,)),
        pixels=Box(0, 255, (48, 48, 3), np.uint8),
        hand=Box(0, 255, (48, 48, 3), np.uint8),
    )
    action_space = Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {name: self.np_random.integers(0, 9, space.shape).astype(space.dtype)
                for name, space in self.observation_space.items()}, {}  # fmt: skip

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], float(action[0]), False, False, {"is_success": False}


def test_an_import_runs_in_a_task_with_other_names_of_cameras(tmp_path: Path) -> None:
    path, _ = written("lerobot_images", tmp_path)
    with pytest.raises(ConfigError, match=mentions("source.cameras observation.images.wrist pixels")):
        import_policy(path, LerobotSource(cameras=("pixels",)))
    policy, _ = import_policy(path, LerobotSource(cameras=("hand", "pixels")))
    assert list(policy.images) == ["hand", "pixels"]
    task = Gym(factory=local_factory(Tabletop), max_episode_steps=5)
    found = evaluate(policy, task, Settings(episodes=2), num_workers=0)
    assert [row.length for row in found.rows] == [5, 5]
    assert all(np.isfinite(row.return_) and row.return_ != 0 for row in found.rows)


def test_the_scheduler_of_the_program_is_kept(tmp_path: Path) -> None:
    path, _ = written(
        "lerobot_states", tmp_path, noise_scheduler_type="DDPM", num_inference_steps=None, clip_sample=False
    )
    policy, _ = import_policy(path, LerobotSource())
    assert policy.sampler == DDPM(clip_x0=None, noise_clip=None, min_std=0.0, final_std=None)
    assert policy.chunk.executed == slice(1, 5)


def test_a_state_that_never_moved_is_shifted(tmp_path: Path) -> None:
    path, arrays = written("lerobot_states", tmp_path)
    stats = {key.removeprefix("stats."): value for key, value in arrays.items() if key.startswith("stats.")}
    stats["observation.state.max"] = stats["observation.state.min"].clone()
    save_file(stats, tmp_path / "policy_preprocessor_step.safetensors")
    policy, _ = import_policy(path, LerobotSource())
    still = torch.cat([stats["observation.state.min"], torch.tensor([0.1, 0.2])])
    encoded = policy.encode({"state": still.repeat(1, 2, 1)}).vec
    expected = torch.tensor([-1.0, -1.0, -1.0, 0.1, 0.2])  # the state of the environment is not normalised
    torch.testing.assert_close(encoded, expected.repeat(1, 2))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vision_backbone": "resnet34"}, CapabilityError, "vision_backbone resnet18 resnet34"),
        ({"use_group_norm": False}, CapabilityError, "use_group_norm True False"),
        ({"type": "act"}, CapabilityError, "type diffusion act"),
        ({"crop_shape": [40, 41]}, CapabilityError, "40 41 48 encoder.crop"),
        ({"crop_shape": [41, 41]}, CapabilityError, "41 48 centred"),
        ({"noise_scheduler_type": "LCM"}, CapabilityError, "noise_scheduler_type LCM"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path, _ = written("lerobot_images", tmp_path, **changes)
    with pytest.raises(error, match=mentions(message)):
        import_policy(path, LerobotSource())


def test_files_beside_the_weights_are_needed(tmp_path: Path) -> None:
    path, _ = written("lerobot_states", tmp_path)
    (tmp_path / "policy_preprocessor_step.safetensors").unlink()
    with pytest.raises(CheckpointError, match=mentions("policy_preprocessor_step.safetensors")):
        import_policy(path, LerobotSource())
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=mentions("config.json")):
        import_policy(path, LerobotSource())


def test_a_configuration_without_a_key_is_refused(tmp_path: Path) -> None:
    path, _ = written("lerobot_states", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["horizon"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=mentions("source=lerobot 'horizon' version")):
        import_policy(path, LerobotSource())


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_tensors_that_do_not_fit_are_named(change: str, tmp_path: Path) -> None:
    path, _ = written("lerobot_states", tmp_path)
    facts, _ = recorded("lerobot_states")
    weights, name = weights_of(facts["shapes"]), "diffusion.unet.final_conv.1.bias"
    moved = {"missing": {}, "unexpected": {name: weights[name], "diffusion.other": weights[name].clone()}}
    rest = {key: value for key, value in weights.items() if key != name}
    save_file(rest | moved[change], path)
    named = "final_conv.1.bias" if change == "missing" else "diffusion.other"
    with pytest.raises(CheckpointError, match=mentions(f"{change} {named}")):
        import_policy(path, LerobotSource())
