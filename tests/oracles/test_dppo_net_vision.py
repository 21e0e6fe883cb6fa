"""A policy with images equals DPPO's released vision network: outputs and every gradient.

The activation is not recorded in the arrays; it is the one that reproduces them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, assert_gradients, install, official_weights, read, residual_dims
from official_vision import encoder_keys, observation_of, sizes_of, vit_config
from torch import Tensor

from policies.backbones.mlp import MlpConfig
from policies.build import build_policy
from policies.encoders.vit import VitEncoderConfig
from policies.policy import Policy, PolicyConfig

ACTIVATION = "mish"


def released(arrays: dict[str, Tensor]) -> tuple[Policy, dict[str, str]]:
    """Return a policy with the released weights, and the released names of its own."""
    weights = official_weights(arrays)
    return build(
        arrays, vit_config(weights, arrays["out0"], lambda config: output(build(arrays, config)[0], arrays))
    )


def output(policy: Policy, arrays: dict[str, Tensor]) -> Tensor:
    cond = policy.encode(observation_of(arrays))
    return policy.field(arrays["in.x"], arrays["in.t"].float(), cond)


def build(arrays: dict[str, Tensor], encoder: VitEncoderConfig) -> tuple[Policy, dict[str, str]]:
    weights = official_weights(arrays)
    time_dim = weights["time_embedding.1.weight"].shape[1]
    backbone = MlpConfig(activation=ACTIVATION, time_dim=time_dim, **residual_dims(weights, "mlp_mean."))
    horizon, action_dim = arrays["in.x"].shape[1:]
    sizes = sizes_of(arrays)
    config = PolicyConfig(
        encoder=encoder,
        backbone=backbone,
        obs_steps=sizes.pop("obs_steps"),
        horizon=horizon,
        act_steps=horizon,
        observation_clip=None,  # the arrays are normalised: statistics stay at identity
    )
    policy = build_policy(config, action_dim=action_dim, **sizes)
    keys = {theirs: f"field.{ours}" for theirs, ours in backbone.official_keys().items()}
    keys |= encoder_keys(encoder, weights)
    normalizer = {
        name: value for name, value in policy.state_dict().items() if name.startswith("normalizer.")
    }
    install(policy, keys | {name: name for name in normalizer}, weights | normalizer)
    return policy, keys


@pytest.mark.golden("dppo_net_vision*.npz")
def test_forward_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy, keys = released(arrays)
    out = output(policy, arrays)
    torch.testing.assert_close(out, arrays["out0"], **OUTPUT)
    assert_gradients(policy, keys, [out], arrays)


@pytest.mark.golden("dppo_net_vision*.npz")
def test_one_encoding_serves_all_steps_of_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    policy, _ = released(arrays)
    with torch.no_grad():
        cond = policy.encode(observation_of(arrays))
        bound = policy.field.bind(cond, arrays["in.t"].float())
        rows = torch.stack([bound(k, arrays["in.x"])[k] for k in range(len(cond))])
    torch.testing.assert_close(rows, arrays["out0"], **OUTPUT)
