"""Ensembles of values: all ways to evaluate them are the networks one by one, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import mentions
from torch import Tensor

from policies.errors import ConfigError
from policies.networks import native
from policies.networks.critics import (
    AGGREGATES,
    Ensemble,
    EnsembleConfig,
    Members,
    aggregate,
    aggregate_of,
    aggregate_with_slopes,
    polyak,
)

COND, ACTION = 5, 3


@pytest.fixture(params=["in C", "plain"], autouse=True)
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test with the program in C, where there is a compiler, and without."""
    if request.param == "plain":
        monkeypatch.setattr(native, "serves", lambda x: False)


def ensemble(members: int = 3, width: int = 32, **config: Any) -> Ensemble:
    torch.manual_seed(0)
    net = EnsembleConfig(members, (width, width), **config).build(COND, ACTION)
    with torch.no_grad():
        for part in [*net.scale, *net.shift]:  # away from 1 and 0, which would hide a mistake
            part.add_(0.3 * torch.randn_like(part))
    return net


def one_by_one(net: Ensemble, cond: Tensor, action: Tensor) -> Tensor:
    """Return values (E, B) by plain layers."""
    found, act = [], torch.tanh if net.config.activation == "tanh" else F.relu
    for e in range(net.members):
        h = torch.cat([cond, action], dim=1)
        layers = net.layers_of(e)
        for layer in layers[:-1]:
            h = F.linear(h, layer["weight"], layer["bias"])
            if net.config.norm_after:
                h = act(h)
            if "scale" in layer:
                h = F.layer_norm(h, h.shape[-1:], layer["scale"], layer["shift"], net.config.norm_eps)
            if not net.config.norm_after:
                h = act(h)
        found.append(F.linear(h, layers[-1]["weight"], layers[-1]["bias"])[:, 0])
    return torch.stack(found)


AFTER = {"layer_norm": True, "norm_after": True, "norm_eps": 0.1}


@pytest.mark.parametrize("rows", [7, 2048])
@pytest.mark.parametrize(
    "config",
    [{}, {"layer_norm": True}, AFTER, {"activation": "tanh"}, {"activation": "tanh", "layer_norm": True}],
    ids=["plain", "normalised before", "normalised after", "tanh", "tanh, normalised before"],
)
def test_small_and_large_batches_are_the_networks_one_by_one(rows: int, config: dict[str, Any]) -> None:
    """Few rows go through one batched product per layer, many through plain ones."""
    net, generator = ensemble(**config), torch.Generator().manual_seed(1)
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


@pytest.mark.parametrize("members", [1, 2, 5])
def test_members_are_loaded_in_any_order(members: int) -> None:
    net, twin = ensemble(members, layer_norm=True), ensemble(members, layer_norm=True)
    cond, action = torch.randn(7, COND), torch.randn(7, ACTION)
    twin.load_members([net.layers_of(e) for e in reversed(range(members))])
    torch.testing.assert_close(twin(cond, action).flip(0), net(cond, action))
    torch.testing.assert_close(net(cond, action), one_by_one(net, cond, action), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [7, 2048])
def test_frozen_weights_get_no_gradient_and_inputs_the_same(rows: int) -> None:
    net, cond = ensemble(layer_norm=True), torch.randn(rows, COND)
    action = torch.randn(rows, ACTION, requires_grad=True)
    (free,) = torch.autograd.grad(net(cond, action).sum(), action)
    net(cond, action, frozen=True).sum().backward()
    torch.testing.assert_close(action.grad, free)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("rows", [7, 2048])
@pytest.mark.parametrize(
    "config", [{"layer_norm": True}, {"cosines": 4, "layer_norm": True}, {"bins": 5}], ids=str
)
@pytest.mark.parametrize("members", [2, torch.tensor([2, 0])], ids=["the first", "chosen"])
def test_some_members_are_those_of_all(members: Members, config: dict[str, Any], rows: int) -> None:
    net, cond = ensemble(**config), torch.randn(rows, COND)
    action = torch.randn(rows, ACTION, requires_grad=True)
    few, all_ = net(cond, action, members=members, frozen=True), net(cond, action, frozen=True)
    expected = all_[:2] if isinstance(members, int) else all_[members]
    torch.testing.assert_close(few, expected, rtol=1e-5, atol=1e-6)
    of_few, of_all = (torch.autograd.grad(found.sum(), action)[0] for found in (few, expected))
    torch.testing.assert_close(of_few, of_all, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", AGGREGATES)
def test_an_aggregate_asks_for_the_members_that_count(how: str) -> None:
    net, subset = ensemble(4), torch.tensor([3, 1])
    cond, action = torch.randn(7, COND), torch.randn(7, ACTION)
    options: dict[str, Any] = {"subset": subset, "pessimism": 0.7}
    expected = aggregate(net(cond, action), how, **options)
    asked: list[Members] = []

    def evaluate(members: Members = None) -> Tensor:
        asked.append(members)
        return net(cond, action, members=members)

    torch.testing.assert_close(aggregate_of(evaluate, how, **options), expected)
    assert asked == [subset if how == "subset_min" else None]


def test_weights_begin_as_those_of_pytorch_unless_told_otherwise() -> None:
    """What is told changes neither names nor shapes, nor the draws of other layers."""
    plain, told = ensemble(), ensemble(hidden_bias=0.1, last_bound=3e-3)
    assert {name: part.shape for name, part in plain.state_dict().items()} == {
        name: part.shape for name, part in told.state_dict().items()
    }
    for ours, other in zip(plain.weight[:-1], told.weight[:-1], strict=True):
        assert torch.equal(ours, other)
    for bias, width in zip(plain.bias, (COND + ACTION, 32, 32), strict=True):
        assert 0.5 * width**-0.5 < float(bias.detach().abs().max()) <= width**-0.5
    for bias in told.bias[:-1]:
        assert bool((bias == 0.1).all())
    for part in (told.weight[-1], told.bias[-1]):
        value = part.detach().flatten()
        assert 1e-4 < float(value.abs().max()) <= 3e-3 and len(value.unique()) == len(value)


def test_what_comes_after_a_norm_needs_one() -> None:
    with pytest.raises(ConfigError, match=mentions("critic.norm_after critic.layer_norm")):
        EnsembleConfig(norm_after=True)


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("members", [1, 2, 5])
def test_slopes_of_an_aggregate_are_those_of_autograd(how: str, members: int) -> None:
    values = torch.randn(members, 3, 7, generator=torch.Generator().manual_seed(0))
    values[:, :, 0] = 0.5  # members agree
    options: dict[str, Any] = {"subset": torch.arange(members)[:3], "pessimism": 0.7}
    leaf = values.clone().requires_grad_()
    expected = aggregate(leaf, how, **options)
    value, slopes = aggregate_with_slopes(values, how, **options)
    assert not value.requires_grad and torch.equal(value, expected.detach())
    (of_leaf,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(slopes, of_leaf)


def test_a_target_goes_a_share_of_the_way() -> None:
    late, online = ensemble(), ensemble()
    with torch.no_grad():
        for part in online.parameters():
            part.add_(1.0)
    before = [part.clone() for part in late.parameters()]
    polyak(late, online, 0.25)
    for part, old in zip(late.parameters(), before, strict=True):
        torch.testing.assert_close(part.detach(), old + 0.25)
