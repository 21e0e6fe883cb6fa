"""Laws of both transformer backbones: what is shared or prepared gives the same numbers as what is not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import mentions
from omegaconf import OmegaConf
from pairwise import everything
from small_transformers import CONFIGS, STEPS, assert_same, build, gradients, inputs
from torch import Tensor

from policies.backbones import Backbone
from policies.errors import CapabilityError
from policies.networks.attention import set_attention
from policies.protocols import Cond
from policies.registry import from_json, to_json

TIMES = torch.arange(STEPS).float()
QUIET = "ignore:.*torch.jit.script:DeprecationWarning"

every_network = pytest.mark.parametrize("name", CONFIGS)
one_of_each = pytest.mark.parametrize("name", ["dit-tokens", "dp", "dp-blocks-in-memory", "gpt"])


@every_network
@pytest.mark.parametrize("shared", ["time", "cond", "both"])
def test_shared_rows_equal_repeated_rows(name: str, shared: str) -> None:
    net = build(name).double()
    x, _, cond = inputs(net, 9)
    generator = torch.Generator().manual_seed(1)
    step = torch.randint(STEPS, (9,), generator=generator)
    row = torch.randint(4, (9,), generator=generator)
    few, times = cond.rows(torch.arange(4)), TIMES.double()
    few.vec.requires_grad_()
    time_args = (times, step) if shared != "cond" else (times[step], None)
    cond_args = (few, row) if shared != "time" else (few.rows(row), None)
    ours = net(x, time_args[0], cond_args[0], cond_row=cond_args[1], time_row=time_args[1])
    theirs = net(x, times[step], few.rows(row))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = list(net.parameters())
    assert_same(gradients(ours, few.vec, *weights), gradients(theirs, few.vec, *weights), 1e-11)


@every_network
@pytest.mark.parametrize("grad", [False, True])
def test_bind_equals_forward(name: str, grad: bool) -> None:
    net = build(name)
    for batch in (1, 3):
        x, _, cond = inputs(net, batch)
        with torch.set_grad_enabled(grad):
            for _ in range(2):  # the second time from the tables of the first
                bound = net.bind(cond, TIMES)
                for k in (0, 3, STEPS - 1):
                    expected = net(x, TIMES[k].expand(batch), cond)
                    torch.testing.assert_close(bound(k, x), expected, rtol=1e-5, atol=1e-5)


@one_of_each
@pytest.mark.parametrize("horizon", [1, 2, 7, 16, 33])
def test_any_horizon_is_possible(name: str, horizon: int) -> None:
    net = build(name, chunk=(horizon, 2), obs_tokens=1) if name != "dit-tokens" else build(
        name, chunk=(horizon, 2)
    )  # fmt: skip
    for batch in (0, 2):
        x, time, cond = inputs(net, batch)
        with torch.no_grad():
            out = net(x, time, cond)
            again = net.bind(cond, TIMES[2:3])(0, x)
        assert out.shape == (batch, horizon, 2) and out.isfinite().all()
        torch.testing.assert_close(again, net(x, torch.full_like(time, 2), cond), rtol=1e-5, atol=1e-5)


@every_network
def test_one_condition_may_be_shared_by_all_rows(name: str) -> None:
    net = build(name)
    x, _, cond = inputs(net, 5)
    one = cond.rows(torch.tensor([0]))
    shared, repeated = net.bind(one, TIMES)(2, x), net.bind(one.repeat(5), TIMES)(2, x)
    torch.testing.assert_close(shared, repeated, rtol=1e-5, atol=1e-5)


@every_network
def test_gradients_flow_through_bind(name: str) -> None:
    net = build(name).double()
    x, _, cond = inputs(net, 4)
    times = TIMES.double()
    with torch.no_grad():
        net.bind(cond, times)  # a remembered table must not cut the graph
    x.requires_grad_(), cond.vec.requires_grad_()
    of = [x, cond.vec, *net.parameters()]
    ours, theirs = net.bind(cond, times)(1, x), net(x, times[1].expand(4), cond)
    assert_same(gradients(ours, *of), gradients(theirs, *of), 1e-11)


@one_of_each
def test_a_bound_network_with_frozen_weights_is_differentiable_in_the_state(name: str) -> None:
    net = build(name).requires_grad_(False)
    x, _, cond = inputs(net, 4)
    x.requires_grad_()
    with torch.inference_mode():
        net.bind(cond, TIMES)  # tables made without a graph serve one that needs it
    ours = gradients(net.bind(cond, TIMES)(1, x), x)
    assert_same(ours, gradients(net(x, TIMES[1].expand(4), cond), x), 1e-4)


@every_network
def test_rows_do_not_influence_each_other(name: str) -> None:
    net = build(name)
    x, time, cond = inputs(net, 6)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    with torch.no_grad():
        for evaluate in (lambda x: net(x, time, cond), lambda x: net.bind(cond, TIMES)(0, x)):
            torch.testing.assert_close(evaluate(spoiled)[others], evaluate(x)[others], rtol=0, atol=1e-6)
            assert evaluate(spoiled)[2].isnan().all()


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


def _optimizer_step(net: Any) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    net(*inputs(net, 4)).square().sum().backward()
    with torch.no_grad():
        net.bind(inputs(net, 4)[2], TIMES)  # acting between backward and step
    optimizer.step()


@torch.no_grad()
def _each_weight(net: Any) -> None:
    for weight in net.parameters():
        weight.mul_(1.2)


def _load_other(net: Any) -> None:
    net.load_state_dict({name: value + 0.1 for name, value in net.state_dict().items()})


@one_of_each
@pytest.mark.parametrize("change", [_optimizer_step, _each_weight, _load_other])
def test_acting_follows_the_weights(name: str, change: Callable[[Any], None]) -> None:
    net = build(name)
    x, _, cond = inputs(net, 3)
    with torch.no_grad():
        before = net.bind(cond, TIMES)(2, x)
    change(net)
    with torch.no_grad():
        after = net.bind(cond, TIMES)(2, x)
        torch.testing.assert_close(after, net(x, TIMES[2].expand(3), cond), rtol=1e-5, atol=1e-4)
    assert (after - before).abs().max() > 1e-3


@one_of_each
def test_acting_follows_each_single_weight(name: str) -> None:
    net = build(name, second_time=True).double()
    x, time, cond = inputs(net, 2)
    times, seconds = TIMES.double(), TIMES.double() + 1
    with torch.no_grad():
        for weight_name, weight in net.named_parameters():
            before = net.bind(cond, times, seconds)(2, x)
            weight.add_(torch.cos(torch.arange(weight.numel())).view_as(weight))
            after = net.bind(cond, times, seconds)(2, x)
            expected = net(x, torch.full_like(time, 2), cond, second_time=torch.full_like(time, 3))
            torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-10, msg=weight_name)
            assert not torch.equal(after, before), weight_name


@one_of_each
def test_acting_follows_the_times_and_a_change_of_type(name: str) -> None:
    net = build(name)
    x, _, cond = inputs(net, 3)
    times = TIMES.clone()
    with torch.no_grad():
        net.bind(cond, times)
        times.add_(1.0)
        out, expected = net.bind(cond, times)(0, x), net(x, torch.ones(3), cond)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        net.double()
        x, _, cond = inputs(net, 3)
        assert net.bind(cond, times.double())(0, x).dtype == torch.float64


@one_of_each
def test_copies_pickles_and_state_carry_no_tables(name: str) -> None:
    net = build(name)
    x, _, cond = inputs(net, 3)
    keys, size = set(net.state_dict()), len(pickle.dumps(net))
    with torch.no_grad():
        out = net.bind(cond, TIMES)(0, x)
        assert set(net.state_dict()) == keys == set(dict(net.named_parameters()))
        assert len(pickle.dumps(net)) == size
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(twin.bind(cond, TIMES)(0, x), out)
            twin.outlet.bias.add_(1.0)
            torch.testing.assert_close(twin.bind(cond, TIMES)(0, x), out + 1)
        assert torch.equal(net.bind(cond, TIMES)(0, x), out)


# -- the interface ----------------------------------------------------------------------------------------


@one_of_each
def test_bind_and_shared_rows_carry_the_second_time(name: str) -> None:
    net = build(name, second_time=True)
    x, _, cond = inputs(net, 9)
    seconds, row = TIMES.flip(0) / 3, torch.arange(9) % STEPS
    with torch.no_grad():
        for _ in range(2):  # the second time from the tables of the first
            bound = net.bind(cond, TIMES, seconds)
            for k in range(STEPS):
                here = net(x, TIMES[k].expand(9), cond, second_time=seconds[k].expand(9))
                torch.testing.assert_close(bound(k, x), here, rtol=1e-5, atol=1e-5)
        shared = net(x, TIMES, cond, time_row=row, second_time=seconds)
        plain = net(x, TIMES[row], cond, second_time=seconds[row])
        moved = net.bind(cond, TIMES, seconds + 1)(STEPS - 1, x)
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(moved, here)


@one_of_each
def test_a_second_time_that_is_missing_or_not_expected_is_refused(name: str) -> None:
    x, time, cond = inputs(build(name), 3)
    with pytest.raises(CapabilityError, match=mentions("time")):
        build(name, second_time=True)(x, time, cond)
    with pytest.raises(CapabilityError, match=mentions("time")):
        build(name)(x, time, cond, second_time=time)


def test_configurations_survive_json_and_omegaconf() -> None:
    for config in CONFIGS.values():
        assert from_json("backbone", to_json("backbone", config)) == config
        assert OmegaConf.structured(type(config)).width == type(config)().width


@one_of_each
def test_the_network_satisfies_the_protocol(name: str) -> None:
    assert isinstance(build(name), Backbone)


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


@pytest.mark.slow
@pytest.mark.skipif(not everything, reason="with --all: without it a perceptron is compiled")
@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(("name", "how"), [("dit-tokens", "math"), ("dp", "auto")])
def test_compiled_without_a_graph_break_equals_eager(name: str, how: str) -> None:
    net = build(name, depth=1)
    set_attention(net, how)
    x, _, cond = inputs(net, 5)
    row = torch.arange(5).flip(0)

    def loop(x: Tensor, vec: Tensor, tokens: Tensor | None) -> Tensor:
        bound = net.bind(Cond(vec, tokens), TIMES)
        return bound(1, bound(0, x))

    def shared(x: Tensor, vec: Tensor, tokens: Tensor | None) -> Tensor:
        return net(x, TIMES, Cond(vec, tokens), cond_row=row, time_row=row)

    arguments, weights = (x, cond.vec, cond.tokens), list(net.parameters())
    with torch.no_grad():
        compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*arguments), loop(*arguments), rtol=1e-5, atol=1e-5)
    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    theirs = gradients(shared(*arguments), *weights)
    assert_same(gradients(compiled(*arguments), *weights), theirs, 1e-4)
