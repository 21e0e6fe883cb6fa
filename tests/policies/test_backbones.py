"""Laws of every backbone: what is shared, bound or remembered gives the numbers of what is not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pairwise import everything, repeated
from small_backbones import COND, CONFIGS, MLPS, STEPS, assert_same, build, gradients, inputs
from torch import Tensor

from policies.backbones import Backbone
from policies.errors import CapabilityError
from policies.networks.attention import set_attention
from policies.protocols import Cond
from policies.registry import from_json, to_json

every_network = pytest.mark.parametrize("name", CONFIGS)
COSTLY = ["unet-scale-deep-relu", "dit-tokens", "dp", "dp-blocks-in-memory", "gpt"]
one_of_each = pytest.mark.parametrize("name", ["mlp-one-block", *COSTLY])
every_perceptron = pytest.mark.parametrize("name", [*MLPS, *COSTLY])


def made(name: str, *, second_time: bool = False) -> Any:
    """Build a network in double precision; a perceptron in single, where a program in C serves it."""
    net = build(name, second_time=second_time)
    return net if name.startswith("mlp") else net.double()


def times_of(net: Any) -> Tensor:
    return torch.arange(STEPS).to(next(net.parameters()).dtype)


def assert_close(found: Tensor, expected: Tensor, size: float = 1.0) -> None:
    """Compare numbers about as large as `size`."""
    single = found.dtype == torch.float32
    rtol, atol = (1e-5, 1e-6) if single else (1e-12, 1e-12)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=size * atol)


def assert_same_gradients(ours: list[Tensor], theirs: list[Tensor]) -> None:
    single = ours[0].dtype == torch.float32
    assert_same(ours, theirs, 1e-5 if single else 1e-11, share=1e-7 if single else 1e-3)


def fresh(net: Any, x: Tensor, time: Tensor, cond: Cond, second_time: Tensor | None = None) -> Tensor:
    """Evaluate a copy, which has no tables yet, with a graph: this way equals the plain networks."""
    with torch.enable_grad():
        out: Tensor = copy.deepcopy(net)(x, time, cond, second_time=second_time)
    return out.detach()


# -- what is shared or bound ------------------------------------------------------------------------------


@every_network
@pytest.mark.parametrize("shared", ["time", "cond", "both"])
def test_shared_rows_equal_repeated_rows(name: str, shared: str) -> None:
    net = made(name)
    x, _, cond = inputs(net, 9)
    generator = torch.Generator().manual_seed(1)
    step = torch.randint(STEPS, (9,), generator=generator)
    row = torch.randint(4, (9,), generator=generator)
    few, times = cond.rows(torch.arange(4)), times_of(net)
    few.vec.requires_grad_()
    time_args = (times, step) if shared != "cond" else (times[step], None)
    cond_args = (few, row) if shared != "time" else (few.rows(row), None)
    ours = net(x, time_args[0], cond_args[0], cond_row=cond_args[1], time_row=time_args[1])
    theirs = net(x, times[step], few.rows(row))
    assert_close(ours, theirs)
    weights = list(net.parameters())
    assert_same_gradients(gradients(ours, few.vec, *weights), gradients(theirs, few.vec, *weights))


@every_network
@pytest.mark.parametrize("grad", [False, True])
def test_bind_equals_forward(name: str, grad: bool) -> None:
    net = made(name)
    times = times_of(net)
    for batch in (1, 3, 600) if name in MLPS and not grad else (1, 3):  # many rows take another way there
        x, _, cond = inputs(net, batch)
        with torch.set_grad_enabled(grad):
            for _ in range(2):  # the second time from the tables of the first
                bound = net.bind(cond, times)
                for k in range(STEPS) if name in MLPS else (0, 3, STEPS - 1):
                    assert_close(bound(k, x), net(x, times[k].expand(batch), cond))


@every_network
def test_one_condition_may_be_shared_by_all_rows(name: str) -> None:
    net = made(name)
    x, _, cond = inputs(net, 5)
    one, times = cond.rows(torch.tensor([0])), times_of(net)
    assert_close(net.bind(one, times)(2, x), net.bind(one.repeat(5), times)(2, x))


@every_network
def test_gradients_flow_through_bind(name: str) -> None:
    net = made(name)
    x, time, cond = inputs(net, 4)
    times = times_of(net)
    with torch.no_grad():
        net.bind(cond, times)  # a remembered table must not cut the graph
        net(x, time, cond)
    of = [x.requires_grad_(), cond.vec.requires_grad_(), *net.parameters()]
    ours, theirs = net.bind(cond, times)(1, x), net(x, times[1].expand(4), cond)
    assert_same_gradients(gradients(ours, *of), gradients(theirs, *of))


@every_network
def test_a_bound_network_with_frozen_weights_is_differentiable_in_the_state(name: str) -> None:
    net = made(name).requires_grad_(False)
    x, _, cond = inputs(net, 4)
    times = times_of(net)
    x.requires_grad_()
    theirs = gradients(net(x, times[1].expand(4), cond), x)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            bound = net.bind(cond.rows(torch.arange(4)), times)
        if mode is torch.inference_mode:
            bound = net.bind(cond, times)  # tables made without a graph serve one that needs it
        assert_same_gradients(gradients(bound(1, x), x), theirs)


@every_network
def test_rows_do_not_influence_each_other(name: str) -> None:
    net = made(name)
    x, time, cond = inputs(net, 6)
    spoiled, times = x.clone(), times_of(net)
    spoiled[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    atol = 0.0 if name.startswith(("mlp", "unet")) else 1e-12  # attention may round otherwise
    with torch.no_grad():
        for evaluate in (lambda x: net(x, time, cond), lambda x: net.bind(cond, times)(0, x)):
            torch.testing.assert_close(evaluate(spoiled)[others], evaluate(x)[others], rtol=0, atol=atol)
            assert evaluate(spoiled)[2].isnan().all()


# -- what is remembered -----------------------------------------------------------------------------------


def _optimizer_step(**options: bool) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
        net(*inputs(net, 4)).square().sum().backward()
        with torch.no_grad():
            net.bind(inputs(net, 4)[2], times_of(net))  # acting between backward and step
        optimizer.step()

    return change


@torch.no_grad()
def _each_weight(net: Any) -> None:
    for weight in net.parameters():
        weight.mul_(1.2)


def _load_other(net: Any) -> None:
    net.load_state_dict({name: value + 0.1 for name, value in net.state_dict().items()})


@every_perceptron
@pytest.mark.parametrize(
    "change",
    [
        _optimizer_step(fused=True),
        _optimizer_step(foreach=True),
        _optimizer_step(foreach=False),
        _each_weight,
        _load_other,
    ],
    ids=["fused", "foreach", "single", "in-place", "load"],
)
def test_acting_follows_the_weights(name: str, change: Callable[[Any], None]) -> None:
    net = made(name)
    x, _, cond = inputs(net, 3)
    times = times_of(net)
    with torch.no_grad():
        before = net.bind(cond, times)(2, x)
    change(net)
    with torch.no_grad():
        after, time = net.bind(cond, times)(2, x), times[2].expand(3)
        expected = fresh(net, x, time, cond)
        size = max(1.0, float(expected.abs().max()))
        assert_close(after, expected, size)
        assert_close(net(x, time, cond), expected, size)
    assert (after - before).abs().max() > 1e-3


@every_perceptron
def test_acting_follows_each_single_weight(name: str) -> None:
    net = made(name, second_time=True)
    x, time, cond = inputs(net, 2)
    times = times_of(net)[:3]
    seconds = times + 1
    with torch.no_grad():
        for weight_name, weight in net.named_parameters():
            before = net.bind(cond, times, seconds)(2, x)
            weight.add_(torch.cos(torch.arange(weight.numel())).view_as(weight))
            after = net.bind(cond, times, seconds)(2, x)
            expected = net(x, torch.full_like(time, 2), cond, second_time=torch.full_like(time, 3))
            assert_close(after, expected, max(1.0, float(expected.abs().max())))
            assert not torch.equal(after, before), weight_name


@one_of_each
def test_acting_follows_the_times_and_a_change_of_type(name: str) -> None:
    net = build(name)
    x, _, cond = inputs(net, 3)
    times = torch.arange(STEPS).float()
    with torch.no_grad():
        net.bind(cond, times)
        times.add_(1.0)
        assert_close(net.bind(cond, times)(0, x), net(x, torch.ones(3), cond))
        net.double()
        x, _, cond = inputs(net, 3)
        assert net.bind(cond, times.double())(0, x).dtype == torch.float64


def outlet_of(net: Any) -> Any:
    """Return the last layer."""
    return getattr(net, "trunk", getattr(net, "unet", net)).outlet


@one_of_each
def test_copies_pickles_and_state_carry_no_tables(name: str) -> None:
    net = made(name)
    x, _, cond = inputs(net, 3)
    times = times_of(net)
    keys, size = set(net.state_dict()), len(pickle.dumps(net))
    with torch.no_grad():
        out = net.bind(cond, times)(0, x)
        assert set(net.state_dict()) == keys == set(dict(net.named_parameters()))
        assert len(pickle.dumps(net)) == size
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(twin.bind(cond, times)(0, x), out)
            outlet_of(twin).bias.add_(1.0)
            torch.testing.assert_close(twin.bind(cond, times)(0, x), out + 1)
        assert torch.equal(net.bind(cond, times)(0, x), out)


# -- the interface ----------------------------------------------------------------------------------------


@one_of_each
def test_bind_and_shared_rows_carry_the_second_time(name: str) -> None:
    net = made(name, second_time=True)
    x, _, cond = inputs(net, 9)
    times, row = times_of(net), torch.arange(9) % STEPS
    seconds = times.flip(0) / 3
    with torch.no_grad():
        for _ in range(2):  # the second time from the tables of the first
            bound = net.bind(cond, times, seconds)
            for k in range(STEPS):
                here = net(x, times[k].expand(9), cond, second_time=seconds[k].expand(9))
                assert_close(bound(k, x), here)
        shared = net(x, times, cond, time_row=row, second_time=seconds)
        assert_close(shared, net(x, times[row], cond, second_time=seconds[row]))
        moved = net.bind(cond, times, seconds + 1)(STEPS - 1, x)
    assert not torch.allclose(moved, here)


@one_of_each
def test_a_second_time_that_is_missing_or_not_expected_is_refused(name: str) -> None:
    x, time, cond = inputs(build(name), 3)
    with pytest.raises(CapabilityError, match="built with a second time and called without"):
        build(name, second_time=True)(x, time, cond)
    with pytest.raises(CapabilityError, match="built without a second time and called with"):
        build(name)(x, time, cond, second_time=time)


@pytest.mark.parametrize(("name", "backbone"), [("mlp-one-block", "mlp"), ("unet-one-level", "unet1d")])
def test_tokens_are_refused_by_networks_without_attention(name: str, backbone: str) -> None:
    with pytest.raises(CapabilityError, match=f"backbone={backbone} cannot attend to tokens"):
        CONFIGS[name].build((5, 3), COND, token_dim=3)


@every_network
def test_configurations_survive_json_and_omegaconf(name: str) -> None:
    config = CONFIGS[name]
    assert from_json("backbone", to_json("backbone", config)) == config
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config


@one_of_each
def test_the_network_satisfies_the_protocol(name: str) -> None:
    assert isinstance(build(name), Backbone)


# -- tracing ----------------------------------------------------------------------------------------------

COMPILED = [
    ("mlp-two-blocks-mish-norm-encoder", "auto"),
    ("mlp-plain-norm", "auto"),
    ("unet-one-level", "auto"),
    ("dit-tokens", "math"),
    ("dp", "auto"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("name", "how"), repeated(COMPILED))
def test_gradients_of_a_compiled_network_equal_eager_ones(name: str, how: str) -> None:
    net = build(name)
    set_attention(net, how)
    x, _, cond = inputs(net, 5)
    times, row = torch.arange(STEPS).float(), torch.tensor([4, 0, 0, 3, 1])

    def shared(x: Tensor, vec: Tensor, tokens: Tensor | None) -> Tensor:
        return net(x, times, Cond(vec, tokens), cond_row=row, time_row=row)

    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    arguments, weights = (x, cond.vec, cond.tokens), list(net.parameters())
    ours, theirs = (gradients(call(*arguments), *weights) for call in (compiled, shared))
    assert_same(ours, theirs, 1e-5 if name.startswith("mlp") else 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.skipif(not everything, reason="with --all: without it the contracts compile the loops")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("name", "how"), [("mlp-one-block", "auto"), ("dit-tokens", "math"), ("dp", "auto")])
def test_a_compiled_loop_equals_eager(backend: str, name: str, how: str) -> None:
    net = build(name)
    set_attention(net, how)
    x, _, cond = inputs(net, 5)
    times = torch.arange(STEPS).float()

    def loop(x: Tensor, vec: Tensor, tokens: Tensor | None) -> Tensor:
        bound = net.bind(Cond(vec, tokens), times)
        return bound(1, bound(0, x))

    arguments = x, cond.vec, cond.tokens
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1):  # a pool takes longer to start
        compiled = torch.compile(loop, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(*arguments), loop(*arguments), rtol=1e-5, atol=1e-5)
