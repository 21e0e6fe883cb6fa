"""The critic equals DPPO's released state critic: values and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, assert_gradients, install, official_weights, read, residual_dims

from policies.networks.heads import CriticConfig


@pytest.mark.golden("dppo_net_critic*.npz")
def test_values_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    weights = official_weights(arrays)
    config = CriticConfig(**residual_dims(weights, "Q1."))
    critic = config.build(arrays["in.state"][0].numel())
    install(critic, config.official_keys(), weights)
    value = critic(arrays["in.state"])
    torch.testing.assert_close(value, arrays["out0"].squeeze(1), **OUTPUT)
    assert_gradients(critic, config.official_keys(), [value], arrays)
    with torch.no_grad():
        torch.testing.assert_close(critic(arrays["in.state"]), value, **OUTPUT)
