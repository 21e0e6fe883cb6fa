"""Ensembles of values: both ways to evaluate them are the networks one by one, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from policies.ensembles import Ensemble, EnsembleConfig, polyak

COND, ACTION = 5, 3


def ensemble(members: int = 3, width: int = 32, **config: bool) -> Ensemble:
    torch.manual_seed(0)
    net = EnsembleConfig(members, (width, width), **config).build(COND, ACTION)
    with torch.no_grad():
        for part in [*net.scale, *net.shift]:  # away from 1 and 0, which would hide a mistake
            part.add_(0.3 * torch.randn_like(part))
    return net


def one_by_one(net: Ensemble, cond: Tensor, action: Tensor) -> Tensor:
    """Return values (E, B) by plain layers."""
    found = []
    for e in range(net.members):
        h = torch.cat([cond, action], dim=1)
        layers = net.layers_of(e)
        for layer in layers[:-1]:
            h = F.linear(h, layer["weight"], layer["bias"])
            if "scale" in layer:
                h = F.layer_norm(h, h.shape[-1:], layer["scale"], layer["shift"])
            h = F.relu(h)
        found.append(F.linear(h, layers[-1]["weight"], layers[-1]["bias"])[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("rows", [7, 2048])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_small_and_large_batches_are_the_networks_one_by_one(rows: int, layer_norm: bool) -> None:
    """Few rows go through one batched product per layer, many through plain ones."""
    net, generator = ensemble(layer_norm=layer_norm), torch.Generator().manual_seed(1)
    cond = torch.randn(rows, COND, generator=generator)
    action = torch.randn(rows, ACTION, generator=generator, requires_grad=True)
    assert net._large(cond) == (rows > 1000)
    weights = [action, *net.parameters()]
    found, expected = net(cond, action), one_by_one(net, cond, action)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().mean(), weights),
        torch.autograd.grad(expected.square().mean(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [7, 2048])
def test_frozen_weights_get_no_gradient_and_inputs_the_same(rows: int) -> None:
    net, cond = ensemble(layer_norm=True), torch.randn(rows, COND)
    action = torch.randn(rows, ACTION, requires_grad=True)
    (free,) = torch.autograd.grad(net(cond, action).sum(), action)
    net(cond, action, frozen=True).sum().backward()
    torch.testing.assert_close(action.grad, free)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("rows", [7, 2048])
def test_the_first_members_are_those_of_all(rows: int) -> None:
    net, cond, action = ensemble(), torch.randn(rows, COND), torch.randn(rows, ACTION)
    few = net(cond, action, members=2)
    torch.testing.assert_close(few, net(cond, action)[:2], rtol=1e-5, atol=1e-6)


def test_a_target_goes_a_share_of_the_way() -> None:
    late, online = ensemble(), ensemble()
    with torch.no_grad():
        for part in online.parameters():
            part.add_(1.0)
    before = [part.clone() for part in late.parameters()]
    polyak(late, online, 0.25)
    for part, old in zip(late.parameters(), before, strict=True):
        torch.testing.assert_close(part.detach(), old + 0.25)
