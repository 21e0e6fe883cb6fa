"""Diffusion Policy on images: imported whole and equal; the reference was recorded with its released code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from messages import mentions
from released import recorded, weights_of
from safetensors.torch import save_file
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import CheckpointError, ConfigError
from policies.importing.diffusion_policy_image import DiffusionPolicyImageSource
from policies.importing.importing import import_policy
from policies.samplers.ddpm import DDIM, DDPM
from policies.storage.policy_folder import load_policy, save_policy

CAMERAS = {"agentview_image": "agentview", "wrist_image": "wrist"}
FOUR_STEPS = DDIM(steps=4, recompute_eps=False, noise_clip=None)


def written(folder: Path, **others: Tensor) -> tuple[Path, DiffusionPolicyImageSource, dict[str, Tensor]]:
    facts, arrays = recorded("diffusion_policy_image")
    weights = weights_of(facts["shapes"])
    weights |= {name: torch.ones(1) for name in weights if name.endswith("temperature")}
    weights |= {
        f"normalizer.params_dict.{key.removeprefix('map.')}": value.float()
        for key, value in arrays.items()
        if key.startswith("map.")
    }
    save_file(weights | others, folder / "latest.safetensors")
    keys = tuple(facts["keys"])
    source = DiffusionPolicyImageSource(keys=keys, horizon=8, act_steps=4, images=(48, 48), crop=(40, 40))
    return folder / "latest.safetensors", source, arrays


def observation(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    state = torch.cat([arrays["in.robot0_eef_pos"], arrays["in.gripper"]], dim=-1)
    return {"state": state} | {ours: arrays[f"in.{key}"].movedim(2, -1) for key, ours in CAMERAS.items()}


def test_an_import_acts_as_the_program_and_can_be_fine_tuned(tmp_path: Path) -> None:
    path, source, arrays = written(tmp_path)
    published, conversion = import_policy(path, source)
    assert published.sampler == DDPM(noise_clip=None, min_std=0.0, final_std=None)
    assert isinstance(published, DenoisingPolicy)
    policy = published.with_sampler(FOUR_STEPS)
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    actions = loaded.act(observation(arrays), noise=arrays["noise"])
    torch.testing.assert_close(actions, arrays["out"], rtol=1e-4, atol=2e-5)
    assert conversion.facts()["imported_source"]["state"] == ["robot0_eef_pos", "gripper"]
    assert conversion.skipped["the encoder under its other name"] > 0

    generator = torch.Generator().manual_seed(0)
    cond = policy.encode(observation(arrays), generator=generator)
    policy.matching_loss(cond, arrays["noise"], policy.sample_te(2, generator=generator)).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


def test_the_order_of_the_observations_must_be_given(tmp_path: Path) -> None:
    path, source, _ = written(tmp_path)
    with pytest.raises(ConfigError, match=mentions("source.keys agentview_image gripper wrist_image")):
        import_policy(path, replace(source, keys=()))


def test_another_normalisation_than_of_groups_is_refused(tmp_path: Path) -> None:
    name = "obs_encoder.obs_nets.wrist_image.nets.0.nets.1.running_mean"
    path, source, _ = written(tmp_path, **{name: torch.zeros(64)})
    with pytest.raises(CheckpointError, match=mentions(f"unexpected {name}")):
        import_policy(path, source)


def test_a_temperature_of_its_own_is_refused(tmp_path: Path) -> None:
    name = "obs_encoder.obs_nets.wrist_image.nets.1.temperature"
    path, source, _ = written(tmp_path, **{name: torch.full((1,), 0.5)})
    with pytest.raises(CheckpointError, match=mentions("temperature 1")):
        import_policy(path, source)


def test_weights_without_cameras_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=mentions("x.safetensors cameras")):
        import_policy(tmp_path / "x.safetensors", DiffusionPolicyImageSource())
