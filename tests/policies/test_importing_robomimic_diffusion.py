"""robomimic's diffusion policy: imported whole and equal; recorded with robomimic 0.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import mentions
from pairwise import each_value
from released import recorded, weights_of
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError
from policies.importing.importing import import_policy
from policies.importing.robomimic import RobomimicSource
from policies.policy import Policy
from policies.samplers.ddpm import DDIM
from policies.storage.policy_folder import load_policy, save_policy

KINDS = ("states", "images")


def written(
    kind: str, folder: Path, *, averaged: bool = True, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Write a checkpoint as the program does; `changes` are settings of its configuration by dotted name."""
    facts, arrays = recorded(f"robomimic_diffusion_{kind}")
    whole, shapes = facts["whole"], facts["shapes"]
    constant = ("pos_x", "pos_y", "temperature")
    weights = weights_of({name: shape for name, shape in shapes.items() if not name.endswith(constant)})
    weights |= {name: torch.ones(shape) for name, shape in shapes.items() if name.endswith(constant)}
    others = {name: value + 0.25 for name, value in weights.items()}
    model = {"nets": others, "ema": weights} if averaged else {"nets": weights, "ema": None}
    if changes and kind == "images":
        model = {"nets": {"weight": torch.ones(1)}, "ema": None}  # refused before they are read
    for name, value in changes.items():
        *parents, last = name.split(".")
        node = whole["config"]
        for parent in parents:
            node = node[parent]
        node[last] = value
    path = folder / "model_epoch_3.pth"
    torch.save(whole | {"config": json.dumps(whole["config"]), "model": model}, path)
    return path, arrays


def observation(arrays: dict[str, Tensor], keys: tuple[str, ...]) -> dict[str, Tensor]:
    obs = {"state": torch.cat([arrays[f"in.{key}"] for key in keys], dim=-1)}
    cameras = [name for name in arrays if name.endswith("_image")]
    return obs | {
        name.removeprefix("in.").removesuffix("_image"): arrays[name].movedim(2, -1) for name in cameras
    }


@pytest.mark.parametrize(
    ("kind", "averaged", "keys"),
    each_value(KINDS, [True, False], [("object", "robot0_eef_pos"), ("robot0_eef_pos", "object")]),
)
def test_an_import_acts_as_the_program_and_can_be_fine_tuned(
    kind: str, averaged: bool, keys: tuple[str, ...], tmp_path: Path
) -> None:
    path, arrays = written(kind, tmp_path, averaged=averaged)
    policy, conversion = import_policy(path, RobomimicSource(keys=keys))
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    actions = loaded.act(observation(arrays, keys), noise=arrays["noise"])
    torch.testing.assert_close(actions, arrays["out"], rtol=1e-4, atol=2e-5)
    assert conversion.entry == ("model/ema" if averaged else "model/nets")
    assert conversion.normalizer["action"] == "checkpoint"
    assert_can_be_fine_tuned(policy, arrays, keys)


def assert_can_be_fine_tuned(policy: Policy, arrays: dict[str, Tensor], keys: tuple[str, ...]) -> None:
    assert isinstance(policy, DenoisingPolicy) and isinstance(policy.sampler, DDIM)
    generator = torch.Generator().manual_seed(0)
    cond = policy.encode(observation(arrays, keys), generator=generator)
    policy.matching_loss(cond, arrays["noise"], policy.sample_te(2, generator=generator)).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


def test_the_raw_weights_can_be_chosen(tmp_path: Path) -> None:
    path, _ = written("states", tmp_path)
    _, conversion = import_policy(path, RobomimicSource(), entry="nets")
    assert conversion.entry == "model/nets"
    with pytest.raises(CheckpointError, match=mentions("entry=average ema nets")):
        import_policy(path, RobomimicSource(), entry="average")


CAMERA = "observation.encoder.rgb."


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "images",
            {f"{CAMERA}core_kwargs.backbone_class": "ResNet50Conv"},
            "backbone_class ResNet18Conv ResNet50Conv",
        ),
        ("images", {f"{CAMERA}obs_randomizer_class": "ColorRandomizer"}, "CropRandomizer ColorRandomizer"),
        ("images", {"observation.modalities.obs.depth": ["depth"]}, "diffusion depth"),
        ("states", {"algo.ddim.steps_offset": 1}, "steps_offset 0 1"),
        ("states", {"algo.ddim.beta_schedule": "sigmoid"}, "beta_schedule sigmoid"),
        ("states", {"train.action_config": {"actions": {"format": "rot_6d"}}}, "actions rot_6d"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = written(kind, tmp_path, averaged=False, **changes)
    with pytest.raises(CapabilityError, match=mentions(message)):
        import_policy(path, RobomimicSource())


def test_images_that_our_encoder_would_see_otherwise_are_refused(tmp_path: Path) -> None:
    path, _ = written("images", tmp_path)
    whole = torch.load(path, weights_only=True)
    shapes = whole["shape_metadata"]["all_shapes"]
    widths = {"object": 4, "robot0_eef_pos": 3, "agentview_image": 3}
    statistics = {key: {"mean": [0.5] * width, "std": [0.1] * width} for key, width in widths.items()}
    torch.save(whole | {"obs_normalization_stats": statistics}, path)
    with pytest.raises(CapabilityError, match=mentions("statistics pixels agentview_image")):
        import_policy(path, RobomimicSource())
    larger = whole["shape_metadata"] | {"all_shapes": shapes | {"agentview_image": [3, 56, 56]}}
    torch.save(whole | {"shape_metadata": larger}, path)
    with pytest.raises(CapabilityError, match=mentions("crop 40 56 one fraction")):
        import_policy(path, RobomimicSource())
