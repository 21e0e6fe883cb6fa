"""The MLP backbone equals DPPO's released diffusion MLP: outputs and every gradient.

The activation is not recorded in the arrays; the names of the files tell it (`relu`, otherwise Mish).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from official_networks import (
    OUTPUT,
    assert_gradients,
    install,
    official_weights,
    plain_dims,
    read,
    residual_dims,
)
from torch import Tensor

from policies.backbones.mlp import MlpBackbone, MlpConfig
from policies.protocols import Cond


def build(path: Path, arrays: dict[str, Tensor]) -> MlpBackbone:
    weights = official_weights(arrays)
    is_residual = "mlp_mean.layers.0.weight" in weights
    trunk = (
        residual_dims(weights, "mlp_mean.")
        if is_residual
        else {
            "residual": False,
            "hidden_dims": plain_dims(weights, "mlp_mean.")[:-1],
            "layer_norm": "mlp_mean.moduleList.0.norm_1.weight" in weights,
        }
    )
    config = MlpConfig(
        activation="relu" if "relu" in path.stem else "mish",
        time_dim=weights["time_embedding.1.weight"].shape[1],
        cond_dims=plain_dims(weights, "cond_mlp."),
        **trunk,
    )
    net = config.build(tuple(arrays["in.x"].shape[1:]), arrays["in.state"][0].numel())
    install(net, config.official_keys(), weights)
    return net


@pytest.mark.golden("dppo_net_mlp*.npz")
def test_forward_and_gradients_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    net, cond = build(golden_path, arrays), Cond(arrays["in.state"].flatten(1))
    out = net(arrays["in.x"], arrays["in.t"].float(), cond)
    torch.testing.assert_close(out, arrays["out0"], **OUTPUT)
    assert_gradients(net, net.config.official_keys(), [out], arrays)


@pytest.mark.golden("dppo_net_mlp*.npz")
def test_shared_rows_equal_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    net, cond = build(golden_path, arrays), Cond(arrays["in.state"].flatten(1))
    order = torch.arange(len(cond))
    out = net(arrays["in.x"], arrays["in.t"].float(), cond, cond_row=order, time_row=order)
    torch.testing.assert_close(out, arrays["out0"], **OUTPUT)
    assert_gradients(net, net.config.official_keys(), [out], arrays)


@pytest.mark.golden("dppo_net_mlp*.npz")
@pytest.mark.parametrize("grad", [False, True])
def test_bound_field_equals_the_released_network(golden_path: Path, grad: bool) -> None:
    arrays = read(golden_path)
    net, cond = build(golden_path, arrays), Cond(arrays["in.state"].flatten(1))
    with torch.set_grad_enabled(grad):
        bound = net.bind(cond, arrays["in.t"].float())
        rows = torch.stack([bound(k, arrays["in.x"])[k] for k in range(len(cond))])
    torch.testing.assert_close(rows, arrays["out0"], **OUTPUT)
    if grad:
        assert_gradients(net, net.config.official_keys(), [rows], arrays)
