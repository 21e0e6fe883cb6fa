"""MIP's networks: the reference files hold what its released modules give for weights drawn by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_checkpoints import TOLERANCE, shaken
from messages import mentions
from released import recorded, weights_of
from torch import Tensor

from policies.denoising import DenoisingPolicy
from policies.errors import CapabilityError, CheckpointError, ConfigError
from policies.importing.importing import import_policy
from policies.importing.mip import MipSource
from policies.storage.policy_folder import load_policy, save_policy

LIMITS = {
    "obs_min": -np.ones(5), "obs_max": np.ones(5),
    "action_min": np.array([-1.0, -1.0, 2.0]), "action_max": np.array([1.0, 3.0, 2.0]),
}  # fmt: skip
"""Observations map to themselves; the last action never moved."""

SOURCE = MipSource(horizon=8)
NOISE = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))  # which these policies do not use


def written(name: str, folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a recorded network as its program does; returns the files and the recorded arrays."""
    facts, arrays = recorded(f"mip_{name}")
    whole: dict[str, Any] = {key: weights_of(shapes) for key, shapes in facts["shapes"].items()}
    if name == "mlp":
        whole["flow_map"]["net.frequencies"] = arrays["frequencies"]
    averaged = {f"{key}_ema": weights for key, weights in whole.items()}
    raw = {key: shaken(weights) for key, weights in whole.items()}
    raw["flow_map"] |= {key: value for key, value in whole["flow_map"].items() if "frequencies" in key}
    torch.save(averaged | raw | {"optimizer": {"state": {}}} | changes, folder / "model_best.pt")
    np.savez(folder / "normalization.npz", **LIMITS)
    return {"path": folder / "model_best.pt", "normalization": folder / "normalization.npz"}, arrays


@pytest.mark.parametrize("name", ["mlp", "unet"])
@pytest.mark.parametrize("loss", ["mip", "regression"])
def test_a_loaded_import_does_what_the_released_program_does(name: str, loss: str, tmp_path: Path) -> None:
    files, arrays = written(name, tmp_path)
    policy, conversion = import_policy(**files, source=replace(SOURCE, loss=loss))
    loaded = load_policy(save_policy(policy, tmp_path / "policy", provenance=conversion.facts()))
    assert isinstance(loaded, DenoisingPolicy)
    cond = loaded.encode({"state": arrays["state"]})
    with torch.no_grad():
        out = loaded.field(arrays["x"], arrays["time"], cond)
        chunk = loaded.decode(cond, NOISE)
    torch.testing.assert_close(out, arrays["out"], **TOLERANCE)
    torch.testing.assert_close(chunk, arrays[loss], **TOLERANCE)
    physical = loaded.act({"state": arrays["state"]})
    expected = arrays[loss] * torch.tensor([1.0, 2.0, 0.5]) + torch.tensor([0.0, 1.0, 2.5])
    torch.testing.assert_close(physical, expected[:, 1:], **TOLERANCE)
    assert set(conversion.skipped) == {"the scalar that losses of flow maps read"}


def test_averaged_weights_are_preferred_and_others_can_be_chosen(tmp_path: Path) -> None:
    files, arrays = written("mlp", tmp_path)
    averaged, conversion = import_policy(**files, source=SOURCE)
    raw, other = import_policy(**files, source=SOURCE, entry="flow_map")
    assert (conversion.entry, other.entry) == ("flow_map_ema", "flow_map")
    obs = {"state": arrays["state"]}
    assert not torch.allclose(averaged.act(obs), raw.act(obs))
    with pytest.raises(CheckpointError, match=mentions("entry=optimizer flow_map_ema")):
        import_policy(**files, source=SOURCE, entry="optimizer")


def test_an_import_can_be_trained_on(tmp_path: Path) -> None:
    files, arrays = written("unet", tmp_path)
    policy, _ = import_policy(**files, source=SOURCE)
    assert isinstance(policy, DenoisingPolicy)
    cond = policy.encode({"state": arrays["state"]})
    te = policy.sample_te(len(cond), generator=torch.Generator().manual_seed(0))
    policy.matching_loss(cond, arrays["x"], te).mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in policy.parameters())


@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_a_network_without_an_encoder_reads_observations(name: str, tmp_path: Path) -> None:
    """Its identity encoder: the embedded observations of the reference, given as observations."""
    files, arrays = written(name, tmp_path)
    embed = torch.nn.functional.leaky_relu
    encoder = torch.load(files["path"], weights_only=True)["encoder_ema"]
    h = arrays["state"].flatten(1)
    for layer in ("0.0", "1.0"):
        h = embed(h @ encoder[f"mlp.mlp.{layer}.weight"].t() + encoder[f"mlp.mlp.{layer}.bias"])
    h = h @ encoder["mlp.mlp.2.weight"].t() + encoder["mlp.mlp.2.bias"]
    files, _ = written(name, tmp_path, encoder_ema={})
    limits = {"obs_min": -np.ones(16), "obs_max": np.ones(16)}
    np.savez(files["normalization"], **(LIMITS | limits))
    policy, _ = import_policy(**files, source=SOURCE)
    assert isinstance(policy, DenoisingPolicy)
    chunk = policy.decode(policy.encode({"state": h.view(2, 2, 16)}), NOISE)
    torch.testing.assert_close(chunk, arrays["mip"], **TOLERANCE)


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    for name, horizon in (("unet", None), ("mlp", 9)):
        with pytest.raises(ConfigError, match=mentions(f"source.horizon={horizon}")):
            import_policy(**written(name, tmp_path)[0], source=replace(SOURCE, horizon=horizon))
    files, arrays = written("mlp", tmp_path)
    with pytest.raises(ConfigError, match=mentions("normalization=<npz file")):
        import_policy(files["path"], SOURCE)
    model = torch.load(files["path"], weights_only=True)["flow_map_ema"]
    for change, error, message in (
        ({"net.frequencies": 2 * arrays["frequencies"]}, CapabilityError, "max_freq"),
        ({"net.extra.weight": torch.zeros(2)}, CheckpointError, "extra.weight"),
        ({"net.input_proj.weight": torch.zeros(16, 40)}, CheckpointError, "input_proj.weight 40"),
        ({"net.input_proj.weight": torch.zeros(16, 73)}, CheckpointError, "trunk.inlet.weight"),
    ):
        files, _ = written("mlp", tmp_path, flow_map_ema=model | change)
        with pytest.raises(error, match=mentions(message)):
            import_policy(**files, source=SOURCE)
    for entry, change, message in (
        ("encoder_ema", {"key_model_map.rgb.weight": torch.zeros(2)}, "key_model_map encoder_type=mlp"),
        (
            "encoder_ema",
            {"mlp.mlp.0.weight": torch.zeros(2), "mlp.mlp.0.bias": torch.zeros(2)},
            "mlp.mlp.0.weight 2",
        ),
        (
            "encoder_ema",
            {"mlp.mlp.0.weight": torch.zeros(2, 2), "mlp.mlp.0.bias": torch.zeros(3)},
            "mlp.mlp.0.bias 2",
        ),
        ("flow_map_ema", {"net.mlp.0.weight": torch.zeros(2)}, "MLP ChiUNet"),
    ):
        files, _ = written("mlp", tmp_path, **{entry: change})
        with pytest.raises((CapabilityError, CheckpointError), match=mentions(message)):
            import_policy(**files, source=SOURCE)
    files, _ = written("mlp", tmp_path)
    np.savez(files["normalization"], **(LIMITS | {"obs_min": -np.ones(4), "obs_max": np.ones(4)}))
    with pytest.raises(ConfigError, match=mentions("condition 10 4")):
        import_policy(**files, source=SOURCE)
