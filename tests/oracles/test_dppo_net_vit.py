"""A critic behind an image encoder equals DPPO's released vision critic: values and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, assert_gradients, install, official_weights, read, residual_dims
from official_vision import encoder_keys, observation_of, sizes_of, vit_config
from torch import nn

from policies.encoders import ObservationSizes
from policies.heads import CriticConfig
from policies.normalizer import Normalizer


@pytest.mark.golden("dppo_net_vit*.npz")
def test_values_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    weights = official_weights(arrays)
    config, sizes = vit_config(weights), ObservationSizes(**sizes_of(arrays))
    encoder = config.build(sizes)
    head = CriticConfig(**residual_dims(weights, "Q1."))
    net = nn.ModuleDict({"encoder": encoder, "critic": head.build(encoder.cond_dim)})
    keys = {theirs: f"critic.{ours}" for theirs, ours in head.official_keys().items()}
    keys |= encoder_keys(config, weights)
    install(net, keys, weights)
    as_it_is = Normalizer({"state": "identity"}, {"state": sizes.obs_dim})
    value = net["critic"](net["encoder"](observation_of(arrays), as_it_is))
    torch.testing.assert_close(value, arrays["out0"].squeeze(1), **OUTPUT)
    assert_gradients(net, keys, [value], arrays)
