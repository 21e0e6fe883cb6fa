"""Laws of transformer backbones: ways of attending, derivatives of derivatives, dropout."""

from __future__ import annotations

import pytest
import torch
from small_backbones import TRANSFORMERS, assert_same, build, gradients, inputs
from torch import Tensor

from policies.networks.attention import set_attention

QUIET = "ignore:.*torch.jit.script:DeprecationWarning"

every_network = pytest.mark.parametrize("name", TRANSFORMERS)
one_of_each = pytest.mark.parametrize("name", ["dit-tokens", "dp", "dp-blocks-in-memory", "gpt"])


# -- second order -----------------------------------------------------------------------------------------


@every_network
def test_both_ways_of_attending_give_the_same_numbers_and_gradients(name: str) -> None:
    net = build(name)
    x, time, cond = inputs(net, 5)
    x.requires_grad_(), cond.vec.requires_grad_()
    results = []
    for how in ("auto", "math"):
        set_attention(net, how)
        out = net(x, time, cond)
        results.append((out, gradients(out, x, cond.vec, *net.parameters())))
    (fused, of_fused), (explicit, of_explicit) = results
    torch.testing.assert_close(fused, explicit, rtol=1e-5, atol=1e-5)
    assert_same(of_fused, of_explicit, 1e-5)


@pytest.mark.filterwarnings(QUIET)
@every_network
def test_forward_mode_derivatives_equal_finite_differences(name: str) -> None:
    net = build(name, second_time=True).double()
    set_attention(net, "math")
    x, time, cond = inputs(net, 3)
    generator = torch.Generator().manual_seed(7)
    tangents = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in (x, time, time)]

    def evaluate(x: Tensor, time: Tensor, second: Tensor) -> Tensor:
        return net(x, time, cond, second_time=second)

    point, step = (x, time, time + 0.5), 1e-6
    out, derivative = torch.func.jvp(evaluate, point, tuple(tangents))
    ahead, behind = (
        evaluate(*(p + sign * step * t for p, t in zip(point, tangents, strict=True))) for sign in (1, -1)
    )
    torch.testing.assert_close(out, evaluate(*point))
    torch.testing.assert_close(derivative, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings(QUIET)
@one_of_each
def test_a_forward_mode_derivative_can_be_trained_on(name: str) -> None:
    """The gradient of a jvp equals that of the same number by reverse mode twice."""
    net = build(name).double()
    set_attention(net, "math")
    x, time, cond = inputs(net, 3)
    tangent, weights = torch.cos(x), list(net.parameters())
    _, forward = torch.func.jvp(lambda x: net(x, time, cond), (x,), (tangent,))
    x = x.clone().requires_grad_()
    cotangent = torch.zeros_like(x, requires_grad=True)
    (pulled,) = torch.autograd.grad(net(x, time, cond), x, cotangent, create_graph=True)
    (twice,) = torch.autograd.grad(pulled, cotangent, tangent, create_graph=True)
    torch.testing.assert_close(forward, twice, rtol=1e-10, atol=1e-10)
    assert_same(gradients(forward, *weights), gradients(twice, *weights), 1e-9)


@one_of_each
def test_a_gradient_with_respect_to_the_state_can_be_trained_on(name: str) -> None:
    net = build(name).double()
    set_attention(net, "math")
    x, time, cond = inputs(net, 2)
    x.requires_grad_()

    def slope(x: Tensor) -> Tensor:
        energy = (net(x, time, cond) * x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    (second,) = torch.autograd.grad(slope(x).square().sum(), net.inlet.weight)
    step, direction = 1e-6, torch.cos(torch.arange(second.numel()).double()).view_as(second)
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            net.inlet.weight.add_(sign * step * direction)
        sides.append(float(slope(x).detach().square().sum()))
        with torch.no_grad():
            net.inlet.weight.sub_(sign * step * direction)
    expected = (sides[0] - sides[1]) / (2 * step)
    assert float((second * direction).sum()) == pytest.approx(expected, rel=1e-5)


# -- what is remembered -----------------------------------------------------------------------------------


# -- the interface ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dit-tokens", "dp", "dp-blocks-in-memory"])
def test_dropout_leaves_evaluation_alone_and_changes_training(name: str) -> None:
    net, plain = build(name, dropout=0.5), build(name)
    x, time, cond = inputs(net, 3)
    with torch.no_grad(), torch.random.fork_rng():
        assert torch.equal(net(x, time, cond), plain(x, time, cond))
        torch.manual_seed(0)
        noisy = net.train()(x, time, cond)
        torch.manual_seed(0)
        assert torch.equal(net(x, time, cond), noisy)
        assert not torch.allclose(net(x, time, cond), noisy)
        assert torch.equal(plain.train()(x, time, cond), plain.eval()(x, time, cond))


# -- tracing ----------------------------------------------------------------------------------------------
