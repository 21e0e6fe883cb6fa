"""A critic behind an image encoder equals DPPO's released vision critic: values and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, assert_gradients, install, official_weights, read, residual_dims
from official_vision import encoder_keys, observation_of, sizes_of, vit_config
from torch import Tensor, nn

from policies.encoders import ObservationSizes
from policies.encoders.vit import VitEncoderConfig
from policies.networks.heads import CriticConfig
from policies.normalizer import Normalizer


@pytest.mark.golden("dppo_net_vit*.npz")
def test_values_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    weights = official_weights(arrays)
    expected = arrays["out0"].squeeze(1)
    config = vit_config(weights, expected, lambda config: value_of(build(arrays, config)[0], arrays))
    net, keys = build(arrays, config)
    value = value_of(net, arrays)
    torch.testing.assert_close(value, expected, **OUTPUT)
    assert_gradients(net, keys, [value], arrays)


def build(arrays: dict[str, Tensor], config: VitEncoderConfig) -> tuple[nn.ModuleDict, dict[str, str]]:
    """Return encoder and critic with the released weights, and the released names of their own."""
    weights = official_weights(arrays)
    encoder = config.build(ObservationSizes(**sizes_of(arrays)))
    head = CriticConfig(**residual_dims(weights, "Q1."))
    net = nn.ModuleDict({"encoder": encoder, "critic": head.build(encoder.cond_dim)})
    keys = {theirs: f"critic.{ours}" for theirs, ours in head.official_keys().items()}
    keys |= encoder_keys(config, weights)
    install(net, keys, weights)
    return net, keys


def value_of(net: nn.ModuleDict, arrays: dict[str, Tensor]) -> Tensor:
    obs_dim = ObservationSizes(**sizes_of(arrays)).obs_dim
    as_it_is = Normalizer({"state": "identity"}, {"state": obs_dim})
    return net["critic"](net["encoder"](observation_of(arrays), as_it_is))
