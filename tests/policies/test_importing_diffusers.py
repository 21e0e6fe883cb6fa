"""A UNet1DModel of diffusers and its scheduler: files that diffusers writes, compared with its loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import mentions
from released import weights_of
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, ConfigError
from policies.importing.diffusers import DiffusersSource
from policies.importing.importing import import_policy
from policies.samplers.ddpm import DDIM, DDPM
from policies.samplers.diffusers import Diffusers
from policies.storage.policy_folder import load_policy, save_policy

diffusers = pytest.importorskip("diffusers")

UNET = {
    "in_channels": 3, "out_channels": 3, "block_out_channels": (16, 32, 32), "layers_per_block": 1,
    "down_block_types": ("DownResnetBlock1D",) * 3, "up_block_types": ("UpResnetBlock1D",) * 2,
    "mid_block_type": "MidResTemporalBlock1D", "out_block_type": "OutConv1DBlock", "act_fn": "mish",
    "time_embedding_type": "positional", "use_timestep_embedding": True, "flip_sin_to_cos": False,
    "freq_shift": 1, "norm_num_groups": 8, "sample_size": 65536,
}  # fmt: skip
SOURCE = DiffusersSource(obs_dim=5, horizon=8, steps=4)
SCHEDULERS = {
    "DDPMScheduler": {"variance_type": "fixed_small_log", "clip_sample": False},
    "DDIMScheduler": {"clip_sample": True},
    "DPMSolverMultistepScheduler": {"solver_order": 2, "timestep_spacing": "leading"},
    "UniPCMultistepScheduler": {},
}


def pipeline(folder: Path, scheduler: str, **changes: Any) -> tuple[Path, Any, Any]:
    """Write the folders of a pipeline; returns the path of the weights, the network and the scheduler."""
    network = diffusers.UNet1DModel(**(UNET | changes)).eval()
    network.load_state_dict(weights_of({name: value.shape for name, value in network.state_dict().items()}))
    network.save_pretrained(folder / "unet")
    settings = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample", "num_train_timesteps": 20}
    made = getattr(diffusers, scheduler)(**settings, **SCHEDULERS.get(scheduler, {}))
    made.save_pretrained(folder / "scheduler")
    return folder / "unet" / "diffusion_pytorch_model.safetensors", network, made


def imported(path: Path, folder: Path, source: DiffusersSource = SOURCE) -> DenoisingPolicy:
    policy, conversion = import_policy(path, source, identity=["state", "action"])
    loaded = load_policy(save_policy(policy, folder / "policy", provenance=conversion.facts()))
    assert isinstance(loaded, DenoisingPolicy) and conversion.skipped == {}
    return loaded


@pytest.mark.parametrize("name", ["DDIMScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_an_import_samples_what_the_pipeline_samples(name: str, tmp_path: Path) -> None:
    path, network, scheduler = pipeline(tmp_path, name)
    policy = imported(path, tmp_path)
    noise = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    actions = policy.act(torch.full((2, 1, 5), 7.0), noise=noise)  # of any observation
    scheduler.set_timesteps(4)
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for level in scheduler.timesteps:
        with torch.no_grad():
            out = network(x.movedim(1, 2), level).sample.movedim(1, 2)
        x = scheduler.step(out, level, x).prev_sample
    torch.testing.assert_close(actions, x, rtol=1e-4, atol=2e-5)


def test_a_stochastic_scheduler_is_our_sampler(tmp_path: Path) -> None:
    path, _, _ = pipeline(tmp_path, "DDPMScheduler")
    policy = imported(path, tmp_path)
    assert policy.sampler == DDPM(steps=4, clip_x0=None, noise_clip=None, min_std=0.0, final_std=None)
    assert (policy.process.prediction, policy.process.num_levels) == ("x0", 20)
    for name, kind in (("DDIMScheduler", DDIM), ("UniPCMultistepScheduler", Diffusers)):
        path, _, _ = pipeline(tmp_path / name, name)
        assert isinstance(imported(path, tmp_path / name).sampler, kind)


def test_training_gives_the_observation_a_meaning(tmp_path: Path) -> None:
    path, _, _ = pipeline(tmp_path, "DDPMScheduler")
    policy = imported(path, tmp_path)
    generator = torch.Generator().manual_seed(0)
    obs, action = torch.randn(4, 1, 5, generator=generator), torch.randn(4, 8, 3, generator=generator)
    optimiser = torch.optim.Adam(policy.parameters(), 1e-3)
    policy.matching_loss(
        policy.encode({"state": obs}), action, policy.sample_te(4, generator=generator)
    ).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())
    noise = policy.sample_noise(1, generator=generator)

    def spread() -> Tensor:
        return policy.act(obs[:2], noise=noise.expand(2, *noise.shape[1:])).diff(dim=0).abs().max()

    assert spread() < 1e-5
    optimiser.step()
    assert spread() > 1e-4


def test_statistics_beside_it_are_those_of_dppo(tmp_path: Path) -> None:
    path, _, _ = pipeline(tmp_path, "DDPMScheduler")
    limits = {f"{name}_{end}": value * np.ones(width) for name, width in (("obs", 5), ("action", 3))
              for end, value in (("min", -2.0), ("max", 4.0))}  # fmt: skip
    np.savez(tmp_path / "normalization.npz", **limits)
    policy, _ = import_policy(path, SOURCE, normalization=tmp_path / "normalization.npz")
    torch.testing.assert_close(policy.physical(torch.ones(1, 3)), torch.full((1, 3), 4.0))
    with pytest.raises(ConfigError, match=mentions("state identity")):
        import_policy(path, SOURCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freq_shift": 0}, "freq_shift 1 0"),
        ({"layers_per_block": 2}, "layers_per_block 1 2"),
        ({"in_channels": 4}, "in_channels out_channels"),
    ],
)
def test_other_networks_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, _, _ = pipeline(tmp_path, "DDIMScheduler", **changes)
    with pytest.raises(CapabilityError, match=mentions(message)):
        import_policy(path, SOURCE, identity=["state", "action"])


def test_other_schedulers_and_missing_sizes_are_refused(tmp_path: Path) -> None:
    path, _, _ = pipeline(tmp_path, "DDIMScheduler")
    with pytest.raises(ConfigError, match=mentions("source.obs_dim source.horizon")):
        import_policy(path, DiffusersSource(), identity=["state", "action"])
    place = tmp_path / "scheduler" / "scheduler_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"_class_name": "LCMScheduler"}))
    with pytest.raises(CapabilityError, match=mentions("LCMScheduler DDPMScheduler")):
        import_policy(path, SOURCE, identity=["state", "action"])
