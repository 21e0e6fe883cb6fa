"""The Gaussian actor equals DPPO's released Gaussian MLP: mean, deviation and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, assert_gradients, install, official_weights, read, residual_dims

from policies.networks.heads import GaussianHeadConfig


@pytest.mark.golden("dppo_net_gaussian*.npz")
def test_distribution_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    weights = official_weights(arrays)
    low, high = (weights.pop(f"logvar_{name}") for name in ("min", "max"))
    initial = weights["logvar"].mean().clamp(low, high)
    std = (float(torch.exp(0.5 * log_var)) for log_var in (low, initial, high))
    stated = dict(zip(("min_std", "init_std", "max_std"), std, strict=True))
    config = GaussianHeadConfig(**stated, **residual_dims(weights, "mlp_mean."))
    action_dim = len(weights["logvar"])
    chunk = (arrays["out0"].shape[1] // action_dim, action_dim)
    head = config.build(chunk, arrays["in.state"][0].numel())
    torch.testing.assert_close(head.log_var.detach(), initial.expand(action_dim))
    install(head, config.official_keys(), weights)
    outputs = head(arrays["in.state"].flatten(1))
    for ours, name in zip(outputs, ("out0", "out1"), strict=True):
        torch.testing.assert_close(ours.flatten(1), arrays[name], **OUTPUT)
    assert_gradients(head, config.official_keys(), list(outputs), arrays)
