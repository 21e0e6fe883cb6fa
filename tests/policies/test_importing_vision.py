"""The vision networks of DPPO and ReinFlow: the reference files hold released networks of both.

ReinFlow's MLP has the same names and layers as DPPO's; the test gives it the same weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_checkpoints import TOLERANCE, arrays_of, shaken, under
from messages import mentions
from released import recorded, weights_of
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.dppo_image import DppoImageSource
from policies.importing.importing import import_policy
from policies.importing.reinflow_image import ReinflowImageSource
from policies.importing.reinflow_shortcut_image import ReinflowShortcutImageSource
from policies.importing.vision import VisionSource
from policies.samplers.ode import Euler
from policies.storage.policy_folder import load_policy, save_policy

SOURCES = {
    "dppo": DppoImageSource,
    "reinflow": ReinflowImageSource,
    "shortcut": ReinflowShortcutImageSource,
}
TUNED = {"dppo": "actor_ft.", "reinflow": "actor_ft.policy."}


class Example:
    """The reference: weights, inputs, output, and statistics that map observations to themselves."""

    def __init__(self) -> None:
        self.arrays = arrays_of("dppo_net_vision_mlp")
        self.weights = {key[2:]: value for key, value in self.arrays.items() if key.startswith("w.")}
        rgb = self.arrays["in.rgb"].unflatten(2, (-1, 3)).permute(2, 0, 1, 4, 5, 3).to(torch.uint8)
        self.cameras = tuple(f"camera{i}" for i in range(len(rgb)))
        self.observation = {"state": self.arrays["in.state"], **dict(zip(self.cameras, rgb, strict=True))}
        self.steps, width = self.arrays["in.state"].shape[1:]
        self.limits = {"obs_min": -np.ones(width), "obs_max": np.ones(width)}
        action_dim = self.arrays["in.x"].shape[2]
        self.limits |= {"action_min": -np.ones(action_dim), "action_max": 3 * np.ones(action_dim)}

    def source(self, kind: str) -> Any:
        height, width = self.observation["camera0"].shape[2:4]
        return SOURCES[kind](cameras=self.cameras, images=(height, width), obs_steps=self.steps)


def written(of: Example, folder: Path, model: dict[str, Tensor]) -> dict[str, Any]:
    torch.save({"epoch": 3, "model": model}, folder / "state_3.pt")
    np.savez(folder / "normalization.npz", **of.limits)
    return {"path": folder / "state_3.pt", "normalization": folder / "normalization.npz"}


@pytest.mark.parametrize("kind", TUNED)
@pytest.mark.parametrize("tuned", [False, True])
def test_a_loaded_import_predicts_what_the_released_network_predicts(
    kind: str, tuned: bool, tmp_path: Path
) -> None:
    of = Example()
    model = under("network.", of.weights)
    if tuned:
        model = under(TUNED[kind], of.weights) | {"critic.Q1.weight": torch.zeros(2, 2)}
        others = shaken(of.weights)
        model |= (
            under("actor_old.", others)
            if kind == "reinflow"
            else under("actor.", others) | under("network.", others)
        )
    policy, conversion = import_policy(**written(of, tmp_path, model), source=of.source(kind))
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    assert isinstance(loaded, DenoisingPolicy)
    with torch.no_grad():
        out = loaded.field(of.arrays["in.x"], of.arrays["in.t"].float(), loaded.encode(of.observation))
    torch.testing.assert_close(out, of.arrays["out0"], **TOLERANCE)
    assert conversion.tensors == len(of.weights) and bool(conversion.skipped) == tuned
    physical = loaded.physical(torch.ones(1, of.arrays["in.x"].shape[2]))
    torch.testing.assert_close(physical, torch.full_like(physical, 3.0))


def test_an_import_can_be_fine_tuned(tmp_path: Path) -> None:
    of = Example()
    policy, _ = import_policy(
        **written(of, tmp_path, under("network.", of.weights)), source=of.source("reinflow")
    )
    assert isinstance(policy, DenoisingPolicy)
    generator = torch.Generator().manual_seed(0)
    cond = policy.encode(of.observation, generator=generator)
    te = policy.sample_te(len(cond), generator=generator)
    policy.matching_loss(cond, of.arrays["in.x"], te).mean().backward()
    assert all(weight.grad is not None for weight in policy.parameters())


def test_what_no_tensor_tells_is_asked_for(tmp_path: Path) -> None:
    of = Example()
    files, source = written(of, tmp_path, under("network.", of.weights)), of.source("dppo")
    with pytest.raises(ConfigError, match=mentions("source.cameras")):
        import_policy(**files, source=replace(source, cameras=()))
    with pytest.raises(ConfigError, match=mentions("normalization=<normalization.npz")):
        import_policy(files["path"], source)
    with pytest.raises(ConfigError, match=mentions(f"source.obs_steps={of.steps + 1}")):
        import_policy(**files, source=replace(source, obs_steps=of.steps + 1))
    with pytest.raises(ConfigError, match=mentions("images height width")):
        replace(source, images=(96,))
    assert issubclass(DppoImageSource, VisionSource)


@pytest.mark.parametrize(
    ("name", "message"), [("mlp_mean.layers.0.bias", "missing"), ("compress1.weight", "source.cameras")]
)
def test_missing_tensors_are_named(name: str, message: str, tmp_path: Path) -> None:
    of = Example()
    name = name if name in of.weights else name.replace("compress1", "compress")
    of.weights.pop(name)
    with pytest.raises((CheckpointError, ConfigError), match=mentions(message)):
        import_policy(**written(of, tmp_path, under("network.", of.weights)), source=of.source("dppo"))


def two_cameras(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a recorded network on two cameras; returns its files and the recorded arrays."""
    facts, arrays = recorded(name)
    of = Example()
    of.limits = {f"{name}_{end}": sign * np.ones(width) for name, width in (("obs", 5), ("action", 3))
                 for end, sign in (("min", -1), ("max", 1))}  # fmt: skip
    return written(of, folder, under("network.", weights_of(facts["shapes"]))), arrays


def seen(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the observation of a recorded network on two cameras."""
    front, wrist = arrays["rgb"].unflatten(2, (2, 3)).permute(2, 0, 1, 4, 5, 3)
    return {"state": arrays["state"], "front": front, "wrist": wrist}


def unet(folder: Path) -> tuple[dict[str, Any], DppoImageSource, dict[str, Tensor]]:
    """Write DPPO's U-Net on two cameras; returns its files, its source and the recorded arrays."""
    files, arrays = two_cameras("dppo_image_unet", folder)
    return files, DppoImageSource(cameras=("front", "wrist"), images=(48, 48), horizon=4), arrays


def test_a_unet_on_images_predicts_what_the_released_one_predicts(tmp_path: Path) -> None:
    files, source, arrays = unet(tmp_path)
    policy, conversion = import_policy(**files, source=source)
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    assert isinstance(loaded, DenoisingPolicy)
    with torch.no_grad():
        out = loaded.field(arrays["x"], arrays["time"].float(), loaded.encode(seen(arrays)))
    torch.testing.assert_close(out, arrays["out"], **TOLERANCE)
    assert conversion.skipped == {} and loaded.chunk.shape == (4, 3)


def test_a_unet_on_images_needs_its_horizon_and_no_encoder_of_the_state(tmp_path: Path) -> None:
    files, source, _ = unet(tmp_path)
    with pytest.raises(ConfigError, match=mentions("source.horizon")):
        import_policy(**files, source=replace(source, horizon=None))
    model = torch.load(files["path"], weights_only=True)["model"]
    torch.save({"model": model | {"network.cond_mlp.layers.0.weight": torch.zeros(2, 2)}}, files["path"])
    with pytest.raises(CapabilityError, match=mentions("cond_mlp")):
        import_policy(**files, source=source)


def shortcut(folder: Path) -> tuple[dict[str, Any], ReinflowShortcutImageSource, dict[str, Tensor]]:
    """Write ReinFlow's shortcut flow on two cameras; returns its files, its source and the arrays."""
    files, arrays = two_cameras("reinflow_image_shortcut", folder)
    return files, ReinflowShortcutImageSource(cameras=("front", "wrist"), images=(48, 48)), arrays


@pytest.mark.parametrize("prefix", ["network.", "actor_ft.policy."])
def test_a_shortcut_flow_on_images_predicts_what_the_released_one_predicts(
    prefix: str, tmp_path: Path
) -> None:
    files, source, arrays = shortcut(tmp_path)
    model = torch.load(files["path"], weights_only=True)["model"]
    model = {name.replace("network.", prefix): value for name, value in model.items()}
    torch.save({"model": model}, files["path"])
    policy, conversion = import_policy(**files, source=source)
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    assert isinstance(loaded, DenoisingPolicy)
    with torch.no_grad():
        cond = loaded.encode(seen(arrays))
        out = loaded.field(arrays["x"], arrays["time"], cond, second_time=arrays["length"])
    torch.testing.assert_close(out, arrays["out"], **TOLERANCE)
    assert conversion.skipped == {} and loaded.chunk.shape == (4, 3)


def test_a_shortcut_flow_on_images_can_be_evaluated_as_released(tmp_path: Path) -> None:
    files, source, arrays = shortcut(tmp_path)
    policy, _ = import_policy(**files, source=source, sampler=Euler(steps=4, clip_state=1.0))
    chunk = policy.decode(policy.encode(seen(arrays)), arrays["x"])
    torch.testing.assert_close(chunk, arrays["chunk"], **TOLERANCE)
    assert chunk.abs().max() == 1 and chunk.abs().min() < 1


def test_each_flow_of_reinflow_on_images_needs_its_source(tmp_path: Path) -> None:
    files, source, _ = shortcut(tmp_path)
    rectified = ReinflowImageSource(cameras=source.cameras, images=source.images)
    with pytest.raises(CapabilityError, match=mentions("source=reinflow_shortcut_image")):
        import_policy(**files, source=rectified)
    with pytest.raises(ConfigError, match=mentions("source.obs_steps=2")):
        import_policy(**files, source=replace(source, obs_steps=2))
    with pytest.raises(ConfigError, match=mentions("max_steps source.steps=4")):
        replace(source, max_steps=4)
    of = Example()
    files = written(of, tmp_path, under("network.", of.weights))
    with pytest.raises(CheckpointError, match=mentions("ShortCutFlowViT")):
        import_policy(**files, source=of.source("shortcut"))
