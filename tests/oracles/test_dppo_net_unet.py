"""The U-Net backbone equals DPPO's released `Unet1D`: outputs and every gradient.

The activation is not recorded in the arrays; the names of the files tell it (`relu`, otherwise Mish).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from official_networks import OUTPUT, install, official_weights, read
from official_unets import assert_gradient, nearest, shape_of
from pairwise import repeated
from torch import Tensor

from policies.backbones.unet1d import Unet1dBackbone, Unet1dConfig
from policies.protocols import Cond

EPS = (1e-5, 1e-4)
"""What the released configurations add to the variance of a group."""


def inputs(arrays: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Cond]:
    return arrays["in.x"].to(dtype), arrays["in.t"].to(dtype), Cond(arrays["in.state"].flatten(1).to(dtype))


def build(path: Path, arrays: dict[str, Tensor]) -> Unet1dBackbone:
    weights = official_weights(arrays)
    film_layers = 3 if "mid_modules.0.cond_encoder.4.weight" in weights else 1
    encoder = sum(name.startswith("cond_mlp.") and name.endswith(".weight") for name in weights)
    out = weights.get(f"cond_mlp.layers.{encoder // 2}.weight")
    shape = shape_of(weights, "time_mlp", f"cond_encoder.{4 if film_layers == 3 else 1}") | {
        "film_layers": film_layers,
        "cond_dims": () if out is None else (*[out.shape[1]] * (encoder - 1), out.shape[0]),
        "activation": "relu" if "relu" in path.stem else "mish",
    }
    x, time, cond = inputs(arrays, torch.float32)

    def candidate(groups: int, eps: float) -> Unet1dBackbone:
        config = Unet1dConfig(groups=groups, norm_eps=eps, **shape)
        net = config.build((x.shape[1], x.shape[2]), cond.vec.shape[1])
        install(net, keys_of(net), weights)
        return net

    if "final_conv.0.block.2.weight" not in weights:
        return candidate(0, EPS[0])
    return nearest(candidate, shape["widths"], EPS, lambda net: net(x, time, cond) - arrays["out0"])


def keys_of(net: Unet1dBackbone) -> dict[str, str]:
    return net.config.official_keys("dppo", action_dim=net.chunk_shape[1])


Evaluate = Callable[[Unet1dBackbone, Tensor, Tensor, Cond], Tensor]


def each_row(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    return net(x, time, cond)


def shared_rows(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    rows = torch.arange(len(x))
    return net(x, time, cond, cond_row=rows, time_row=rows)


def bound(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    field = net.bind(cond, time)
    return torch.stack([field(k, x)[k] for k in range(len(x))])


@pytest.mark.golden("dppo_net_unet*.npz")
@pytest.mark.parametrize("evaluate", repeated([each_row, shared_rows, bound]))
def test_outputs_and_gradients_equal_the_released_network(golden_path: Path, evaluate: Evaluate) -> None:
    arrays = read(golden_path)
    released = build(golden_path, arrays)
    keys = keys_of(released)

    def outputs_and_gradients(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        net = copy.deepcopy(released).to(dtype)
        out = evaluate(net, *inputs(arrays, dtype))
        weight = torch.cos(torch.arange(out.numel(), dtype=dtype))
        named = dict(net.named_parameters())
        found = torch.autograd.grad((out.flatten() * weight).sum(), list(named.values()))
        return out, dict(zip(named, found, strict=True))

    out, single = outputs_and_gradients(torch.float32)
    _, double = outputs_and_gradients(torch.float64)
    torch.testing.assert_close(out, arrays["out0"], **OUTPUT)
    recorded = {name[2:]: value for name, value in arrays.items() if name.startswith("g.")}
    assert set(recorded) == set(keys)
    for name, gradient in recorded.items():
        assert_gradient(name, single[keys[name]], double[keys[name]], gradient, **OUTPUT)


@pytest.mark.golden("dppo_net_unet*.npz")
def test_acting_without_gradients_equals_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    net, (x, time, cond) = build(golden_path, arrays), inputs(arrays, torch.float32)
    with torch.no_grad():
        for out in (net(x, time, cond), bound(net, x, time, cond)):
            torch.testing.assert_close(out, arrays["out0"], **OUTPUT)
