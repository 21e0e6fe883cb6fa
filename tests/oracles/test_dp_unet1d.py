"""The U-Net backbone equals Diffusion Policy's released `ConditionalUnet1D`: outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from official_networks import install, read
from official_unets import assert_gradient, nearest, shape_of
from pairwise import repeated
from torch import Tensor

from policies.backbones.unet1d import Unet1dBackbone, Unet1dConfig
from policies.protocols import Cond

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
"""Tolerance of the reference numbers for networks."""

ONE_TIME = 42.0
"""The time of `y_scalar_t`."""


def inputs(arrays: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Cond]:
    cond = arrays.get("global_cond", torch.zeros(len(arrays["x"]), 0))
    return arrays["x"].to(dtype).clone(), arrays["t"].to(dtype), Cond(cond.to(dtype))


def build(arrays: dict[str, Tensor]) -> Unet1dBackbone:
    weights = {name[2:]: value for name, value in arrays.items() if name.startswith("w/")}
    shape = shape_of(weights, "diffusion_step_encoder", "cond_encoder.1")
    x, time, cond = inputs(arrays, torch.float32)
    action_dim = x.shape[2]

    def candidate(groups: int, eps: float) -> Unet1dBackbone:
        config = Unet1dConfig(groups=groups, norm_eps=eps, final_groups=8, **shape)
        net = config.build((x.shape[1], action_dim), cond.vec.shape[1])
        install(net, config.official_keys("diffusion_policy", action_dim=action_dim), weights)
        return net

    return nearest(candidate, shape["widths"], (1e-5,), lambda net: net(x, time, cond) - arrays["y"])


Evaluate = Callable[[Unet1dBackbone, Tensor, Tensor, Cond], Tensor]


def each_row(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    return net(x, time, cond)


def shared_rows(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    rows = torch.arange(len(x))
    return net(x, time, cond, cond_row=rows, time_row=rows)


def each_action(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    return net(x, time.unsqueeze(1).expand(x.shape[:2]), cond)


def bound(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    field = net.bind(cond, time)
    return torch.stack([field(k, x)[k] for k in range(len(x))])


def bound_when_frozen(net: Unet1dBackbone, x: Tensor, time: Tensor, cond: Cond) -> Tensor:
    return bound(net.requires_grad_(False), x, time, cond)


@pytest.mark.golden("dp_unet1d*.npz")
@pytest.mark.parametrize("evaluate", repeated([each_row, shared_rows, each_action, bound, bound_when_frozen]))
def test_outputs_and_gradients_equal_the_released_network(golden_path: Path, evaluate: Evaluate) -> None:
    arrays = read(golden_path)
    net = build(arrays)

    def outputs_and_gradient(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, time, cond = inputs(arrays, dtype)
        out = evaluate(copy.deepcopy(net).to(dtype), x.requires_grad_(), time, cond)
        return out, torch.autograd.grad((out * arrays["cotangent"]).sum(), x)[0]

    out, single = outputs_and_gradient(torch.float32)
    _, double = outputs_and_gradient(torch.float64)
    torch.testing.assert_close(out, arrays["y"], **TOLERANCE)
    assert_gradient("x", single, double, arrays["grad_x"], **TOLERANCE)


@pytest.mark.golden("dp_unet1d*.npz")
def test_one_time_for_all_rows_equals_the_released_network(golden_path: Path) -> None:
    arrays = read(golden_path)
    net, (x, _, cond) = build(arrays), inputs(arrays, torch.float32)
    one, rows = torch.tensor([ONE_TIME]), torch.zeros(len(x), dtype=torch.long)
    with torch.no_grad():
        outs = (net(x, one, cond, time_row=rows), net.bind(cond, one)(0, x))
    for out in outs:
        torch.testing.assert_close(out, arrays["y_scalar_t"], **TOLERANCE)
