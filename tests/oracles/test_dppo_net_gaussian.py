"""The Gaussian actor equals DPPO's released Gaussian MLP: mean, deviation and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, assert_gradients, install, official_weights, read, residual_dims

from policies.heads import GaussianHeadConfig


@pytest.mark.golden("dppo_net_gaussian*.npz")
def test_distribution_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    weights = official_weights(arrays)
    limits = {name: float(torch.exp(0.5 * weights.pop(f"logvar_{name}"))) for name in ("min", "max")}
    config = GaussianHeadConfig(
        min_std=limits["min"], max_std=limits["max"], **residual_dims(weights, "mlp_mean.")
    )
    action_dim = len(weights["logvar"])
    chunk = (arrays["out0"].shape[1] // action_dim, action_dim)
    head = config.build(chunk, arrays["in.state"][0].numel())
    torch.testing.assert_close(head.log_var.detach(), weights["logvar"])  # the official initial deviation
    install(head, config.official_keys(), weights)
    outputs = head(arrays["in.state"].flatten(1))
    for ours, name in zip(outputs, ("out0", "out1"), strict=True):
        torch.testing.assert_close(ours.flatten(1), arrays[name], **OUTPUT)
    assert_gradients(head, config.official_keys(), list(outputs), arrays)
